"""WebSockets of the daemon's own protocol: their endpoint, login, frames in and events out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import structlog
from starlette.routing import BaseRoute, Match, NoMatchFound

from inferencecenter.api.request_context import admit
from inferencecenter.api.websocket.commands import COMMANDS
from inferencecenter.auth.rate_limits import RefusalBackoffs
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.base import SUBPROTOCOL
from inferencecenter.protocol.codec import FrameError, read_frame
from inferencecenter.protocol.values import ClientLimits, LogRecord
from inferencecenter.server import event_factory
from inferencecenter.server.connection import LARGE_FRAME_CHARS, SocketConnection
from inferencecenter.server.handshake import chooses_v1, refusal_body, refusal_headers
from inferencecenter.server.outbox import Outbox
from inferencecenter.server.states import ConnectionState
from inferencecenter.server.websocket import SCOPE_KEY
from inferencecenter.sessions.images.library import has_images
from inferencecenter.telemetry.logs import RECENT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.datastructures import URLPath
    from starlette.types import Receive, Scope, Send

    from inferencecenter.api.embedding import EmbeddingJob
    from inferencecenter.api.websocket.commands import Command
    from inferencecenter.auth.account import Account
    from inferencecenter.auth.audit import AuditEvent
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.codec import Frame
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.outbox import Wire
    from inferencecenter.server.websocket import WebSocket
    from inferencecenter.sessions.journal import Journal


EventT = TypeVar("EventT", bound="Event")

_SHOWN_CHARS: Final = 100

MAX_EMBEDDINGS: Final = 8
"""Maximum number of requests for embeddings that run on a socket."""

LOG_INTERVAL_S: Final = 0.5
MAX_LOG_LINES: Final = 100
"""Maximum number of lines of an event; what is above it in an interval is left out."""
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_log = structlog.get_logger(__name__)


class LogTail:
    """A subscription to the daemon's log, until ``stop``; on the event loop."""

    def __init__(self, send: Callable[[Event], None], *, level: str) -> None:
        self._send = send
        self._levels = frozenset(_LEVELS[_LEVELS.index(level) :])
        self._number = 0
        self._timer = asyncio.get_running_loop().call_soon(self._push)

    def stop(self) -> None:
        self._timer.cancel()

    def _push(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL_S, self._push)
        found, skipped = RECENT.after(self._number, limit=MAX_LOG_LINES)
        if not found:
            return
        self._number = found[-1].number
        lines = tuple(
            LogRecord(at=line.at, level=line.level, text=line.text) for line in found if line.level in self._levels
        )
        if lines or skipped:
            self._send(events.Log(log_lines=lines, skipped=skipped))


