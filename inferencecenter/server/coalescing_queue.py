"""The queue of a slow reader: a FIFO bounded in bytes that coalesces text of one turn.

Text is appended to the last text of its key, which is a session, a response or a turn, unless another entry of that key
came after it; so the events of a key stay in order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from inferencecenter.protocol.events import MAX_JOINED_BYTES, Text, Token, continues_text, text_of, with_text

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence, Sized

    from inferencecenter.protocol.base import Event
    from inferencecenter.telemetry.metrics import DaemonMetrics

_EVENT_BYTES: Final = 256
_TOKEN_BYTES: Final = 64
_LOGPROB_BYTES: Final = 96

KeyT = TypeVar("KeyT", bound="Hashable")
TextT = TypeVar("TextT")
PartT = TypeVar("PartT", bound="Sized")
ItemT = TypeVar("ItemT")
OtherT = TypeVar("OtherT")


class _Run(Generic[KeyT, TextT, PartT]):
    """Parts of one text, which become one item."""

    __slots__ = ("key", "n_bytes", "parts", "seq", "text")

    def __init__(self, key: KeyT, text: TextT) -> None:
        self.key = key
        self.text = text
        self.parts: list[PartT] = []
        self.n_bytes = 0
        self.seq = 0


class CoalescingQueue(Generic[KeyT, TextT, PartT, ItemT]):
    """A queue to one reader; an entry is a key, an item and its size, or parts of a text.

    Args:
        join: Returns the item of consecutive parts of a text, given also the number of the last part's event.
        limit_bytes: Maximum number of queued bytes.
        overflowed: Called once beyond the limit, when the queue was emptied; nothing may be put into it afterwards.
        metrics: Where bytes and overflows are counted.
    """

    __slots__ = ("_join", "_limit_bytes", "_metrics", "_overflowed", "_queued", "_runs", "entries", "n_bytes")

    def __init__(
        self,
        join: Callable[[TextT, int, Sequence[PartT]], ItemT],
        *,
        limit_bytes: int,
        overflowed: Callable[[], None],
        metrics: DaemonMetrics,
    ) -> None:
        self.entries: deque[tuple[KeyT, ItemT, int] | _Run[KeyT, TextT, PartT]] = deque()
        self.n_bytes = 0
        self._runs: dict[KeyT, _Run[KeyT, TextT, PartT]] = {}
        self._join = join
        self._limit_bytes = limit_bytes
        self._overflowed = overflowed
        self._metrics = metrics
        self._queued = metrics.outbox_bytes

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def head(self) -> ItemT | None:
        """The first item, ``None`` if it is text."""
        first = self.entries[0]
        return first[1] if type(first) is tuple else None

    def put(self, key: KeyT, item: ItemT, n_bytes: int) -> None:
        """Append an item; later text of its key is not joined to text before it."""
        if self._runs:
            self._runs.pop(key, None)
        self.entries.append((key, item, n_bytes))
        self._grow(n_bytes)

    def put_text(self, key: KeyT, text: TextT, seq: int, part: PartT) -> None:
        """Append a part of a text to those of the same text that are queued, or as an entry of its own."""
        n_bytes = len(part)
        run = self._runs.get(key)
        if run is None or run.text is not text or run.n_bytes + n_bytes > MAX_JOINED_BYTES:
            run = self._runs[key] = _Run(key, text)
            self.entries.append(run)
        run.seq = seq
        run.parts.append(part)
        run.n_bytes += n_bytes
        self._grow(n_bytes)

    def pop(self) -> tuple[KeyT, ItemT]:
        """Remove the first entry, and return its key and its item."""
        entry = self.entries.popleft()
        if isinstance(entry, tuple):
            self._grow(-entry[2])
            return entry[:2]
        if self._runs.get(entry.key) is entry:
            del self._runs[entry.key]
        self._grow(-entry.n_bytes)
        return entry.key, self._join(entry.text, entry.seq, entry.parts)

    def pop_all(self) -> list[tuple[KeyT, ItemT]]:
        """Remove all entries, and return their keys and items."""
        items = [
            entry[:2] if isinstance(entry, tuple) else (entry.key, self._join(entry.text, entry.seq, entry.parts))
            for entry in self.entries
        ]
        self.clear()
        return items

    def clear(self) -> None:
        """Drop all entries."""
        self._grow(-self.n_bytes)
        self.entries.clear()
        self._runs.clear()

    def _grow(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._queued.value += n_bytes
        if self.n_bytes > self._limit_bytes:
            self.clear()
            self._metrics.outbox_overflows.inc()
            self._overflowed()


class EventQueue(CoalescingQueue[KeyT, Text, str, "Event | OtherT"], Generic[KeyT, OtherT]):
    """A queue of events of turns, and of other items; sizes are approximate.

    Args:
        limit_bytes: Maximum number of queued bytes.
        overflowed: See ``CoalescingQueue``.
        metrics: Where bytes and overflows are counted.
        n_separate: Number of entries from which text is coalesced.
    """

    __slots__ = ("_n_separate",)

    def __init__(
        self, *, limit_bytes: int, overflowed: Callable[[], None], metrics: DaemonMetrics, n_separate: int = 0
    ) -> None:
        super().__init__(_joined, limit_bytes=limit_bytes, overflowed=overflowed, metrics=metrics)
        self._n_separate = n_separate

    def put_event(self, key: KeyT, event: Event) -> None:
        """Append an event, or its text to that of the last one of its key."""
        if len(self.entries) < self._n_separate or not isinstance(event, Text) or event.logprobs is not None:
            self.put(key, event, _size_of(event))
            return
        run = self._runs.get(key)
        text = run.text if run is not None and continues_text(run.text, event) else event
        self.put_text(key, text, event.seq, text_of(event))


def _joined(first: Text, seq: int, parts: Sequence[str]) -> Text:
    if len(parts) == 1 and seq == first.seq:
        return first
    return with_text(first, "".join(parts), seq=seq, logprobs=None)


def _size_of(event: Event) -> int:
    if type(event) is Token and event.logprobs is None:  # by far the most frequent, so it is fast
        return len(event.content)
    if not isinstance(event, Text):
        return _EVENT_BYTES
    return _TOKEN_BYTES + len(text_of(event)) + _LOGPROB_BYTES * sum(1 + len(each.top) for each in event.logprobs or ())
