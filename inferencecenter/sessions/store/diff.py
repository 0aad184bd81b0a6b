"""The difference between a history and what the file holds of it. Pure.

Mostly something is appended. A rewind cuts, and where a conversation was rendered anew its tokens are replaced.
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
    """What the file holds of a session.

    ``pieces`` are the ends, in bytes of tokens and in characters of covered text, of the pieces that both are kept in.
    ``first_turn`` is the number of the row of the first of ``turns``.
    """

    history: History = _NOTHING
    pieces: tuple[tuple[int, int], ...] = ()
    turns: tuple[TranscriptTurn, ...] = ()
    first_turn: int = 0

    @property
    def next_turn(self) -> int:
        """Number of the row of the turn that ends next."""
        return self.first_turn + len(self.turns)


@dataclass(frozen=True, slots=True)
class HistoryDiff:
    """Of each kind, how many of the first rows stay, and what follows them."""

    n_messages: int
    messages: tuple[ChatMessage, ...]
    n_pieces: int
    piece: tuple[bytes, str] | None
    n_marks: int
    marks: tuple[TurnCheckpoint, ...]
    pieces: tuple[tuple[int, int], ...]
    """The ends of all pieces afterwards."""


@dataclass(frozen=True, slots=True)
class TurnsDiff:
    """The rows from ``first`` up to before ``end`` stay, those behind go, and ``turns`` follow."""

    first: int
    end: int
    turns: tuple[TranscriptTurn, ...]


def history_diff(before: PersistedState, now: History) -> HistoryDiff:
    """Return how the file's rows become those of the history ``now``."""
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
    """Return how the file's turns become ``now``."""
    n_common = _n_common(before.turns, now)
    first = before.first_turn if n_common else 0
    return TurnsDiff(first, first + n_common, now[n_common:])


def _n_common_pieces(before: PersistedState, now: History) -> int:
    """Return how many of the first pieces are the beginning of ``now`` as well."""
    held, pieces = before.history, before.pieces

    def differs(count: int) -> bool:
        n_bytes, n_chars = pieces[count - 1]
        return not (now.tokens.startswith(held.tokens[:n_bytes]) and now.covered.startswith(held.covered[:n_chars]))

    if not pieces or (held.tokens is now.tokens and held.covered is now.covered):
        return len(pieces)
    # What goes on from there, or was taken back, is told apart without looking at each piece.
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
    # Mostly they are the very same objects, which this finds out without looking into them.
    if held[:shorter] == now[:shorter]:
        return shorter
    return next(index for index in range(shorter) if held[index] != now[index])
