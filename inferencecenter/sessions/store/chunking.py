"""Splits large records into chunks of bounded size, for short transactions. Pure.

A session that is created with a long history takes several transactions. Invariant: its row in ``sessions`` is not
``complete`` until the last of them, so readers skip it and the next start deletes it if the daemon was killed; no
client is notified before the last chunk is committed. A fork shares rows that exist already and is never split.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.history import chars_of
from inferencecenter.sessions.journal import (
    HistoryChanged,
    SessionDeleted,
    SessionOpened,
    TokensAppended,
    TurnEnded,
    TurnQueued,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inferencecenter.protocol.values import ChatMessage
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.store.recorder import Entry

CHUNK_BYTES: Final = 256 * 1024
"""Approximate bytes that one chunk writes or deletes, which takes milliseconds."""
_ROW_BYTES: Final = 128
_MAX_NEW_MESSAGES: Final = 1000


@dataclass(frozen=True, slots=True)
class OpenedChunk:
    """A chunk of a new session: its messages and turns up to these numbers; the last chunk writes the rest."""

    record: SessionOpened
    n_messages: int
    n_turns: int
    is_first: bool = False
    is_last: bool = False


def chunks_of(entry: Entry) -> Iterable[Entry]:
    match entry:
        case SessionOpened(parent=None) if _is_long(entry.history.messages, entry.notes.values()):
            return _chunks_of_opened(entry)
        case _:
            return (entry,)


def size_of(entry: Entry) -> int:
    """Return the approximate bytes that an entry writes; of a history only the new part counts."""
    match entry:
        case TokensAppended():
            content = len(entry.tokens) + len(entry.text)
        case OpenedChunk():
            content = CHUNK_BYTES
        case SessionOpened(parent=None):
            content = sum(map(_message_size, entry.history.messages))
        case TurnEnded(history=history):
            content = _size_from(history, history.turns[-1].n_before if history.turns else 0)
        case HistoryChanged(history=history):
            content = _size_from(history, history.turns[-1].n_messages if history.turns else 0)
        case TurnQueued(spec=spec):
            content = len(spec.request.prompt or "") + sum(map(_message_size, spec.request.messages or ()))
        case SessionDeleted(n_chars=n_chars):
            content = min(n_chars, CHUNK_BYTES)
        case _:
            content = 0
    return _ROW_BYTES + content


def _is_long(messages: Iterable[ChatMessage], notes: Iterable[str] = ()) -> bool:
    total = 0
    for weight in chain(map(_message_size, messages), map(len, notes)):
        total += weight
        if total > CHUNK_BYTES:
            return True
    return False


def _chunks_of_opened(record: SessionOpened) -> Iterator[OpenedChunk]:
    total, is_first = 0, True
    for n, message in enumerate(record.history.messages, 1):
        total += _message_size(message)
        if total >= CHUNK_BYTES:
            yield OpenedChunk(record, n, 0, is_first=is_first)
            total, is_first = 0, False
    n_messages = len(record.history.messages)
    for n, turn in enumerate(record.turns, 1):
        total += _ROW_BYTES + len(record.notes.get(turn.turn_id, ""))
        if total >= CHUNK_BYTES:
            yield OpenedChunk(record, n_messages, n, is_first=is_first)
            total, is_first = 0, False
    yield OpenedChunk(record, n_messages, len(record.turns), is_first=is_first, is_last=True)


def _message_size(message: ChatMessage) -> int:
    return _ROW_BYTES + chars_of(message)


def _size_from(history: History, start: int) -> int:
    new = history.messages[max(start, len(history.messages) - _MAX_NEW_MESSAGES) :]
    return sum(map(_message_size, new))
