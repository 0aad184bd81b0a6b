"""A daemon whose GPU temperature a test controls: ``python -m tests.e2e.hot_daemon serve``.

NVML's functions are replaced. A file holds the temperature; without the file it cannot be read.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pynvml

from inferencecenter.cli import main
from inferencecenter.supervisor import thermal

TEMPERATURE_VARIABLE: Final = "TEST_TEMPERATURE_FILE"
_GIB: Final = 2**30


def temperature_c(_handle: object, _sensor: int) -> int:
    """Read the simulated temperature from the file."""
    try:
        return int(Path(os.environ[TEMPERATURE_VARIABLE]).read_text())
    except FileNotFoundError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None


def unsupported(*_arguments: object) -> None:
    """Raise NVML's error for a reading that the GPU does not support."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def simulate_nvml() -> None:
    """Make NVML report one GPU, which the thermal throttler reads continuously."""
    played = {name: unsupported for name in vars(pynvml) if name.startswith("nvmlDeviceGet")}
    vars(pynvml).update(
        played,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.10",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _handle: "GPU",
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(total=4 * _GIB, used=_GIB, free=3 * _GIB),
        nvmlDeviceGetTemperature=temperature_c,
    )
    vars(thermal).update(BUSY_EVERY_S=0.02, IDLE_EVERY_S=0.02)


if __name__ == "__main__":
    simulate_nvml()
    main()
