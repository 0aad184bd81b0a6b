"""What llama.cpp itself computes on, told without loading it here: by its files, and by a process that loads it.

NVML knows NVIDIA's GPUs only; with a build for Vulkan, ROCm or SYCL the devices and their memory are llama.cpp's own.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from inferencecenter.hardware.placement import Device

_GPU_LIBRARIES: Final = ("cuda", "hip", "musa", "vulkan", "metal", "sycl", "opencl", "cann")
_PROBE: Final = "inferencecenter.engine.llama.devices"
_PROBE_TIMEOUT_S: Final = 60.0
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class GgmlDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as llama.cpp shows it; ``id`` is its address on the bus, empty where it does not tell."""

    name: str
    description: str
    id: str
    is_gpu: bool
    free_bytes: _Bytes
    total_bytes: _Bytes


def gpu_backends() -> tuple[str, ...]:
    """Return what kinds of GPU the installed llama.cpp was built for, by the libraries that lie beside it."""
    spec = find_spec("llama_cpp")
    places = [] if spec is None else [Path(place) / "lib" for place in spec.submodule_search_locations or ()]
    return tuple(kind for kind in _GPU_LIBRARIES if any(next(place.glob(f"*ggml-{kind}*"), None) for place in places))


def probe() -> tuple[Device, ...]:
    """Let another process load llama.cpp and tell its GPUs; none where that fails, for whatever reason.

    A driver that does not suit the library may end the process, which has nothing else to lose.
    """
    found: list[GgmlDevice] = []
    # The border to llama.cpp's drivers, which also write to the output: what cannot be read are no devices.
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
