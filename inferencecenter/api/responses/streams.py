"""Streams of a socket: responses of one stream run in sequence, those of different streams concurrently."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.api.request_turns import TurnSink
    from inferencecenter.api.responses.request_schemas import CreateOnSocket
    from inferencecenter.api.responses.response_events import ResponseEventBuilder


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
    """One stream: its running response, or the request whose conversation is compacted, and its queue."""

    stream_id: str | None
    sink: TurnSink[ResponseEventBuilder] | None = None
    compacting: RequestContext | None = None
    waiting: deque[QueuedRequest] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        """Whether the next request may start."""
        return self.sink is None and self.compacting is None


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
