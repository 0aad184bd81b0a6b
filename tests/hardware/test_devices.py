"""Which GPUs a model can be placed on."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import ggml, nvml
from inferencecenter.hardware.devices import find_devices, from_reading, node_devices, select_devices
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
    """Return a function that gives this machine GPUs and a llama.cpp built for them."""

    def has(*, kinds: tuple[str, ...], readings: tuple[GpuReading, ...] = (), probed: tuple[Device, ...] = ()) -> None:
        monkeypatch.setattr(ggml, "gpu_backends", lambda: kinds)
        monkeypatch.setattr(nvml, "read_gpus", lambda: Gpus(readings))
        monkeypatch.setattr(ggml, "probe", lambda: probed)

    return has


def test_cpu_build_uses_no_gpu(machine: Callable[..., None]) -> None:
    """Nothing is planned for GPUs that only the driver lists."""
    machine(kinds=(), readings=(READING,), probed=(VULKAN,))
    assert find_devices() == ()


def test_gpus_are_identified_by_pci_address(machine: Callable[..., None]) -> None:
    """The engine finds a GPU by its address."""
    machine(kinds=("cuda",), readings=(READING, OTHER))
    assert [(device.id, device.name, device.free_bytes, device.index) for device in find_devices()] == [
        ("0000:01:00.0", "GTX 1060", 2900, 0),
        ("0000:02:00.0", "RTX 3060", 11_000, 1),
    ]


@pytest.mark.parametrize("wanted", ["1", "GPU-bb", "0000:02:00.0"])
def test_gpus_are_selected_by_index_uuid_or_address(machine: Callable[..., None], wanted: str) -> None:
    """They have the given order, each once."""
    machine(kinds=("cuda",), readings=(READING, OTHER))
    assert [device.name for device in find_devices([wanted])] == ["RTX 3060"]
    assert [device.index for device in find_devices([wanted, "0", wanted])] == [1, 0]


def test_unknown_gpu_is_refused(machine: Callable[..., None]) -> None:
    """The error names the available ones."""
    machine(kinds=("cuda",), readings=(READING,))
    with pytest.raises(InferenceCenterError, match="no GPU 7") as caught:
        find_devices(["7"])
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert "GTX 1060: 0, GPU-aa, 0000:01:00.0" in (caught.value.hint or "")
    with pytest.raises(InferenceCenterError, match="no GPU 7"):
        select_devices([], ["7"])


@pytest.mark.parametrize("readings", [(), (replace(READING, mig=True),)])
def test_llama_cpp_is_queried_where_nvml_reports_nothing(
    machine: Callable[..., None], readings: tuple[GpuReading, ...]
) -> None:
    """This covers other vendors' GPUs and MIG instances."""
    machine(kinds=("cuda", "vulkan"), readings=readings, probed=(VULKAN,))
    assert find_devices() == (VULKAN,)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Device, ...]]:
    """RPC servers by their address, for a llama.cpp that reaches them."""
    there: dict[str, tuple[Device, ...]] = {}
    monkeypatch.setattr(ggml, "reaches_servers", lambda: True)
    monkeypatch.setattr(ggml, "probe_server", lambda server: there.get(server, ()))
    return there


def test_devices_of_servers_follow_those_of_the_machine(
    machine: Callable[..., None], servers: dict[str, tuple[Device, ...]]
) -> None:
    """They have the order of the settings; a server that does not answer is omitted, with a log line."""
    machine(kinds=("vulkan",), probed=(VULKAN,))
    servers["b:1"] = (replace(VULKAN, id="RPC0[b:1]", remote=True),)
    with capture_logs() as logs:
        found = find_devices((), ["a:1", "b:1"])
    assert [device.id for device in found] == ["Vulkan0", "RPC0[b:1]"]
    assert [(line["event"], line["server"]) for line in logs] == [("rpc_server_unavailable", "a:1")]
    assert find_devices(["RPC0[b:1]"], ["b:1"]) == servers["b:1"]


def test_devices_of_nodes_are_named_by_them(servers: dict[str, tuple[Device, ...]]) -> None:
    """The name that llama.cpp has for a device is an alias."""
    servers["127.0.0.1:7"] = tuple(replace(VULKAN, id=f"RPC{each}[127.0.0.1:7]", remote=True) for each in range(2))
    with capture_logs() as logs:
        found = node_devices({"box2": "127.0.0.1:7", "box3": "127.0.0.1:8"})
    assert [(device.id, device.name, device.aliases) for device in found] == [
        (f"RPC{each}[box2]", f"RPC{each}[box2]", (f"RPC{each}[127.0.0.1:7]",)) for each in range(2)
    ]
    assert [line["server"] for line in logs] == ["box3"]


