"""Outbox: the only writer of a connection; sends at once while the peer reads, and otherwise queues up to a limit.

Control frames are never dropped. Queued text of a turn is coalesced. Beyond the limit of bytes the peer counts as too
slow, and the connection is closed.

Bulk data requested by the client, such as missed events or a transcript, may exceed that limit although the client
reads. It is *replayed*: it keeps its place in the order, is encoded only once the peer has read what precedes it, and
does not count towards the limit. A long event is encoded in pieces, each a fragment of one message, at the speed of the
peer and at most one per iteration of the event loop. A connection runs its next bulk request when the last one was
written (``wait_replayed``), so that at most one is queued.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

import orjson

from inferencecenter.protocol.codec import PIECE_BYTES, encode, encode_in_pieces
from inferencecenter.protocol.events import Reasoning, Token, ToolCall, continues_text, text_of
from inferencecenter.server.coalescing_queue import CoalescingQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.events import Text
    from inferencecenter.telemetry.metrics import DaemonMetrics

QueueT = TypeVar("QueueT", bound="CoalescingQueue[Any, Any, Any, Any]")

_LEAST_BYTES: Final = 1024
"""Cost of encoding a short event, as the number of bytes of a long one that takes the same time."""


class Wire(Protocol):
    """The transport that an outbox writes to."""

    on_writable: Callable[[], None] | None
    on_lost: Callable[[], None] | None

    @property
    def takes_frames(self) -> bool:
        """Whether the peer keeps up."""

    def write_text(self, frame: bytes) -> None: ...

    def write_piece(self, piece: bytes, *, first: bool, last: bool) -> None:
        """Write a fragment of a text message; no other message may start before the last fragment."""

    def finish(self, code: int, reason: str, *, linger_s: float) -> None:
        """Send a close frame, and abort the connection if it is not answered in time."""


class TextFrames:
    """Encodes the frames of one text of a turn, which differ in few bytes.

    The result equals ``codec.encode`` of the event, at a tenth of its cost.

    Args:
        first: The first event of the text.
        first_protocol: The socket speaks the first protocol, which has tokens only.
    """

    def __init__(self, first: Text, *, first_protocol: bool) -> None:
        self._first = first
        self._plain_turn = first.turn_id if type(first) is Token else None
        self._numbered = not first_protocol
        head = b'{"op":%b,"session_id":%b' % (orjson.dumps(first.op), orjson.dumps(first.session_id))
        if first_protocol:
            self._head, self._middle = head + b',"content":"', b""
        else:
            self._head = head + b',"seq":'
            self._middle = b',"turn_id":%b,%b"' % (orjson.dumps(first.turn_id), _field(first))

    def take(self, event: Text) -> bool:
        """Return whether an event belongs to this text."""
        if self._plain_turn is not None and type(event) is Token:  # by far the most frequent, so it is fast
            return event.turn_id == self._plain_turn
        return continues_text(self._first, event)

    def frame(self, seq: int, content: bytes) -> bytes:
        """Return the frame of ``content``, the inside of a JSON string."""
        if self._numbered:
            return b'%b%d%b%b"}' % (self._head, seq, self._middle, content)
        return b'%b%b"}' % (self._head, content)

    def join(self, seq: int, parts: Sequence[bytes]) -> bytes:
        """Return the frame of all parts of a content."""
        return self.frame(seq, b"".join(parts))


class _Replayed:
    """A replayed event; it is encoded in pieces from its turn in the queue on."""

    __slots__ = ("event", "pieces")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.pieces: Iterator[tuple[bytes, bool]] | None = None


class SocketOutbox(ABC, Generic[QueueT]):
    """Writes to one socket what its subclass sends, and queues it while the peer is behind.

    Args:
        wire: The socket.
        queue: Makes the queue.
        limit_bytes: Maximum number of queued bytes.
        overflowed: Called once beyond the limit; the outbox then accepts nothing more.
        metrics: Where frames and bytes are counted.
    """

    __slots__ = ("_closed", "_entries", "_flushing", "_frames_out", "_overflowed", "_queue", "_wire")

    def __init__(
        self,
        wire: Wire,
        *,
        queue: Callable[..., QueueT],
        limit_bytes: int,
        overflowed: Callable[[], None],
        metrics: DaemonMetrics,
    ) -> None:
        self._wire = wire
        self._frames_out = metrics.frames_out
        self._overflowed = overflowed
        self._queue = queue(limit_bytes=limit_bytes, overflowed=self._overflow, metrics=metrics)
        self._entries = self._queue.entries
        self._flushing: asyncio.Handle | None = None
        self._closed = False

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<{type(self).__name__} {len(self._entries)} frames, {self.waiting_bytes} bytes{closed}>"

    @property
    def waiting_bytes(self) -> int:
        return self._queue.n_bytes

    def flush(self) -> None:
        """Write queued frames while the peer keeps up; of events still to be encoded one piece, and the rest soon."""
        n_bytes = 0
        while self._entries and self._wire.takes_frames:
            if n_bytes >= PIECE_BYTES:
                if self._flushing is None:
                    self._flushing = asyncio.get_running_loop().call_soon(self._flush_on)
                return
            n_bytes += self._write_next()

    def close(self, *, write_rest: bool) -> None:
        """Accept nothing more; queued frames are passed to the transport or dropped."""
        self._closed = True
        while write_rest and self._entries:
            self._write_next()
        if self._flushing is not None:
            self._flushing.cancel()
        self._queue.clear()

    @abstractmethod
    def _write_next(self) -> int:
        """Write the first entry, or a piece of it, and return the bytes encoded for it at this moment."""

    def _write(self, frame: bytes) -> None:
        self._wire.write_text(frame)
        self._frames_out.value += 1

    def _flush_on(self) -> None:
        self._flushing = None
        self.flush()

    def _overflow(self) -> None:
        self.close(write_rest=False)
        self._overflowed()


_FrameQueue: TypeAlias = CoalescingQueue[str | None, TextFrames, bytes, bytes | _Replayed]


class Outbox(SocketOutbox[_FrameQueue]):
    """Outbox of a socket of the daemon's own protocol; see ``SocketOutbox``.

    Args:
        wire: The socket.
        sent: Called with each event that is not a text to be joined, once it is written or queued.
        limit_bytes: Maximum number of queued bytes.
        overflowed: Called once beyond the limit; the outbox then accepts nothing more.
        metrics: Where frames and bytes are counted.
    """

    __slots__ = ("_first_protocol", "_frames", "_n_replayed", "_replayed", "_sent")

    def __init__(
        self,
        wire: Wire,
        *,
        sent: Callable[[Event], None] = lambda _: None,
        limit_bytes: int,
        overflowed: Callable[[], None],
        metrics: DaemonMetrics,
    ) -> None:
        queue = partial(_FrameQueue, TextFrames.join)
        super().__init__(wire, queue=queue, limit_bytes=limit_bytes, overflowed=overflowed, metrics=metrics)
        self._sent = sent
        self._first_protocol = True
        self._frames: dict[str, TextFrames] = {}
        self._n_replayed = 0
        self._replayed: asyncio.Future[None] | None = None

    def enable_v1(self) -> None:
        """From now on send all ops and fields, not only those of the first protocol."""
        self._first_protocol = False
        self._frames.clear()

    def send(self, event: Event) -> None:
        """Send an event now, or queue it while the peer is behind."""
        if self._closed:
            return
        if (type(event) is Token or self._joins(event)) and event.logprobs is None and event.id is None:
            self._send_text(event)
            return
        session_id = self._forget_text(event)
        frame = encode(event, first_protocol=self._first_protocol)
        if frame is not None:
            if not self._entries and self._wire.takes_frames:
                self._write(frame.encode())
            else:
                self._queue.put(session_id, frame.encode(), len(frame))
        self._sent(event)

    def replay(self, events: Sequence[Event]) -> None:
        """Queue events to be encoded once the peer has read what precedes them."""
        if self._closed:
            return
        for event in events:
            self._queue.put(self._forget_text(event), _Replayed(event), 0)
            self._n_replayed += 1
        self.flush()
        for event in events:
            self._sent(event)

    @property
    def replay_pending(self) -> bool:
        """Whether replayed events are queued."""
        return self._n_replayed > 0

    async def wait_replayed(self) -> None:
        """Wait until none is queued, or the outbox is closed; for one task at a time."""
        while self.replay_pending and not self._closed:
            self._replayed = asyncio.get_running_loop().create_future()
            await self._replayed

    def close(self, *, write_rest: bool) -> None:
        """Accept nothing more; queued frames are passed to the transport or dropped."""
        super().close(write_rest=write_rest)
        self._frames.clear()
        self._n_replayed = 0
        self._end_replay()

    def _joins(self, event: Event) -> TypeGuard[Reasoning | ToolCall]:
        """Return whether an event other than a token carries text only; one that names a tool does not."""
        return not self._first_protocol and (
            isinstance(event, Reasoning) or (isinstance(event, ToolCall) and event.name is None)
        )

    def _send_text(self, event: Text) -> None:
        session_id = event.session_id
        frames = self._frames.get(session_id)
        if frames is None or not frames.take(event):
            frames = self._frames[session_id] = TextFrames(event, first_protocol=self._first_protocol)
        content = orjson.dumps(event.content if type(event) is Token else text_of(event))[1:-1]
        if not self._entries and self._wire.takes_frames:
            self._write(frames.frame(event.seq, content))
        else:
            self._queue.put_text(session_id, frames, event.seq, content)

    def _forget_text(self, event: Event) -> str | None:
        """Drop the encoder of an event's session, so that later text is not joined to text before; return its id."""
        session_id: str | None = getattr(event, "session_id", None)
        if session_id is not None:
            self._frames.pop(session_id, None)
        return session_id

    def _write_next(self) -> int:
        if isinstance(replayed := self._queue.head, _Replayed):
            return self._write_piece(replayed)
        _, frame = self._queue.pop()
        assert isinstance(frame, bytes), "replayed events are handled above"
        self._write(frame)
        return 0

    def _write_piece(self, entry: _Replayed) -> int:
        """Write the next piece of an event; events unknown to the first protocol are not sent to its sockets."""
        first = entry.pieces is None
        if entry.pieces is None:
            entry.pieces = iter(()) if self._first_protocol else encode_in_pieces(entry.event)
        piece, last = next(entry.pieces, (b"", True))
        if last:
            self._queue.pop()
            self._n_replayed -= 1
            if not self._n_replayed:
                self._end_replay()
        if first and last and piece:
            self._write(piece)
        elif piece:
            self._wire.write_piece(piece, first=first, last=last)
            self._frames_out.value += last
        return max(len(piece), _LEAST_BYTES)

    def _end_replay(self) -> None:
        if self._replayed is not None and not self._replayed.done():
            self._replayed.set_result(None)


def _field(event: Text) -> bytes:
    """Return the JSON between an event's turn and its text."""
    if isinstance(event, ToolCall):
        return b'"index":%d,"call_id":%b,"arguments":' % (event.index, orjson.dumps(event.call_id))
    return b'"content":'
