"""Backoff, retry limit and final close codes of a client's reconnects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.client.retry import HEALTHY_AFTER_S, BackoffPolicy, ReconnectBackoff, closing_error, is_final
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.close import CloseCode

FOR_EVER = BackoffPolicy(give_up_after_s=None)


def backoff(policy: BackoffPolicy = FOR_EVER, *, random: float = 1.0) -> ReconnectBackoff:
    """A backoff that begins at 0 s, with constant jitter."""
    return ReconnectBackoff(policy, random=lambda: random, now=0.0)


def test_bound_doubles_up_to_its_limit() -> None:
    """It starts at 0.2 s and doubles with each attempt up to 10 s."""
    waits = backoff()
    assert [waits.next_wait_s(now=0.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert waits.attempt == 8


@given(st.floats(0, 1), st.integers(0, 100))
def test_full_jitter_is_applied(random: float, attempts: int) -> None:
    """Delays are drawn from 0 to the bound, so that many clients do not reconnect at once."""
    waits = backoff(random=random)
    for _ in range(attempts):
        waits.next_wait_s(now=0.0)
    wait_s = waits.next_wait_s(now=0.0)
    assert wait_s == pytest.approx(random * min(10.0, 0.2 * 2 ** min(attempts, 30)))


def test_requested_delay_is_the_minimum() -> None:
    """The jitter is added to it."""
    assert backoff(random=0.0).next_wait_s(now=0.0, retry_after_s=7.0) == 7.0
    assert backoff(random=1.0).next_wait_s(now=0.0, retry_after_s=7.0) == pytest.approx(7.2)


@given(st.floats(1, 1000), st.floats(0, 1), st.lists(st.floats(0, 5), max_size=400))
def test_attempts_end_at_the_limit(give_up_after_s: float, random: float, attempts_s: list[float]) -> None:
    """No attempt begins after the limit."""
    waits = backoff(BackoffPolicy(give_up_after_s=give_up_after_s), random=random)
    now = 0.0
    for attempt_s in attempts_s:
        wait_s = waits.next_wait_s(now=now)
        if wait_s is None:
            assert now >= give_up_after_s
            return
        assert now + wait_s <= give_up_after_s * 1.000001
        now += wait_s + attempt_s


def test_delay_beyond_the_limit_ends_the_attempts() -> None:
    """Attempts end if the daemon requests a longer delay than is left."""
    assert backoff(BackoffPolicy(give_up_after_s=5.0)).next_wait_s(now=0.0, retry_after_s=6.0) is None


def test_only_a_lasting_connection_resets_the_backoff() -> None:
    """A daemon that accepts and drops connections at once is not flooded."""
    waits = backoff(BackoffPolicy(give_up_after_s=50.0))
    for _ in range(4):
        waits.next_wait_s(now=0.0)
    waits.lost(now=40.0, up_s=1.0)
    assert waits.next_wait_s(now=80.0) == 3.2
    waits.lost(now=200.0, up_s=HEALTHY_AFTER_S)
    assert waits.next_wait_s(now=200.0) == 0.2


@pytest.mark.parametrize(
    ("code", "final"),
    [
        (CloseCode.NORMAL, ErrorCode.DAEMON_UNREACHABLE),
        (CloseCode.SHUTDOWN, ErrorCode.DAEMON_UNREACHABLE),
        (CloseCode.POLICY, ErrorCode.FORBIDDEN),
        (CloseCode.TOO_LARGE, ErrorCode.MESSAGE_TOO_LARGE),
        (CloseCode.INTERNAL, None),
        (CloseCode.RESTART, None),
        (CloseCode.OVERLOADED, None),
        (CloseCode.NOT_AUTHENTICATED, ErrorCode.NOT_AUTHENTICATED),
        (CloseCode.TOO_SLOW, None),
        (CloseCode.TOO_MANY, None),
        (1006, None),
        (1005, None),
        (None, None),
    ],
)
def test_final_close_codes(code: int | None, final: ErrorCode | None) -> None:
    """A final one has its error code; any other means temporarily unreachable."""
    error, is_over = closing_error(code, None)
    assert is_over is (final is not None)
    assert error.code is (final or ErrorCode.DAEMON_UNREACHABLE)


def test_every_close_code_is_classified() -> None:
    """The protocol's table and the client's agree."""
    finals = {code for code in CloseCode if closing_error(code, None)[1]}
    assert finals == {1000, 1001, 1008, 1009, 4401}


def test_final_refusals() -> None:
    """A wrong credential is final; a full or absent daemon is not."""
    assert is_final(InferenceCenterError(ErrorCode.NOT_AUTHENTICATED))
    assert is_final(InferenceCenterError(ErrorCode.FORBIDDEN))
    assert not is_final(InferenceCenterError(ErrorCode.RATE_LIMITED))
    assert not is_final(InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE))
