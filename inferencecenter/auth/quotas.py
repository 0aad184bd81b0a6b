"""Usage and quotas of all tokens, and of clients with an API key: turns in a window, tokens in a bucket and per day.

Retry times are exact: one millisecond earlier the turn is still refused.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from inferencecenter.auth.rate_limits import MINUTE_MS, TokenBucket
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from inferencecenter.auth.account import Account
    from inferencecenter.auth.accounts import Accounts

BUSY_RETRY_MS: Final = 1000
"""Retry hint with too many concurrent turns; when one ends is unknown."""
SWEEP_FROM: Final = 1000
"""Number of tokens below which none is dropped."""
TICK_MS: Final = 100
"""Granularity of a window: events within a tick share an entry, so that a window holds at most some hundreds."""
DAY_MS: Final = 86_400_000
_MAX_OTHER_DAYS: Final = 4


class SlidingWindow:
    """Sliding window over the last minute in whole ticks: at most a tick longer than a minute."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[int, int]] = deque()
        self._total = 0

    def total(self, *, now_ms: int) -> int:
        """Return the number of events within the minute."""
        while self._ticks and _leaves_ms(self._ticks[0][0]) <= now_ms:
            self._total -= self._ticks.popleft()[1]
        return self._total

    def retry_after_ms(self, limit: int, *, now_ms: int) -> int | None:
        """Return the time until fewer than ``limit`` events are within the minute; ``None`` if that is so now."""
        excess = self.total(now_ms=now_ms) - limit
        if excess < 0:
            return None
        for tick, count in self._ticks:
            excess -= count
            if excess < 0:
                return _leaves_ms(tick) - now_ms
        raise AssertionError("a limit is at least 1")

    def count(self, *, now_ms: int) -> None:
        tick = now_ms // TICK_MS
        self.total(now_ms=now_ms)
        if self._ticks and self._ticks[-1][0] == tick:
            self._ticks[-1] = (tick, self._ticks[-1][1] + 1)
        else:
            self._ticks.append((tick, 1))
        self._total += 1


def _leaves_ms(tick: int) -> int:
    return (tick + 1) * TICK_MS + MINUTE_MS