class Connection(SocketConnection[Outbox]):
    """A socket of the daemon's own protocol; authenticated with the upgrade or by a frame.

    Args:
        context: The rest of the daemon.
        wire: The transport.
        address: Address that failed logins are counted for.
        v1: Whether the socket chose the subprotocol.
        traceparent: Span of the client's trace for turns that name none.
        unix_uid: User of a program on the Unix socket.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        context: ServerContext,
        wire: Wire,
        *,
        address: str,
        v1: bool,
        traceparent: str | None = None,
        unix_uid: int | None = None,
    ) -> None:
        outbox = partial(Outbox, sent=self._watch_turns)
        super().__init__(
            context, wire, outbox=outbox, backoffs=RefusalBackoffs(), address=address, traceparent=traceparent
        )
        # A session sends to the outbox without a call in between; what a closed connection is sent is dropped there.
        self.send, self.replay, self.wait_replayed = self._outbox.send, self._outbox.replay, self._outbox.wait_replayed
        self.v1 = False
        self.unix_uid = unix_uid
        self._turns: dict[str, str] = {}
        self._embeddings: set[EmbeddingJob] = set()
        self._log_tail: LogTail | None = None
        self._rest: Callable[[], Awaitable[None]] | None = None
        if v1:
            self.enable_v1()

    def enable_v1(self) -> None:
        """Send this socket all ops and fields from now on."""
        self.v1 = True
        self._outbox.enable_v1()

    def accepted(self) -> None:
        """Send the first event: the authenticated account, or that authentication is required."""
        if self.authenticated:
            self.send(self.auth_success())
        else:
            self.send(self.hello())
            self._arm(self.context.settings.auth_timeout_s, "authentication timeout")

    def _left(self) -> None:
        self.context.hub.remove(self)

    def hello(self) -> events.Hello:
        context = self.context
        return event_factory.hello(
            context.models.status,
            context.settings,
            uptime_s=context.uptime_s(),
            storable=context.sessions.fault is None,
        )

    def audit(self, event: AuditEvent, detail: str = "") -> None:
        """Record an action of its client in the audit log."""
        self.context.audit(self.client, self.address, event, detail)

    def authenticate(self, account: Account) -> None:
        """Authenticate the socket as ``account``.

        Raises:
            InferenceCenterError: ``rate_limited`` when the client has too many sockets.
        """
        self.context.hub.join(account.client_id, self)
        self._sign_in(account)
        self.context.quotas.admit(account)
        _log.info("client_connected", client=account.client_id, address=self.address, v1=self.v1)

    def auth_success(self) -> events.AuthSuccess:
        """Return the client's own settings."""
        client = self.client
        limits = self.context.limits_of(client.client_id, client.token_id)
        return events.AuthSuccess(
            client_id=client.client_id,
            max_sessions=client.max_sessions,
            scopes=tuple(sorted(client.scopes)),
            priority=client.priority,
            limits=ClientLimits(
                max_sessions=client.max_sessions,
                max_connections=self.context.settings.max_connections_per_client,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                tokens_per_day=limits.tokens_per_day,
                concurrent_turns=limits.concurrent_turns,
                max_tokens=limits.max_tokens,
                models=limits.models,
            ),
        )

    def defer(self, rest: Callable[[], Awaitable[None]]) -> None:
        """Run the rest of a command before the next frame is read: it waits for a disk or another service."""
        self._rest = rest

    def answer_later(
        self,
        request: Request,
        work: Callable[[], Awaitable[EventT]],
        *,
        then: Callable[[EventT], None] | None = None,
    ) -> None:
        """Reply with the event of ``work``, or its error, before the next frame is read.

        ``then`` is called with the event after the reply, which may close this socket.
        """

        async def run() -> None:
            try:
                answer = await work()
            except InferenceCenterError as error:
                self.fail(error, request_id=request.id, op=request.op)
                return
            except Exception:  # noqa: BLE001 - boundary: a defect must not close the socket
                _log.exception("command_failed", op=request.op)
                self.fail(InferenceCenterError(ErrorCode.INTERNAL), request_id=request.id, op=request.op)
                return
            self._reply(request, answer, self.context.sessions.journal_for(request, self.client_id))
            if then is not None:
                then(answer)

        self.defer(run)

    def answer_from_disk(
        self, request: Request, work: Callable[[], EventT], *, then: Callable[[EventT], None] | None = None
    ) -> None:
        """Reply with the event of ``work``, which runs on the disk worker; see ``answer_later``."""
        self.answer_later(request, partial(self.context.disk_worker.run, self.client_id, work), then=then)

    async def _process(self, text: str) -> None:
        """Execute the request of a frame, and send the reply or an error.

        It is first charged by op and size, so that excess requests are refused before they are validated. A reply about
        a session is sent once it is durable, together with the session's events; all others at once.
        """
        frame = await self._read(text)
        command, request = COMMANDS.get(frame.op), None
        try:
            self._charge(command, frame)
            request = await self.aside(text, frame.parse)
            assert command is not None, "each op that can be parsed has a command"
            if command.in_bulk:
                await self.wait_replayed()
            self._admit(command, request)
            if (session_id := getattr(request, "session_id", None)) is not None:
                await self.context.load_session(self.client, session_id, closing=frame.op == "close_session")
            request = await self._with_images(request)
            if self.closed:  # while it was read, or waited
                return
            journal = self.context.sessions.journal_for(request, self.client_id)
            answer = command.handler(self, request)
        except InferenceCenterError as error:
            if command is not None and command.is_free and self.authenticated:
                self.context.operations.count(self.client_id, n_frame_chars=frame.n_chars)
            self._refuse(frame, error, understood=request is not None or error.code is ErrorCode.RATE_LIMITED)
        except Exception:  # noqa: BLE001 - boundary: a defect in one frame must not close the socket
            _log.exception("command_failed", op=frame.op)
            self._refuse(frame, InferenceCenterError(ErrorCode.INTERNAL), understood=request is not None)
        else:
            if answer is not None:
                self._reply(request, answer, journal)
        while (rest := self._rest) is not None:
            self._rest = None
            await rest()

    def _reply(self, request: Request, answer: Event, journal: Journal) -> None:
        """Send the answer to a request once ``journal`` releases it."""
        reply = answer if request.id is None else answer.model_copy(update={"id": request.id})
        in_bulk = COMMANDS[request.op].in_bulk
        journal.release(lambda: self.replay((reply,)) if in_bulk else self.send(reply))

    async def _with_images(self, request: Request) -> Request:
        """Return a request whose images are stored and named by digest; it has waited for their decoding.

        Raises:
            InferenceCenterError: See ``ImageLibrary.resolve``; ``session_not_found``.
        """
        if not isinstance(request, requests.Infer | requests.Append) or not has_images(request.messages or ()):
            return request
        sessions = self.context.sessions
        owner = sessions.image_owner(self.client, request.session_id)
        messages = await sessions.images.resolve(owner, request.messages or ())
        try:
            sessions.image_owner(self.client, request.session_id)
        except InferenceCenterError:  # it was closed meanwhile
            sessions.images.release(owner.client_id, owner.session_id)
            raise
        return request.model_copy(update={"messages": messages})

    async def _read(self, text: str) -> Frame:
        """Parse a frame, a large one in a thread.

        Raises:
            InferenceCenterError: See ``read_frame``; ``message_too_large`` also for more than a login takes before
                authentication.
        """
        if len(text) >= LARGE_FRAME_CHARS and not self.authenticated:
            raise InferenceCenterError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"the frame has {len(text)} characters, which is too long before authentication",
                hint="Authenticate first.",
            )
        try:
            return await self.aside(text, partial(read_frame, text))
        except InferenceCenterError:
            if self.authenticated:
                self.context.operations.count(self.client_id, n_frame_chars=len(text))
            raise

    def _charge(self, command: Command | None, frame: Frame) -> None:
        """Charge the client for the operation of a frame, which also delays the next frame; see ``Pacer``.

        Raises:
            InferenceCenterError: ``rate_limited``, or ``not_authenticated`` for an op that requires it.
        """
        if not self.authenticated:
            if command is None or command.scope is not None:
                raise InferenceCenterError(
                    ErrorCode.NOT_AUTHENTICATED, hint='Send {"op": "auth", "token": …} or client_id with api_key.'
                )
        elif command is None or not command.is_free:
            context, by_size = self.context, command is not None and command.by_size
            n_chars = context.sessions.session_chars(self.client, frame.session_id or "") if by_size else 0
            n_units = 1 if command is None else command.n_units
            context.operations.charge(self.client_id, n_units=n_units, n_chars=n_chars, n_frame_chars=frame.n_chars)
            self._delay_s = context.operation_delay_s(self.client_id)

    def _admit(self, command: Command, request: Request) -> None:
        """Refuse an op that the protocol, the scopes or the state of this socket do not allow.

        Raises:
            InferenceCenterError: ``unknown_op``, ``forbidden`` or ``engine_unavailable``.
        """
        if not self.v1 and not request.first_protocol:
            raise InferenceCenterError(
                ErrorCode.UNKNOWN_OP,
                "the first protocol does not have this op",
                field="op",
                hint='Send {"op": "hello", "protocol": 1} before it, or choose the subprotocol inferencecenter.v1.',
            )
        if command.scope is not None and command.scope not in self.client.scopes:
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                f"this requires the scope {command.scope}",
                hint="Use a token of a client that has it.",
            )
        if command.starts_work and self.state is ConnectionState.DRAINING:
            raise InferenceCenterError(
                ErrorCode.ENGINE_UNAVAILABLE, "the daemon is about to stop", hint="Reconnect when it is back."
            )

    def _refuse(self, frame: Frame, error: InferenceCenterError, *, understood: bool) -> None:
        """Send an error; for a request that was not ``understood`` it has only the id."""
        if understood:
            self.fail(error, request_id=frame.id, op=frame.op, session_id=frame.session_id)
        else:
            self.fail(error, request_id=frame.id)

    def _fail_frame(self, error: InferenceCenterError) -> None:
        self.fail(error, request_id=error.request_id if isinstance(error, FrameError) else None)

    def fail(
        self,
        error: InferenceCenterError,
        *,
        request_id: str | None = None,
        op: str = "",
        session_id: str | None = None,
    ) -> None:
        """Send an error about a frame of the client; ``op`` and ``session_id`` are those of the frame."""
        self._refused = True
        self.context.metrics.errors.labels(error.code.value).inc()
        if self.v1:
            self.send(event_factory.error_event(error, request_id=request_id, session_id=session_id))
            return
        for event in event_factory.legacy_errors(error, request_id=request_id, op=op, session_id=session_id):
            self.send(event)

    def _announce_drain(self, deadline_s: float) -> None:
        self.send(events.GoingAway(deadline_ms=int(deadline_s * 1000), resume=self.context.sessions.durable))

    @property
    def _busy(self) -> bool:
        return bool(self._turns or self._embeddings)

    def check_embeddings(self) -> None:
        """Refuse more requests for embeddings than a socket may have at once: their results are large.

        Raises:
            InferenceCenterError: ``queue_full``.
        """
        if len(self._embeddings) >= MAX_EMBEDDINGS:
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                f"{MAX_EMBEDDINGS} requests for embeddings run on this socket already",
                hint="Wait for one of them.",
            )

    def embedding_started(self, job: EmbeddingJob) -> None:
        """Keep a request that ends with the socket."""
        self._embeddings.add(job)

    def embedding_ended(self, job: EmbeddingJob) -> None:
        """Forget a request that has ended."""
        self._embeddings.discard(job)
        self._leave_if_drained()

    def tail_log(self, level: str | None) -> None:
        """Send the log from a level on, in place of an earlier subscription; ``None`` ends it."""
        if self._log_tail is not None:
            self._log_tail.stop()
        self._log_tail = None if level is None else LogTail(self.send, level=level)

    def _release(self) -> None:
        self.tail_log(None)
        for job in tuple(self._embeddings):
            job.abort()
        self.context.feed.unsubscribe(self)
        self.context.hub.leave(self.client.client_id, self)
        self.context.sessions.detach(self)
        _log.info("client_disconnected", client=self.client.client_id, address=self.address)

    def _watch_turns(self, event: Event) -> None:
        """Follow the sessions attached to this socket, which stays open at shutdown until their turns end."""
        match event:
            case events.Queued():
                self._turns[event.session_id] = event.turn_id
                return
            case events.SessionResumed(turn_id=str(turn_id)):
                self._turns[event.session_id] = turn_id
                return
            case events.End() | events.Error(turn_id=str()):
                if self._turns.get(event.session_id or "") == event.turn_id:
                    del self._turns[event.session_id or ""]
            case events.SessionResumed() | events.SessionDetached():
                self._turns.pop(event.session_id, None)
            case _:
                return
        self._leave_if_drained()


