"""The streams of a socket: in each, one response after the other; different ones go on at once."""

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
    """Hears one turn; implements ``sessions.client.EventSink``.

    Args:
        session_id: The session.
        store: Whether the response may be asked for later, and so goes on without its socket.
        builder: What makes frames of events.
        told: Called with each event.
        ended: Called when there will be no more.
    """

    def __init__(
        self,
        session_id: str,
        *,
        store: bool,
        builder: ResponseEventBuilder,
        told: Callable[[ResponseEventBuilder, Event], None],
        ended: Callable[[ResponseSink], None],
    ) -> None:
        self.builder = builder
        self._session_id = session_id
        self._store = store
        self._told = told
        self._ended = ended
        self._over = False

    def send(self, event: Event) -> None:
        """Take an event; what comes after the turn's end belongs to others."""
        if self._over:
            return
        self._told(self.builder, event)
        is_end = isinstance(event, _ENDS) or (isinstance(event, events.Error) and event.turn_id is not None)
        if is_end:
            self._over = True
            self._ended(self)

    def cancel(self, sessions: SessionManager, client: Principal) -> None:
        """Have the turn end.

        Raises:
            InferenceCenterError: ``nothing_to_abort`` when it has just ended.
        """
        sessions.abort(client, Abort(op="abort", session_id=self._session_id))

    def leave(self, sessions: SessionManager, client: Principal) -> None:
        """Hear no more; a turn that nobody can ask for later ends, and leaves nothing behind."""
        over, self._over = self._over, True
        if not over and not self._store:
            with suppress(InferenceCenterError):  # it has ended, and its end is on its way
                sessions.abort(client, Abort(op="abort", session_id=self._session_id, discard=True))
        sessions.detach(self)


MAX_STREAMS: Final = 16
"""Lanes of one socket in which something runs or waits."""
MAX_WAITING: Final = 64
"""Requests of one socket that wait for others of their lanes."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits, and how many bytes it takes."""

    request: CreateOnSocket
    n_bytes: int


@dataclass(slots=True)
class ResponseStream:
    """One lane: what runs in it, and what waits for that."""

    stream_id: str | None
    sink: ResponseSink | None = None
    waiting: deque[QueuedRequest] = field(default_factory=deque)


class ResponseStreams:
    """All lanes of one socket in which something runs or waits.

    Args:
        max_waiting_bytes: What requests that wait may take together.
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
        """All lanes."""
        return list(self._streams.values())

    @property
    def sinks(self) -> list[ResponseSink]:
        """What runs."""
        return [stream.sink for stream in self._streams.values() if stream.sink is not None]

    def find(self, stream_id: str | None) -> ResponseSink | None:
        """Return what runs in a lane."""
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.sink

    def queue(self, request: CreateOnSocket, *, n_bytes: int) -> ResponseStream:
        """Have a request wait for its turn in its lane, and return that.

        Raises:
            InferenceCenterError: ``websocket_stream_limit_reached``.
        """
        stream = self._streams.get(request.stream_id)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                raise InferenceCenterError(
                    ErrorCode.STREAM_LIMIT,
                    f"responses run in {MAX_STREAMS} lanes of this socket, as many as may",
                    hint="Wait for the end of one, or use another socket.",
                    field="stream_id",
                )
            stream = self._streams[request.stream_id] = ResponseStream(request.stream_id)
        elif self._n_waiting >= MAX_WAITING or self._n_bytes + n_bytes > self._max_waiting_bytes:
            raise InferenceCenterError(
                ErrorCode.STREAM_LIMIT,
                f"{self._n_waiting} requests wait on this socket, with {self._n_bytes} bytes",
                hint="Wait for the end of some, or use other lanes or another socket.",
                field="stream_id",
            )
        stream.waiting.append(QueuedRequest(request, n_bytes))
        self._n_waiting += 1
        self._n_bytes += n_bytes
        return stream

    def take(self, stream: ResponseStream) -> CreateOnSocket | None:
        """Return the next request of a lane in which nothing runs; a lane without any is gone."""
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
        """Let nothing wait any more; return what did."""
        given_up = [waiting.request for stream in self._streams.values() for waiting in stream.waiting]
        for stream in list(self._streams.values()):
            stream.waiting.clear()
            if stream.sink is None:
                del self._streams[stream.stream_id]
        self._n_waiting = self._n_bytes = 0
        return given_up
