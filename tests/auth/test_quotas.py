"""Quotas of tokens, in virtual time."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth import accounts_db
from inferencecenter.auth.account import Account
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.quotas import BUSY_RETRY_MS, SWEEP_FROM, AccessQuota, AccessQuotas
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DAY_S = 86_400
NOON = 20_000 * DAY_S + DAY_S // 2


class Time:
    """Both clocks, advanced by a test."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def unix(self) -> float:
        """Unix seconds; it starts at noon."""
        return NOON + self.passed_s

    def monotonic(self) -> float:
        """Seconds since some moment."""
        return 100.0 + self.passed_s

    def wait_ms(self, wait_ms: int) -> None:
        """Advance the time."""
        self.passed_s += wait_ms / 1000


def quota(time: Time, **limits: Any) -> AccessQuota:
    """A quota with these limits."""
    created = AccessQuota(clock=time.unix, monotonic=time.monotonic)
    created.limits = AccessLimits(**limits)
    return created


def refused(quota: AccessQuota) -> InferenceCenterError:
    """Return why no turn may begin now."""
    with pytest.raises(InferenceCenterError) as caught:
        quota.check_turn()
    return caught.value


def turn(quota: AccessQuota, n_tokens: int = 0) -> bool:
    """Run a turn; return whether any of today's tokens are left."""
    quota.check_turn()
    quota.begin_turn()
    left = quota.use(n_tokens)
    quota.end_turn()
    return left


def test_without_limits_nothing_is_refused() -> None:
    """Usage is still counted."""
    free = quota(Time())
    for _ in range(1000):
        assert turn(free, 1000)
    assert free.used_today == 1_000_000
    assert (free.requests_left, free.minute_tokens_left, free.day_tokens_left) == (None, None, None)


def test_requests_per_minute() -> None:
    """The third of two is refused until the stated millisecond."""
    time = Time()
    limited = quota(time, requests_per_minute=2)
    turn(limited)
    time.wait_ms(20_000)
    turn(limited)
    error = refused(limited)
    assert (error.code, error.retry_after_ms) == (ErrorCode.RATE_LIMITED, 40_100)
    assert "2 turns per minute" in error.message
    time.wait_ms(40_099)
    assert refused(limited).retry_after_ms == 1
    time.wait_ms(1)
    limited.check_turn()


def test_tokens_per_minute() -> None:
    """A turn may overdraw; the next one waits for the refill."""
    time = Time()
    limited = quota(time, tokens_per_minute=60)
    assert turn(limited, 90)
    assert limited.minute_tokens_left == -30
    error = refused(limited)
    assert (error.code, error.retry_after_ms) == (ErrorCode.RATE_LIMITED, 31_000)
    time.wait_ms(30_999)
    assert refused(limited).retry_after_ms == 1
    time.wait_ms(1)
    limited.check_turn()


