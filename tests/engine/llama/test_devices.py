"""Tests of ``engine.llama.devices``."""

from __future__ import annotations

from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama import devices
from inferencecenter.hardware.ggml import GgmlDevice
from inferencecenter.ipc.engine_options import EngineOptions


def test_build_without_a_gpu_offloads_no_layers() -> None:
    """The device list is llama.cpp's own; a CPU is a device, but takes no layers."""
    assert devices._device_by_type(0)
    assert devices.offloads() == any(map(devices._device_by_type, (1, 2)))


@pytest.mark.parametrize(
    ("supported", "present", "expected"),
    [(True, {1}, True), (True, {2}, True), (True, {0, 3}, False), (False, {1}, False), (True, set(), False)],
)
def test_layers_are_offloaded_only_to_a_present_gpu(
    monkeypatch: pytest.MonkeyPatch, *, supported: bool, present: set[int], expected: bool
) -> None:
    """A build with RPC, or with an accelerator that is no GPU, is not enough."""
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: supported)
    monkeypatch.setattr(devices, "_device_by_type", lambda kind: kind if kind in present else None)
    assert devices.offloads() is expected


def _device(name: str, place: str, *, is_gpu: bool = True) -> GgmlDevice:
    return GgmlDevice(name=name, description=name, id=place, is_gpu=is_gpu, free_bytes=1, total_bytes=2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU and two GPUs, one of which is listed by a second driver too."""
    there = [
        (1, _device("CPU", "", is_gpu=False)),
        (2, _device("CUDA0", "0000:01:00.0")),
        (3, _device("CUDA1", "0000:02:00.0")),
        (4, _device("Vulkan0", "0000:01:00.0")),
    ]
    monkeypatch.setattr(devices, "devices", lambda: there)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_selected_by_address_or_name() -> None:
    """They have the given order; of a GPU that is listed twice the first entry counts."""
    assert devices.pointers(("0000:02:00.0", "0000:01:00.0")) == [3, 2]
    assert devices.pointers(("Vulkan0",)) == [4]
    assert devices.pointers(()) == []


@pytest.mark.usefixtures("two_gpus")
def test_server_is_connected_to_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is connected to once, and only if one of its devices is wanted; their names include the server."""
    asked: list[str] = []

    def server_devices(server: str) -> list[tuple[int, GgmlDevice]]:
        asked.append(server)
        return [(number, _device(f"RPC{number - 8}[{server}]", "")) for number in (8, 9)] if server == "a:1" else []

    monkeypatch.setattr(devices, "server_devices", server_devices)
    assert devices.pointers(("CUDA0",)) == [2]
    assert asked == []
    assert devices.pointers(("RPC1[a:1]", "CUDA0", "RPC0[a:1]")) == [9, 2, 8]
    assert asked == ["a:1"]
    with pytest.raises(InferenceCenterError, match=r"does not find the GPU RPC0\[gone:1\]"):
        devices.pointers(("RPC0[gone:1]",))


def test_server_that_cannot_be_reached_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is closed, or llama.cpp was built without RPC."""
    assert devices.server_devices("127.0.0.1:1") == []
    monkeypatch.setattr(devices, "_backend_by_name", lambda _: 1)
    assert devices.server_devices("127.0.0.1:1") == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["CPU", "", "0000:03:00.0"])
def test_missing_gpu_is_refused(name: str) -> None:
    """The CPU is not a GPU."""
    with pytest.raises(InferenceCenterError, match=r"CUDA0 \(0000:01:00.0\)") as refusal:
        devices.pointers((name,))
    assert refusal.value.code is ErrorCode.INVALID_CONFIG


@pytest.mark.usefixtures("two_gpus")
def test_optional_gpu_may_be_missing() -> None:
    """Without it the model runs on the CPU, and a log line gives the reason."""
    lines: list[tuple[str, str]] = []

    def log(level: str, line: str) -> None:
        lines.append((level, line))

    options = EngineOptions(
        backend="llama",
        parent_pid=1,
        devices=("0000:03:00.0",),
        n_gpu_layers=9,
        tensor_split=(1.0,),
        cpu_tensors=("x",),
    )
    with pytest.raises(InferenceCenterError):
        devices.present(options, on_log=log)
    found = devices.present(options.replace(gpu_optional=True), on_log=log)
    expected: dict[str, Any] = {"devices": (), "n_gpu_layers": 0, "main_gpu": -1, "tensor_split": (), "cpu_tensors": ()}
    assert {name: getattr(found, name) for name in expected} == expected
    ((level, line),) = lines
    assert level == "warning"
    assert "0000:03:00.0" in line
    there = options.replace(devices=("CUDA1",))
    assert devices.present(there, on_log=log) is there


def test_devices_of_this_machine() -> None:
    """The CPU is a device, with all of the memory."""
    names = [device.name for _, device in devices.devices()]
    assert "CPU" in names
