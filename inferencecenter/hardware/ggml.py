"""Finds the devices of llama.cpp without loading it into this process: by its files, and by a process that loads it.

NVML knows only NVIDIA's GPUs; builds for Vulkan, ROCm or SYCL have devices that only llama.cpp can list.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from inferencecenter.hardware.placement import Device

_GPU_LIBRARIES: Final = ("cuda", "hip", "musa", "vulkan", "metal", "sycl", "opencl", "cann")
_LIBRARIES_VARIABLE: Final = "LLAMA_CPP_LIB_PATH"
_PROBE: Final = "inferencecenter.engine.llama.devices"
_PROBE_TIMEOUT_S: Final = 60.0
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class GgmlDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as llama.cpp reports it; ``id`` is its PCI address, empty if unknown."""

    name: str
    description: str
    id: str
    is_gpu: bool
    free_bytes: _Bytes
    total_bytes: _Bytes


def gpu_backends() -> tuple[str, ...]:
    """Return the GPU backends that llama.cpp was built with, by its libraries."""
    places = _library_folders()
    return tuple(kind for kind in _GPU_LIBRARIES if any(next(place.glob(f"*ggml-{kind}*"), None) for place in places))


def _library_folders() -> list[Path]:
    """Return where ``llama_cpp`` loads its libraries from: its own folder, unless a variable names another."""
    chosen = os.environ.get(_LIBRARIES_VARIABLE)
    if chosen is not None:
        return [Path(chosen)]
    spec = find_spec("llama_cpp")
    return [] if spec is None else [Path(place) / "lib" for place in spec.submodule_search_locations or ()]


def probe() -> tuple[Device, ...]:
    """Have a process load llama.cpp and list its GPUs; none if that fails.

    A driver that is incompatible with the library may crash that process, which has nothing else to lose.
    """
    found: list[GgmlDevice] = []
    # The border to llama.cpp's drivers, which also write to the output: unreadable output means no devices.
    with suppress(Exception):
        done = subprocess.run(  # noqa: S603 - this Python and a constant
            [sys.executable, "-m", _PROBE], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        found = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[GgmlDevice])
    return tuple(
        Device(
            id=device.id or device.name,
            name=device.description or device.name,
            free_bytes=device.free_bytes,
            total_bytes=device.total_bytes,
            aliases=(device.name,),
        )
        for device in found
        if device.is_gpu
    )
