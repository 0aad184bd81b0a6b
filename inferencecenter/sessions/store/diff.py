"""Computes the difference between a history and its stored rows. Pure.

A turn usually appends. A rewind truncates, and a conversation that was rendered again replaces its tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.sessions.history import History

if TYPE_CHECKING:
    from inferencecenter.protocol.values import ChatMessage, TranscriptTurn
    from inferencecenter.sessions.history import TurnCheckpoint

_T = TypeVar("_T")
_NOTHING: Final = History()


@dataclass(frozen=True, slots=True)
class PersistedState:
    """The stored rows of a session.

    ``pieces`` are the cumulative ends, in bytes of tokens and in characters of covered text, of the stored pieces.
    ``first_turn`` is the row number of the first of ``turns``.
    """

    history: History = _NOTHING
    pieces: tuple[tuple[int, int], ...] = ()
    turns: tuple[TranscriptTurn, ...] = ()
    first_turn: int = 0

    @property
    def next_turn(self) -> int:
        """Row number of the next turn."""
        return self.first_turn + len(self.turns)


@dataclass(frozen=True, slots=True)
class HistoryDiff:
    """For each kind, how many of the first rows are kept and what follows them."""

    n_messages: int
    messages: tuple[ChatMessage, ...]
    n_pieces: int
    piece: tuple[bytes, str] | None
    n_marks: int
    marks: tuple[TurnCheckpoint, ...]
    pieces: tuple[tuple[int, int], ...]
    """The ends of all pieces after the change."""


@dataclass(frozen=True, slots=True)
class TurnsDiff:
    """The rows from ``first`` up to before ``end`` are kept, later ones are deleted, and ``turns`` are appended."""

    first: int
    end: int
    turns: tuple[TranscriptTurn, ...]


def history_diff(before: PersistedState, now: History) -> HistoryDiff:
    """Return how to change the stored rows to those of ``now``."""
    held = before.history
    n_messages = _n_common(held.messages, now.messages)
    n_marks = _n_common(held.turns, now.turns)
    n_pieces = _n_common_pieces(before, now)
    pieces = before.pieces[:n_pieces]
    n_bytes, n_chars = pieces[-1] if pieces else (0, 0)
    piece = None
    if n_bytes < len(now.tokens) or n_chars < len(now.covered):
        piece = now.tokens[n_bytes:], now.covered[n_chars:]
        pieces = (*pieces, (len(now.tokens), len(now.covered)))
    return HistoryDiff(
        n_messages=n_messages,
        messages=now.messages[n_messages:],
        n_pieces=n_pieces,
        piece=piece,
        n_marks=n_marks,
        marks=now.turns[n_marks:],
        pieces=pieces,
    )


def turns_diff(before: PersistedState, now: tuple[TranscriptTurn, ...]) -> TurnsDiff:
    """Return how to change the stored turns to ``now``."""
    n_common = _n_common(before.turns, now)
    first = before.first_turn if n_common else 0
    return TurnsDiff(first, first + n_common, now[n_common:])


def _n_common_pieces(before: PersistedState, now: History) -> int:
    """Return how many of the first pieces ``now`` starts with."""
    held, pieces = before.history, before.pieces

    def differs(count: int) -> bool:
        n_bytes, n_chars = pieces[count - 1]
        return not (now.tokens.startswith(held.tokens[:n_bytes]) and now.covered.startswith(held.covered[:n_chars]))

    if not pieces or (held.tokens is now.tokens and held.covered is now.covered):
        return len(pieces)
    # Appending and truncation, the common cases, need no search.
    if held.tokens.startswith(now.tokens) and held.covered.startswith(now.covered):
        n_bytes, n_chars = len(now.tokens), len(now.covered)
        return min(bisect_right(pieces, n_bytes, key=itemgetter(0)), bisect_right(pieces, n_chars, key=itemgetter(1)))
    if not differs(len(pieces)):
        return len(pieces)
    return bisect_left(range(1, len(pieces) + 1), True, key=differs)


def _n_common(held: tuple[_T, ...], now: tuple[_T, ...]) -> int:
    if held is now:
        return len(held)
    shorter = min(len(held), len(now))
    # Usually the elements are identical objects, which makes this comparison cheap.
    if held[:shorter] == now[:shorter]:
        return shorter
    return next(index for index in range(shorter) if held[index] != now[index])
