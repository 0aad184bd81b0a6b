"""Thermal states: transitions, hysteresis, dwell time, and NVML's throttle reasons."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.state_machine import IllegalTransitionError
from inferencecenter.hardware.nvml import NO_GPU, GpuReading
from inferencecenter.hardware.thermal import (
    THERMAL,
    Heat,
    ThermalChange,
    ThermalState,
    Thresholds,
    next_heat,
    select_gpus,
)

COOL, WARM, HOT = ThermalState
THRESHOLDS = Thresholds(warm_c=80, hot_c=87, hysteresis_c=5, dwell_s=10)
LEGAL = {
    (COOL, ThermalChange.WARMED): WARM,
    (COOL, ThermalChange.OVERHEATED): HOT,
    (WARM, ThermalChange.OVERHEATED): HOT,
    (HOT, ThermalChange.COOLED): WARM,
    (WARM, ThermalChange.COOLED): COOL,
}


def at(temperature_c: float | None, *slowdowns: str) -> GpuReading:
    """Return a GPU's readings of this temperature and these throttle reasons."""
    return GpuReading(temperature_c=temperature_c, slowdowns=slowdowns)


def states(*moments: tuple[float, float | None], start: ThermalState = COOL) -> list[ThermalState]:
    """Return the states after these seconds and temperatures."""
    heat, seen = Heat(state=start, required_at_s=0.0), []
    for now, temperature_c in moments:
        heat = next_heat(heat, [at(temperature_c)], THRESHOLDS, now=now)
        seen.append(heat.state)
    return seen


@pytest.mark.parametrize("state", list(ThermalState))
@pytest.mark.parametrize("change", list(ThermalChange))
def test_only_listed_transitions_are_possible(state: ThermalState, change: ThermalChange) -> None:
    """Any other event raises."""
    if (state, change) in LEGAL:
        assert THERMAL.next(state, change) is LEGAL[state, change]
    else:
        with pytest.raises(IllegalTransitionError):
            THERMAL.next(state, change)


@pytest.mark.parametrize(
    ("temperature_c", "state"), [(None, COOL), (20, COOL), (79, COOL), (80, WARM), (86, WARM), (87, HOT), (120, HOT)]
)
def test_heating_takes_effect_at_once(temperature_c: float | None, state: ThermalState) -> None:
    """It does so from the threshold on, and may skip a state in one sample."""
    assert states((0.0, temperature_c)) == [state]


def test_cooling_steps_down_after_the_dwell_time() -> None:
    """Each step counts from the last reading in the hotter state."""
    assert (
        states((0, 90), (1, 40), (9, 40), (10, 40), (19, 40), (20, 40), (21, 40)) == [HOT] * 3 + [WARM] * 2 + [COOL] * 2
    )


def test_hysteresis_holds_the_state() -> None:
    """It is held for any length of time."""
    assert states((0, 87), (100, 82), (200, 82), (300, 81.9)) == [HOT, HOT, HOT, WARM]
    assert states((0, 80), (100, 75), (200, 74.9)) == [WARM, WARM, COOL]


def test_reheating_restarts_the_dwell_time() -> None:
    """A reading in the state restarts it."""
    assert states((0, 80), (8, 40), (9, 80), (11, 40), (18, 40), (19, 40)) == [WARM] * 5 + [COOL]


@pytest.mark.parametrize(
    ("slowdowns", "state"),
    [
        (("hw_thermal",), HOT),
        (("hw_slowdown", "hw_thermal"), HOT),
        (("sw_thermal",), WARM),
        (("hw_slowdown",), WARM),
        (("power_brake",), WARM),
        (("power_cap",), COOL),
        (("something_new",), COOL),
        ((), COOL),
    ],
)
@pytest.mark.parametrize("temperature_c", [None, 50.0])
def test_thermal_throttling_counts_at_any_temperature(
    slowdowns: tuple[str, ...], state: ThermalState, temperature_c: float | None
) -> None:
    """It counts without a temperature, too; a power cap is normal for a busy GPU."""
    heat = next_heat(Heat(), [at(temperature_c, *slowdowns)], THRESHOLDS, now=0.0)
    assert heat.state is state
    assert all(name in heat.reason for name in slowdowns[-1:] if state is not COOL)


def test_reason_has_the_figures() -> None:
    """It has the reading and the threshold that it exceeds."""
    heat = next_heat(Heat(), [at(88.0)], THRESHOLDS, now=0.0)
    assert heat == Heat(state=HOT, required_at_s=0.0, temperature_c=88.0, reason="88 °C, hot from 87 °C on")
    cooler = next_heat(heat, [at(60.0)], THRESHOLDS, now=10.0)
    assert (cooler.state, cooler.reason) == (WARM, "60 °C")


def test_hottest_gpu_counts() -> None:
    """State and temperature are those of the hottest GPU."""
    heat = next_heat(Heat(), [at(40.0), at(88.0), NO_GPU], THRESHOLDS, now=0.0)
    assert (heat.state, heat.temperature_c) == (HOT, 88.0)


@pytest.mark.parametrize("gone", [[], [NO_GPU], [at(None)]])
def test_missing_gpu_cools_down(gone: list[GpuReading]) -> None:
    """It steps down after the dwell times."""
    heat = next_heat(Heat(state=HOT, required_at_s=0.0), gone, THRESHOLDS, now=10.0)
    assert (heat.state, heat.temperature_c, heat.reason) == (WARM, None, "no reading any more")
    assert next_heat(heat, gone, THRESHOLDS, now=20.0).state is COOL


@given(st.lists(st.tuples(st.floats(0, 30), st.none() | st.floats(0, 120)), max_size=60))
def test_thermal_state_sequences_are_valid(moments: list[tuple[float, float | None]]) -> None:
    """Any readings step down one state at a time, within the dwell time, and end cool."""
    heat, now, order = Heat(), 0.0, list(ThermalState)
    history = [heat]
    for wait_s, temperature_c in moments:
        now += wait_s
        heat = next_heat(heat, [at(temperature_c)], THRESHOLDS, now=now)
        history.append(heat)
        if temperature_c is not None and temperature_c >= THRESHOLDS.hot_c:
            assert heat.state is HOT
        if temperature_c is not None and temperature_c >= THRESHOLDS.warm_c:
            assert heat.state is not COOL
        if temperature_c is None:
            assert heat.state is COOL or now - heat.required_at_s < THRESHOLDS.dwell_s
    for before, after in pairwise(history):
        assert order.index(before.state) - order.index(after.state) <= 1


def test_only_gpus_in_use_are_monitored() -> None:
    """They may be named in any form; if none is chosen, all are monitored."""
    first = GpuReading(index=0, uuid="GPU-a", pci_id="0000:01:00.0")
    second = GpuReading(index=1, uuid="GPU-b", pci_id="0000:02:00.0")
    assert select_gpus([first, second], ()) == (first, second)
    for name in ("1", "GPU-b", "0000:02:00.0"):
        assert select_gpus([first, second], (name,)) == (second,)
    assert select_gpus([first], ("1",)) == ()
