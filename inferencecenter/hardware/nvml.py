"""Readings of NVIDIA GPUs. A value is ``None`` without the library, driver or device, or if it is unsupported."""

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

# NVML's reasons for reduced clocks; idle clocks and the user's own settings are no throttling.
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
    """A reading of one GPU; unsupported values are ``None``.

    Attributes:
        pci_id: Its PCI address as llama.cpp writes it: ``0000:01:00.0``.
        compute_capability: Major and minor, for example (6, 1) of a GTX 1060.
        power_limit_watts: The current power limit.
        mig: Whether it is divided into MIG instances, so that a program gets only part of its memory.
        slowdowns: The current reasons for throttling.
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
    """All GPUs of the driver, in its order.

    Attributes:
        problem: NVML's error if GPUs cannot be listed; ``None`` if they can, or there simply are none.
    """

    readings: tuple[GpuReading, ...] = ()
    driver_version: str | None = None
    problem: str | None = None


def read_gpus() -> Gpus:
    """Read all GPUs; one without memory figures, such as one that fell off the bus, is left out."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(problem=str(error))
    except Exception as error:  # noqa: BLE001 - the border to the driver: an unusable library means no GPUs
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
    """Return the memory that a process uses on a GPU; ``None`` if the driver does not report it (WSL, containers)."""
    used_bytes: int | None = _value(partial(_process_bytes, index, pid))
    return used_bytes


def _process_bytes(index: int, pid: int) -> int | None:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
    return next((process.usedGpuMemory or None for process in processes if process.pid == pid), None)


class Gpu:
    """A GPU of this machine, by default the first. ``read`` blocks for milliseconds: call it off the event loop."""

    def __init__(self, index: int = _FIRST_GPU) -> None:
        self._handle: Any = None
        self._handle = _value(lambda: pynvml.nvmlInit() or pynvml.nvmlDeviceGetHandleByIndex(index))

    @property
    def present(self) -> bool:
        return self._handle is not None

    def read(self) -> GpuReading:
        """Return the current readings; ``NO_GPU`` without a GPU."""
        return _value(lambda: _read(self._handle)) or NO_GPU


def _read(handle: Any) -> GpuReading | None:
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
    """Return an address in the form of llama.cpp's devices: a domain of four digits, in lower case."""
    if info is None:
        return None
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _watts(reading: Callable[[], Any]) -> float | None:
    milliwatts = _value(reading)
    return None if milliwatts is None else milliwatts / 1000


def _value(reading: Callable[[], Any]) -> Any:
    """Return a reading, ``None`` if it is unavailable.

    This is the border to the driver: an older library lacks functions, and one of another version, or a GPU that is
    falling off the bus, returns texts and structures that the binding cannot decode.
    """
    with suppress(Exception):
        return reading()
    return None