class SocketEndpoint(ABC):
    """An ASGI application for one path; uvicorn runs a call of it per socket."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it is closed."""
        await receive()  # websocket.connect, which has no more information than the scope
        try:
            connection = await self._admit(scope)
        except InferenceCenterError as error:
            await refuse_upgrade(self._context, send, error, *self._refusal(error))
            return
        await connection.run(receive, send, subprotocol=SUBPROTOCOL if chooses_v1(scope["subprotocols"]) else None)

    @abstractmethod
    async def _admit(self, scope: Scope) -> SocketConnection[Any]:
        """Return the connection of an upgrade, registered in the hub.

        Raises:
            InferenceCenterError: The upgrade is refused.
        """

    @abstractmethod
    def _refusal(self, error: InferenceCenterError) -> tuple[Mapping[str, str], bytes]:
        """Return the headers and the body of a refusal."""


class WebSocketEndpoint(SocketEndpoint):
    """The endpoint of the daemon's own protocol."""

    def _refusal(self, error: InferenceCenterError) -> tuple[Mapping[str, str], bytes]:
        return refusal_headers(error), refusal_body(error)

    async def _admit(self, scope: Scope) -> Connection:
        context, subprotocols = self._context, scope["subprotocols"]
        context.hub.check_open()
        caller = await admit(context, scope, scope=None, subprotocols=subprotocols)
        context.hub.check_open()  # authentication by an external service takes time
        wire: WebSocket = cast("dict[str, Any]", scope["state"])[SCOPE_KEY]
        connection = Connection(
            context,
            wire,
            address=caller.address,
            v1=chooses_v1(subprotocols),
            traceparent=caller.traceparent,
            unix_uid=caller.unix_uid,
        )
        if caller.account is not None:
            connection.authenticate(caller.account)
        context.hub.add(connection)
        return connection


class UnknownSocketPath(BaseRoute):
    """A route of all unknown WebSocket paths; Starlette would respond with 403."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match any upgrade."""
        return (Match.FULL if scope["type"] == "websocket" else Match.NONE), {}

    def url_path_for(self, name: str, /, **_: Any) -> URLPath:
        """Match nothing."""
        raise NoMatchFound(name, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the upgrade with 404."""
        await receive()
        error = InferenceCenterError(
            ErrorCode.UNKNOWN_OP,
            f"no WebSocket at this path: {scope['path'][:_SHOWN_CHARS]}",
            hint=f"Connect to {self._context.settings.base_path}/ws.",
        )
        await refuse_upgrade(self._context, send, error, refusal_headers(error), refusal_body(error))


async def refuse_upgrade(
    context: ServerContext, send: Send, error: InferenceCenterError, headers: Mapping[str, str], body: bytes
) -> None:
    status = error.spec.http_status
    context.metrics.refused_connections.labels(str(status)).inc()
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": status, "headers": encoded})
    await send({"type": "websocket.http.response.body", "body": body})
