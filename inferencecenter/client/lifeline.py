"""A connection that is opened again whenever its socket is lost."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inferencecenter.client.failures import failure
from inferencecenter.client.link import open_link
from inferencecenter.client.reconnecting import Backoff, BackoffPolicy, Connected, Ended, Reconnecting, is_final
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inferencecenter.client.link import Address, Link, Unknown
    from inferencecenter.client.reconnecting import ConnectionState
    from inferencecenter.protocol.base import Event, Request


@dataclass(frozen=True, slots=True)
class Timing:
    """Time and chance. ``monotonic`` and ``sleep`` are in seconds, ``random`` gives numbers from 0 to 1."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random


class LinkUser(Protocol):
    """Whoever speaks over the connection."""

    def take(self, event: Event | Unknown) -> None:
        """Take an event."""

    def cut(self) -> None:
        """Take note that the socket is lost, and with it what was under way in both directions."""

    async def restore(self, link: Link) -> None:
        """Bring back on a new socket what was open on the one before.

        Raises:
            InferenceCenterError: The daemon cannot do that yet; the attempt counts as failed.
        """

    def told(self, state: ConnectionState) -> None:
        """Hear what becomes of the connection."""


class Lifeline:
    """Keeps one socket open; ``run`` is its only writer.

    Args:
        address: Where the daemon is.
        policy: When to connect again; ``None`` for never.
        timing: Time and chance.
        user: Who speaks over it.
    """

    def __init__(self, address: Address, *, policy: BackoffPolicy | None, timing: Timing, user: LinkUser) -> None:
        self._address = address
        self._policy = policy
        self._timing = timing
        self._user = user
        self._tasks = TaskGroup("lifeline")
        self._link: Link | None = None
        self._failure: InferenceCenterError | None = None
        self._settled = asyncio.Event()
        self.ended: InferenceCenterError | None = None
        self.n_sockets = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} sockets={self.n_sockets} connected={self.connected} ended={self.ended!r}>"

    @property
    def connected(self) -> bool:
        """Whether what is sent now goes out, and everything is restored."""
        return self._settled.is_set() and self.ended is None

    async def until_connected(self) -> None:
        """Wait for the next moment at which everything is restored.

        Raises:
            InferenceCenterError: Why there will be none.
        """
        await self._settled.wait()
        if self.ended is not None:
            raise self.ended

    async def send(self, request: Request) -> None:
        """Send a request; without a socket it is lost.

        Raises:
            InferenceCenterError: ``message_too_large``.
        """
        if self._link is not None:
            await self._link.send(request)

    async def fail(self, error: InferenceCenterError) -> None:
        """Give up the socket, which is open but of no use at the moment."""
        if self._link is not None:
            self._failure = error
            await self._link.close()

    async def run(self, link: Link) -> None:
        """Read from one socket after the other until that is over for good.

        Args:
            link: The first one.
        """
        backoff = new_backoff(self._policy, self._timing)
        restoring: asyncio.Task[None] | None = None
        try:
            while True:
                opened_at = self._timing.monotonic()
                error, final = await self._serve(link, restoring)
                if final or self._policy is None:
                    self._end(error)
                    return
                self._user.cut()
                now = self._timing.monotonic()
                backoff.lost(now=now, up_s=now - opened_at)
                link = await self._reopen(backoff, error)
                self._link = link
                self.n_sockets += 1
                restoring = self._tasks.spawn(self._restore(link), name="restore")
        except _OverError as over:
            self._end(over.error)
        finally:
            await self.close()

    def begin(self, link: Link) -> None:
        """Take the first socket, on which there is nothing to restore."""
        self._link = link
        self.n_sockets = 1
        self._settled.set()

    async def _serve(self, link: Link, restoring: asyncio.Task[None] | None) -> tuple[InferenceCenterError, bool]:
        """Hand out what comes until the socket closes; return why it did, and whether that is final."""
        async for event in link.events():
            self._user.take(event)
        if restoring is not None:
            restoring.cancel()
        failed, self._failure, self._link = self._failure, None, None
        self._settled.clear()
        return link.closing_error() if failed is None else (failed, False)

    async def _restore(self, link: Link) -> None:
        try:
            await self._user.restore(link)
        except InferenceCenterError as error:
            await self.fail(error)
        else:
            self._settled.set()
            self._user.told(Connected())

    async def _reopen(self, backoff: Backoff, error: InferenceCenterError) -> Link:
        """Return a new socket.

        Raises:
            _OverError: There will be none.
        """
        while True:
            wait_s = backoff.next_wait_s(now=self._timing.monotonic(), retry_after_s=(error.retry_after_ms or 0) / 1000)
            if wait_s is None:
                raise _OverError(_given_up(error))
            self._user.told(Reconnecting(attempt=backoff.attempt, in_s=wait_s, error=error))
            await self._timing.sleep(wait_s)
            try:
                return await open_link(self._address)
            except InferenceCenterError as refusal:
                if is_final(refusal):
                    raise _OverError(refusal) from refusal
                error = refusal

    def _end(self, error: InferenceCenterError) -> None:
        self.ended = error
        self._settled.set()
        self._user.told(Ended(error))

    async def close(self) -> None:
        """Leave nobody waiting, whatever the reason, and no socket open, also if ``run`` never came to run."""
        if self.ended is None:
            self._end(failure(ErrorCode.DAEMON_UNREACHABLE, "the client was closed"))
        await self._tasks.cancel()
        if self._link is not None:
            await self._link.close()


class _OverError(Exception):
    """There will be no other socket."""

    def __init__(self, error: InferenceCenterError) -> None:
        super().__init__(str(error))
        self.error = error


def new_backoff(policy: BackoffPolicy | None, timing: Timing) -> Backoff:
    """Return a count of attempts that begins now."""
    return Backoff(policy or BackoffPolicy(), random=timing.random, now=timing.monotonic())


def _given_up(error: InferenceCenterError) -> InferenceCenterError:
    return failure(
        ErrorCode.DAEMON_UNREACHABLE,
        f"the connection was lost and did not come back in time: {error.message}",
        hint=error.hint,
    )
