"""The Responses API over a WebSocket: one socket of one client, and the endpoint that admits it."""

from __future__ import annotations

import asyncio
from asyncio import sleep
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import orjson
import structlog
from starlette.datastructures import Headers

from inferencecenter.api.body import checked
from inferencecenter.api.errors import error_body, error_headers, error_object
from inferencecenter.api.request_context import admit
from inferencecenter.api.responses.request_mapping import prepare_turn, start_turn
from inferencecenter.api.responses.request_schemas import CancelOnSocket, CreateOnSocket
from inferencecenter.api.responses.response_events import ResponseEventBuilder
from inferencecenter.api.responses.serializers import read_response_id
from inferencecenter.api.responses.streams import ResponseSink, ResponseStreams
from inferencecenter.api.websocket.connection import LARGE_FRAME_CHARS
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import SUBPROTOCOL
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.json_bounds import MAX_STRUCTURE, check_json_bounds
from inferencecenter.protocol.requests import Abort
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server.coalescing_queue import EventQueue
from inferencecenter.server.handshake import chooses_v1
from inferencecenter.server.hub import EXPIRED, Deadline
from inferencecenter.server.outbox import SocketOutbox
from inferencecenter.server.states import CONNECTION, ConnectionEvent, ConnectionState
from inferencecenter.server.websocket import LAST_WORD_S, LINGER_S, SCOPE_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from inferencecenter.api.request_context import Caller
    from inferencecenter.api.responses.streams import ResponseStream
    from inferencecenter.auth.account import Account
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.outbox import Wire
    from inferencecenter.telemetry.metrics import DaemonMetrics

_MAX_LANE_CHARS: Final = 64
_Result = TypeVar("_Result")
_GONE: Final = (ErrorCode.SESSION_NOT_FOUND, ErrorCode.TURN_NOT_FOUND)

_log = structlog.get_logger(__name__)


class ResponseOutbox(SocketOutbox["EventQueue[ResponseEventBuilder | None, bytes]"]):
    """Outbox of a Responses socket; see ``SocketOutbox``.

    Events of turns are queued, and frames are made from them when they are sent, so that the sequence numbers of each
    response have no gap, even where text was coalesced.

    Args:
        wire: The transport.
        limit_bytes: Maximum number of queued bytes.
        overflowed: Called once beyond the limit; the outbox then accepts nothing more.
        broken: Called with each response whose events cannot be encoded because of a defect.
        metrics: Where frames and bytes are counted.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        limit_bytes: int,
        overflowed: Callable[[], None],
        broken: Callable[[ResponseEventBuilder], object],
        metrics: DaemonMetrics,
    ) -> None:
        super().__init__(wire, queue=EventQueue, limit_bytes=limit_bytes, overflowed=overflowed, metrics=metrics)
        self._on_broken = broken
        self._broken: set[ResponseEventBuilder] = set()

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that belongs to no response, now or once the peer has caught up."""
        if self._closed:
            return
        if self._keeps_up:
            self._write(frame)
        else:
            self._queue.put(None, frame, len(frame))

    def send_event(self, builder: ResponseEventBuilder, event: Event) -> None:
        """Send an event of a response's turn, now or once the peer has caught up."""
        if self._closed:
            return
        if self._keeps_up:
            self._feed(builder, event)
        else:
            self._queue.put_event(builder, event)

    @property
    def _keeps_up(self) -> bool:
        return not self._entries and self._wire.takes_frames

    def _write_next(self) -> int:
        builder, item = self._queue.pop()
        if isinstance(item, bytes):
            self._write(item)
        elif builder is not None:
            self._feed(builder, item)
        return 0

    def _feed(self, builder: ResponseEventBuilder, event: Event) -> None:
        if builder in self._broken:
            return
        try:
            frames = builder.feed(event)
        except Exception:  # noqa: BLE001 - boundary: a defect in one response must not end the others
            _log.exception("response_untold")
            self._broken.add(builder)
            self._on_broken(builder)
            return
        for frame in frames:
            self._write(frame.data)


