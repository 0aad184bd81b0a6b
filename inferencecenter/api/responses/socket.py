"""The Responses API over a WebSocket: one socket of one client, and the endpoint that admits it."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import orjson
import structlog

from inferencecenter.api.body import checked
from inferencecenter.api.endpoint import with_known_model
from inferencecenter.api.errors import error_body, error_headers, error_object, openai_status
from inferencecenter.api.foreign_fields import FieldReport
from inferencecenter.api.request_context import ClientDisconnectedError, RequestContext, admit, paced
from inferencecenter.api.request_turns import TurnSink
from inferencecenter.api.responses.compaction import compacted_input
from inferencecenter.api.responses.mcp_tools import uses_mcp, with_mcp_tools
from inferencecenter.api.responses.request_mapping import load_context, prepare_turn, start_turn
from inferencecenter.api.responses.request_schemas import RESPONSE_FIELDS, CancelOnSocket, CreateOnSocket
from inferencecenter.api.responses.response_events import ResponseEventBuilder
from inferencecenter.api.responses.serializers import read_response_id
from inferencecenter.api.websocket.connection import SocketEndpoint
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol.codec import MAX_STRUCTURE, check_json_bounds
from inferencecenter.protocol.requests import Abort
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server.coalescing_queue import EventQueue
from inferencecenter.server.connection import SocketConnection
from inferencecenter.server.outbox import SocketOutbox
from inferencecenter.server.states import ConnectionState
from inferencecenter.server.websocket import SCOPE_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from starlette.types import Scope as AsgiScope

    from inferencecenter.api.request_context import Caller, RequestContext
    from inferencecenter.api.request_turns import TurnSink
    from inferencecenter.api.responses.request_mapping import CompactedInput
    from inferencecenter.api.responses.request_schemas import CreateOnSocket
    from inferencecenter.api.responses.response_events import ResponseEventBuilder
    from inferencecenter.api.responses.response_schemas import McpOutputItem
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.outbox import Wire
    from inferencecenter.telemetry.metrics import DaemonMetrics


# Streams of a socket: responses of one stream run in sequence, those of different streams concurrently.

MAX_STREAMS: Final = 16
"""Maximum number of streams of one socket with running or queued responses."""
MAX_WAITING: Final = 64
"""Maximum number of queued requests of one socket."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A queued request, its size in bytes, and the warnings about it."""

    request: CreateOnSocket
    n_bytes: int
    warnings: Sequence[str] = ()


@dataclass(slots=True)
class ResponseStream:
    """One stream: its running response, or the request that is prepared by calls or compaction, and its queue."""

    stream_id: str | None
    sink: TurnSink[ResponseEventBuilder] | None = None
    preparing: RequestContext | None = None
    waiting: deque[QueuedRequest] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        """Whether the next request may start."""
        return self.sink is None and self.preparing is None


class ResponseStreams:
    """All streams of one socket with running or queued responses.

    Args:
        max_waiting_bytes: Maximum total size of queued requests.
    """

    def __init__(self, *, max_waiting_bytes: int) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._streams: dict[str | None, ResponseStream] = {}
        self._n_waiting = 0
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def active(self) -> list[ResponseStream]:
        return list(self._streams.values())

    def find(self, stream_id: str | None) -> ResponseStream | None:
        """Return a stream with running or queued responses."""
        return self._streams.get(stream_id)

    def queue(self, queued: QueuedRequest) -> ResponseStream:
        """Queue a request in its stream, and return the stream.

        Raises:
            InferenceCenterError: ``websocket_stream_limit_reached``.
        """
        stream = self._streams.get(queued.request.stream_id)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                raise InferenceCenterError(
                    ErrorCode.STREAM_LIMIT,
                    f"responses run in {MAX_STREAMS} streams of this socket, which is the maximum",
                    hint="Wait until one ends, or use another socket.",
                    field="stream_id",
                )
            stream = self._streams[queued.request.stream_id] = ResponseStream(queued.request.stream_id)
        elif self._n_waiting >= MAX_WAITING or self._n_bytes + queued.n_bytes > self._max_waiting_bytes:
            raise InferenceCenterError(
                ErrorCode.STREAM_LIMIT,
                f"{self._n_waiting} requests are queued on this socket, with {self._n_bytes} bytes",
                hint="Wait until some end, or use other streams or another socket.",
                field="stream_id",
            )
        stream.waiting.append(queued)
        self._n_waiting += 1
        self._n_bytes += queued.n_bytes
        return stream

    def take(self, stream: ResponseStream) -> QueuedRequest | None:
        """Return the next request of an idle stream; an empty stream is removed."""
        if not stream.idle:
            return None
        if not stream.waiting:
            self._streams.pop(stream.stream_id, None)
            return None
        waiting = stream.waiting.popleft()
        self._n_waiting -= 1
        self._n_bytes -= waiting.n_bytes
        return waiting

    def drop_queued(self) -> list[CreateOnSocket]:
        """Remove and return all queued requests."""
        given_up = [waiting.request for stream in self._streams.values() for waiting in stream.waiting]
        for stream in list(self._streams.values()):
            stream.waiting.clear()
            if stream.idle:
                del self._streams[stream.stream_id]
        self._n_waiting = self._n_bytes = 0
        return given_up