def test_tokens_per_day() -> None:
    """The turn that uses the last token is notified; the next is refused until the stated midnight in UTC."""
    time = Time()
    limited = quota(time, tokens_per_day=100)
    assert turn(limited, 99)
    assert not turn(limited, 1)
    error = refused(limited)
    assert (error.code, error.retry_after_ms) == (ErrorCode.QUOTA_EXCEEDED, DAY_S // 2 * 1000)
    assert error.hint == "The next day begins at 2024-10-05 00:00 UTC."
    time.wait_ms(DAY_S // 2 * 1000 - 1)
    assert refused(limited).retry_after_ms == 1
    time.wait_ms(1)
    assert turn(limited, 50)
    assert (limited.used_today, limited.day_tokens_left) == (50, 50)


def test_turn_over_midnight_counts_for_both_days() -> None:
    """Tokens generated after midnight count for the new day only."""
    time = Time()
    limited = quota(time, tokens_per_day=100)
    limited.begin_turn()
    assert limited.use(99)
    time.wait_ms(DAY_S // 2 * 1000)
    assert limited.use(99)
    assert limited.used_today == 99


def test_concurrent_turns() -> None:
    """One more is refused until one ends, without a retry delay."""
    limited = quota(Time(), concurrent_turns=2)
    limited.begin_turn()
    limited.begin_turn()
    error = refused(limited)
    assert (error.code, error.retry_after_ms) == (ErrorCode.RATE_LIMITED, BUSY_RETRY_MS)
    limited.end_turn()
    limited.check_turn()


def test_resumed_turn_counts_as_running() -> None:
    """It is no new request, and its earlier tokens count for today."""
    limited = quota(Time(), concurrent_turns=1, requests_per_minute=1, tokens_per_day=100)
    limited.resume_turn(40)
    assert (limited.running, limited.requests_left, limited.day_tokens_left) == (1, 1, 60)
    assert refused(limited).code is ErrorCode.RATE_LIMITED
    limited.end_turn()
    limited.check_turn()


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(0, 40_000_000), st.integers(1, 20)), max_size=40))
def test_daily_quota_is_overdrawn_by_one_turn_at_most(limit: int, turns: list[tuple[int, int]]) -> None:
    """Sequential turns are refused once the limit is reached."""
    time, by_day = Time(), dict[int, list[int]]()
    limited = quota(time, tokens_per_day=limit)
    for wait_ms, n_tokens in turns:
        time.wait_ms(wait_ms)
        used = by_day.setdefault(int(time.unix() // DAY_S), [])
        if sum(used) >= limit:
            assert refused(limited).code is ErrorCode.QUOTA_EXCEEDED
        else:
            turn(limited, n_tokens)
            used.append(n_tokens)
        assert limited.used_today == sum(used)


# Scopes of limits.


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    """Accounts with one client that may use 1000 tokens a day."""
    with closing(Accounts.open(tmp_path / "accounts.sqlite3", clock=lambda: 1000.0)) as opened:
        opened.ensure_client("ada", max_sessions=1, priority="normal")
        opened.change_client("ada", limits=AccessLimits(tokens_per_day=1000, requests_per_minute=5))
        yield opened


@pytest.fixture
def quotas(accounts: Accounts) -> AccessQuotas:
    """Quotas where 7 turns at once are the default."""
    time = Time()
    return AccessQuotas(accounts, defaults=AccessLimits(concurrent_turns=7), clock=time.unix, monotonic=time.monotonic)


def test_token_limits_override_account_and_daemon(accounts: Accounts, quotas: AccessQuotas) -> None:
    """Each limit of a token overrides by itself; one that is explicitly removed does not fall back."""
    own = AccessLimits(tokens_per_day=10, requests_per_minute=None)
    new = accounts.create_token("ada", limits=own)
    account = accounts.verify_token(new.token)
    assert account is not None
    limits = quotas.admit(account).limits
    assert (limits.tokens_per_day, limits.requests_per_minute, limits.concurrent_turns) == (10, None, 7)


def test_tokens_of_a_client_are_counted_separately(accounts: Accounts, quotas: AccessQuotas) -> None:
    """The client's sum is known."""
    ids = [accounts.create_token("ada").token_id for _ in range(2)]
    quotas.of("ada", ids[0]).use(600)
    quotas.of("ada", ids[1]).use(500)
    assert quotas.of("ada", ids[0]).day_tokens_left == 400
    assert quotas.used_today("ada") == 1100
    assert quotas.used_today("unknown") == 0


def test_limit_changes_apply_at_once_and_keep_usage(accounts: Accounts, quotas: AccessQuotas) -> None:
    """Changed limits of the token, the account and the daemon apply to a quota in use."""
    token_id = accounts.create_token("ada").token_id
    quota = quotas.of("ada", token_id)
    quota.use(300)
    accounts.limit_token(token_id, AccessLimits(tokens_per_day=200))
    accounts.change_client("ada", limits=AccessLimits(max_tokens=50))
    quotas.reload(AccessLimits(concurrent_turns=1))
    assert quotas.of("ada", token_id) is quota
    assert quota.limits == AccessLimits(tokens_per_day=200, max_tokens=50, concurrent_turns=1)
    with pytest.raises(InferenceCenterError, match="300 tokens today"):
        quota.check_turn()


def test_external_clients_keep_their_limits(quotas: AccessQuotas) -> None:
    """They apply until the next login."""
    account = Account("guest", 1, "normal", frozenset({Scope.USER}), limits=AccessLimits(max_tokens=5))
    quota = quotas.admit(account)
    quotas.reload()
    assert quota.limits.max_tokens == 5
    assert quotas.admit(Account("guest", 1, "normal", frozenset({Scope.USER}))) is quota
    assert quota.limits.max_tokens is None


def test_stored_usage_counts(accounts: Accounts, quotas: AccessQuotas) -> None:
    """Usage counts by client and token, and for unknown clients."""
    token_id = accounts.create_token("ada").token_id
    quotas.restore_usage({("ada", token_id): 990, ("guest", ""): 5})
    assert quotas.of("ada", token_id).day_tokens_left == 10
    assert quotas.used_today("guest") == 5


def test_idle_tokens_are_evicted(accounts: Accounts) -> None:
    """Those in use by a socket or turn and those used today stay."""
    time = Time()
    quotas = AccessQuotas(accounts, clock=time.unix, monotonic=time.monotonic)
    accounts_by_name = {name: external_account(name) for name in ("connected", "running", "used")}
    quotas.watch(lambda: [("connected", "t")])
    for account in accounts_by_name.values():
        quotas.admit(account)
    quotas.of("running", "t").begin_turn()
    quotas.of("used", "t").use(5)
    for n in range(5 * SWEEP_FROM):
        time.wait_ms(1_000)
        quotas.admit(external_account(f"guest-{n}"))
        assert len(quotas) <= 2 * SWEEP_FROM
    assert {name: quotas.of(name, "t").limits.max_tokens for name in accounts_by_name} == dict.fromkeys(
        accounts_by_name, 5
    )
    assert quotas.used_today("used") == 5
    time.wait_ms(DAY_S * 1_000)
    quotas.of("running", "t").end_turn()
    for n in range(5 * SWEEP_FROM):
        time.wait_ms(1_000)
        quotas.admit(external_account(f"other-{n}"))
    assert quotas.of("used", "t").limits.max_tokens is None
    assert quotas.of("connected", "t").limits.max_tokens == 5


def external_account(name: str) -> Account:
    """An account of an external provider."""
    return Account(name, 1, "normal", frozenset({Scope.USER}), token_id="t", limits=AccessLimits(max_tokens=5))


@given(st.sampled_from(["192.0.2.7", "::ffff:192.0.2.7", "192.0.3.7", "2001:db8::1", "2001:db9::1", "", "a", "1.2.3"]))
def test_addresses_match_networks(address: str) -> None:
    """IPv6 and IPv4 addresses match, also IPv4 mapped to IPv6; an invalid address matches none."""
    limits = AccessLimits(addresses=("192.0.2.0/24", "2001:db8::/32"))
    assert limits.allows_address(address) == (address in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1"))
    assert NO_LIMITS.allows_address(address)


def test_only_limits_in_use_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are reread on the event loop, so the cost does not depend on the number of accounts."""
    parsed: list[str] = []
    parse = accounts_db.limits_from_json

    def note(text: str) -> AccessLimits:
        parsed.append(text)
        return parse(text)

    with closing(Accounts.open(tmp_path / "accounts.sqlite3", clock=Time().unix)) as accounts:
        for n in range(50):
            limits = AccessLimits(concurrent_turns=n + 1)
            accounts.create_client(f"c{n}", max_sessions=1, priority="normal", limits=limits)
        token = accounts.create_token("c7", limits=AccessLimits(requests_per_minute=3)).token_id
        quotas = AccessQuotas(accounts, clock=Time().unix, monotonic=Time().monotonic)
        monkeypatch.setattr(accounts_db, "limits_from_json", note)
        found = [quotas.of("c7", token_id).limits for token_id in (token, "", "missing")]
        assert [(each.requests_per_minute, each.concurrent_turns) for each in found] == [
            (3, 8),
            (None, 8),
            (None, None),
        ]
        quotas.reload()
        assert len(parsed) == 6
