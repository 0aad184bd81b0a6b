"""Outbox: the only writer of a connection; sends at once while the peer reads, and otherwise queues up to a limit.

Control frames are never dropped. Queued text of a turn is coalesced into one frame. Beyond the limit of bytes the peer
counts as too slow, and the connection is closed.

Bulk data requested by the client, such as missed events or a transcript, may exceed that limit although the client
reads. It is *replayed*: it keeps its place in the order, is encoded only once the peer has read what precedes it, and
does not count towards the limit. A long event is encoded in pieces, each a fragment of one message, at the speed of the
peer and at most one per iteration of the event loop. A connection runs its next bulk request when the last one was
written (``wait_replayed``), so that at most one is queued.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeGuard

import orjson

from inferencecenter.protocol.codec import PIECE_BYTES, encode, encode_in_pieces
from inferencecenter.protocol.events import Reasoning, Token, ToolCall, goes_on, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.events import Text
    from inferencecenter.telemetry.metrics import DaemonMetrics

# Below the default limit of WebSocket clients (1 MiB), with room for JSON around it.
MAX_JOINED_BYTES: Final = 64 * 1024
_LEAST_BYTES: Final = 1024
"""Cost of encoding a short event, as the number of bytes of a long one that takes the same time."""


class Wire(Protocol):
    """The transport that an outbox writes to."""

    on_writable: Callable[[], None] | None
    on_lost: Callable[[], None] | None

    @property
    def takes_frames(self) -> bool:
        """Whether the peer keeps up."""

    def write_text(self, frame: bytes) -> None:
        """Write a text frame."""

    def write_piece(self, piece: bytes, *, first: bool, last: bool) -> None:
        """Write a fragment of a text message; no other message may start before the last fragment."""

    def finish(self, code: int, reason: str, *, linger_s: float) -> None:
        """Send a close frame, and abort the connection if it is not answered in time."""


class TextFrames:
    """Encodes the frames of one text of a turn, which differ in few bytes.

    The result equals ``codec.encode`` of the event, at a tenth of its cost.

    Args:
        first: The first event of the text.
        dagger_only: The socket speaks the first protocol, which has tokens only.
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
        """Return whether an event belongs to this text."""
        if self._plain_turn is not None and type(event) is Token:  # by far the most frequent, so it is fast
            return event.turn_id == self._plain_turn
        return goes_on(self._first, event)

    def frame(self, seq: int, content: bytes) -> bytes:
        """Return the frame of ``content``, the inside of a JSON string."""
        if self._numbered:
            return b'%b%d%b%b"}' % (self._head, seq, self._middle, content)
        return b'%b%b"}' % (self._head, content)


class _Run:
    """Text of one turn that is queued as one frame."""

    __slots__ = ("content", "frames", "seq", "session_id")

    def __init__(self, session_id: str, frames: TextFrames) -> None:
        self.session_id = session_id
        self.frames = frames
        self.seq = 0
        self.content = bytearray()


class _Replayed:
    """A replayed event; it is encoded in pieces from its turn in the queue on."""

    __slots__ = ("event", "pieces")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.pieces: Iterator[tuple[bytes, bool]] | None = None


class Outbox:
    """Queue of events to one client.

    Args:
        wire: The socket.
        limit_bytes: Maximum number of queued bytes.
        overflowed: Called once beyond the limit; the outbox then accepts nothing more.
        metrics: Where frames and bytes are counted.
    """

    def __init__(self, wire: Wire, *, limit_bytes: int, overflowed: Callable[[], None], metrics: DaemonMetrics) -> None:
        self._wire = wire
        self._limit_bytes = limit_bytes
        self._overflowed = overflowed
        self._metrics = metrics
        self._dagger_only = True
        self._queue: deque[bytes | _Run | _Replayed] = deque()
        self._flushing: asyncio.Handle | None = None
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
        """Queued bytes."""
        return self._bytes

    def enable_v1(self) -> None:
        """From now on send all ops and fields, not only those of the first protocol."""
        self._dagger_only = False
        self._frames.clear()

    def send(self, event: Event) -> None:
        """Send an event now, or queue it while the peer is behind."""
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
        """Queue events to be encoded once the peer has read what precedes them."""
        if self._closed:
            return
        for event in events:
            self._begin_anew(event)
            self._queue.append(_Replayed(event))
            self._n_replayed += 1
        self.flush()

    @property
    def replay_pending(self) -> bool:
        """Whether replayed events are queued."""
        return self._n_replayed > 0

    async def wait_replayed(self) -> None:
        """Wait until none is queued, or the outbox is closed; for one task at a time."""
        while self._n_replayed and not self._closed:
            self._replayed = asyncio.get_running_loop().create_future()
            await self._replayed

    def flush(self) -> None:
        """Write queued frames while the peer keeps up; of events still to be encoded one piece, and the rest soon."""
        n_bytes = 0
        while self._queue and self._wire.takes_frames:
            if n_bytes >= PIECE_BYTES:
                if self._flushing is None:
                    self._flushing = asyncio.get_running_loop().call_soon(self._flush_on)
                return
            n_bytes += self._write_next()

    def close(self, *, write_rest: bool) -> None:
        """Accept nothing more; queued frames are passed to the transport or dropped."""
        self._closed = True
        while write_rest and self._queue:
            self._write_next()
        if self._flushing is not None:
            self._flushing.cancel()
        self._grow(-self._bytes)
        for held in (self._queue, self._runs, self._frames):
            held.clear()
        self._n_replayed = 0
        self._end_replay()

    def _joins(self, event: Event) -> TypeGuard[Reasoning | ToolCall]:
        """Return whether an event other than a token carries text only; one that names a tool does not."""
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
        """Prevent later text of an event's session from being joined to text before it, and drop its encoder."""
        session_id: str | None = getattr(event, "session_id", None)
        if session_id is not None:
            self._runs.pop(session_id, None)
            self._frames.pop(session_id, None)

    def _end_replay(self) -> None:
        if self._replayed is not None and not self._replayed.done():
            self._replayed.set_result(None)

    def _flush_on(self) -> None:
        self._flushing = None
        self.flush()

    def _write_next(self) -> int:
        """Write the next frame, or a piece of it, and return its cost in bytes."""
        entry = self._queue[0]
        if isinstance(entry, _Replayed):
            return self._write_piece(entry)
        del self._queue[0]
        if isinstance(entry, bytes):
            self._grow(-len(entry))
            self._write(entry)
            return 0
        if self._runs.get(entry.session_id) is entry:
            del self._runs[entry.session_id]
        self._grow(-len(entry.content))
        self._write(entry.frames.frame(entry.seq, bytes(entry.content)))
        return 0

    def _write_piece(self, entry: _Replayed) -> int:
        """Write the next piece of an event; events unknown to the first protocol are not sent to its sockets."""
        first = entry.pieces is None
        if entry.pieces is None:
            entry.pieces = iter(()) if self._dagger_only else encode_in_pieces(entry.event)
        piece, last = next(entry.pieces, (b"", True))
        if last:
            del self._queue[0]
            self._n_replayed -= 1
            if not self._n_replayed:
                self._end_replay()
        if first and last and piece:
            self._write(piece)
        elif piece:
            self._wire.write_piece(piece, first=first, last=last)
            self._metrics.frames_out.inc(last)
        return max(len(piece), _LEAST_BYTES)

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
    """Return the JSON between an event's turn and its text."""
    if isinstance(event, ToolCall):
        return b'"index":%d,"call_id":%b,"arguments":' % (event.index, orjson.dumps(event.call_id))
    return b'"content":'
