"""What counts towards which memory limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from inferencecenter.config.settings import GpuSettings, MemorySettings
from inferencecenter.hardware.memory import MemoryLimit, ResidentMemory
from inferencecenter.hardware.nvml import NO_GPU, GpuReading, Gpus
from inferencecenter.hardware.pressure import MemoryUsage
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor import memory_pressure
from inferencecenter.supervisor.memory_pressure import gpu_memory, main_memory, reader

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20
PARKED = EngineStatus(EngineState.READY, pid=7, parked_bytes=90, parked_ram_bytes=40)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the kernel's figures; by default none is known."""

    def say(
        *, group: MemoryLimit | None = None, machine: MemoryLimit | None = None, **processes: ResidentMemory
    ) -> None:
        known = {os.getpid() if name == "front" else int(name[1:]): each for name, each in processes.items()}
        monkeypatch.setattr(memory_pressure, "cgroup_memory", lambda: group)
        monkeypatch.setattr(memory_pressure, "machine_memory", lambda: machine)
        monkeypatch.setattr(memory_pressure, "resident_memory", lambda pid: known.get(pid, ResidentMemory()))

    say()
    return say


def test_ceiling_counts_the_daemons_processes(kernel: Callable[..., None]) -> None:
    """Only memory of the daemon and its engines counts, not what the machine uses otherwise."""
    kernel(
        front=ResidentMemory(100, 1),
        _7=ResidentMemory(1000, 10),
        machine=MemoryLimit(999, 1000),
        group=MemoryLimit(999, 1000),
    )
    usage = main_memory(MemorySettings(ram_ceiling_mib=2), [EngineStatus(EngineState.READY, pid=7)])
    assert usage == MemoryUsage(name="memory", used_bytes=1111, limit_bytes=2 * MIB, calm_bytes=int(1.9 * MIB))


@pytest.mark.parametrize(("shared", "counted"), [(0, 40), (10, 40), (40, 40), (45, 45)])
def test_offloaded_kv_counts_once(kernel: Callable[..., None], shared: int, counted: int) -> None:
    """It may be part of the engine's shared memory; that of a sleeping engine counts, too."""
    kernel(_7=ResidentMemory(1000, shared))
    asleep = EngineStatus(EngineState.ASLEEP, parked_ram_bytes=5)
    usage = main_memory(MemorySettings(ram_ceiling_mib=1), [PARKED, asleep])
    assert usage is not None
    assert usage.used_bytes == 1000 + counted + 5
    assert usage.parked_bytes == 45


def test_limited_cgroup_counts_completely(kernel: Callable[..., None]) -> None:
    """The limit is 90 %, even if other processes share the group."""
    kernel(front=ResidentMemory(100), group=MemoryLimit(500, 1000), machine=MemoryLimit(1, 2))
    usage = main_memory(MemorySettings(hysteresis_percent=10), [PARKED])
    assert usage == MemoryUsage(name="memory", used_bytes=500, limit_bytes=900, calm_bytes=810, parked_bytes=40)


def test_machine_limit_is_the_fallback(kernel: Callable[..., None]) -> None:
    """The limit is 95 %."""
    kernel(machine=MemoryLimit(500, 1000))
    usage = main_memory(MemorySettings(hysteresis_percent=0), [])
    assert usage == MemoryUsage(name="memory", used_bytes=500, limit_bytes=950, calm_bytes=950)


@pytest.mark.usefixtures("kernel")
def test_unknown_figures_do_not_count() -> None:
    """They are not an error."""
    assert main_memory(MemorySettings(), [PARKED]) is None
    assert reader(MemorySettings(), GpuSettings())([PARKED]) == []


def test_gpu_memory_floor() -> None:
    """Hysteresis is relative to the floor, as a model may use most of the rest. A GPU without readings is skipped."""
    gpus = [GpuReading(index=1, vram_total_bytes=1000, vram_free_bytes=90), NO_GPU]
    (usage,) = gpu_memory(gpus, floor_bytes=100, hysteresis=0.05)
    assert usage == MemoryUsage(name="GPU 1", used_bytes=910, limit_bytes=900, calm_bytes=895)
    assert usage.is_over


def test_only_gpus_in_use_are_measured(kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a floor NVML is not used."""
    kernel(machine=MemoryLimit(500, 1000))
    assert [each.name for each in reader(MemorySettings(), GpuSettings())([])] == ["memory"]
    readings = tuple(GpuReading(index=index, vram_total_bytes=9 * MIB, vram_free_bytes=MIB) for index in (0, 1))
    monkeypatch.setattr(memory_pressure, "read_gpus", lambda: Gpus(readings))
    seen = reader(MemorySettings(vram_floor_mib=2), GpuSettings(devices=("1",)))([])
    assert [(each.name, each.is_over) for each in seen] == [("memory", False), ("GPU 1", True)]


@pytest.mark.parametrize(
    "wrong", [{"ram_ceiling_mib": 0}, {"vram_floor_mib": -1}, {"hysteresis_percent": 51}, {"ram": 1}]
)
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    """They are refused before an engine starts."""
    with pytest.raises(ValidationError):
        MemorySettings(**wrong)
