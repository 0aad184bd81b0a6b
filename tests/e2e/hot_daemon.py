"""A daemon on a machine with a GPU that a test heats: ``python -m tests.e2e.hot_daemon serve``.

NVML's functions are played. The temperature is what a file says; without the file there is nothing to read.
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
    """Read the file that plays the sensor."""
    try:
        return int(Path(os.environ[TEMPERATURE_VARIABLE]).read_text())
    except FileNotFoundError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None


def unsupported(*_arguments: object) -> None:
    """Say what NVML says of a reading that a GPU does not have."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def play_nvml() -> None:
    """Have NVML tell of one GPU, and the guard look at it all the time."""
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
    play_nvml()
    main()
