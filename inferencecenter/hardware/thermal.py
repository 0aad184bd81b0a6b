"""GPU heat as three states with hysteresis. Pure: readings and the time are arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from inferencecenter.core.state_machine import StateMachine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferencecenter.hardware.nvml import GpuReading


class ThermalState(StrEnum):
    """The degrees of throttling."""

    COOL = "cool"
    WARM = "warm"
    HOT = "hot"


class ThermalChange(StrEnum):
    """The transitions."""

    WARMED = "warmed"
    OVERHEATED = "overheated"
    COOLED = "cooled"


# Up at once, down one state at a time.
THERMAL: Final = StateMachine(
    "thermal",
    {
        (ThermalState.COOL, ThermalChange.WARMED): ThermalState.WARM,
        (ThermalState.COOL, ThermalChange.OVERHEATED): ThermalState.HOT,
        (ThermalState.WARM, ThermalChange.OVERHEATED): ThermalState.HOT,
        (ThermalState.HOT, ThermalChange.COOLED): ThermalState.WARM,
        (ThermalState.WARM, ThermalChange.COOLED): ThermalState.COOL,
    },
)
_ORDER: Final = tuple(ThermalState)

# NVML's reasons for throttling by heat. hw_thermal: so hot that clocks are halved or worse. sw_thermal: the driver
# lowers them to keep a temperature. hw_slowdown without hw_thermal and power_brake: too much power is drawn, or the
# power supply reports so. power_cap is not among them: a busy GPU normally runs at it.
_SLOWDOWN_STATES: Final = {
    "hw_thermal": ThermalState.HOT,
    "sw_thermal": ThermalState.WARM,
    "hw_slowdown": ThermalState.WARM,
    "power_brake": ThermalState.WARM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The temperatures from which a GPU counts as warm or hot, in °C.

    It does until it has been ``hysteresis_c`` cooler for ``dwell_s``.
    """

    warm_c: float
    hot_c: float
    hysteresis_c: float
    dwell_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """A state, the time in seconds at which it was last required, the highest temperature, and the reason as text."""

    state: ThermalState = ThermalState.COOL
    required_at_s: float = -math.inf
    temperature_c: float | None = None
    reason: str = ""


def select_gpus(readings: Iterable[GpuReading], selected: Sequence[str]) -> tuple[GpuReading, ...]:
    """Return the readings of GPUs selected by index, UUID or PCI address; all if ``selected`` is empty."""
    return tuple(
        reading
        for reading in readings
        if not selected or not {str(reading.index), reading.uuid, reading.pci_id}.isdisjoint(selected)
    )


def next_heat(heat: Heat, readings: Sequence[GpuReading], thresholds: Thresholds, *, now: float) -> Heat:
    """Return the heat after these readings.

    The hottest GPU counts. Unavailable readings have no effect. Each step down takes ``dwell_s`` in which no reading
    required the state above it.
    """
    temperature_c = max((each.temperature_c for each in readings if each.temperature_c is not None), default=None)
    required = [each for reading in readings for each in _required(reading, heat.state, thresholds)]
    state, reason = max(required, key=lambda each: _ORDER.index(each[0]), default=(ThermalState.COOL, ""))
    if _ORDER.index(state) >= _ORDER.index(heat.state):
        if state is not heat.state:
            hot = state is ThermalState.HOT
            state = THERMAL.next(heat.state, ThermalChange.OVERHEATED if hot else ThermalChange.WARMED)
        return Heat(state=state, required_at_s=now, temperature_c=temperature_c, reason=reason)
    if now - heat.required_at_s < thresholds.dwell_s:
        return Heat(state=heat.state, required_at_s=heat.required_at_s, temperature_c=temperature_c, reason=heat.reason)
    cooler = THERMAL.next(heat.state, ThermalChange.COOLED)
    why = "no reading any more" if temperature_c is None else f"{temperature_c:g} °C"
    return Heat(state=cooler, required_at_s=now, temperature_c=temperature_c, reason=reason or why)


def _required(reading: GpuReading, state: ThermalState, thresholds: Thresholds) -> list[tuple[ThermalState, str]]:
    """Return the states that a GPU requires, and why, given the current ``state``."""
    required = [
        (_SLOWDOWN_STATES[name], f"the GPU slows down: {name}")
        for name in reading.slowdowns or ()
        if name in _SLOWDOWN_STATES
    ]
    if reading.temperature_c is not None:
        limits_c = {ThermalState.WARM: thresholds.warm_c, ThermalState.HOT: thresholds.hot_c}
        for each, limit_c in limits_c.items():
            kept = _ORDER.index(each) <= _ORDER.index(state)
            if reading.temperature_c >= limit_c - (thresholds.hysteresis_c if kept else 0.0):
                required.append((each, f"{reading.temperature_c:g} °C, {each.value} from {limit_c:g} °C on"))
    return required
