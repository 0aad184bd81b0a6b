"""What a session remembers of its turns that have ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.protocol.requests import START
from inferencecenter.protocol.values import TranscriptTurn, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferencecenter.protocol.events import End, Error

MAX_TURNS: Final = 1000
"""Turns that are listed."""
MAX_TURN_KEYS: Final = 64
"""Turns that a repeated ``turn_key`` finds."""
MAX_FAILURES: Final = 16
"""Turns that failed, which are remembered with the reason."""
_NO_ENDS: Final[Mapping[str, End]] = MappingProxyType({})
_NO_NOTES: Final[Mapping[str, str]] = MappingProxyType({})
_NO_FAILURES: Final[Mapping[str, Failure]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a turn failed, as was told, and what was noted of it."""

    error: Error
    note: str


class Ledger:
    """A session's turns, the sum of them, and the ends that a repeated ``turn_key`` is answered with.

    Args:
        turns: Those that have ended, oldest first.
        ends: How those with a key have ended, the latest last.
        notes: What was noted of turns by their ids.
        failures: Why turns failed, by their ids, the latest last.
        usage: The sum of the turns, where it is known.
    """

    def __init__(
        self,
        turns: Iterable[TranscriptTurn] = (),
        ends: Mapping[str, End] = _NO_ENDS,
        notes: Mapping[str, str] = _NO_NOTES,
        failures: Mapping[str, Failure] = _NO_FAILURES,
        *,
        usage: Usage | None = None,
    ) -> None:
        self._turns = list(turns)
        self._notes = dict(notes)
        self._ends = OrderedDict(list(ends.items())[-MAX_TURN_KEYS:])
        self._failures = OrderedDict(list(failures.items())[-MAX_FAILURES:])
        self.usage = _sum(self._turns) if usage is None else usage

    @property
    def turns(self) -> tuple[TranscriptTurn, ...]:
        """The last turns, oldest first, as clients are told of them."""
        return tuple(self._turns[-MAX_TURNS:])

    @property
    def all_turns(self) -> tuple[TranscriptTurn, ...]:
        """All turns, oldest first, as they are written down."""
        return tuple(self._turns)

    @property
    def notes(self) -> Mapping[str, str]:
        """What was noted of turns by their ids."""
        return dict(self._notes)

    @property
    def n_note_chars(self) -> int:
        """Characters of all notes."""
        return sum(map(len, self._notes.values()))

    def turn(self, turn_id: str) -> tuple[TranscriptTurn, str] | None:
        """Return how a turn is listed and what was noted of it; ``None`` if it is not known."""
        turn = next((turn for turn in reversed(self._turns) if turn.turn_id == turn_id), None)
        return None if turn is None else (turn, self._notes.get(turn_id, ""))

    def record(self, turn_key: str | None, end: End, *, n_messages: int, note: str = "") -> TranscriptTurn:
        """Take note of a turn that did not fail, after which there are ``n_messages``, and return how it is listed."""
        turn = TranscriptTurn(
            turn_id=end.turn_id, finish_reason=end.finish_reason, messages=n_messages, usage=end.usage
        )
        self._turns.append(turn)
        self.usage = _add(self.usage, end.usage)
        if note:
            self._notes[end.turn_id] = note
        if turn_key is not None:
            self._ends[turn_key] = end
            if len(self._ends) > MAX_TURN_KEYS:
                self._ends.popitem(last=False)
        return turn

    def remember(self, turn_id: str, failure: Failure) -> None:
        """Take note of a turn that failed."""
        self._failures[turn_id] = failure
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def failure(self, turn_id: str) -> Failure | None:
        """Return why a turn failed, if that is still known."""
        return self._failures.get(turn_id)

    def find(self, turn_key: str | None) -> End | None:
        """Return how the turn with this key ended, if it is still known."""
        return None if turn_key is None else self._ends.get(turn_key)

    def until(self, turn: str | None) -> Ledger:
        """Return what is known of the turns up to ``turn``, which is there; of none for ``START``, of all without it.

        The keys stay behind: what they are answered with belongs to this session's events.
        """
        if turn is None:
            return Ledger(self._turns, notes=self._notes, usage=self.usage)
        turns = self._turns[: self._length(turn)]
        kept = {known.turn_id for known in turns}
        return Ledger(turns, notes={turn_id: note for turn_id, note in self._notes.items() if turn_id in kept})

    def rewind(self, turn: str) -> None:
        """Forget all turns after ``turn``, which is there, or all of them for ``START``; and all that failed."""
        length = self._length(turn)
        gone = {later.turn_id for later in self._turns[length:]}
        del self._turns[length:]
        self.usage = _sum(self._turns)
        for key in [key for key, end in self._ends.items() if end.turn_id in gone]:
            del self._ends[key]
        for turn_id in gone:
            self._notes.pop(turn_id, None)
        self._failures.clear()

    def _length(self, turn: str) -> int:
        if turn == START:
            return 0
        return next(index for index, known in enumerate(self._turns, start=1) if known.turn_id == turn)


def _sum(turns: Iterable[TranscriptTurn]) -> Usage:
    usages = [turn.usage for turn in turns]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


def _add(total: Usage, usage: Usage) -> Usage:
    return Usage(
        prompt_tokens=total.prompt_tokens + usage.prompt_tokens,
        cached_tokens=total.cached_tokens + usage.cached_tokens,
        completion_tokens=total.completion_tokens + usage.completion_tokens,
        reasoning_tokens=total.reasoning_tokens + usage.reasoning_tokens,
    )
