"""The GPUs that a model can be put on: those that both the driver and the installed llama.cpp know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import ggml, nvml
from inferencecenter.hardware.placement import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.hardware.nvml import GpuReading


def find_devices(wanted: Sequence[str] = ()) -> tuple[Device, ...]:
    """Return the GPUs that are wanted, or all; none where llama.cpp was built for none. Blocks.

    NVML is asked where llama.cpp was built with CUDA. What it does not know (other drivers' GPUs, instances of a GPU
    that is divided by MIG) is asked of llama.cpp, in a process that takes about a second.

    Raises:
        InferenceCenterError: ``invalid_config`` when one that is wanted is not there.
    """
    kinds = ggml.gpu_backends()
    readings = nvml.read_gpus().readings if "cuda" in kinds else ()
    if readings and not any(reading.mig for reading in readings):
        return select_devices([from_reading(reading) for reading in readings], wanted)
    return select_devices(ggml.probe() if kinds else (), wanted)


def from_reading(reading: GpuReading) -> Device:
    """Return the GPU of a reading that has memory figures."""
    index = reading.index or 0
    return Device(
        id=reading.pci_id or f"CUDA{index}",
        name=reading.name or f"GPU {index}",
        free_bytes=reading.vram_free_bytes or 0,
        total_bytes=reading.vram_total_bytes or 0,
        index=index,
        aliases=tuple(filter(None, (str(index), reading.uuid))),
    )


def select_devices(devices: Sequence[Device], wanted: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices that are wanted, in that order; all where none is named.

    Raises:
        InferenceCenterError: ``invalid_config`` when one is not there.
    """
    if not wanted:
        return tuple(devices)
    known = {name: device for device in reversed(devices) for name in (device.id, *device.aliases)}
    for name in wanted:
        if name not in known:
            there = "; ".join(f"{device.name}: {', '.join((*device.aliases, device.id))}" for device in devices)
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"There is no GPU {name}.",
                hint=f"llama.cpp can use: {there}." if there else "llama.cpp can use no GPU here.",
                field="gpu.devices",
            )
    return tuple(known[name] for name in dict.fromkeys(wanted))
