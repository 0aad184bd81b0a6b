"""What is used of the memory that there is, and how much may be, as the settings have it."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.memory import cgroup_memory, machine_memory, resident
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.pressure import MAIN_MEMORY, Usage
from inferencecenter.hardware.thermal import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferencecenter.hardware.nvml import GpuReading
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.settings import GpuSettings, MemorySettings

_MIB: Final = 2**20
_OF_CGROUP: Final = 0.90
_OF_MACHINE: Final = 0.95


def reader(memory: MemorySettings, gpu: GpuSettings) -> Callable[[Sequence[EngineStatus]], list[Usage]]:
    """Return what measures the memory around engines in these states; it blocks for some milliseconds."""
    return partial(_read, memory, gpu)


def _read(memory: MemorySettings, gpu: GpuSettings, engines: Sequence[EngineStatus]) -> list[Usage]:
    main = main_memory(memory, engines)
    usages = [] if main is None else [main]
    if memory.vram_floor_mib is not None:
        floor_bytes = memory.vram_floor_mib * _MIB
        readings = watched(read_gpus().readings, gpu.devices)
        usages += gpu_memory(readings, floor_bytes=floor_bytes, hysteresis=memory.hysteresis_percent / 100)
    return usages


def main_memory(memory: MemorySettings, engines: Sequence[EngineStatus]) -> Usage | None:
    """Return what is used of main memory: by this daemon if a ceiling is set, else of its group's or the machine's.

    The daemon's own is, of its processes, ``RssAnon + RssShmem``. What is parked counts once: as shared memory of an
    engine that has touched it, or as files that it has not.
    """
    parked_bytes = sum(each.parked_ram_bytes for each in engines)
    if memory.ram_ceiling_mib is not None:
        used_bytes, limit_bytes = _own_bytes(engines), memory.ram_ceiling_mib * _MIB
    elif (group := cgroup_memory()) is not None:
        used_bytes, limit_bytes = group.used_bytes, int(group.total_bytes * _OF_CGROUP)
    elif (machine := machine_memory()) is not None:
        used_bytes, limit_bytes = machine.used_bytes, int(machine.total_bytes * _OF_MACHINE)
    else:
        return None
    return Usage(
        name=MAIN_MEMORY,
        used_bytes=used_bytes,
        limit_bytes=limit_bytes,
        calm_bytes=int(limit_bytes * (1 - memory.hysteresis_percent / 100)),
        parked_bytes=parked_bytes,
    )


def gpu_memory(readings: Iterable[GpuReading], *, floor_bytes: int, hysteresis: float) -> list[Usage]:
    """Return what is used of each GPU, where ``floor_bytes`` are to be free, and are amply by ``hysteresis`` more."""
    return [
        Usage(
            name=f"GPU {reading.index}",
            used_bytes=reading.vram_total_bytes - reading.vram_free_bytes,
            limit_bytes=reading.vram_total_bytes - floor_bytes,
            calm_bytes=reading.vram_total_bytes - int(floor_bytes * (1 + hysteresis)),
        )
        for reading in readings
        if reading.vram_total_bytes is not None and reading.vram_free_bytes is not None
    ]


def _own_bytes(engines: Iterable[EngineStatus]) -> int:
    front = resident(os.getpid())
    total = front.own_bytes + front.shared_bytes
    for each in engines:
        engine = resident(each.pid) if each.pid is not None else None
        own, shared = (engine.own_bytes, engine.shared_bytes) if engine else (0, 0)
        total += own + max(shared, each.parked_ram_bytes)
    return total