_MAX_STREAM_ID_CHARS: Final = 64
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
        """Send a frame outside of responses, now or once the peer has caught up."""
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


class ResponsesSocket(SocketConnection[ResponseOutbox]):
    """An admitted socket. Implements ``server.hub.Participant``.

    Args:
        context: The rest of the daemon.
        wire: The transport.
        caller: The client.
    """

    def __init__(self, context: ServerContext, wire: Wire, caller: Caller) -> None:
        super().__init__(
            context,
            wire,
            outbox=partial(ResponseOutbox, broken=self._break_soon),
            backoffs=context.refusal_backoffs,
            address=caller.address,
            traceparent=caller.traceparent,
        )
        self._caller = caller
        self._tasks = TaskGroup("responses_socket")
        self._streams = ResponseStreams(max_waiting_bytes=context.settings.max_body_bytes)
        self._stream_id: str | None = None  # of the frame that is processed
        self._sign_in(caller.client)

    def accepted(self) -> None:
        """Log the client."""
        _log.info("client_connected", client=self.client_id, address=self.address, responses=True)

    def _left(self) -> None:
        self.context.hub.exit(self)
        self.context.metrics.connections.dec()
        _log.info("client_disconnected", client=self.client_id, address=self.address)

    async def _process(self, text: str) -> None:
        self._stream_id = None
        frame = await self.aside(text, partial(_object, text))
        self._stream_id = _stream_id_of(frame)
        report = FieldReport(RESPONSE_FIELDS, strict=self.context.settings.strict_dialects)
        request = await self.aside(text, partial(_request, frame, report))
        if self.closed:  # while the frame was read
            return
        if isinstance(request, CreateOnSocket):
            request = with_known_model(self.context, request, report)
            self.context.metrics.count_fields(report.table.dialect, report.labels)
            await load_context(self.context, self.client, request)
            if self.closed:
                return
            self._queue(QueuedRequest(request, len(text), report.warnings))
        else:
            self._cancel(request)

    def _fail_frame(self, error: InferenceCenterError) -> None:
        self._fail(error, self._stream_id)

    def _announce_drain(self, deadline_s: float) -> None:
        for request in self._streams.drop_queued():
            self._fail(_stopping(), request.stream_id)

    @property
    def _busy(self) -> bool:
        return bool(self._streams)

    def _release(self) -> None:
        self._streams.drop_queued()
        for stream in self._streams.active:
            if stream.sink is not None:
                stream.sink.leave(self.context.sessions, self.client)
            if stream.preparing is not None:
                stream.preparing.end(ClientDisconnectedError())

    def _queue(self, queued: QueuedRequest) -> None:
        if self._state is ConnectionState.DRAINING:
            raise _stopping()
        self._advance(self._streams.queue(queued))

    def _cancel(self, request: CancelOnSocket) -> None:
        """Cancel the named response, on whichever socket, or the one running in a stream of this socket.

        Raises:
            InferenceCenterError: ``turn_not_found`` or ``nothing_to_abort``.
        """
        sessions, client = self.context.sessions, self.client
        if request.response_id is None:
            stream = self._streams.find(request.stream_id)
            if stream is None or stream.idle:
                raise InferenceCenterError(ErrorCode.NOTHING_TO_ABORT, "No response is running in this stream.")
            if stream.preparing is not None:
                stream.preparing.end(_cancelled())
            elif stream.sink is not None:
                sessions.abort(client, Abort(op="abort", session_id=stream.sink.session_id))
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

    def _advance(self, stream: ResponseStream) -> None:
        """Start the next response of a stream, if none is running in it."""
        while (queued := self._streams.take(stream)) is not None:
            with self._failures_sent(stream):
                if queued.request.context_management or uses_mcp(queued.request):
                    stream.preparing = RequestContext(self._caller)
                    self._tasks.spawn(self._begin_prepared(queued, stream, stream.preparing), name="preparation")
                else:
                    stream.sink = self._begin(queued, stream)

    async def _begin_prepared(
        self, queued: QueuedRequest, stream: ResponseStream, request_context: RequestContext
    ) -> None:
        """Start a response before which calls run or the conversation is compacted, and then the next one."""
        with self._failures_sent(stream), suppress(ClientDisconnectedError):
            request, added = await with_mcp_tools(self.context, request_context, queued.request)
            compacted, warnings = await compacted_input(self.context, request_context, request)
            await load_context(self.context, request_context.client, request)  # it may have been archived meanwhile
            if not self.closed:
                prepared = replace(queued, request=request)
                more = (*added.warnings, *warnings)
                stream.sink = self._begin(prepared, stream, warnings=more, mcp_items=added.items, compacted=compacted)
        stream.preparing = None
        if not self.closed:
            self._advance(stream)
            self._leave_if_drained()

    @contextmanager
    def _failures_sent(self, stream: ResponseStream) -> Iterator[None]:
        """Send the client the error of a response that cannot start; the stream continues with its queue."""
        try:
            yield
        except InferenceCenterError as error:
            self._fail(error, stream.stream_id)
        except Exception:  # noqa: BLE001 - boundary: the queues of this stream and the others continue
            _log.exception("response_failed")
            self._fail(InferenceCenterError(ErrorCode.INTERNAL), stream.stream_id)

    def _break_soon(self, builder: ResponseEventBuilder) -> None:
        # Not at once: a session may be in the middle of publishing.
        asyncio.get_running_loop().call_soon(self._break, builder)

    def _break(self, builder: ResponseEventBuilder) -> None:
        """End a response that cannot be encoded, with an error; its stream continues."""
        if self.closed:
            return
        self._fail(InferenceCenterError(ErrorCode.INTERNAL), builder.stream_id)
        for stream in self._streams.active:
            if stream.sink is not None and stream.sink.key is builder:
                stream.sink.leave(self.context.sessions, self.client)
                stream.sink = None
                self._advance(stream)
        self._leave_if_drained()

    def _begin(
        self,
        queued: QueuedRequest,
        stream: ResponseStream,
        *,
        warnings: Sequence[str] = (),
        mcp_items: tuple[McpOutputItem, ...] = (),
        compacted: CompactedInput | None = None,
    ) -> TurnSink[ResponseEventBuilder]:
        context, client, request = self.context, self.client, queued.request
        prepared = prepare_turn(
            context,
            client,
            request,
            warnings=(*queued.warnings, *warnings),
            generate=request.generate,
            mcp_items=mcp_items,
            compacted=compacted,
        )
        builder = ResponseEventBuilder(
            prepared.echo,
            top_logprobs=request.top_logprobs or 0,
            clock=context.clock,
            stream_id=request.stream_id,
            generate=request.generate,
            first_items=prepared.first_items,
            mcp_tools=prepared.mcp_tools,
        )
        sink = TurnSink(
            builder, prepared.infer.session_id, on_event=partial(self._on_turn_event, stream), outlived=request.store
        )
        infer = prepared.infer.model_copy(update={"traceparent": self.traceparent})
        start_turn(context, client, prepared, lambda _, note: context.sessions.infer(client, infer, sink, note=note))
        return sink

    def _on_turn_event(self, stream: ResponseStream, sink: TurnSink[ResponseEventBuilder], event: Event) -> None:
        self._outbox.send_event(sink.key, event)
        if sink.over:
            # Not at once: a session may be in the middle of publishing the end of a turn.
            asyncio.get_running_loop().call_soon(self._ended, stream, sink)

    def _ended(self, stream: ResponseStream, sink: TurnSink[ResponseEventBuilder]) -> None:
        self.context.sessions.detach(sink)
        if self.closed or stream.sink is not sink:
            return
        stream.sink = None
        self._advance(stream)
        self._leave_if_drained()

    def _fail(self, error: InferenceCenterError, stream_id: str | None) -> None:
        """Send the client an error about one of its frames."""
        self._refused = True
        self.context.metrics.errors.labels(error.code.value).inc()
        stream = {} if stream_id is None else {"stream_id": stream_id}
        message = {"type": "error", "status": openai_status(error), "error": error_object(error), **stream}
        self._outbox.send_frame(orjson.dumps(message))


