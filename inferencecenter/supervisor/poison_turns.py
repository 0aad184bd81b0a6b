"""Identifies turns that kill engines (poison turns). Pure.

The turns that a dead engine was busy with are suspects. A suspect that generates ``PROVEN_TOKENS`` more tokens is
cleared, alone or in company. One that is suspected a second time before that is isolated: it runs with no other turn in
the engine. Only the death of an engine that was busy with the isolated turn alone convicts it. An engine that was
killed from outside, by an operator or the OOM killer, need not have died of the turn: there the second death convicts.

The death of a daemon counts as a death of its engines. The turns that the next daemon resumes are suspected of it, or
only the isolated one; so a turn that kills daemon and engine together is identified by the fifth death. A turn that
made progress between two deaths of daemons is not suspected of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PROVEN_TOKENS: Final = 16
TRIED_AFTER: Final = 2
"""Suspicions after which a turn is isolated."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """A turn was suspected ``times`` times and is cleared at ``clear_at_tokens`` generated tokens."""

    times: int
    clear_at_tokens: int


class PoisonTurnDetector:
    """The suspected turns, and which of them is isolated."""

    def __init__(self) -> None:
        self._suspicions: dict[str, _Suspicion] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.times}, on_trial={self.isolated})"

    def __len__(self) -> int:
        return len(self._suspicions)

    @property
    def isolated(self) -> str | None:
        """The turn that must run alone; ``None`` while all may run together.

        Between two deaths of an engine it changes only when this turn is cleared or ends.
        """
        return next((name for name, suspicion in self._suspicions.items() if suspicion.times >= TRIED_AFTER), None)

    @property
    def times(self) -> dict[str, int]:
        """How often each suspect was named."""
        return {turn_id: suspicion.times for turn_id, suspicion in self._suspicions.items()}

    @property
    def n_tokens(self) -> dict[str, int]:
        """The generated tokens of each suspect when it was last named."""
        return {name: suspicion.clear_at_tokens - PROVEN_TOKENS for name, suspicion in self._suspicions.items()}

    def restore(self, turn_id: str, *, times: int, n_tokens: int) -> None:
        """Restore a suspicion that an earlier daemon stored."""
        self._suspicions[turn_id] = _Suspicion(times, n_tokens + PROVEN_TOKENS)

    def lost(self, named: Mapping[str, int], *, from_outside: bool = False) -> str | None:
        """Record the death of an engine; return the turn that is convicted of it, if any.

        Args:
            named: The turns that the engine was busy with, and the tokens that each had generated.
            from_outside: Whether the engine was killed by something that may be unrelated to them.
        """
        on_trial = self.isolated
        if on_trial is not None and named.keys() == {on_trial}:
            died_alone_before = self._suspicions[on_trial].times > TRIED_AFTER
            if not from_outside or died_alone_before:
                del self._suspicions[on_trial]
                return on_trial
        for turn_id, n_tokens in named.items():
            before = self._suspicions.get(turn_id)
            times = before.times + 1 if before else 1
            self._suspicions[turn_id] = _Suspicion(times, n_tokens + PROVEN_TOKENS)
        return None

    def clears(self, turn_id: str, n_tokens: int) -> bool:
        """Return whether a turn is cleared by the tokens it has generated, and if so drop the suspicion."""
        suspicion = self._suspicions.get(turn_id)
        if suspicion is None or n_tokens < suspicion.clear_at_tokens:
            return False
        del self._suspicions[turn_id]
        return True

    def forget(self, turn_id: str) -> None:
        """Drop a turn that has ended."""
        self._suspicions.pop(turn_id, None)
