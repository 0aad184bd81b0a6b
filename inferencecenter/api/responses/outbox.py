"""Outbox of a Responses socket: sends at once while the peer reads, and otherwise queues up to a limit.

Events of turns are queued, and frames are made from them when they are sent, so that the sequence numbers of each
response have no gap, even where text was coalesced.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.api.request_turns import Text, TextRun, size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.api.responses.response_events import ResponseEventBuilder
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.outbox import Wire
    from inferencecenter.telemetry.metrics import DaemonMetrics

_EVENT_BYTES: Final = 256

_log = structlog.get_logger(__name__)


class _Waiting:
    """A queued entry."""

    __slots__ = ("builder", "n_bytes", "what")

    def __init__(self, builder: ResponseEventBuilder, what: Event | TextRun, n_bytes: int) -> None:
        self.builder = builder
        self.what = what
        self.n_bytes = n_bytes


class ResponseOutbox:
    """Queue of frames and events to one client.

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
        self._wire = wire
        self._limit_bytes = limit_bytes
        self._overflowed = overflowed
        self._broken = broken
        self._metrics = metrics
        self._queue: deque[_Waiting | bytes] = deque()
        self._runs: dict[ResponseEventBuilder, _Waiting] = {}
        self._untold: set[ResponseEventBuilder] = set()  # responses of which nothing more is sent
        self._bytes = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<Outbox {len(self._queue)} entries, {self._bytes} bytes{', closed' if self._closed else ''}>"

    @property
    def waiting_bytes(self) -> int:
        """Queued bytes, approximately."""
        return self._bytes

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that belongs to no response, now or once the peer has caught up."""
        if self._closed:
            return
        if self._keeps_up:
            self._write(frame)
            return
        self._queue.append(frame)
        self._grow(len(frame))

    def send_event(self, builder: ResponseEventBuilder, event: Event) -> None:
        """Send an event of a response's turn, now or once the peer has caught up."""
        if self._closed:
            return
        if self._keeps_up:
            self._feed(builder, event)
        elif isinstance(event, Text):
            self._wait_joined(builder, event)
        else:
            # Later text must not be joined to text before this event.
            self._runs.pop(builder, None)
            self._queue.append(_Waiting(builder, event, _EVENT_BYTES))
            self._grow(_EVENT_BYTES)

    def flush(self) -> None:
        """Write queued entries while the peer keeps up."""
        while self._queue and self._wire.takes_frames:
            self._send(self._queue.popleft())

    def close(self, *, write_rest: bool) -> None:
        """Accept nothing more; queued frames are passed to the transport or dropped."""
        self._closed = True
        self._runs.clear()
        while self._queue and write_rest:
            self._send(self._queue.popleft())
        self._queue.clear()
        self._grow(-self._bytes)

    @property
    def _keeps_up(self) -> bool:
        return not self._queue and self._wire.takes_frames

    def _wait_joined(self, builder: ResponseEventBuilder, event: Text) -> None:
        n_bytes = size_of(event)
        waiting = self._runs.get(builder)
        if waiting is not None and isinstance(waiting.what, TextRun) and waiting.what.add(event):
            waiting.n_bytes += n_bytes
        else:
            waiting = self._runs[builder] = _Waiting(builder, TextRun(event), n_bytes)
            self._queue.append(waiting)
        self._grow(n_bytes)

    def _send(self, entry: _Waiting | bytes) -> None:
        if isinstance(entry, bytes):
            self._grow(-len(entry))
            self._write(entry)
            return
        if self._runs.get(entry.builder) is entry:
            del self._runs[entry.builder]
        self._grow(-entry.n_bytes)
        what = entry.what
        self._feed(entry.builder, what.joined() if isinstance(what, TextRun) else what)

    def _feed(self, builder: ResponseEventBuilder, event: Event) -> None:
        if builder in self._untold:
            return
        try:
            frames = builder.feed(event)
        except Exception:  # noqa: BLE001 - boundary: a defect in one response must not end the others
            _log.exception("response_untold")
            self._untold.add(builder)
            self._broken(builder)
            return
        for frame in frames:
            self._write(frame.data)

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
