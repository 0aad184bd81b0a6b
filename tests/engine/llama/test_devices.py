"""Tests of ``engine.llama.devices``."""

from __future__ import annotations

from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama import devices
from inferencecenter.hardware.ggml import GgmlDevice
from inferencecenter.ipc.engine_options import EngineOptions


def test_a_build_without_a_gpu_offloads_nothing() -> None:
    """What llama.cpp says here is what it says of itself; a processor is a device, but takes no layers."""
    assert devices._device_by_type(0)
    assert devices.offloads() == any(map(devices._device_by_type, (1, 2)))


@pytest.mark.parametrize(
    ("supported", "present", "expected"),
    [(True, {1}, True), (True, {2}, True), (True, {0, 3}, False), (False, {1}, False), (True, set(), False)],
)
def test_layers_go_to_a_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, *, supported: bool, present: set[int], expected: bool
) -> None:
    """A build that could use other machines, or an accelerator that is no GPU, is not enough."""
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: supported)
    monkeypatch.setattr(devices, "_device_by_type", lambda kind: kind if kind in present else None)
    assert devices.offloads() is expected


def _device(name: str, place: str, *, is_gpu: bool = True) -> GgmlDevice:
    return GgmlDevice(name=name, description=name, id=place, is_gpu=is_gpu, free_bytes=1, total_bytes=2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor and two GPUs, one of which a second driver shows too."""
    there = [
        (1, _device("CPU", "", is_gpu=False)),
        (2, _device("CUDA0", "0000:01:00.0")),
        (3, _device("CUDA1", "0000:02:00.0")),
        (4, _device("Vulkan0", "0000:01:00.0")),
    ]
    monkeypatch.setattr(devices, "devices", lambda: there)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_by_address_or_name() -> None:
    """In the order in which they are wanted; of one that is there twice the first."""
    assert devices.pointers(("0000:02:00.0", "0000:01:00.0")) == [3, 2]
    assert devices.pointers(("Vulkan0",)) == [4]
    assert devices.pointers(()) == []


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["CPU", "", "0000:03:00.0"])
def test_missing_gpu_is_refused(name: str) -> None:
    """The processor is none."""
    with pytest.raises(InferenceCenterError, match=r"CUDA0 \(0000:01:00.0\)") as refusal:
        devices.pointers((name,))
    assert refusal.value.code is ErrorCode.INVALID_CONFIG


@pytest.mark.usefixtures("two_gpus")
def test_optional_gpu_may_be_missing() -> None:
    """Without it the model runs on the processor, and a line of the log says why."""
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
    """The processor is one, with all of the memory."""
    names = [device.name for _, device in devices.devices()]
    assert "CPU" in names
