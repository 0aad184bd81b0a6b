"""The latest events of a session, kept for clients that come back."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from inferencecenter.protocol.codec import encode
from inferencecenter.protocol.events import Reasoning, Token, ToolCall
from inferencecenter.protocol.text_events import goes_on, text_of, with_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.protocol.base import SessionEvent
    from inferencecenter.protocol.events import Error
    from inferencecenter.protocol.text_events import Text
    from inferencecenter.protocol.values import TokenLogprobs

Numbered: TypeAlias = "SessionEvent | Error"
"""An event with a number; an error has one when it ends a turn."""
MAX_JOINED_BYTES: Final = 64 * 1024
"""Of token text in one event: below what WebSocket clients accept by default (1 MiB), with room for JSON around it."""
_TOKEN_BYTES: Final = 64

_log = structlog.get_logger(__name__)
_LOGPROB_BYTES: Final = 64


class _Run:
    """Pieces of one text whose numbers follow each other; kept as text, since there are many."""

    __slots__ = ("contents", "first", "first_seq", "logprobs", "plain_turn")

    def __init__(self, event: Text) -> None:
        self.first = event
        self.plain_turn = event.turn_id if type(event) is Token else None
        self.first_seq = event.seq
        self.contents: deque[str] = deque()
        self.logprobs: deque[tuple[TokenLogprobs, ...] | None] | None = None if event.logprobs is None else deque()

    def takes(self, event: Text) -> bool:
        # By far most are tokens, so these are quick.
        is_plain = self.plain_turn is not None and type(event) is Token
        return (
            (event.turn_id == self.plain_turn if is_plain else goes_on(self.first, event))
            and event.seq == self.first_seq + len(self.contents)
            and (event.logprobs is None) == (self.logprobs is None)
        )

    def add(self, event: Text, text: str) -> None:
        self.contents.append(text)
        if self.logprobs is not None:
            self.logprobs.append(event.logprobs)

    def drop_first(self) -> int:
        """Forget the first token and return what it took."""
        self.first_seq += 1
        content = self.contents.popleft()
        return _token_bytes(content, self.logprobs.popleft() if self.logprobs is not None else None)

    def after(self, last_seq: int) -> Iterator[Text]:
        """Yield what came after ``last_seq``, joined as far as one event should hold."""
        parts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        size = 0
        for index in range(max(0, last_seq + 1 - self.first_seq), len(self.contents)):
            entry = self.logprobs[index] if self.logprobs is not None else None
            parts.append(self.contents[index])
            logprobs.extend(entry or ())
            size += _token_bytes(self.contents[index], entry)
            if size >= MAX_JOINED_BYTES:
                yield self._joined(index, parts, logprobs)
                parts, logprobs, size = [], [], 0
        if parts:
            yield self._joined(len(self.contents) - 1, parts, logprobs)

    def _joined(self, index: int, parts: list[str], logprobs: list[TokenLogprobs]) -> Text:
        return with_text(self.first, "".join(parts), seq=self.first_seq + index, logprobs=tuple(logprobs) or None)


class Replay:
    """Numbered events up to a number of bytes, the oldest are forgotten first.

    Args:
        limit_bytes: What they may take, about.
        seq: Number of the last event that is already lost.
    """

    def __init__(self, limit_bytes: int, *, seq: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._entries: deque[_Run | tuple[Numbered, int]] = deque()
        self._lost_seq = seq
        self._last_seq = seq
        self._folded = False

    def __repr__(self) -> str:
        return f"<Replay {self._lost_seq + 1}..{self._last_seq}, {self._bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """What is kept takes, about."""
        return self._bytes

    def add(self, event: Numbered) -> None:
        """Keep an event, whose number follows the last one's.

        A number that was given to an event which a defect kept from being told leaves a gap. What came before it is
        forgotten then: clients that come back from there are told how the session stands instead.
        """
        assert event.seq is not None, "what is kept has a number"
        if event.seq != self._last_seq + 1:
            _log.error("event_numbers_have_a_gap", after=self._last_seq, next=event.seq)
            self._forget_all(event.seq - 1)
        self._last_seq = event.seq
        if self._folded:
            self._lost_seq = event.seq
            return
        if type(event) is Token or isinstance(event, Reasoning | ToolCall):
            self._add_text(event)
        else:
            size = len(encode(event) or "")
            self._entries.append((event, size))
            self._bytes += size
        while self._bytes > self._limit_bytes:
            self._forget_oldest()

    def after(self, last_seq: int) -> list[Numbered] | None:
        """Return all events after ``last_seq``, neighbouring pieces of a text joined; ``None`` if some are lost."""
        if last_seq < self._lost_seq:
            return None
        missing: list[Numbered] = []
        for entry in self._entries:
            if isinstance(entry, _Run):
                missing.extend(entry.after(last_seq))
            elif (entry[0].seq or 0) > last_seq:
                missing.append(entry[0])
        return missing

    def fold(self) -> None:
        """Forget all events, and keep none until ``unfold``."""
        self._forget_all(self._last_seq)
        self._folded = True

    def unfold(self) -> None:
        """Keep events again."""
        self._folded = False

    def _forget_all(self, last_seq: int) -> None:
        self._entries.clear()
        self._bytes = 0
        self._lost_seq = last_seq

    def _add_text(self, event: Text) -> None:
        last = self._entries[-1] if self._entries else None
        if not isinstance(last, _Run) or not last.takes(event):
            last = _Run(event)
            self._entries.append(last)
        text = event.content if type(event) is Token else text_of(event)
        last.add(event, text)
        self._bytes += _token_bytes(text, event.logprobs)

    def _forget_oldest(self) -> None:
        oldest = self._entries[0]
        if isinstance(oldest, _Run):
            self._lost_seq = oldest.first_seq
            self._bytes -= oldest.drop_first()
            if oldest.contents:
                return
        else:
            self._lost_seq = oldest[0].seq or 0
            self._bytes -= oldest[1]
        self._entries.popleft()


def _token_bytes(content: str, logprobs: tuple[TokenLogprobs, ...] | None) -> int:
    """Return about how much memory a token takes, which is more than its text."""
    n_probabilities = sum(1 + len(entry.top) for entry in logprobs or ())
    return _TOKEN_BYTES + len(content.encode()) + n_probabilities * _LOGPROB_BYTES
