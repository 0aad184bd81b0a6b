"""Plans on a real GPU: its readings, and the memory that its driver says is used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from benchmarks.model import SHAPES, write_model
from inferencecenter.config.sections import EngineSettings
from inferencecenter.config.settings import GpuSettings
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.vram_calibration import VramCalibration
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.supervisor.planning import Planner
from tests.engine.process import Child
from tests.vulkan import software

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.hardware.placement import Device

SHAPE: Final = "qwen2.5-0.5b"


@pytest.fixture(scope="module")
def model(devices: tuple[Device, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of half a billion random weights, large compared with the driver's memory."""
    if software.is_software(devices[0]) or devices[0].remote:
        pytest.skip("the processor would need minutes, and no driver tells its use of memory")
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path, SHAPES[SHAPE], name=SHAPE)
    return path


def test_nvml_readings_are_complete(devices: tuple[Device, ...]) -> None:
    """NVML reports what a plan and the thermal throttler need."""
    readings = [reading for reading in read_gpus().readings if reading.index in {device.index for device in devices}]
    for reading in readings:
        assert reading.vram_free_bytes
        assert reading.pci_id
        assert reading.temperature_c is not None
        assert reading.slowdowns is not None


def test_memory_estimate_is_within_5_percent(tmp_path: Path, devices: tuple[Device, ...], model: Path) -> None:
    """Compares the estimate with the engine's VRAM, driver included; it is exact at the next start."""
    options = EngineOptions(backend="llama", parent_pid=os.getpid(), model_path=str(model))
    corrections = VramCalibration(tmp_path / "plan.json")
    planner = Planner(engine=EngineSettings(), gpu=GpuSettings(devices=(devices[0].id,)), calibration=corrections)
    planned = planner.first(options)
    assert planned.n_gpu_layers == SHAPES[SHAPE].layers + 1
    child = Child(planned)
    try:
        info = child.ready()
        planner.compare(info, child.process.pid)
    finally:
        child.process.kill()
        child.process.wait()
    kept = msgspec.json.decode((tmp_path / "plan.json").read_bytes())
    (entry,) = kept.values()
    assert entry["used_bytes"] == pytest.approx(entry["estimated_bytes"], rel=0.05)
