"""Tests of GPU readings, with NVML's answers played by the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from inferencecenter.hardware.nvml import NO_GPU, Gpu, GpuReading

if TYPE_CHECKING:
    from collections.abc import Callable

READINGS: dict[str, Any] = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByIndex": lambda _index: "handle",
    "nvmlDeviceGetName": lambda _handle: "GPU",
    "nvmlDeviceGetTemperature": lambda _handle, _sensor: 61,
    "nvmlDeviceGetMemoryInfo": lambda _handle: SimpleNamespace(total=300, used=100, free=200),
    "nvmlDeviceGetPowerUsage": lambda _handle: 55_500,
    "nvmlDeviceGetFanSpeed": lambda _handle: 30,
    "nvmlDeviceGetUtilizationRates": lambda _handle: SimpleNamespace(gpu=12, memory=1),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _handle: (
        pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
    ),
}
WHOLE = GpuReading(
    name="GPU",
    temperature_c=61,
    vram_total_bytes=300,
    vram_used_bytes=100,
    vram_free_bytes=200,
    power_watts=55.5,
    fan_percent=30,
    utilization_percent=12,
    slowdowns=("sw_thermal",),
)
FIELDS = {
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetTemperature": ("temperature_c",),
    "nvmlDeviceGetMemoryInfo": ("vram_total_bytes", "vram_used_bytes", "vram_free_bytes"),
    "nvmlDeviceGetPowerUsage": ("power_watts",),
    "nvmlDeviceGetFanSpeed": ("fan_percent",),
    "nvmlDeviceGetUtilizationRates": ("utilization_percent",),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("slowdowns",),
}


def failing(code: int) -> Callable[..., None]:
    """Return an NVML call that fails."""

    def call(*_arguments: object) -> None:
        raise pynvml.NVMLError(code)

    return call


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML with one GPU that tells everything."""
    for name, answer in READINGS.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_a_gpu_that_tells_everything() -> None:
    """Power is in watts; idling is no slowdown."""
    gpu = Gpu()
    assert gpu.present
    assert gpu.read() == WHOLE


@pytest.mark.parametrize("call", FIELDS)
def test_a_single_missing_reading_is_none(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What the model does not support is ``None``; everything else is read."""
    monkeypatch.setattr(pynvml, call, failing(pynvml.NVML_ERROR_NOT_SUPPORTED))
    reading = Gpu().read()
    missing = {name for name in GpuReading.__dataclass_fields__ if getattr(reading, name) is None}
    assert missing == set(FIELDS[call])


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_INVALID_ARGUMENT),
    ],
)
def test_no_library_no_driver_no_device(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """Each is simply no GPU, with every reading ``None``."""
    monkeypatch.setattr(pynvml, call, failing(code))
    gpu = Gpu()
    assert not gpu.present
    assert gpu.read() == NO_GPU == GpuReading()


def test_a_gpu_that_is_lost_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that falls off the bus gives empty readings, not failures."""
    gpu = Gpu()
    for call in FIELDS:
        monkeypatch.setattr(pynvml, call, failing(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert gpu.read() == NO_GPU


def test_zero_is_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU with a stopped fan and no slowdown is not one that does not tell."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFanSpeed", lambda _handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _handle: SimpleNamespace(gpu=0, memory=0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _handle: 0)
    reading = Gpu().read()
    assert (reading.fan_percent, reading.utilization_percent, reading.slowdowns) == (0, 0, ())
