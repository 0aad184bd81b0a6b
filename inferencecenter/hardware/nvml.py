"""Readings of the first NVIDIA GPU. What cannot be read is ``None``: no driver, no device, or not on this model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pynvml

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_GPU: Final = 0

# NVML's names of what slows a GPU down; idle clocks and the user's own settings are no throttling.
_SLOWDOWNS: Final = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power_brake",
}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at a GPU; each value is ``None`` where the GPU does not tell."""

    name: str | None = None
    temperature_c: float | None = None
    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None
    vram_free_bytes: int | None = None
    power_watts: float | None = None
    fan_percent: float | None = None
    utilization_percent: float | None = None
    slowdowns: tuple[str, ...] | None = None


NO_GPU: Final = GpuReading()


class Gpu:
    """The first GPU of this machine. ``read`` blocks for some milliseconds; call it off the event loop."""

    def __init__(self) -> None:
        self._handle: Any = None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._handle = _value(lambda: pynvml.nvmlDeviceGetHandleByIndex(_FIRST_GPU))

    @property
    def present(self) -> bool:
        """Whether there is a GPU to read."""
        return self._handle is not None

    def read(self) -> GpuReading:
        """Return the readings now; ``NO_GPU`` without one."""
        handle = self._handle
        if handle is None:
            return NO_GPU
        memory = _value(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        utilization = _value(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = _value(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
        reasons = _value(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return GpuReading(
            name=_value(lambda: pynvml.nvmlDeviceGetName(handle)),
            temperature_c=_value(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            vram_total_bytes=memory and memory.total,
            vram_used_bytes=memory and memory.used,
            vram_free_bytes=memory and memory.free,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            fan_percent=_value(lambda: pynvml.nvmlDeviceGetFanSpeed(handle)),
            utilization_percent=utilization and utilization.gpu,
            slowdowns=None if reasons is None else tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit),
        )


def _value(reading: Callable[[], Any]) -> Any:
    try:
        return reading()
    except pynvml.NVMLError:
        return None