class ResponsesSocket:
    """An admitted socket; runs on the event loop, and only ``receive`` waits.

    Implements ``server.hub.Participant``. ``_move`` is the only writer of its state.

    Args:
        context: The rest of the daemon.
        wire: The transport.
        caller: The client.
    """

    def __init__(self, context: ServerContext, wire: Wire, caller: Caller) -> None:
        self._context = context
        self._wire = wire
        self._caller = caller
        self._state = CONNECTION.next(ConnectionState.CONNECTED, ConnectionEvent.AUTHENTICATE)
        self._expiry: Deadline | None = None
        self._streams = ResponseStreams(max_waiting_bytes=context.settings.max_body_bytes)
        self._outbox = ResponseOutbox(
            wire,
            limit_bytes=context.settings.outbox_bytes,
            overflowed=self._too_slow,
            # Not at once: a session may be in the middle of publishing.
            broken=lambda builder: asyncio.get_running_loop().call_soon(self._break, builder),
            metrics=context.metrics,
        )
        wire.on_writable = self._outbox.flush
        if caller.account.expires_at is not None:
            expired = CloseCode.NOT_AUTHENTICATED, EXPIRED
            self._expiry = Deadline(caller.account.expires_at - context.clock(), lambda: self.dismiss(*expired))

    def __repr__(self) -> str:
        return f"<ResponsesSocket {self._state} {self.address} {self.account.client_id} {len(self._streams)} lanes>"

    @property
    def account(self) -> Account:
        """The authenticated account."""
        return self._caller.account

    @property
    def address(self) -> str:
        """Remote address."""
        return self._caller.address

    async def receive(self, text: str | None) -> None:
        """Process a frame; ``None`` stands for a binary one.

        An error in one frame or response is sent to the client, and the socket stays open.
        """
        if self._closed:
            return
        self._context.metrics.frames_in.inc()
        stream_id = None
        try:
            frame = await self._aside(text, partial(_object, text))
            stream_id = _lane_of(frame)
            request = await self._aside(text, partial(_request, frame))
            if self._closed:  # while the frame was read
                return
            if isinstance(request, CreateOnSocket):
                self._queue(request, n_bytes=len(text or ""))
            else:
                self._cancel(request)
            self._context.refusal_backoffs.accepted(self.account.client_id)
        except InferenceCenterError as error:
            self._fail(error, stream_id)
            if delay_s := self._context.refusal_backoffs.refused(self.account.client_id):
                await sleep(delay_s)
        except Exception:  # noqa: BLE001 - boundary: a defect must not affect the socket's other streams down
            _log.exception("frame_failed")
            self._fail(InferenceCenterError(ErrorCode.INTERNAL), stream_id)

    def set_max_sessions(self, max_sessions: int) -> None:
        """Set the maximum number of sessions of its client."""
        self._caller = self._caller.allowed(max_sessions)

    def drain(self, deadline_s: float) -> None:
        """Start nothing new, and close when all running responses have ended."""
        if self._state is not ConnectionState.AUTHENTICATED:
            return
        self._move(ConnectionEvent.DRAIN)
        for request in self._streams.drop_queued():
            self._fail(_stopping(), request.stream_id)
        self._leave_if_drained()

    def dismiss(self, code: CloseCode, reason: str) -> None:
        """Close after all queued frames; stored responses continue."""
        self._end((code, reason, LINGER_S), write_rest=True)

    def lost(self) -> None:
        """Clean up after the socket was closed by either side."""
        self._end(None, write_rest=False)

    def _queue(self, request: CreateOnSocket, *, n_bytes: int) -> None:
        if self._state is ConnectionState.DRAINING:
            raise _stopping()
        self._advance(self._streams.queue(request, n_bytes=n_bytes))

    def _cancel(self, request: CancelOnSocket) -> None:
        """Cancel the named response, on whichever socket, or the one running in a stream of this socket.

        Raises:
            InferenceCenterError: ``turn_not_found`` or ``nothing_to_abort``.
        """
        sessions, client = self._context.sessions, self._caller.client
        if request.response_id is None:
            sink = self._streams.find(request.stream_id)
            if sink is None:
                raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, "No response is running in this stream.")
            sink.cancel(sessions, client)
            return
        try:
            place = read_response_id(request.response_id)
            sessions.abort(client, Abort(op="abort", session_id=place.session_id, turn_id=place.turn_id))
        except InferenceCenterError as error:
            if error.code not in _GONE:
                raise
            raise InferenceCenterError(
                ErrorCode.TURN_NOT_FOUND, "No such response is running.", field="response_id"
            ) from None

    async def _aside(self, text: str | None, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on a frame; a large one in a thread."""
        if text is None or len(text) < LARGE_FRAME_CHARS:
            return work()
        return await self._context.worker.run(self.account.client_id, work)

    def _advance(self, stream: ResponseStream) -> None:
        """Start the next response of a stream, if none is running in it."""
        while (request := self._streams.take(stream)) is not None:
            try:
                stream.sink = self._begin(request, stream)
            except InferenceCenterError as error:
                self._fail(error, request.stream_id)
            except Exception:  # noqa: BLE001 - boundary: the queues of this stream and the others continue
                _log.exception("response_failed")
                self._fail(InferenceCenterError(ErrorCode.INTERNAL), request.stream_id)

    def _break(self, builder: ResponseEventBuilder) -> None:
        """End a response that cannot be encoded, with an error; its stream continues."""
        if self._state is ConnectionState.CLOSED:
            return
        self._fail(InferenceCenterError(ErrorCode.INTERNAL), builder.stream_id)
        for stream in self._streams.active:
            if stream.sink is not None and stream.sink.builder is builder:
                stream.sink.leave(self._context.sessions, self._caller.client)
                stream.sink = None
                self._advance(stream)
        self._leave_if_drained()

    def _begin(self, request: CreateOnSocket, stream: ResponseStream) -> ResponseSink:
        context, client = self._context, self._caller.client
        asked = prepare_turn(context, client, request, generate=request.generate)
        builder = ResponseEventBuilder(
            asked.echo,
            top_logprobs=request.top_logprobs or 0,
            clock=context.clock,
            stream_id=request.stream_id,
            generate=request.generate,
        )
        sink = ResponseSink(
            asked.infer.session_id,
            store=request.store,
            builder=builder,
            on_event=self._outbox.send_event,
            on_end=lambda sink: self._end_soon(stream, sink),
        )
        infer = asked.infer.model_copy(update={"traceparent": self._caller.traceparent})
        start_turn(context, client, asked, lambda _, note: context.sessions.infer(client, infer, sink, note=note))
        return sink

    def _end_soon(self, stream: ResponseStream, sink: ResponseSink) -> None:
        # Not at once: a session may be in the middle of publishing the end of a turn.
        asyncio.get_running_loop().call_soon(self._ended, stream, sink)

    def _ended(self, stream: ResponseStream, sink: ResponseSink) -> None:
        self._context.sessions.detach(sink)
        if self._state is ConnectionState.CLOSED or stream.sink is not sink:
            return
        stream.sink = None
        self._advance(stream)
        self._leave_if_drained()

    def _fail(self, error: InferenceCenterError, stream_id: str | None) -> None:
        """Send the client an error about one of its frames."""
        self._context.metrics.errors.labels(error.code.value).inc()
        stream = {} if stream_id is None else {"stream_id": stream_id}
        message = {"type": "error", "status": error.spec.http_status, "error": error_object(error), **stream}
        self._outbox.send_frame(orjson.dumps(message))

    @property
    def _closed(self) -> bool:
        return self._state is ConnectionState.CLOSED

    def _move(self, event: ConnectionEvent) -> None:
        self._state = CONNECTION.next(self._state, event)

    def _leave_if_drained(self) -> None:
        if self._state is ConnectionState.DRAINING and not self._streams:
            self.dismiss(CloseCode.RESTART, "the daemon stops")

    def _too_slow(self) -> None:
        _log.warning("slow_reader", client=self.account.client_id, address=self.address)
        # Not at once: a session may be in the middle of publishing.
        slow = CloseCode.TOO_SLOW, "too slow a reader", LAST_WORD_S
        asyncio.get_running_loop().call_soon(lambda: self._end(slow, write_rest=False))

    def _end(self, farewell: tuple[CloseCode, str, float] | None, *, write_rest: bool) -> None:
        """Close once: with a code, a reason and the peer's time to answer in seconds, or silently with ``None``."""
        if self._state is ConnectionState.CLOSED:
            return
        self._move(ConnectionEvent.CLOSE)
        if self._expiry is not None:
            self._expiry.cancel()
        self._outbox.close(write_rest=write_rest)
        self._wire.on_writable = None
        if farewell is not None:
            code, reason, linger_s = farewell
            self._wire.finish(code, reason, linger_s=linger_s)
        self._streams.drop_queued()
        for sink in self._streams.sinks:
            sink.leave(self._context.sessions, self._caller.client)


class ResponsesEndpoint:
    """An ASGI application for one path; uvicorn runs a call of it per socket."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one socket until it is closed."""
        await receive()  # websocket.connect, which has no more information than the scope
        try:
            socket = await self._admit(scope)
        except InferenceCenterError as error:
            await self._refuse(send, error)
            return
        metrics = self._context.metrics
        metrics.connections.inc()
        try:
            subprotocol = SUBPROTOCOL if chooses_v1(scope["subprotocols"]) else None
            await send({"type": "websocket.accept", "subprotocol": subprotocol})
            _log.info("client_connected", client=socket.account.client_id, address=socket.address, responses=True)
            while (message := await receive())["type"] == "websocket.receive":
                await socket.receive(message.get("text"))
                # Between frames of a client that sends many at once, other clients run.
                await asyncio.sleep(0)
        finally:
            socket.lost()
            self._context.hub.exit(socket)
            metrics.connections.dec()
            _log.info("client_disconnected", client=socket.account.client_id, address=socket.address)

    async def _admit(self, scope: AsgiScope) -> ResponsesSocket:
        """Return the socket of an upgrade.

        Raises:
            InferenceCenterError: The upgrade is refused.
        """
        hub = self._context.hub
        hub.check_open()
        subprotocols = scope["subprotocols"]
        caller = await admit(self._context, scope, Headers(scope=scope), scope=Scope.USER, subprotocols=subprotocols)
        wire: Wire = cast("dict[str, Any]", scope["state"])[SCOPE_KEY]
        socket = ResponsesSocket(self._context, wire, caller)
        try:
            hub.enter(socket)
        except InferenceCenterError as error:
            socket.lost()
            if error.code is not ErrorCode.RATE_LIMITED:
                raise
            raise InferenceCenterError(
                ErrorCode.CONNECTION_LIMIT,
                error.message,
                hint="Close one of them; one socket supports any number of responses.",
                retry_after_ms=error.retry_after_ms,
            ) from None
        return socket

    async def _refuse(self, send: Send, error: InferenceCenterError) -> None:
        status = error.spec.http_status
        self._context.metrics.refused_connections.labels(str(status)).inc()
        headers = {"content-type": "application/json", **error_headers(error)}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "websocket.http.response.start", "status": status, "headers": encoded})
        await send({"type": "websocket.http.response.body", "body": error_body(error)})


