"""Which replica of a model runs a turn: the rule, and the rates that it compares.

A turn waits for a slot, and then prefills what its replica does not hold in KV. The replica that ran the session's last
turn has to prefill only the new message, so the turn goes there unless its wait exceeds the wait elsewhere by more than
``PREFILL_WEIGHT`` times the time to prefill the history again: that prefill also delays the turns beside it and behind
it, and each move costs such a prefill. A turn without KV goes where the wait is shortest, then where the smallest share
of the slots is taken, then to the replica that is preferred otherwise, then to the first.

The wait is what the turns ahead hold their slots for: their number, times the mean time that a turn holds one, divided
by the slots. A replica that is not loaded adds the time to load it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.ipc.messages import EmbeddingDone, Finished

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import StepOutput

PREFILL_WEIGHT: Final = 3.0
"""Seconds of waiting that a turn accepts for each second of prefill; see decision 43."""
ASSUMED_HELD_S: Final = 5.0
"""How long a turn holds its slot, before one was measured."""
ASSUMED_PREFILL_TOKEN_S: Final = 0.001
ASSUMED_LOAD_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica's turns, waiting and running, its slots and its measured rates.

    ``startup_s`` is the time until it is loaded. Unmeasured rates are assumed.
    """

    turns: int
    slots: int
    startup_s: float = 0.0
    held_s: float = ASSUMED_HELD_S
    prefill_token_s: float = ASSUMED_PREFILL_TOKEN_S

    @property
    def wait_s(self) -> float:
        """How long another turn waits for a slot."""
        return self.startup_s + max(0, self.turns + 1 - self.slots) * self.held_s / self.slots


def choose_replica(
    loads: Sequence[ReplicaLoad], *, holder: int | None = None, n_tokens: int = 0, preferred: int | None = None
) -> int:
    """Return the replica for a turn; see the module.

    Args:
        loads: The replicas that may run it.
        holder: The one that holds the KV of the session's history.
        n_tokens: The tokens of the history.
        preferred: The one to take if the others are no better.
    """

    def cost(index: int) -> tuple[float, float, bool, int]:
        load = loads[index]
        return load.wait_s, load.turns / load.slots, index != preferred, index

    best = min(range(len(loads)), key=cost)
    if holder is None:
        return best
    prefill_s = n_tokens * loads[best].prefill_token_s
    return holder if loads[holder].wait_s <= loads[best].wait_s + PREFILL_WEIGHT * prefill_s else best


_NEWEST: Final = 0.2
"""Weight of the newest figure in a mean."""


class ReplicaRates:
    """Exponentially weighted means of what a replica's engine takes, in seconds; ``None`` before the first figure."""

    def __init__(self) -> None:
        self.held_s: float | None = None
        self.prefill_token_s: float | None = None
        self.load_s: float | None = None

    def step(self, step: StepOutput) -> None:
        """Update the means with a step of the engine."""
        for event in step.events:
            if isinstance(event, Finished | EmbeddingDone):
                self.held_s = _mean(self.held_s, max(0.0, event.total_ms - event.queue_ms) / 1000)
        if (work := step.work) is not None and work.prefill_tokens:
            self.prefill_token_s = _mean(self.prefill_token_s, work.prefill_s / work.prefill_tokens)

    def loaded(self, seconds: float) -> None:
        """Update the mean time of loading."""
        self.load_s = _mean(self.load_s, seconds)


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)
