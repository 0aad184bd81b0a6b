"""How short memory is, as three states with hysteresis. Pure: figures and the time come from outside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from inferencecenter.core.state_machine import StateMachine

if TYPE_CHECKING:
    from collections.abc import Sequence

MAIN_MEMORY: Final = "memory"
"""The name of the usage that is of main memory; the others are of GPUs."""
SETTLED_S: Final = 30.0
"""How long nothing may have been over its limit before a state is left for the next one down."""


class PressureState(StrEnum):
    """What is done about memory: nothing, parked KV is given up, or no turn begins either."""

    EASY = "easy"
    SHEDDING = "shedding"
    FULL = "full"


class PressureChange(StrEnum):
    """What moves it."""

    TIGHTENED = "tightened"
    EXHAUSTED = "exhausted"
    RELIEVED = "relieved"


PRESSURE: Final = StateMachine(
    "memory pressure",
    {
        (PressureState.EASY, PressureChange.TIGHTENED): PressureState.SHEDDING,
        (PressureState.EASY, PressureChange.EXHAUSTED): PressureState.FULL,
        (PressureState.SHEDDING, PressureChange.EXHAUSTED): PressureState.FULL,
        (PressureState.FULL, PressureChange.RELIEVED): PressureState.SHEDDING,
        (PressureState.SHEDDING, PressureChange.RELIEVED): PressureState.EASY,
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """A kind of memory: what is used of it, and how much may be.

    At ``calm_bytes``, below the limit, it counts as relieved at once. ``parked_bytes`` of what is used can be given up.
    """

    name: str
    used_bytes: int
    limit_bytes: int
    calm_bytes: int
    parked_bytes: int = 0

    @property
    def is_over(self) -> bool:
        """Whether more is used than may be."""
        return self.used_bytes > self.limit_bytes

    @property
    def kept_bytes(self) -> int:
        """What of the parked may stay when as much of it is given up as brings the usage to ``calm_bytes``."""
        return max(0, self.parked_bytes - max(0, self.used_bytes - self.calm_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """A state, whether the last look found a usage over its limit, the second at which one last was, and that look."""

    state: PressureState = PressureState.EASY
    is_over: bool = False
    over_at_s: float = -math.inf
    usages: tuple[MemoryUsage, ...] = ()

    def usage(self, name: str) -> MemoryUsage | None:
        """Return what was seen of one kind of memory."""
        return next((each for each in self.usages if each.name == name), None)


def next_pressure(pressure: Pressure, usages: Sequence[MemoryUsage], *, now: float) -> Pressure:
    """Return how short memory is after this look.

    What is over its limit is first given a chance: parked KV goes, and only a second look in a row that still finds
    something over it makes it full. Where nothing is parked it is full at once. The way back is in order. Turns begin
    again as soon as everything is calm, and parking is free again when nothing has been over for ``SETTLED_S``. That
    time also ends a full state between limit and calm, which a model that alone takes so much would never leave.
    """
    over = [each for each in usages if each.is_over]
    state, change = pressure.state, None
    if over:
        exhausted = pressure.is_over or not all(each.parked_bytes for each in over)
        if state is not PressureState.FULL and exhausted:
            change = PressureChange.EXHAUSTED
        elif state is PressureState.EASY:
            change = PressureChange.TIGHTENED
    elif state is not PressureState.EASY:
        settled = now - pressure.over_at_s >= SETTLED_S
        calm = all(each.used_bytes <= each.calm_bytes for each in usages)
        if settled or (calm and state is PressureState.FULL):
            change = PressureChange.RELIEVED
    return Pressure(
        state=PRESSURE.next(state, change) if change else state,
        is_over=bool(over),
        over_at_s=now if over else pressure.over_at_s,
        usages=tuple(usages),
    )
