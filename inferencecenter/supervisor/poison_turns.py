"""Which turns may have ended an engine, and which of them is tried alone. Pure.

The turns that a dead engine was busy with are suspected. A suspect that generates ``PROVEN_TOKENS`` more than it had is
cleared, alone or in company. One that is suspected a second time before is tried: it runs with no other turn in the
engine. Only an engine that dies while it is busy with a turn that is tried convicts that turn. One that is killed from
outside, by a person or for want of memory, need not have died of it: that convicts the second time.

A daemon that dies is such a death of its engines too. The turns that the next daemon resumes are suspected of it, or
the one alone that was tried; so a turn that ends daemon and engine together is found by the fifth. One that got any
further between two deaths of daemons is not suspected of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PROVEN_TOKENS: Final = 16
TRIED_AFTER: Final = 2
"""Suspicions after which a turn is tried alone."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """``times`` a turn was named by a dead engine; ``clear_at_tokens`` generated tokens it is cleared."""

    times: int
    clear_at_tokens: int


class PoisonTurnDetector:
    """The turns under suspicion."""

    def __init__(self) -> None:
        self._suspicions: dict[str, _Suspicion] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.times}, on_trial={self.isolated})"

    def __len__(self) -> int:
        return len(self._suspicions)

    @property
    def isolated(self) -> str | None:
        """The turn that is to run alone; ``None`` while all may run together.

        Between two losses of an engine it changes only when this turn is cleared or over.
        """
        return next((name for name, suspicion in self._suspicions.items() if suspicion.times >= TRIED_AFTER), None)

    @property
    def times(self) -> dict[str, int]:
        """How often each suspect was named."""
        return {turn_id: suspicion.times for turn_id, suspicion in self._suspicions.items()}

    @property
    def n_tokens(self) -> dict[str, int]:
        """How many tokens each had when it was named last."""
        return {name: suspicion.clear_at_tokens - PROVEN_TOKENS for name, suspicion in self._suspicions.items()}

    def restore(self, turn_id: str, *, times: int, n_tokens: int) -> None:
        """Take over what an earlier daemon suspected of a turn."""
        self._suspicions[turn_id] = _Suspicion(times, n_tokens + PROVEN_TOKENS)

    def lost(self, named: Mapping[str, int], *, from_outside: bool = False) -> str | None:
        """Take note that an engine died; return the turn that did it, if that is known now.

        Args:
            named: The turns that the engine was busy with, and how many tokens each had generated.
            from_outside: Whether it was killed by something that may have nothing to do with them.
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
        """Take note of how many tokens a turn has generated; tell whether that frees it from suspicion."""
        suspicion = self._suspicions.get(turn_id)
        if suspicion is None or n_tokens < suspicion.clear_at_tokens:
            return False
        del self._suspicions[turn_id]
        return True

    def forget(self, turn_id: str) -> None:
        """Take note that a turn is over."""
        self._suspicions.pop(turn_id, None)