def _object(text: str | None) -> dict[str, Any]:
    """Parse a frame as a JSON object.

    Raises:
        InferenceCenterError: ``invalid_request``, ``invalid_json`` or ``message_too_large``.
    """
    if text is None:
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "the frame is binary", hint="Send JSON in text frames.")
    if len(text) > MAX_STRUCTURE:
        check_json_bounds(text.encode())
    try:
        frame = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_JSON, f"the frame is not JSON: {error.msg} at character {error.pos}"
        ) from None
    if not isinstance(frame, dict):
        raise InferenceCenterError(ErrorCode.INVALID_JSON, "the frame is JSON, but not an object")
    return frame


def _request(frame: dict[str, Any]) -> CreateOnSocket | CancelOnSocket:
    """Return the request in a frame.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    match frame.get("type"):
        case "response.create":
            return checked(CreateOnSocket, frame)
        case "response.cancel":
            return checked(CancelOnSocket, frame)
        case other:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"type is {str(other)[:64]!r}, which must be response.create or response.cancel",
                field="type",
            )


def _lane_of(frame: dict[str, Any]) -> str | None:
    """Return the stream in which errors about a frame are sent, even if the frame is invalid otherwise."""
    found = frame.get("stream_id")
    return found if isinstance(found, str) and 0 < len(found) <= _MAX_LANE_CHARS else None


def _stopping() -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "the daemon is about to stop")
