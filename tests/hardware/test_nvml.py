"""GPU readings, with NVML's calls replaced."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from inferencecenter.hardware.nvml import NO_GPU, Gpu, GpuReading, Gpus, process_bytes, read_gpus

if TYPE_CHECKING:
    from collections.abc import Callable

READINGS: dict[str, Any] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580.10",
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
    "nvmlDeviceGetName": lambda _handle: "GPU",
    "nvmlDeviceGetTemperature": lambda _handle, _sensor: 61,
    "nvmlDeviceGetMemoryInfo": lambda _handle: SimpleNamespace(total=300, used=100, free=200),
    "nvmlDeviceGetPowerUsage": lambda _handle: 55_500,
    "nvmlDeviceGetEnforcedPowerLimit": lambda _handle: 120_000,
    "nvmlDeviceGetFanSpeed": lambda _handle: 30,
    "nvmlDeviceGetUtilizationRates": lambda _handle: SimpleNamespace(gpu=12, memory=1),
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _handle: (
        pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
    ),
    "nvmlDeviceGetUUID": lambda _handle: "GPU-1",
    "nvmlDeviceGetPciInfo": lambda _handle: SimpleNamespace(domain=0, bus=0xC1, device=0),
    "nvmlDeviceGetCudaComputeCapability": lambda _handle: (6, 1),
    "nvmlDeviceGetClockInfo": lambda _handle, clock: 1500 if clock == pynvml.NVML_CLOCK_SM else 4000,
    "nvmlDeviceGetMigMode": lambda _handle: [pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_DISABLE],
    "nvmlDeviceGetComputeRunningProcesses": lambda _handle: [
        SimpleNamespace(pid=7, usedGpuMemory=90),
        SimpleNamespace(pid=8, usedGpuMemory=None),
    ],
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
    uuid="GPU-1",
    pci_id="0000:c1:00.0",
    compute_capability=(6, 1),
    power_limit_watts=120,
    sm_clock_mhz=1500,
    memory_clock_mhz=4000,
    mig=False,
)
FIELDS = {
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetTemperature": ("temperature_c",),
    "nvmlDeviceGetMemoryInfo": ("vram_total_bytes", "vram_used_bytes", "vram_free_bytes"),
    "nvmlDeviceGetPowerUsage": ("power_watts",),
    "nvmlDeviceGetEnforcedPowerLimit": ("power_limit_watts",),
    "nvmlDeviceGetFanSpeed": ("fan_percent",),
    "nvmlDeviceGetUtilizationRates": ("utilization_percent",),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("slowdowns",),
    "nvmlDeviceGetUUID": ("uuid",),
    "nvmlDeviceGetPciInfo": ("pci_id",),
    "nvmlDeviceGetCudaComputeCapability": ("compute_capability",),
    "nvmlDeviceGetClockInfo": ("sm_clock_mhz", "memory_clock_mhz"),
    "nvmlDeviceGetMigMode": ("mig",),
}


def failing(code: int) -> Callable[..., None]:
    """Return an NVML call that fails."""

    def call(*_arguments: object) -> None:
        raise pynvml.NVMLError(code)

    return call


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML with two GPUs that support every reading."""
    for name, answer in READINGS.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_complete_readings() -> None:
    """Power is in watts; idling is no throttling."""
    gpu = Gpu()
    assert gpu.present
    assert gpu.read() == WHOLE


def test_gpus_are_listed_in_driver_order() -> None:
    """They have their index and the driver's version."""
    assert read_gpus() == Gpus((replace(WHOLE, index=0), replace(WHOLE, index=1)), driver_version="580.10")


@pytest.mark.parametrize("call", FIELDS)
def test_unsupported_reading_is_none(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Every other reading is present."""
    monkeypatch.setattr(pynvml, call, failing(pynvml.NVML_ERROR_NOT_SUPPORTED))
    expected = replace(WHOLE, **dict.fromkeys(FIELDS[call]))
    assert Gpu().read() == expected


@pytest.mark.parametrize("call", FIELDS)
def test_missing_nvml_function_gives_none(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The readings of a function that the library or the binding lacks are ``None``."""
    monkeypatch.setattr(pynvml, call, failing(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    reading = Gpu().read()
    monkeypatch.delattr(pynvml, call)
    assert Gpu().read() == reading == replace(WHOLE, **dict.fromkeys(FIELDS[call]))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        ("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVML_ERROR_INVALID_ARGUMENT),
    ],
)
def test_without_library_or_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """Every reading is ``None``."""
    monkeypatch.setattr(pynvml, call, failing(code))
    gpu = Gpu()
    assert not gpu.present
    assert gpu.read() == NO_GPU == GpuReading()
    assert read_gpus().readings == ()


def test_driver_mismatch_is_logged() -> None:
    """NVML's message names the cause."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlInit", failing(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
        assert "mismatch" in (read_gpus().problem or "").lower()


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"])
def test_failing_count_or_version(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Without a count there is no GPU, without a version only that is missing."""
    monkeypatch.setattr(pynvml, call, failing(pynvml.NVML_ERROR_UNKNOWN))
    assert len(read_gpus().readings) == (0 if call == "nvmlDeviceGetCount" else 2)


def test_lost_gpu_gives_empty_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises nothing, and is in no list."""
    gpu = Gpu()
    for call in FIELDS:
        monkeypatch.setattr(pynvml, call, failing(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert gpu.read() == NO_GPU
    assert read_gpus().readings == ()


def test_other_gpu_keeps_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two GPUs is lost."""

    def handle(index: int) -> str:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return "handle"

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [reading.index for reading in read_gpus().readings] == [1]


def test_mig_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory read here is then not what a process gets."""
    mode = [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda _handle: mode)
    assert Gpu().read().mig is True


@pytest.mark.parametrize(("pid", "expected"), [(7, 90), (8, None), (9, None)])
def test_process_memory_on_a_gpu(pid: int, expected: int | None) -> None:
    """It is ``None`` if the driver does not report it, or lists no such process."""
    assert process_bytes(0, pid) == expected


def test_process_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ``None`` if the driver refuses the list of processes, or the GPU."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", failing(pynvml.NVML_ERROR_NO_PERMISSION))
    assert process_bytes(0, 7) is None
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", failing(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert process_bytes(0, 7) is None


def test_zero_is_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU with a stopped fan differs from one without readings."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFanSpeed", lambda _handle: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _handle: SimpleNamespace(gpu=0, memory=0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _handle: 0)
    reading = Gpu().read()
    assert (reading.fan_percent, reading.utilization_percent, reading.slowdowns) == (0, 0, ())


ODD: list[Any] = [
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ValueError("NULL pointer access"),
    MemoryError(),
    None,
    "text",
    -1,
    2**70,
    object(),
]


@pytest.mark.parametrize("answer", ODD, ids=range(8))
@pytest.mark.parametrize("call", READINGS)
@pytest.mark.usefixtures("nvml")
def test_malformed_driver_answer_costs_its_reading(monkeypatch: pytest.MonkeyPatch, call: str, answer: Any) -> None:
    """The figure is missing or the GPU is left out, and nothing is raised."""

    def odd(*_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pynvml, call, odd)
    assert len(read_gpus().readings) <= 256
    assert isinstance(Gpu().read(), GpuReading)
    process_bytes(0, 7)