class ResponsesEndpoint(SocketEndpoint):
    """The endpoint of the Responses API."""

    def _refusal(self, error: InferenceCenterError) -> tuple[Mapping[str, str], bytes]:
        return {"content-type": "application/json", **error_headers(error)}, error_body(error)

    async def _admit(self, scope: AsgiScope) -> ResponsesSocket:
        context, hub = self._context, self._context.hub
        hub.check_open()
        caller = await admit(context, scope, scope=Scope.USER, subprotocols=scope["subprotocols"])
        wire: Wire = cast("dict[str, Any]", scope["state"])[SCOPE_KEY]
        socket = ResponsesSocket(context, wire, caller)
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
        try:
            async with paced(context, socket.client_id):
                context.operations.charge(socket.client_id)
        except BaseException:
            socket.lost()
            hub.exit(socket)
            raise
        context.metrics.connections.inc()
        return socket


def _object(text: str) -> dict[str, Any]:
    """Parse a frame as a JSON object.

    Raises:
        InferenceCenterError: ``invalid_json`` or ``message_too_large``.
    """
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


def _request(frame: dict[str, Any], report: FieldReport) -> CreateOnSocket | CancelOnSocket:
    """Return the request in a frame; ``report`` receives the fields without effect.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    match frame.get("type"):
        case "response.create":
            return checked(CreateOnSocket, frame, context=report)
        case "response.cancel":
            return checked(CancelOnSocket, frame, context=report)
        case other:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"type is {str(other)[:64]!r}, which must be response.create or response.cancel",
                field="type",
            )


def _stream_id_of(frame: dict[str, Any]) -> str | None:
    """Return the stream in which errors about a frame are sent, even if the frame is invalid otherwise."""
    found = frame.get("stream_id")
    return found if isinstance(found, str) and 0 < len(found) <= _MAX_STREAM_ID_CHARS else None


def _cancelled() -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, "the response was cancelled before it began")


def _stopping() -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "the daemon is about to stop")
