"""Multiplexes requests and session events over one connection: matches replies to requests, events to sessions."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from inferencecenter.client.errors import as_exception, failure, outcome_unknown
from inferencecenter.client.reconnect import ConnectionState, Ended
from inferencecenter.client.retry import LOAD_TIMEOUT_S, RetryPolicy
from inferencecenter.client.transport import ReconnectingTransport, Timing, UnknownEvent, new_backoff
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

    from inferencecenter.client.reconnect import BackoffPolicy, ReconnectBackoff
    from inferencecenter.client.session import ClientSession
    from inferencecenter.client.transport import Address, Transport
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
    requests.ListModels,
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


class RequestMultiplexer:
    """Routes requests, replies and session events over a connection that survives its sockets.

    Args:
        address: Address and credential of the daemon.
        policy: Backoff of reconnects; ``None`` disables reconnecting.
        on_notice: Called with each notification that concerns every session.
        timing: Clock and randomness.
        retries: Default number of retries after a temporary failure.

    Attributes:
        line: The reconnecting transport.
        timing: Clock and randomness.
        hello: The daemon's ``hello`` of the latest connection.
        account: The authenticated account.
        sessions: Sessions that are resumed after each reconnect, by id.
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
        self.line = ReconnectingTransport(address, policy=policy, timing=timing, user=self)
        self.sessions: dict[str, ClientSession] = {}
        self._policy = policy
        self.timing = timing
        self._retries = retries
        self._on_notice = on_notice
        self._tasks = TaskGroup("client")
        self._winding_up: set[asyncio.Task[None]] = set()
        # Replayed events keep the ids of the frames they answered, possibly frames of another connection.
        self._name = uuid.uuid4().hex[:8]
        self._ids = itertools.count(1)
        self._pending: dict[str, _Pending] = {}
        self._asking: dict[str, ClientSession] = {}

    async def run(self, link: Transport) -> None:
        """Keep the connection open until it ends for good.

        Args:
            link: The first socket.
        """
        try:
            await self.line.run(link)
        finally:
            await self._tasks.cancel()

    def begin(self, link: Transport) -> None:
        """Start with the first socket; ``run`` reads from it."""
        self.hello, self.account = link.hello, link.account
        self.line.begin(link)

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
        await self.line.until_connected()
        return await self.request_unchecked(request, is_interim=is_interim)

    async def request_unchecked(self, request: Request, *, is_interim: Callable[[Event], bool] = _is_answer) -> Event:
        """Send a request on the current socket, restored or not, and return its direct reply.

        Raises:
            InferenceCenterError: See ``request``.
        """
        request = self.numbered(request)
        pending = _Pending(request, asyncio.get_running_loop().create_future(), is_interim)
        self._pending[str(request.id)] = pending
        try:
            await self.line.send(request)
            return await pending.answer
        finally:
            del self._pending[str(request.id)]

    def numbered(self, request: R) -> R:
        """Return the request with a new id."""
        return request.model_copy(update={"id": f"{self._name}-{next(self._ids)}"})

    # Interface for sessions.

    def patience(
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

    def drain(self, turn: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run, in the background, the reader that brings an abandoned turn to its end."""
        task = self._tasks.spawn(turn, name="wind_up")
        self._winding_up.add(task)
        task.add_done_callback(self._winding_up.discard)
        return task

    async def drained(self, *, timeout_s: float) -> None:
        """Wait until all abandoned turns have ended, as long as the connection is up."""
        if self._winding_up and self.line.connected:
            await asyncio.wait(self._winding_up, timeout=timeout_s)

    def attach(self, session: ClientSession) -> None:
        """Route events to the session from now on, and resume it after each reconnect."""
        self.sessions[session.session_id] = session

    def detach(self, session: ClientSession) -> None:
        """Stop routing events to the session."""
        if self.sessions.get(session.session_id) is session:
            del self.sessions[session.session_id]

    def register_listener(self, request_id: str, session: ClientSession) -> None:
        """Route the replies to a frame to the session, even those that do not name the session."""
        self._asking[request_id] = session

    def unregister_listener(self, request_id: str) -> None:
        """Ignore further replies to a frame."""
        self._asking.pop(request_id, None)

    def fill_gap(self, session: ClientSession) -> None:
        """Resume a session that has missed events although the socket is open."""
        self._tasks.spawn(self._fill_gap(session), name="fill_gap")

    async def pause(self, backoff: ReconnectBackoff, refusal: InferenceCenterError) -> None:
        """Wait before the next attempt.

        Raises:
            InferenceCenterError: The failure, when the backoff is exhausted.
        """
        retry_after_s = (refusal.retry_after_ms or 0) / 1000
        wait_s = backoff.next_wait_s(now=self.timing.monotonic(), retry_after_s=retry_after_s)
        if wait_s is None:
            raise refusal
        await self.timing.sleep(wait_s)

    def new_backoff(self) -> ReconnectBackoff:
        """Return a new backoff that starts now."""
        return new_backoff(self._policy, self.timing)

    # Interface for the transport.

    def take(self, event: Event | UnknownEvent) -> None:
        """Route an event to the requests and sessions it concerns."""
        if isinstance(event, ModelChanged):
            self.hello = self.hello.model_copy(update={"model": event.model})
        # A broadcast that answers a request also goes to the requester.
        if isinstance(event, EngineChanged | GoingAway | ModelChanged | StorageChanged | Thermal):
            self._notify(event)
        request_id = None if isinstance(event, UnknownEvent) else event.id
        # By request id first: a refusal for another client's session does not name the session.
        asking = self._asking.get(request_id or "")
        pending = self._pending.get(request_id or "")
        session = asking or self.sessions.get(str(getattr(event, "session_id", None)))
        if session is not None:
            session.take(event, direct=asking is not None or pending is not None)
        if pending is None or pending.answer.done() or isinstance(event, UnknownEvent):
            return
        if isinstance(event, Error):
            pending.answer.set_exception(as_exception(event))
        elif not pending.is_interim(event):
            pending.answer.set_result(event)

    def cut(self) -> None:
        """Handle the loss of the socket: requests that are not idempotent fail."""
        for session in self.sessions.values():
            session.cut()
        for pending in self._pending.values():
            if not isinstance(pending.request, _REPEATABLE) and not pending.answer.done():
                pending.answer.set_exception(outcome_unknown(pending.request.op))

    async def restore(self, link: Transport) -> None:
        """Resume every session, then repeat the unanswered requests.

        Raises:
            InferenceCenterError: The daemon cannot do that yet.
        """
        self.hello, self.account = link.hello, link.account
        unanswered = [pending.request for pending in self._pending.values() if not pending.answer.done()]
        results = await asyncio.gather(*map(self._resume, list(self.sessions.values())), return_exceptions=True)
        for failed in results:
            if failed is not None:
                raise failed
        for request in unanswered:
            await self.line.send(request)

    def told(self, state: ConnectionState) -> None:
        """Publish the state of the connection; its end also fails everything that waits."""
        if isinstance(state, Ended):
            for pending in self._pending.values():
                if not pending.answer.done():
                    pending.answer.set_exception(state.error)
            for session in list(self.sessions.values()):
                session.fail(state.error)
        self._notify(state)

    def _notify(self, notice: Notice) -> None:
        if self._on_notice is not None:
            # Scheduled, so that a failing callback cannot end the connection.
            asyncio.get_running_loop().call_soon(self._on_notice, notice)

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
            await session.repeat_abort(resumed.turn_id)

    async def _fill_gap(self, session: ClientSession) -> None:
        try:
            await self._resume(session)
        except InferenceCenterError as error:
            await self.line.fail(error)


def expect(event: Event, kind: type[E]) -> E:
    """Return the event, checked to be of this type.

    Raises:
        InferenceCenterError: ``internal`` when it is not.
    """
    if isinstance(event, kind):
        return event
    raise failure(ErrorCode.INTERNAL, f"the daemon answered with an unexpected op, {event.op}")
