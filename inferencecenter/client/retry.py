"""Backoff of reconnects, retries after temporary errors of the daemon, and the errors that end both."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from inferencecenter.client.errors import TryLaterError, failure
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.close import CLOSE_CODES, CloseCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

T = TypeVar("T")

HEALTHY_AFTER_S: Final = 10.0
"""Seconds after which a connection counts as stable: its loss restarts the backoff."""
LOAD_TIMEOUT_S: Final = 600.0
"""Default timeout for loading a model; some are read from slow disks."""
_LOOK_AGAIN_S: Final = 1.0
_MAX_DOUBLINGS: Final = 30

# Every other close code, and a socket that ends without one, leads to a reconnect.
_FINAL_CLOSES: Final[Mapping[int, ErrorCode]] = MappingProxyType(
    {
        CloseCode.NORMAL: ErrorCode.DAEMON_UNREACHABLE,
        CloseCode.SHUTDOWN: ErrorCode.DAEMON_UNREACHABLE,
        CloseCode.POLICY: ErrorCode.FORBIDDEN,
        CloseCode.TOO_LARGE: ErrorCode.MESSAGE_TOO_LARGE,
        CloseCode.NOT_AUTHENTICATED: ErrorCode.NOT_AUTHENTICATED,
    }
)
_FINAL_REFUSALS: Final = frozenset({ErrorCode.NOT_AUTHENTICATED, ErrorCode.FORBIDDEN})


@dataclass(frozen=True, slots=True)
class Timing:
    """Clock and randomness. ``monotonic`` and ``sleep`` are in seconds, ``random`` returns numbers from 0 to 1."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection is up; every open session has been restored."""


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """The socket is lost.

    Attributes:
        attempt: Number of the next attempt, from 1.
        in_s: Seconds until the next attempt.
        error: Why the socket, or the previous attempt, failed.
    """

    attempt: int
    in_s: float
    error: InferenceCenterError


@dataclass(frozen=True, slots=True)
class Ended:
    """The connection has ended for good."""

    error: InferenceCenterError


ConnectionState: TypeAlias = Connected | Reconnecting | Ended


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Bounds of the backoff, in seconds.

    Attributes:
        min_s: Bound of the first delay; doubles with each attempt.
        max_s: Bound of any delay.
        give_up_after_s: Seconds without a connection after which attempts stop; ``None`` for never.
    """

    min_s: float = 0.2
    max_s: float = 10.0
    give_up_after_s: float | None = 300.0


class ReconnectBackoff:
    """Counts attempts; each delay is uniform between 0 and a bound that doubles (full jitter).

    Args:
        policy: Bounds.
        random: Returns numbers from 0 to 1.
        now: Current time, in seconds of the clock used for all calls.
    """

    def __init__(self, policy: BackoffPolicy, *, random: Callable[[], float], now: float) -> None:
        self._policy = policy
        self._random = random
        self._since = now
        self.attempt = 0

    def lost(self, *, now: float, up_s: float) -> None:
        """Record the loss of a connection that was up for ``up_s``; a short one counts as a failed attempt."""
        self._since = now
        if up_s >= HEALTHY_AFTER_S:
            self.attempt = 0

    def next_wait_s(self, *, now: float, retry_after_s: float = 0.0) -> float | None:
        """Return the delay in seconds before the next attempt, ``None`` to give up.

        Args:
            now: Current time in seconds.
            retry_after_s: Minimum delay given by the daemon; the jitter is added to it.
        """
        policy = self._policy
        bound_s = min(policy.max_s, math.ldexp(policy.min_s, min(self.attempt, _MAX_DOUBLINGS)))
        wait_s = retry_after_s + self._random() * bound_s
        if policy.give_up_after_s is not None:
            left_s = self._since + policy.give_up_after_s - now
            if left_s <= 0 or retry_after_s > left_s:
                return None
            wait_s = min(wait_s, left_s)
        self.attempt += 1
        return wait_s


_RETRIES: Final = BackoffPolicy(min_s=0.5, give_up_after_s=None)


class RetryPolicy:
    """Decides whether one operation is retried, and waits before each retry.

    Args:
        retries: Number of retries after temporary errors.
        load_timeout_s: Seconds to wait for the model to load; these waits do not count as retries.
        on_loading: Called with the daemon's refusal, about once a second, while the model loads.
        timing: Clock and randomness.
    """

    def __init__(
        self,
        *,
        retries: int = 0,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        on_loading: Callable[[str], None] | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._retries = retries
        self._load_timeout_s = load_timeout_s
        self._on_loading = on_loading
        self._timing = timing or Timing()
        self._loaded_until: float | None = None
        self._backoff = ReconnectBackoff(_RETRIES, random=self._timing.random, now=0.0)

    async def wait(self, error: InferenceCenterError) -> None:
        """Wait until the operation may be retried.

        Raises:
            InferenceCenterError: The error itself, if it is not to be retried.
        """
        if error.code is ErrorCode.MODEL_LOADING:
            wait_s = self._until_loaded(error)
            if self._on_loading is not None:
                self._on_loading(error.message)
        else:
            wait_s = self._until_retry(error)
        await self._timing.sleep(wait_s)

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``attempt``, called until it succeeds or the policy is exhausted.

        Raises:
            InferenceCenterError: The last error of ``attempt``.
        """
        while True:
            try:
                return await attempt()
            except InferenceCenterError as error:
                await self.wait(error)

    def _until_loaded(self, error: InferenceCenterError) -> float:
        now = self._timing.monotonic()
        if self._loaded_until is None:
            self._loaded_until = now + self._load_timeout_s
        wait_s = _LOOK_AGAIN_S if error.retry_after_ms is None else error.retry_after_ms / 1000
        if now + wait_s > self._loaded_until:
            raise error
        return wait_s

    def _until_retry(self, error: InferenceCenterError) -> float:
        """Return the daemon's delay with jitter, so that refused clients do not retry simultaneously."""
        if not isinstance(error, TryLaterError) or self._backoff.attempt >= self._retries:
            raise error
        wait_s = self._backoff.next_wait_s(now=0.0, retry_after_s=(error.retry_after_ms or 0) / 1000)
        assert wait_s is not None, "retries are limited by their number, not by time"
        return wait_s


def is_final(error: InferenceCenterError) -> bool:
    """Return whether a failed attempt must not be repeated."""
    return error.code in _FINAL_REFUSALS


def closing_error(code: int | None, reason: str | None) -> tuple[InferenceCenterError, bool]:
    """Return the error for a closed socket, and whether it is final.

    Args:
        code: Close code; ``None`` without one.
        reason: Close reason.
    """
    row = next((row for row in CLOSE_CODES if row.code == code), None)
    message = reason or (row.meaning if row else "without a reason")
    final = _FINAL_CLOSES.get(code) if code is not None else None
    error = failure(
        final or ErrorCode.DAEMON_UNREACHABLE,
        f"the connection closed with {code}: {message}",
        hint=f"{row.client_should.capitalize()}." if row else None,
    )
    return error, final is not None
