"""Streams of a socket: responses of one stream run in sequence, those of different streams concurrently."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import Abort

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.api.responses.request_schemas import CreateOnSocket
    from inferencecenter.api.responses.response_events import ResponseEventBuilder
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.client import Principal
    from inferencecenter.sessions.manager import SessionManager


_ENDS: Final = (events.End, events.SessionClosed, events.SessionExpired, events.SessionDetached)


class ResponseSink:
    """Receives the events of one turn; implements ``sessions.client.EventSink``.

    Args:
        session_id: The session.
        store: Whether the response can be retrieved later, and so continues without its socket.
        builder: Encodes events as frames.
        on_event: Called with each event.
        on_end: Called after the last event.
    """

    def __init__(
        self,
        session_id: str,
        *,
        store: bool,
        builder: ResponseEventBuilder,
        on_event: Callable[[ResponseEventBuilder, Event], None],
        on_end: Callable[[ResponseSink], None],
    ) -> None:
        self.builder = builder
        self._session_id = session_id
        self._store = store
        self._on_event = on_event
        self._on_end = on_end
        self._over = False

    def send(self, event: Event) -> None:
        """Forward an event; events after the turn's end belong to other turns."""
        if self._over:
            return
        self._on_event(self.builder, event)
        is_end = isinstance(event, _ENDS) or (isinstance(event, events.Error) and event.turn_id is not None)
        if is_end:
            self._over = True
            self._on_end(self)

    def cancel(self, sessions: SessionManager, client: Principal) -> None:
        """Cancel the turn.

        Raises:
            InferenceCenterError: ``nothing_to_abort`` when it has just ended.
        """
        sessions.abort(client, Abort(op="abort", session_id=self._session_id))

    def leave(self, sessions: SessionManager, client: Principal) -> None:
        """Detach from the turn; if it cannot be retrieved later, it is aborted without a trace."""
        over, self._over = self._over, True
        if not over and not self._store:
            with suppress(InferenceCenterError):  # it has ended, and its end event is queued
                sessions.abort(client, Abort(op="abort", session_id=self._session_id, discard=True))
        sessions.detach(self)


MAX_STREAMS: Final = 16
"""Maximum number of streams of one socket with running or queued responses."""
MAX_WAITING: Final = 64
"""Maximum number of queued requests of one socket."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A queued request and its size in bytes."""

    request: CreateOnSocket
    n_bytes: int


@dataclass(slots=True)
class ResponseStream:
    """One stream: its running response and its queue."""

    stream_id: str | None
    sink: ResponseSink | None = None
    waiting: deque[QueuedRequest] = field(default_factory=deque)


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
        """All streams."""
        return list(self._streams.values())

    @property
    def sinks(self) -> list[ResponseSink]:
        """The running responses."""
        return [stream.sink for stream in self._streams.values() if stream.sink is not None]

    def find(self, stream_id: str | None) -> ResponseSink | None:
        """Return the response running in a stream."""
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.sink

    def queue(self, request: CreateOnSocket, *, n_bytes: int) -> ResponseStream:
        """Queue a request in its stream, and return the stream.

        Raises:
            InferenceCenterError: ``websocket_stream_limit_reached``.
        """
        stream = self._streams.get(request.stream_id)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                raise InferenceCenterError(
                    ErrorCode.STREAM_LIMIT,
                    f"responses run in {MAX_STREAMS} streams of this socket, which is the maximum",
                    hint="Wait until one ends, or use another socket.",
                    field="stream_id",
                )
            stream = self._streams[request.stream_id] = ResponseStream(request.stream_id)
        elif self._n_waiting >= MAX_WAITING or self._n_bytes + n_bytes > self._max_waiting_bytes:
            raise InferenceCenterError(
                ErrorCode.STREAM_LIMIT,
                f"{self._n_waiting} requests are queued on this socket, with {self._n_bytes} bytes",
                hint="Wait until some end, or use other streams or another socket.",
                field="stream_id",
            )
        stream.waiting.append(QueuedRequest(request, n_bytes))
        self._n_waiting += 1
        self._n_bytes += n_bytes
        return stream

    def take(self, stream: ResponseStream) -> CreateOnSocket | None:
        """Return the next request of an idle stream; an empty stream is removed."""
        if stream.sink is not None:
            return None
        if not stream.waiting:
            self._streams.pop(stream.stream_id, None)
            return None
        waiting = stream.waiting.popleft()
        self._n_waiting -= 1
        self._n_bytes -= waiting.n_bytes
        return waiting.request

    def drop_queued(self) -> list[CreateOnSocket]:
        """Remove and return all queued requests."""
        given_up = [waiting.request for stream in self._streams.values() for waiting in stream.waiting]
        for stream in list(self._streams.values()):
            stream.waiting.clear()
            if stream.sink is None:
                del self._streams[stream.stream_id]
        self._n_waiting = self._n_bytes = 0
        return given_up
