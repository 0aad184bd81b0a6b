"""Memory pressure as three states with hysteresis. Pure: figures and the time are arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from inferencecenter.core.state_machine import StateMachine

if TYPE_CHECKING:
    from collections.abc import Sequence

MAIN_MEMORY: Final = "memory"
"""The name of the usage of main memory; the others are of GPUs."""
SETTLED_S: Final = 30.0
"""Seconds without a usage over its limit before the next lower state."""


class PressureState(StrEnum):
    """The reaction: none, releasing parked KV, or refusing new turns as well."""

    EASY = "easy"
    SHEDDING = "shedding"
    FULL = "full"


class PressureChange(StrEnum):
    """The transitions."""

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
    """The usage of one kind of memory, and its limit.

    At ``calm_bytes``, below the limit, pressure is relieved at once. ``parked_bytes`` of the usage can be released.
    """

    name: str
    used_bytes: int
    limit_bytes: int
    calm_bytes: int
    parked_bytes: int = 0

    @property
    def is_over(self) -> bool:
        return self.used_bytes > self.limit_bytes

    @property
    def kept_bytes(self) -> int:
        """The parked bytes that may stay if enough is released to bring the usage to ``calm_bytes``."""
        return max(0, self.parked_bytes - max(0, self.used_bytes - self.calm_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """A state, whether the last measurement exceeded a limit, the time of the last excess, and that measurement."""

    state: PressureState = PressureState.EASY
    is_over: bool = False
    over_at_s: float = -math.inf
    usages: tuple[MemoryUsage, ...] = ()

    def usage(self, name: str) -> MemoryUsage | None:
        """Return the last measurement of one kind of memory."""
        return next((each for each in self.usages if each.name == name), None)


def next_pressure(pressure: Pressure, usages: Sequence[MemoryUsage], *, now: float) -> Pressure:
    """Return the pressure after a measurement.

    A usage over its limit first releases parked KV, and only a second measurement in a row over a limit makes the state
    full. If nothing is parked it is full at once. Relaxation is in order: turns are admitted again as soon as every
    usage is calm, and parking is unrestricted again when no usage was over its limit for ``SETTLED_S``. That time also
    ends a full state between limit and calm, which a model whose own usage lies there would never leave.
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
