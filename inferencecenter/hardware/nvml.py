"""Readings of NVIDIA GPUs. What cannot be read is ``None``: no library, no driver, no device, or not on this model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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

SLOWDOWN_NAMES: Final = tuple(_SLOWDOWNS.values())


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at a GPU; each value is ``None`` where the GPU does not tell.

    Attributes:
        pci_id: Its address on the bus as llama.cpp writes it: ``0000:01:00.0``.
        compute_capability: Major and minor, as (6, 1) of a GTX 1060.
        power_limit_watts: What it may draw at most now.
        mig: Whether it is divided into instances, so that its memory is not what a program gets.
        slowdowns: What slows it down now.
    """

    name: str | None = None
    temperature_c: float | None = None
    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None
    vram_free_bytes: int | None = None
    power_watts: float | None = None
    fan_percent: float | None = None
    utilization_percent: float | None = None
    slowdowns: tuple[str, ...] | None = None
    index: int | None = None
    uuid: str | None = None
    pci_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    mig: bool | None = None


NO_GPU: Final = GpuReading()


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs that the driver shows, in its order.

    Attributes:
        problem: Why there is none, in NVML's words; ``None`` where there are GPUs, or simply none.
    """

    readings: tuple[GpuReading, ...] = ()
    driver_version: str | None = None
    problem: str | None = None


def read_gpus() -> Gpus:
    """Read all GPUs; a GPU that gives no memory figures, as one that fell off the bus, is left out."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error))
    count = _value(pynvml.nvmlDeviceGetCount) or 0
    handles = [_value(partial(pynvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    readings = [replace(_read(handle), index=index) for index, handle in enumerate(handles) if handle is not None]
    return Gpus(
        readings=tuple(reading for reading in readings if reading.vram_total_bytes),
        driver_version=_value(pynvml.nvmlSystemGetDriverVersion),
    )


def process_bytes(index: int, pid: int) -> int | None:
    """Return the memory that a process has on a GPU; ``None`` where the driver does not tell (WSL, containers)."""
    handle = _value(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    processes = _value(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    return next((process.usedGpuMemory or None for process in processes if process.pid == pid), None)


class Gpu:
    """A GPU of this machine, the first unless told. ``read`` blocks for some milliseconds: not on the event loop."""

    def __init__(self, index: int = _FIRST_GPU) -> None:
        self._handle: Any = None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._handle = _value(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))

    @property
    def present(self) -> bool:
        """Whether there is a GPU to read."""
        return self._handle is not None

    def read(self) -> GpuReading:
        """Return the readings now; ``NO_GPU`` without one."""
        return NO_GPU if self._handle is None else _read(self._handle)


def _read(handle: Any) -> GpuReading:
    memory = _value(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    utilization = _value(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    reasons = _value(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    mig = _value(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    return GpuReading(
        name=_value(lambda: pynvml.nvmlDeviceGetName(handle)),
        temperature_c=_value(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        vram_total_bytes=memory and memory.total,
        vram_used_bytes=memory and memory.used,
        vram_free_bytes=memory and memory.free,
        power_watts=_watts(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
        fan_percent=_value(lambda: pynvml.nvmlDeviceGetFanSpeed(handle)),
        utilization_percent=utilization and utilization.gpu,
        slowdowns=None if reasons is None else tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit),
        uuid=_value(lambda: pynvml.nvmlDeviceGetUUID(handle)),
        pci_id=_pci_id(_value(lambda: pynvml.nvmlDeviceGetPciInfo(handle))),
        compute_capability=_value(lambda: tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
        power_limit_watts=_watts(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
        sm_clock_mhz=_value(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        memory_clock_mhz=_value(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        mig=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
    )


def _pci_id(info: Any) -> str | None:
    """Return an address as llama.cpp's devices give theirs: a domain of four digits, in small letters."""
    if info is None:
        return None
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _watts(reading: Callable[[], Any]) -> float | None:
    milliwatts = _value(reading)
    return None if milliwatts is None else milliwatts / 1000


def _value(reading: Callable[[], Any]) -> Any:
    try:
        return reading()
    # An older driver's library lacks some functions altogether.
    except (pynvml.NVMLError, AttributeError):
        return None
