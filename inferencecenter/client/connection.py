"""A connection to a daemon over successive sockets: reconnects, and routes replies to requests, events to sessions."""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from inferencecenter.client.errors import as_exception, failure, outcome_unknown
from inferencecenter.client.retry import (
    LOAD_TIMEOUT_S,
    BackoffPolicy,
    Connected,
    ConnectionState,
    Ended,
    ReconnectBackoff,
    Reconnecting,
    RetryPolicy,
    Timing,
    is_final,
)
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol import requests
from inferencecenter.protocol.events import (
    EngineChanged,
    Error,
    GoingAway,
    ModelChanged,
    SessionResumed,
    StorageChanged,
    Thermal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from inferencecenter.client.options import Address
    from inferencecenter.client.session import ClientSession
    from inferencecenter.client.transport import Transport
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.events import AuthSuccess, Hello

E = TypeVar("E", bound="Event")
R = TypeVar("R", bound="Request")

Notice: TypeAlias = ConnectionState | EngineChanged | GoingAway | ModelChanged | StorageChanged | Thermal
"""Notifications that concern every session: the connection's state, and the daemon's broadcasts."""

# Idempotent: safe to send again.
_REPEATABLE: Final = (
    requests.Hello,
    requests.Ping,
    requests.GetSession,
    requests.ListSessions,
    requests.SearchSessions,
    requests.ListModels,
    requests.ListShares,
    requests.EmbedTexts,
    requests.RerankDocuments,
    requests.ResumeSession,
    requests.SetMetadata,
    requests.CloseSession,
    requests.UnloadModel,
    requests.Status,
    requests.Metrics,
    requests.Usage,
)


def _is_answer(_event: Event) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class _Pending:
    """An unanswered request; ``is_interim`` recognizes the events that precede its reply."""

    request: Request
    answer: asyncio.Future[Event]
    is_interim: Callable[[Event], bool]


class DaemonConnection:
    """Keeps one socket open, and routes requests, replies and session events over it.

    One task reads from the successive sockets; only it changes the state of the connection.

    Args:
        address: Address and credential of the daemon.
        policy: Backoff of reconnects; ``None`` disables reconnecting.
        on_notice: Called with each notification that concerns every session.
        timing: Clock and randomness.
        retries: Default number of retries after a temporary failure.

    Attributes:
        timing: Clock and randomness.
        hello: The daemon's ``hello`` of the latest connection.
        account: The authenticated account.
        sessions: Sessions that are resumed after each reconnect, by id.
        ended: Why the connection ended for good; ``None`` while it has not.
        n_sockets: Number of sockets so far.
    """

    hello: Hello
    account: AuthSuccess

    def __init__(
        self,
        address: Address,
        *,
        policy: BackoffPolicy | None,
        on_notice: Callable[[Notice], None] | None,
        timing: Timing,
        retries: int = 0,
    ) -> None:
        self._address = address
        self._policy = policy
        self._on_notice = on_notice
        self._retries = retries
        self.timing = timing
        self.sessions: dict[str, ClientSession] = {}
        self.ended: InferenceCenterError | None = None
        self.n_sockets = 0
        self._transport: Transport | None = None
        self._failure: InferenceCenterError | None = None
        self._settled = asyncio.Event()
        self._tasks = TaskGroup("client")
        self._drains: set[asyncio.Task[None]] = set()
        # Replayed events keep the ids of the frames they answered, possibly frames of another connection.
        self._name = os.urandom(4).hex()
        self._ids = itertools.count(1)
        self._pending: dict[str, _Pending] = {}
        self._listeners: dict[str, ClientSession] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} sockets={self.n_sockets} connected={self.connected} ended={self.ended!r}>"

    @property
    def connected(self) -> bool:
        """Whether the socket is open and every session is restored."""
        return self._settled.is_set() and self.ended is None

    async def wait_connected(self) -> None:
        """Wait until the socket is open and every session is restored.

        Raises:
            InferenceCenterError: The connection has ended for good.
        """
        await self._settled.wait()
        if self.ended is not None:
            raise self.ended

    async def open(self) -> None:
        """Open the first socket, which has no sessions to restore, and start to read from it.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, ``forbidden`` or ``rate_limited``.
        """
        transport = await self._open_transport()
        self._settled.set()
        self._tasks.spawn(self._run(transport), name="connection")

    async def close(self) -> None:
        """End the connection, fail all waiting requests and turns, and close the socket."""
        if self.ended is None:
            self._end(failure(ErrorCode.DAEMON_UNREACHABLE, "the client was closed"))
        await self._tasks.cancel()
        if self._transport is not None:
            await self._transport.close()

    async def request(self, request: Request, *, is_interim: Callable[[Event], bool] = _is_answer) -> Event:
        """Send a request and return its direct reply; waits while the connection is lost.

        A read, or a request that closes a session, is sent again if its reply is lost with the socket. The outcome of
        any other request is then unknown.

        Args:
            request: The request.
            is_interim: Called with each event that answers it; the first for which it returns ``False`` is the reply.

        Raises:
            InferenceCenterError: The daemon's refusal, or ``daemon_unreachable``.
        """
        await self.wait_connected()
        return await self.request_unchecked(request, is_interim=is_interim)

    async def request_unchecked(self, request: Request, *, is_interim: Callable[[Event], bool] = _is_answer) -> Event:
        """Send a request on the current socket, restored or not, and return its direct reply.

        Raises:
            InferenceCenterError: See ``request``.
        """
        request = self.with_new_id(request)
        pending = _Pending(request, asyncio.get_running_loop().create_future(), is_interim)
        self._pending[str(request.id)] = pending
        try:
            await self.send(request)
            return await pending.answer
        finally:
            del self._pending[str(request.id)]

    # Interface for sessions.

    def with_new_id(self, request: R) -> R:
        return request.model_copy(update={"id": f"{self._name}-{next(self._ids)}"})

    async def send(self, request: Request) -> None:
        """Send a request; without a socket it is dropped.

        Raises:
            InferenceCenterError: ``message_too_large``.
        """
        if self._transport is not None:
            await self._transport.send(request)

    def attach(self, session: ClientSession) -> None:
        """Route events to the session from now on, and resume it after each reconnect."""
        self.sessions[session.session_id] = session

    def detach(self, session: ClientSession) -> None:
        """Stop routing events to the session."""
        if self.sessions.get(session.session_id) is session:
            del self.sessions[session.session_id]

    def register_listener(self, request_id: str, session: ClientSession) -> None:
        """Route the replies to a frame to the session, even those that do not name the session."""
        self._listeners[request_id] = session

    def unregister_listener(self, request_id: str) -> None:
        """Ignore further replies to a frame."""
        self._listeners.pop(request_id, None)

    def fill_gap(self, session: ClientSession) -> None:
        """Resume a session that has missed events although the socket is open."""
        self._tasks.spawn(self._fill_gap(session), name="fill_gap")

    def drain(self, turn: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run, in the background, the reader that brings an abandoned turn to its end."""
        task = self._tasks.spawn(turn, name="drain")
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return task

    async def wait_drained(self, *, timeout_s: float) -> None:
        """Wait until all abandoned turns have ended, as long as the connection is up."""
        if self._drains and self.connected:
            await asyncio.wait(self._drains, timeout=timeout_s)

    def retry_policy(
        self,
        *,
        retries: int | None = None,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        on_loading: Callable[[str], None] | None = None,
    ) -> RetryPolicy:
        """Return the retry policy of one operation; ``retries`` defaults to the connection's."""
        return RetryPolicy(
            retries=self._retries if retries is None else retries,
            load_timeout_s=load_timeout_s,
            on_loading=on_loading,
            timing=self.timing,
        )

    def new_backoff(self) -> ReconnectBackoff:
        """Return a new backoff that starts now."""
        policy, timing = self._policy or BackoffPolicy(), self.timing
        return ReconnectBackoff(policy, random=timing.random, now=timing.monotonic())

    async def pause(self, backoff: ReconnectBackoff, refusal: InferenceCenterError) -> None:
        """Wait before the next attempt.

        Raises:
            InferenceCenterError: The refusal, when the backoff is exhausted.
        """
        wait_s = self._next_wait_s(backoff, refusal)
        if wait_s is None:
            raise refusal
        await self.timing.sleep(wait_s)

    def _next_wait_s(self, backoff: ReconnectBackoff, error: InferenceCenterError) -> float | None:
        return backoff.next_wait_s(now=self.timing.monotonic(), retry_after_s=(error.retry_after_ms or 0) / 1000)

    # Successive sockets.

    async def _open_transport(self) -> Transport:
        # Imported with the first socket: the WebSocket library takes as long to import as the rest of the client.
        from inferencecenter.client.transport import open_transport  # noqa: PLC0415

        transport = await open_transport(self._address)
        self._transport = transport
        self.n_sockets += 1
        self.hello, self.account = transport.hello, transport.account
        return transport

    async def _run(self, transport: Transport) -> None:
        """Read from successive sockets until the connection ends for good."""
        backoff = self.new_backoff()
        restoring: asyncio.Task[None] | None = None
        try:
            while True:
                opened_at = self.timing.monotonic()
                error, final = await self._serve(transport, restoring)
                if final or self._policy is None:
                    self._end(error)
                    return
                self._on_disconnect()
                now = self.timing.monotonic()
                backoff.lost(now=now, up_s=now - opened_at)
                try:
                    transport = await self._reopen(backoff, error)
                except InferenceCenterError as final_error:
                    self._end(final_error)
                    return
                restoring = self._tasks.spawn(self._restore(), name="restore")
        finally:
            await self.close()

    async def _serve(
        self, transport: Transport, restoring: asyncio.Task[None] | None
    ) -> tuple[InferenceCenterError, bool]:
        """Dispatch events until the socket closes; return why it did, and whether that is final."""
        async for event in transport.events():
            self._dispatch(event)
        if restoring is not None:
            restoring.cancel()
        failed, self._failure, self._transport = self._failure, None, None
        self._settled.clear()
        return transport.closing_error() if failed is None else (failed, False)

    async def _reopen(self, backoff: ReconnectBackoff, error: InferenceCenterError) -> Transport:
        """Return a new socket.

        Raises:
            InferenceCenterError: The connection has ended for good.
        """
        while True:
            wait_s = self._next_wait_s(backoff, error)
            if wait_s is None:
                raise failure(
                    ErrorCode.DAEMON_UNREACHABLE,
                    f"the connection was lost and not restored in time: {error.message}",
                    hint=error.hint,
                )
            self._notify(Reconnecting(attempt=backoff.attempt, in_s=wait_s, error=error))
            await self.timing.sleep(wait_s)
            try:
                return await self._open_transport()
            except InferenceCenterError as refusal:
                if is_final(refusal):
                    raise
                error = refusal

    async def _fail(self, error: InferenceCenterError) -> None:
        """Close an open but unusable socket, which causes a reconnect."""
        if self._transport is not None:
            self._failure = error
            await self._transport.close()

    def _end(self, error: InferenceCenterError) -> None:
        """End for good: all waiting requests and turns fail."""
        self.ended = error
        self._settled.set()
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
        for session in list(self.sessions.values()):
            session.fail(error)
        self._notify(Ended(error))

    # Requests in flight.

    def _dispatch(self, event: Event) -> None:
        """Route an event to the requests and sessions it concerns."""
        if isinstance(event, ModelChanged):
            self.hello = self.hello.model_copy(update={"model": event.model})
        # A broadcast that answers a request also goes to the requester.
        if isinstance(event, EngineChanged | GoingAway | ModelChanged | StorageChanged | Thermal):
            self._notify(event)
        # By request id first: a refusal for another client's session does not name the session.
        listener = self._listeners.get(event.id or "")
        pending = self._pending.get(event.id or "")
        session = listener or self.sessions.get(str(getattr(event, "session_id", None)))
        if session is not None:
            session.apply(event, direct=listener is not None or pending is not None)
        if pending is None or pending.answer.done():
            return
        if isinstance(event, Error):
            pending.answer.set_exception(as_exception(event))
        elif not pending.is_interim(event):
            pending.answer.set_result(event)

    def _on_disconnect(self) -> None:
        """Handle the loss of the socket: requests that are not idempotent fail."""
        for session in self.sessions.values():
            session.on_disconnect()
        for pending in self._pending.values():
            if not isinstance(pending.request, _REPEATABLE) and not pending.answer.done():
                pending.answer.set_exception(outcome_unknown(pending.request.op))

    async def _restore(self) -> None:
        """Resume every session, then repeat the unanswered requests."""
        unanswered = [pending.request for pending in self._pending.values() if not pending.answer.done()]
        results = await asyncio.gather(*map(self._resume, list(self.sessions.values())), return_exceptions=True)
        try:
            for failed in results:
                if failed is not None:
                    raise failed
            for request in unanswered:
                await self.send(request)
        except InferenceCenterError as error:
            await self._fail(error)
        else:
            self._settled.set()
            self._notify(Connected())

    async def _resume(self, session: ClientSession) -> None:
        """Resume a session; drop one that can no longer be resumed.

        Raises:
            InferenceCenterError: It cannot be resumed yet.
        """
        try:
            resumed = expect(await self.request_unchecked(session.resumption()), SessionResumed)
        except InferenceCenterError as error:
            if error.spec.retryable:
                raise
            self.detach(session)
            session.fail(error)
        else:
            await session.resend_abort(resumed.turn_id)

    async def _fill_gap(self, session: ClientSession) -> None:
        try:
            await self._resume(session)
        except InferenceCenterError as error:
            await self._fail(error)

    def _notify(self, notice: Notice) -> None:
        if self._on_notice is not None:
            # Scheduled, so that a failing callback cannot end the connection.
            asyncio.get_running_loop().call_soon(self._on_notice, notice)


def expect(event: Event, kind: type[E]) -> E:
    """Return the event, checked to be of this type.

    Raises:
        InferenceCenterError: ``internal`` when it is not.
    """
    if isinstance(event, kind):
        return event
    raise failure(ErrorCode.INTERNAL, f"the daemon answered with an unexpected op, {event.op}")