@dataclass(slots=True)
class DailyUsage:
    """Tokens used since midnight UTC; ``ends_ms`` is the next one, in Unix milliseconds.

    Each day keeps its own count, so that a clock set back over midnight loses no usage.
    """

    used: int = 0
    ends_ms: int = 0
    _others: dict[int, int] = field(default_factory=dict)

    def at(self, now_ms: float) -> DailyUsage:
        """Return this day, switching to the current one first; called per token, hence one comparison."""
        if not 0 < self.ends_ms - now_ms <= DAY_MS:
            if self.used:
                self._others[self.ends_ms] = self.used
                while len(self._others) > _MAX_OTHER_DAYS:
                    del self._others[next(iter(self._others))]
            self.ends_ms = (int(now_ms) // DAY_MS + 1) * DAY_MS
            self.used = self._others.pop(self.ends_ms, 0)
        return self

    @property
    def end(self) -> str:
        """The end of the day as text."""
        return datetime.fromtimestamp(self.ends_ms / 1000, UTC).strftime("%Y-%m-%d 00:00 UTC")


class AccessQuota:
    """Usage and limits of one token; implements ``sessions.client.Quota``.

    Args:
        clock: Unix seconds.
        monotonic: Monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self.limits: AccessLimits = NO_LIMITS
        self._clock = clock
        self._monotonic = monotonic
        self._requests = SlidingWindow()
        self._minute = TokenBucket()
        self._day = DailyUsage()
        self._running = 0
        self._admitted_ms = _ms(monotonic())

    def check_turn(self) -> None:
        """Refuse another turn if a limit is reached.

        Raises:
            InferenceCenterError: ``rate_limited`` or ``quota_exceeded``.
        """
        limits, now_ms = self.limits, _ms(self._monotonic())
        self._check_day(limits)
        if limits.concurrent_turns is not None and self._running >= limits.concurrent_turns:
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED,
                f"{self._running} turns of this token run or wait, and at most {limits.concurrent_turns} are allowed",
                hint="Wait until one of them ends.",
                retry_after_ms=BUSY_RETRY_MS,
            )
        if limits.requests_per_minute is not None:
            _refuse(
                f"this token is limited to {limits.requests_per_minute} turns per minute",
                self._requests.retry_after_ms(limits.requests_per_minute, now_ms=now_ms),
            )
        if limits.tokens_per_minute is not None:
            _refuse(
                f"this token is limited to {limits.tokens_per_minute} tokens per minute",
                self._minute.retry_after_ms(limits.tokens_per_minute, now_ms=now_ms),
            )

    def begin_turn(self) -> None:
        """Count a submitted turn, until ``end_turn``."""
        self._requests.count(now_ms=_ms(self._monotonic()))
        self._running += 1

    def resume_turn(self, n_tokens: int) -> None:
        """Count a turn resumed after a restart; tokens it generated before count for today."""
        self._running += 1
        self._today().used += n_tokens

    def use(self, n_tokens: int) -> bool:
        """Count prefilled or generated tokens; ``False`` once today's are used up."""
        limits, day = self.limits, self._day.at(self._clock() * 1000)
        day.used += n_tokens
        if limits.tokens_per_minute is not None:
            self._minute.take(n_tokens, limits.tokens_per_minute, now_ms=_ms(self._monotonic()))
        return limits.tokens_per_day is None or day.used < limits.tokens_per_day

    def end_turn(self) -> None:
        """Stop counting a turn as running."""
        self._running -= 1

    def admitted(self) -> None:
        """Record that the token has just authenticated."""
        self._admitted_ms = _ms(self._monotonic())

    @property
    def is_unused(self) -> bool:
        """Whether it can be dropped without loss: nothing is running, nor was it used in this minute or day."""
        now_ms = _ms(self._monotonic())
        limit = self.limits.tokens_per_minute
        return (
            not self._running
            and not self._today().used
            and now_ms - self._admitted_ms > MINUTE_MS
            and not self._requests.total(now_ms=now_ms)
            and (limit is None or self._minute.is_full(limit, now_ms=now_ms))
        )

    def restore_usage(self, n_tokens: int) -> None:
        """Add today's usage from before this daemon was started."""
        self._today().used += n_tokens

    @property
    def running(self) -> int:
        """Number of running and waiting turns."""
        return self._running

    @property
    def used_today(self) -> int:
        """Tokens used since midnight UTC."""
        return self._today().used

    @property
    def day_ends_ms(self) -> int:
        """Unix milliseconds of the next midnight UTC."""
        return self._today().ends_ms

    @property
    def requests_left(self) -> int | None:
        """Turns that may be submitted now; ``None`` without a limit."""
        limit = self.limits.requests_per_minute
        return None if limit is None else max(0, limit - self._requests.total(now_ms=_ms(self._monotonic())))

    @property
    def minute_tokens_left(self) -> int | None:
        """Tokens left in the per-minute bucket, negative if overdrawn; ``None`` without a limit."""
        limit = self.limits.tokens_per_minute
        return None if limit is None else self._minute.left(limit, now_ms=_ms(self._monotonic()))

    @property
    def day_tokens_left(self) -> int | None:
        """Tokens left today; ``None`` without a limit."""
        limit = self.limits.tokens_per_day
        return None if limit is None else max(0, limit - self.used_today)

    def _check_day(self, limits: AccessLimits) -> None:
        day = self._today()
        if limits.tokens_per_day is not None and day.used >= limits.tokens_per_day:
            raise InferenceCenterError(
                ErrorCode.QUOTA_EXCEEDED,
                f"this token has used {day.used} tokens today, and is limited to {limits.tokens_per_day} per day",
                hint=f"The next day begins at {day.end}.",
                retry_after_ms=day.ends_ms - _ms(self._clock()),
            )

    def _today(self) -> DailyUsage:
        return self._day.at(self._clock() * 1000)


class AccessQuotas:
    """The quotas of one daemon, by client and token id; an API key has the empty token id. On the event loop.

    Args:
        accounts: Source of the limits of tokens and clients.
        defaults: Limits where those set none.
        clock: Unix seconds.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        accounts: Accounts,
        *,
        defaults: AccessLimits = NO_LIMITS,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._accounts = accounts
        self._defaults = defaults
        self._clock = clock
        self._monotonic = monotonic
        self._own_limits: dict[tuple[str, str], AccessLimits] = {}
        self._quotas: defaultdict[str, dict[str, AccessQuota]] = defaultdict(dict)
        self._in_use: Callable[[], Collection[tuple[str, str]]] = tuple
        self._sweep_at = SWEEP_FROM

    def watch(self, in_use: Callable[[], Collection[tuple[str, str]]]) -> None:
        """Keep the quotas that ``in_use`` returns: those of the clients and tokens of open sockets."""
        self._in_use = in_use

    def __len__(self) -> int:
        return len(self._own_limits)

    def of(self, client_id: str, token_id: str) -> AccessQuota:
        """Return a quota, created from the accounts at the first use."""
        key = client_id, token_id
        return self._known(*key) or self._make(*key, self._accounts.limits((key,)).get(key, NO_LIMITS))

    def admit(self, account: Account) -> AccessQuota:
        """Return the quota of a newly authenticated account, with that account's limits."""
        client_id, token_id = account.client_id, account.token_id
        quota = self._known(client_id, token_id)
        if quota is None:
            return self._make(client_id, token_id, account.limits)
        quota.admitted()
        self._set(client_id, token_id, account.limits)
        return quota

    def effective(self, own: AccessLimits) -> AccessLimits:
        """Return the effective limits of a token, given its own and its account's as ``own``."""
        return own.over(self._defaults)

    def restore_usage(self, used: Mapping[tuple[str, str], int]) -> None:
        """Add today's usage from before this daemon was started, by client and token id."""
        own = self._accounts.limits(used.keys())
        for key, n_tokens in used.items():
            quota = self._known(*key) or self._make(*key, own.get(key, NO_LIMITS))
            quota.restore_usage(n_tokens)

    def reload(self, defaults: AccessLimits | None = None) -> None:
        """Reread the limits from the accounts, and apply other defaults if given; usage is kept.

        Clients of the external service keep the limits of its last answer.

        Raises:
            InferenceCenterError: ``storage_unavailable``; then nothing changes.
        """
        own = self._accounts.limits(self._own_limits.keys())
        self._defaults = self._defaults if defaults is None else defaults
        for client_id, quotas in self._quotas.items():
            for token_id in quotas:
                self._set(client_id, token_id, own.get((client_id, token_id), self._own_limits[client_id, token_id]))

    def used_today(self, client_id: str) -> int:
        """Return the tokens used by all tokens of a client since midnight UTC."""
        return sum(each.used_today for each in self._quotas.get(client_id, {}).values())

    def _known(self, client_id: str, token_id: str) -> AccessQuota | None:
        return self._quotas.get(client_id, {}).get(token_id)

    def _make(self, client_id: str, token_id: str, own: AccessLimits) -> AccessQuota:
        if len(self._own_limits) >= self._sweep_at:
            self._forget_unused()
        quota = AccessQuota(clock=self._clock, monotonic=self._monotonic)
        self._quotas[client_id][token_id] = quota
        self._set(client_id, token_id, own)
        return quota

    def _forget_unused(self) -> None:
        """Drop unused quotas, as an external service may know any number of clients and tokens.

        Runs when their number has doubled since the last run, so the amortized cost per token is constant.
        """
        in_use = frozenset(self._in_use())
        for client_id, token_id in [key for key in self._own_limits if key not in in_use]:
            quotas = self._quotas[client_id]
            if quotas[token_id].is_unused:
                del quotas[token_id], self._own_limits[client_id, token_id]
                if not quotas:
                    del self._quotas[client_id]
        self._sweep_at = max(SWEEP_FROM, 2 * len(self._own_limits))

    def _set(self, client_id: str, token_id: str, own: AccessLimits) -> None:
        self._own_limits[client_id, token_id] = own
        self._quotas[client_id][token_id].limits = self.effective(own)


def _refuse(reason: str, retry_after_ms: int | None) -> None:
    if retry_after_ms is not None:
        raise InferenceCenterError(
            ErrorCode.RATE_LIMITED, reason, hint="Retry after retry_after_ms.", retry_after_ms=retry_after_ms
        )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
