"""Tests of which GPUs a model can be put on."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import ggml, nvml
from inferencecenter.hardware.devices import find_devices, from_reading, select_devices
from inferencecenter.hardware.nvml import GpuReading, Gpus
from inferencecenter.hardware.placement import Device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READING = GpuReading(
    name="GTX 1060",
    vram_total_bytes=3000,
    vram_free_bytes=2900,
    index=0,
    uuid="GPU-aa",
    pci_id="0000:01:00.0",
    mig=False,
)
OTHER = replace(READING, name="RTX 3060", index=1, uuid="GPU-bb", pci_id="0000:02:00.0", vram_free_bytes=11_000)
VULKAN = Device(id="Vulkan0", name="Radeon", free_bytes=8000, total_bytes=8192, aliases=("Vulkan0",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what gives this machine GPUs and a llama.cpp built for them."""

    def has(*, kinds: tuple[str, ...], readings: tuple[GpuReading, ...] = (), probed: tuple[Device, ...] = ()) -> None:
        monkeypatch.setattr(ggml, "gpu_backends", lambda: kinds)
        monkeypatch.setattr(nvml, "read_gpus", lambda: Gpus(readings))
        monkeypatch.setattr(ggml, "probe", lambda: probed)

    return has


def test_a_build_without_gpus_uses_none(machine: Callable[..., None]) -> None:
    """Whatever the driver shows, nothing is planned for it."""
    machine(kinds=(), readings=(READING,), probed=(VULKAN,))
    assert find_devices() == ()


def test_gpus_of_the_driver(machine: Callable[..., None]) -> None:
    """Their address is what the engine finds them by."""
    machine(kinds=("cuda",), readings=(READING, OTHER))
    assert [(device.id, device.name, device.free_bytes, device.index) for device in find_devices()] == [
        ("0000:01:00.0", "GTX 1060", 2900, 0),
        ("0000:02:00.0", "RTX 3060", 11_000, 1),
    ]


@pytest.mark.parametrize("wanted", ["1", "GPU-bb", "0000:02:00.0"])
def test_a_gpu_that_is_wanted(machine: Callable[..., None], wanted: str) -> None:
    """By index, UUID or address; in the order in which they are named, once."""
    machine(kinds=("cuda",), readings=(READING, OTHER))
    assert [device.name for device in find_devices([wanted])] == ["RTX 3060"]
    assert [device.index for device in find_devices([wanted, "0", wanted])] == [1, 0]


def test_a_gpu_that_is_wanted_and_not_there(machine: Callable[..., None]) -> None:
    """The error names those that are."""
    machine(kinds=("cuda",), readings=(READING,))
    with pytest.raises(InferenceCenterError, match="no GPU 7") as caught:
        find_devices(["7"])
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert "GTX 1060: 0, GPU-aa, 0000:01:00.0" in (caught.value.hint or "")
    with pytest.raises(InferenceCenterError, match="no GPU 7"):
        select_devices([], ["7"])


@pytest.mark.parametrize("readings", [(), (replace(READING, mig=True),)])
def test_what_the_driver_does_not_tell_is_asked_of_llama_cpp(
    machine: Callable[..., None], readings: tuple[GpuReading, ...]
) -> None:
    """As with other drivers' GPUs, and with instances of one that is divided."""
    machine(kinds=("cuda", "vulkan"), readings=readings, probed=(VULKAN,))
    assert find_devices() == (VULKAN,)


def test_a_gpu_that_hides_its_address() -> None:
    """Is found by llama.cpp's name for it."""
    device = from_reading(GpuReading(vram_total_bytes=3000, index=1))
    assert (device.id, device.name, device.free_bytes) == ("CUDA1", "GPU 1", 0)


def _printing(output: object) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(stdout=output)


def test_devices_that_llama_cpp_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs only; what is written before the last line is not looked at."""
    told = [
        {"name": "CPU", "description": "Xeon", "id": "", "is_gpu": False, "free_bytes": 1, "total_bytes": 2},
        {"name": "Vulkan0", "description": "Radeon", "id": "", "is_gpu": True, "free_bytes": 8000, "total_bytes": 8192},
    ]
    monkeypatch.setattr(subprocess, "run", _printing(b"ggml_vulkan: Found 1\n" + json.dumps(told).encode() + b"\n"))
    assert ggml.probe() == (VULKAN,)


@pytest.mark.parametrize("output", [b"", b"no JSON", b'[{"name": 1}]', b"[" * 100_000, b'["\xff"]'])
def test_an_answer_that_is_none(monkeypatch: pytest.MonkeyPatch, output: bytes) -> None:
    """Is no GPU."""
    monkeypatch.setattr(subprocess, "run", _printing(output))
    assert ggml.probe() == ()


@pytest.mark.parametrize(
    "error",
    [subprocess.CalledProcessError(-6, "probe"), subprocess.TimeoutExpired("probe", 60), FileNotFoundError()],
)
def test_a_library_that_ends_its_process(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Or hangs, or cannot be started, has no GPU to offer."""

    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert ggml.probe() == ()


def test_the_installed_library_is_asked() -> None:
    """The real process answers; whether there are GPUs depends on the machine."""
    assert all(device.total_bytes > 0 for device in ggml.probe())


@pytest.mark.parametrize(("files", "kinds"), [((), ()), (("libggml-cuda.so", "libggml-cpu.so"), ("cuda",))])
def test_kinds_of_gpus_by_the_files_of_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    """Without loading any of them."""
    (tmp_path / "lib").mkdir()
    for name in files:
        (tmp_path / "lib" / name).touch()
    monkeypatch.setattr(ggml, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    assert ggml.gpu_backends() == kinds
    monkeypatch.setattr(ggml, "find_spec", lambda _: None)
    assert ggml.gpu_backends() == ()


@pytest.mark.parametrize("size", [-1, 2**60, 1.5, "many"])
def test_a_device_of_an_impossible_size_is_none(monkeypatch: pytest.MonkeyPatch, size: object) -> None:
    """A plan would be made by it."""
    told = {"name": "V", "description": "", "id": "", "is_gpu": True, "free_bytes": size, "total_bytes": 8192}
    monkeypatch.setattr(subprocess, "run", _printing(json.dumps([told]).encode()))
    assert ggml.probe() == ()
