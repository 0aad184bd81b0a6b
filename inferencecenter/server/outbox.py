"""The one writer of a connection: sends at once while the peer reads, and keeps a bounded rest while it does not.

Control frames are never dropped. Text of a turn that waits is joined into one frame. Past the limit of bytes the
peer has stopped reading, and the connection is told to end.

What a client asked for in bulk, as the events that it has missed or a transcript, may be larger than that limit
although the client reads. It is *replayed*: it keeps its place in the order, is encoded only when the peer has read
what is before it, and does not count towards the limit. A connection does the next such request when the last one has
gone out (``replayed``), so that no more than one waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeGuard

import orjson

from inferencecenter.protocol.codec import encode
from inferencecenter.protocol.events import Reasoning, Token, ToolCall
from inferencecenter.protocol.text_events import goes_on, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.text_events import Text
    from inferencecenter.telemetry.metrics import Metrics

# Below what WebSocket clients accept by default (1 MiB), with room for JSON around it.
MAX_JOINED_BYTES: Final = 64 * 1024


class Wire(Protocol):
    """What an outbox writes to."""

    on_writable: Callable[[], None] | None
    on_lost: Callable[[], None] | None

    @property
    def takes_frames(self) -> bool:
        """Whether the peer keeps up."""

    def write_text(self, frame: bytes) -> None:
        """Write a text frame."""

    def finish(self, code: int, reason: str, *, linger_s: float) -> None:
        """Send a close frame, and abort the connection when it is not answered in time."""


class TextFrames:
    """Makes the frames of one text of a turn, of which most bytes are always the same.

    Equal to ``codec.encode`` of the event, at a tenth of its cost.

    Args:
        first: The event that the text begins with.
        dagger_only: The socket speaks the first protocol, which knows tokens only.
    """

    def __init__(self, first: Text, *, dagger_only: bool) -> None:
        self._first = first
        self._plain_turn = first.turn_id if type(first) is Token else None
        self._numbered = not dagger_only
        head = b'{"op":%b,"session_id":%b' % (orjson.dumps(first.op), orjson.dumps(first.session_id))
        if dagger_only:
            self._head, self._middle = head + b',"content":"', b""
        else:
            self._head = head + b',"seq":'
            self._middle = b',"turn_id":%b,%b"' % (orjson.dumps(first.turn_id), _field(first))

    def take(self, event: Text) -> bool:
        """Tell whether these are the frames of an event."""
        if self._plain_turn is not None and type(event) is Token:  # by far the most, so it is quick
            return event.turn_id == self._plain_turn
        return goes_on(self._first, event)

    def frame(self, seq: int, content: bytes) -> bytes:
        """Return the frame for ``content``, which is the inside of a JSON string."""
        if self._numbered:
            return b'%b%d%b%b"}' % (self._head, seq, self._middle, content)
        return b'%b%b"}' % (self._head, content)


class _Run:
    """Text of one turn that waits to go out as one frame."""

    __slots__ = ("content", "frames", "seq", "session_id")

    def __init__(self, session_id: str, frames: TextFrames) -> None:
        self.session_id = session_id
        self.frames = frames
        self.seq = 0
        self.content = bytearray()


class Outbox:
    """Events on their way to one client.

    Args:
        wire: The socket.
        limit_bytes: What may wait.
        overflowed: Called once, when more waits; the outbox takes nothing any more.
        metrics: Where frames and bytes are counted.
    """

    def __init__(self, wire: Wire, *, limit_bytes: int, overflowed: Callable[[], None], metrics: Metrics) -> None:
        self._wire = wire
        self._limit_bytes = limit_bytes
        self._overflowed = overflowed
        self._metrics = metrics
        self._dagger_only = True
        self._queue: deque[bytes | _Run | Event] = deque()
        self._n_replayed = 0
        self._replayed: asyncio.Future[None] | None = None
        self._bytes = 0
        self._runs: dict[str, _Run] = {}
        self._frames: dict[str, TextFrames] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Outbox {len(self._queue)} frames, {self._bytes} bytes{', closed' if self._closed else ''}>"

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the peer."""
        return self._bytes

    def speak_v1(self) -> None:
        """From now on send all ops and fields, not only those of the first protocol."""
        self._dagger_only = False
        self._frames.clear()

    def send(self, event: Event) -> None:
        """Send an event now, or when the peer has caught up."""
        if self._closed:
            return
        if (type(event) is Token or self._joins(event)) and event.logprobs is None and event.id is None:
            self._send_text(event)
            return
        self._begin_anew(event)
        frame = encode(event, dagger_only=self._dagger_only)
        if frame is not None:
            self._put(frame.encode())

    def replay(self, events: Sequence[Event]) -> None:
        """Send events each of which is encoded when the peer has caught up with what is before it."""
        for event in events:
            if self._closed:
                return
            self._begin_anew(event)
            self._queue.append(event)
            self._n_replayed += 1
            self.flush()

    @property
    def replays(self) -> bool:
        """Whether anything waits that ``replay`` was given."""
        return self._n_replayed > 0

    async def replayed(self) -> None:
        """Wait until nothing does, or the outbox is closed; for one task at a time."""
        while self._n_replayed and not self._closed:
            self._replayed = asyncio.get_running_loop().create_future()
            await self._replayed

    def flush(self) -> None:
        """Write what waits for as long as the peer keeps up."""
        while self._queue and self._wire.takes_frames:
            if (frame := self._take()) is not None:
                self._write(frame)

    def close(self, *, write_rest: bool) -> None:
        """Take nothing any more; what waits is handed to the transport or forgotten."""
        self._closed = True
        while write_rest and self._queue:
            if (frame := self._take()) is not None:
                self._write(frame)
        self._grow(-self._bytes)
        for held in (self._queue, self._runs, self._frames):
            held.clear()
        self._n_replayed = 0
        self._end_replay()

    def _joins(self, event: Event) -> TypeGuard[Reasoning | ToolCall]:
        """Tell whether an event that is no token brings text only; the one that names a tool does not."""
        return not self._dagger_only and (
            isinstance(event, Reasoning) or (isinstance(event, ToolCall) and event.name is None)
        )

    def _send_text(self, event: Text) -> None:
        frames = self._frames.get(event.session_id)
        if frames is None or not frames.take(event):
            frames = self._frames[event.session_id] = TextFrames(event, dagger_only=self._dagger_only)
        content = orjson.dumps(event.content if type(event) is Token else text_of(event))[1:-1]
        if not self._queue and self._wire.takes_frames:
            self._write(frames.frame(event.seq, content))
            return
        run = self._runs.get(event.session_id)
        if run is None or run.frames is not frames or len(run.content) + len(content) > MAX_JOINED_BYTES:
            run = self._runs[event.session_id] = _Run(event.session_id, frames)
            self._queue.append(run)
        run.seq = event.seq
        run.content += content
        self._grow(len(content))

    def _put(self, frame: bytes) -> None:
        if not self._queue and self._wire.takes_frames:
            self._write(frame)
            return
        self._queue.append(frame)
        self._grow(len(frame))

    def _begin_anew(self, event: Event) -> None:
        """Let what comes later in an event's session not be joined to text from before it, and forget its frames."""
        session_id: str | None = getattr(event, "session_id", None)
        if session_id is not None:
            self._runs.pop(session_id, None)
            self._frames.pop(session_id, None)

    def _end_replay(self) -> None:
        if self._replayed is not None and not self._replayed.done():
            self._replayed.set_result(None)

    def _take(self) -> bytes | None:
        """Return the next frame; ``None`` for an event that this socket is not told."""
        entry = self._queue.popleft()
        if isinstance(entry, bytes):
            self._grow(-len(entry))
            return entry
        if not isinstance(entry, _Run):
            self._n_replayed -= 1
            if not self._n_replayed:
                self._end_replay()
            frame = encode(entry, dagger_only=self._dagger_only)
            return None if frame is None else frame.encode()
        if self._runs.get(entry.session_id) is entry:
            del self._runs[entry.session_id]
        self._grow(-len(entry.content))
        return entry.frames.frame(entry.seq, bytes(entry.content))

    def _write(self, frame: bytes) -> None:
        self._wire.write_text(frame)
        self._metrics.frames_out.inc()

    def _grow(self, n_bytes: int) -> None:
        self._bytes += n_bytes
        self._metrics.outbox_bytes.inc(n_bytes)
        if self._bytes > self._limit_bytes and not self._closed:
            self.close(write_rest=False)
            self._metrics.outbox_overflows.inc()
            self._overflowed()


def _field(event: Text) -> bytes:
    """Return what stands between an event's turn and its text."""
    if isinstance(event, ToolCall):
        return b'"index":%d,"call_id":%b,"arguments":' % (event.index, orjson.dumps(event.call_id))
    return b'"content":'
