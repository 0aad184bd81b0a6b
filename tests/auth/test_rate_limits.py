"""Rate windows, token buckets and daily counters, in virtual time."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth.quotas import DAY_MS, TICK_MS, DailyUsage, SlidingWindow
from inferencecenter.auth.rate_limits import MINUTE_MS, TokenBucket

LIMITS: Final = st.integers(1, 8)
WAITS: Final = st.lists(st.one_of(st.integers(0, 400), st.integers(0, 90_000)), max_size=60)


@given(LIMITS, WAITS, st.integers(0, 10**12))
def test_no_minute_exceeds_the_limit(limit: int, waits_ms: list[int], now_ms: int) -> None:
    """This holds for any times of the requests."""
    window, let_through = SlidingWindow(), list[int]()
    for wait_ms in waits_ms:
        now_ms += wait_ms
        if window.retry_after_ms(limit, now_ms=now_ms) is None:
            window.count(now_ms=now_ms)
            let_through.append(now_ms)
    for first_ms in let_through:
        assert sum(first_ms <= at_ms <= first_ms + MINUTE_MS for at_ms in let_through) <= limit


@given(LIMITS, WAITS)
def test_window_states_the_exact_retry_time(limit: int, waits_ms: list[int]) -> None:
    """It refuses a millisecond earlier; the wait is at most a tick beyond a minute."""
    window, now_ms = SlidingWindow(), 0
    for wait_ms in waits_ms:
        now_ms += wait_ms
        retry_after_ms = window.retry_after_ms(limit, now_ms=now_ms)
        if retry_after_ms is not None:
            assert 0 < retry_after_ms <= MINUTE_MS + TICK_MS
            assert window.retry_after_ms(limit, now_ms=now_ms + retry_after_ms - 1) is not None
            now_ms += retry_after_ms
            assert window.retry_after_ms(limit, now_ms=now_ms) is None
        window.count(now_ms=now_ms)


def test_lower_limit_applies_to_counted_requests() -> None:
    """With ten in the minute and a limit of three, eight of them have to leave first."""
    window = SlidingWindow()
    for second in range(10):
        window.count(now_ms=second * 1000)
    now_ms = 10_000
    retry_after_ms = window.retry_after_ms(3, now_ms=now_ms)
    assert retry_after_ms == 7_000 + TICK_MS + MINUTE_MS - now_ms
    assert window.total(now_ms=now_ms) == 10
    assert window.total(now_ms=now_ms + retry_after_ms) == 2


def test_window_memory_is_bounded() -> None:
    """A flood of requests uses an entry per tick."""
    window = SlidingWindow()
    for now_ms in range(0, 200_000, 5):
        window.count(now_ms=now_ms)
    assert len(window._ticks) <= MINUTE_MS // TICK_MS + 2


@given(LIMITS, st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 30)), max_size=60))
def test_bucket_states_the_exact_retry_time(limit: int, takes: list[tuple[int, int]]) -> None:
    """It is empty a millisecond earlier, also if it was overdrawn."""
    bucket, now_ms = TokenBucket(), 0
    for wait_ms, n_tokens in takes:
        now_ms += wait_ms
        retry_after_ms = bucket.retry_after_ms(limit, now_ms=now_ms)
        assert (retry_after_ms is None) == (bucket.left(limit, now_ms=now_ms) >= 1)
        if retry_after_ms is not None:
            assert bucket.left(limit, now_ms=now_ms + retry_after_ms - 1) == 0
            now_ms += retry_after_ms
            assert bucket.left(limit, now_ms=now_ms) == 1
        bucket.take(n_tokens, limit, now_ms=now_ms)


@given(LIMITS, st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 5)), min_size=1, max_size=60))
def test_overdraft_is_refilled_first(limit: int, takes: list[tuple[int, int]]) -> None:
    """Until a turn may begin, no more was used than a full bucket and its refill."""
    bucket, now_ms, used = TokenBucket(), 0, list[tuple[int, int]]()
    for wait_ms, n_tokens in takes:
        now_ms += wait_ms
        if bucket.retry_after_ms(limit, now_ms=now_ms) is None:
            for start_ms, _ in used:
                since = sum(tokens for at_ms, tokens in used if at_ms >= start_ms)
                assert since <= limit + limit * (now_ms - start_ms) / MINUTE_MS
        bucket.take(n_tokens, limit, now_ms=now_ms)
        used.append((now_ms, n_tokens))


def test_bucket_holds_at_most_a_minute() -> None:
    """An hour refills no more than a minute."""
    bucket = TokenBucket()
    bucket.take(100, 60, now_ms=0)
    assert bucket.left(60, now_ms=0) == -40
    assert bucket.left(60, now_ms=MINUTE_MS) == 20
    assert bucket.left(60, now_ms=60 * MINUTE_MS) == 60


def test_stopped_clock_refills_nothing() -> None:
    """A clock that goes backwards refills nothing, either."""
    bucket = TokenBucket()
    bucket.take(60, 60, now_ms=5_000)
    assert bucket.left(60, now_ms=5_000) == 0
    assert bucket.left(60, now_ms=4_000) == 0


@given(st.integers(0, 10**14), st.integers(0, 3 * DAY_MS))
def test_day_ends_at_midnight_utc(now_ms: int, later_ms: int) -> None:
    """Usage counts until the end of its day, not longer."""
    day = DailyUsage().at(now_ms)
    day.used = 5
    assert 0 < day.ends_ms - now_ms <= DAY_MS
    assert day.ends_ms % DAY_MS == 0
    is_another = now_ms + later_ms >= day.ends_ms
    assert day.at(now_ms + later_ms).used == (0 if is_another else 5)


@given(st.lists(st.tuples(st.integers(-2 * DAY_MS, 2 * DAY_MS), st.integers(1, 9)), max_size=6))
def test_clock_set_back_over_midnight_keeps_usage(moves: list[tuple[int, int]]) -> None:
    """Each day keeps its usage wherever the clock jumps."""
    now_ms, day = 1_000 * DAY_MS, DailyUsage()
    used: dict[int, int] = {}
    for move_ms, n_tokens in moves:
        now_ms = min(max(now_ms + move_ms, 999 * DAY_MS), 1_003 * DAY_MS - 1)
        day.at(now_ms).used += n_tokens
        used[now_ms // DAY_MS] = used.get(now_ms // DAY_MS, 0) + n_tokens
        assert day.at(now_ms).used == used[now_ms // DAY_MS]


def test_day_end_is_formatted() -> None:
    """It is shown in UTC, to the minute."""
    assert DailyUsage().at(1_763_900_000_000).end == "2025-11-24 00:00 UTC"
