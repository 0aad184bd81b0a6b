"""Finds the devices of llama.cpp without loading it into this process: by its files, and by a process that loads it.

NVML knows only NVIDIA's GPUs; builds for Vulkan, ROCm or SYCL have devices that only llama.cpp can list.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from inferencecenter.hardware.placement import Device

LIBRARY_PATH: Final = "LLAMA_CPP_LIB_PATH"
"""The variable by which the bindings find the libraries; a value that is set wins."""

MTMD_LIBRARY_PATH: Final = "MTMD_CPP_LIB"
"""The same for the library that reads images."""

_LIBRARIES: Final = "inferencecenter_llama"
_BINDINGS: Final = "llama_cpp"
_GPU_LIBRARIES: Final = ("cuda", "hip", "musa", "vulkan", "metal", "sycl", "opencl", "cann")
_PROBE: Final = "inferencecenter.engine.llama.devices"
_PROBE_TIMEOUT_S: Final = 60.0
_SERVER_TIMEOUT_S: Final = 20.0
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class GgmlDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as llama.cpp reports it; ``id`` is its PCI address, empty if unknown.

    The name of a remote device includes its server: ``RPC0[host:port]``, as in llama.cpp's buffer names.
    """

    name: str
    description: str
    id: str
    is_gpu: bool
    free_bytes: _Bytes
    total_bytes: _Bytes


def library_dir() -> Path | None:
    """Return the directory with llama.cpp's libraries; ``None`` where there is none.

    They are named by the environment, installed as a package of their own, or part of the bindings.
    """
    if configured := os.environ.get(LIBRARY_PATH):
        return Path(configured)
    for package in (_LIBRARIES, _BINDINGS):
        spec = find_spec(package)
        for place in () if spec is None else spec.submodule_search_locations or ():
            if (found := Path(place) / "lib").is_dir():
                return found
    return None


def gpu_backends() -> tuple[str, ...]:
    """Return the GPU backends that llama.cpp was built with, by its libraries."""
    place = library_dir()
    if place is None:
        return ()
    return tuple(kind for kind in _GPU_LIBRARIES if next(place.glob(f"*ggml-{kind}*"), None))


def reaches_servers() -> bool:
    """Return whether llama.cpp was built with devices of RPC servers."""
    place = library_dir()
    return place is not None and next(place.glob("*ggml-rpc*"), None) is not None


def probe() -> tuple[Device, ...]:
    """Have a process load llama.cpp and list the GPUs of this machine; none if that fails.

    A driver that is incompatible with the library may crash that process, which has nothing else to lose.
    """
    return _listed(timeout_s=_PROBE_TIMEOUT_S)


def probe_server(server: str) -> tuple[Device, ...]:
    """Have a process list the devices of an RPC server; none if it cannot be reached or serves another program.

    llama.cpp ends the process when the server is none, or of another version, and waits while it serves another.
    """
    return tuple(replace(device, remote=True) for device in _listed(server, timeout_s=_SERVER_TIMEOUT_S))


def _listed(*arguments: str, timeout_s: float) -> tuple[Device, ...]:
    found: list[GgmlDevice] = []
    # The border to llama.cpp's drivers, which also write to the output: unreadable output means no devices.
    with suppress(Exception):
        done = subprocess.run(  # noqa: S603 - this Python, a constant and validated settings
            [sys.executable, "-m", _PROBE, *arguments], capture_output=True, timeout=timeout_s, check=True
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