def test_servers_need_a_build_with_rpc(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting without effect is refused."""
    machine(kinds=())
    monkeypatch.setattr(ggml, "reaches_servers", lambda: False)
    with pytest.raises(InferenceCenterError, match="without RPC") as refusal:
        find_devices((), ["a:1"])
    assert refusal.value.field == "gpu.rpc_servers"


def test_rpc_server_is_queried_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is the process's argument."""
    told = [{"name": "RPC0[a:1]", "description": "a:1", "id": "", "is_gpu": True, "free_bytes": 1, "total_bytes": 2}]
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=json.dumps(told).encode())

    monkeypatch.setattr(subprocess, "run", run)
    (found,) = ggml.probe_server("a:1")
    assert (found.id, found.name, found.remote) == ("RPC0[a:1]", "a:1", True)
    assert asked[0][-1] == "a:1"


def test_gpu_without_address_is_found_by_name() -> None:
    """llama.cpp's device name identifies it."""
    device = from_reading(GpuReading(vram_total_bytes=3000, index=1))
    assert (device.id, device.name, device.free_bytes) == ("CUDA1", "GPU 1", 0)


def _printing(output: object) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(stdout=output)


def test_output_of_the_device_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only GPUs count, and only the last line of the output."""
    told = [
        {"name": "CPU", "description": "Xeon", "id": "", "is_gpu": False, "free_bytes": 1, "total_bytes": 2},
        {"name": "Vulkan0", "description": "Radeon", "id": "", "is_gpu": True, "free_bytes": 8000, "total_bytes": 8192},
    ]
    monkeypatch.setattr(subprocess, "run", _printing(b"ggml_vulkan: Found 1\n" + json.dumps(told).encode() + b"\n"))
    assert ggml.probe() == (VULKAN,)


@pytest.mark.parametrize("output", [b"", b"no JSON", b'[{"name": 1}]', b"[" * 100_000, b'["\xff"]'])
def test_invalid_probe_output_means_no_gpu(monkeypatch: pytest.MonkeyPatch, output: bytes) -> None:
    """A malformed answer yields no device."""
    monkeypatch.setattr(subprocess, "run", _printing(output))
    assert ggml.probe() == ()


@pytest.mark.parametrize(
    "error",
    [subprocess.CalledProcessError(-6, "probe"), subprocess.TimeoutExpired("probe", 60), FileNotFoundError()],
)
def test_failing_device_probe_means_no_gpu(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A probe that crashes, hangs or cannot be started yields no device."""

    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert ggml.probe() == ()


def test_probe_of_the_installed_library() -> None:
    """The real process answers; whether there are GPUs depends on the machine."""
    assert all(device.total_bytes > 0 for device in ggml.probe())


@pytest.mark.parametrize(
    ("files", "kinds"),
    [((), ()), (("libggml-cuda.so", "libggml-cpu.so"), ("cuda",)), (("libggml-rpc.so", "libggml-cpu.so"), ())],
)
def test_gpu_backends_by_library_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    """No library is loaded."""
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    (tmp_path / "lib").mkdir()
    for name in files:
        (tmp_path / "lib" / name).touch()
    monkeypatch.setattr(ggml, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    assert ggml.gpu_backends() == kinds
    assert ggml.reaches_servers() == ("libggml-rpc.so" in files)
    monkeypatch.setattr(ggml, "find_spec", lambda _: None)
    assert ggml.gpu_backends() == ()
    assert not ggml.reaches_servers()


def test_gpu_backends_of_libraries_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable that moves the package's libraries says where to look, and nowhere else."""
    for folder, name in (("lib", "libggml-cuda.so"), ("elsewhere", "libggml-vulkan.so")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    monkeypatch.setattr(ggml, "find_spec", lambda _: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "elsewhere"))
    assert ggml.gpu_backends() == ("vulkan",)


@pytest.mark.parametrize("size", [-1, 2**60, 1.5, "many"])
def test_device_of_impossible_size_is_ignored(monkeypatch: pytest.MonkeyPatch, size: object) -> None:
    """A plan would rely on it."""
    told = {"name": "V", "description": "", "id": "", "is_gpu": True, "free_bytes": size, "total_bytes": 8192}
    monkeypatch.setattr(subprocess, "run", _printing(json.dumps([told]).encode()))
    assert ggml.probe() == ()
