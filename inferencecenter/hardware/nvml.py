"""Readings of NVIDIA GPUs. What cannot be read is ``None``: no library, no driver, no device, or not on this model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pynvml

from inferencecenter.core.errors import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_GPU: Final = 0
_MAX_GPUS: Final = 256

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
    except Exception as error:  # noqa: BLE001 - the border to the driver: a library that cannot be called is none
        return Gpus(problem=reason_of(error))
    count = _value(lambda: min(pynvml.nvmlDeviceGetCount(), _MAX_GPUS)) or 0
    handles = [_value(partial(pynvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    read = [_value(partial(_read, handle)) for handle in handles]
    readings = [replace(reading, index=index) for index, reading in enumerate(read) if reading is not None]
    return Gpus(
        readings=tuple(reading for reading in readings if reading.vram_total_bytes),
        driver_version=_value(pynvml.nvmlSystemGetDriverVersion),
    )


def process_bytes(index: int, pid: int) -> int | None:
    """Return the memory that a process has on a GPU; ``None`` where the driver does not tell (WSL, containers)."""
    used_bytes: int | None = _value(partial(_process_bytes, index, pid))
    return used_bytes


def _process_bytes(index: int, pid: int) -> int | None:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
    return next((process.usedGpuMemory or None for process in processes if process.pid == pid), None)


class Gpu:
    """A GPU of this machine, the first unless told. ``read`` blocks for some milliseconds: not on the event loop."""

    def __init__(self, index: int = _FIRST_GPU) -> None:
        self._handle: Any = None
        self._handle = _value(lambda: pynvml.nvmlInit() or pynvml.nvmlDeviceGetHandleByIndex(index))

    @property
    def present(self) -> bool:
        """Whether there is a GPU to read."""
        return self._handle is not None

    def read(self) -> GpuReading:
        """Return the readings now; ``NO_GPU`` without one."""
        return _value(lambda: _read(self._handle)) or NO_GPU


def _read(handle: Any) -> GpuReading | None:
    """Return what a GPU tells, each value if it can be had; ``None`` without a handle."""
    if handle is None:
        return None
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
    """Return a reading, ``None`` where there is none.

    This is the border to the driver: an older library lacks functions, and one of another version, or a GPU that is
    falling off the bus, gives texts and structures that the binding cannot read.
    """
    with suppress(Exception):
        return reading()
    return None
