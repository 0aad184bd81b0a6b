"""Devices of llama.cpp: ``python -m inferencecenter.engine.llama.devices`` prints them as JSON."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.ggml import GgmlDevice, library_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.ipc.engine_options import EngineOptions

# The engine receives only these names of a server's devices, and finds the server by them.
_RPC_NAME: Final = re.compile(r"RPC\d+\[(?P<server>\S+)\]")
_CONNECT_TIMEOUT_S: Final = 5.0

# enum ggml_backend_dev_type: a GPU with memory of its own, and one that shares the host's.
_GPU_TYPES: Final = (1, 2)
_CPU_TYPE: Final = 0


# The library that llama.cpp itself is linked with. ``llama_cpp._ggml`` may have loaded a second copy of it with a
# device list of its own: wheels contain ``libggml.so`` and ``libggml.so.0`` as two files.
_ggml: Final = lib._lib


class _Properties(ctypes.Structure):
    """``ggml_backend_dev_props`` of ggml-backend.h; the capabilities at its end are five bools."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 5),
    )


_device_by_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("ggml_backend_dev_by_type", _ggml))
_device_count = ctypes.CFUNCTYPE(ctypes.c_size_t)(("ggml_backend_dev_count", _ggml))
_device = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("ggml_backend_dev_get", _ggml))
_get_properties = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Properties))(
    ("ggml_backend_dev_get_props", _ggml)
)
host_buffer_type = ctypes.CFUNCTYPE(ctypes.c_void_p)(("ggml_backend_cpu_buffer_type", _ggml))
"""Return the buffer type of plain host memory."""

_backend_count = ctypes.CFUNCTYPE(ctypes.c_size_t)(("ggml_backend_reg_count", _ggml))
_backend_by_name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(("ggml_backend_reg_by_name", _ggml))
_function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("ggml_backend_reg_get_proc_address", _ggml)
)
_register = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("ggml_backend_register", _ggml))
_device_count_of = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(("ggml_backend_reg_dev_count", _ggml))
_device_of = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("ggml_backend_reg_dev_get", _ggml))
_load_backends_from = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(("ggml_backend_load_all_from_path", _ggml))


def load_backends() -> bool:
    """Load the backends where they are libraries of their own, as in portable builds; return whether there is any.

    Of several for the CPU llama.cpp takes the best that this one can run.
    """
    if _backend_count() == 0 and (place := library_dir()) is not None:
        _load_backends_from(os.fsencode(place))
    return bool(_backend_count() > 0)


def offloads() -> bool:
    """Return whether there is a GPU for layers, here or on a connected server.

    ``llama_supports_gpu_offload`` alone is also true for a build with RPC without a server.
    """
    return bool(lib.llama_supports_gpu_offload()) and any(_device_by_type(each) for each in _GPU_TYPES)


def devices() -> list[tuple[int, GgmlDevice]]:
    """Return llama.cpp's pointer to each device, the CPU included, with its properties."""
    return [_described(_device(index)) for index in range(_device_count())]


def server_devices(server: str) -> list[tuple[int, GgmlDevice]]:
    """Return the devices of an RPC server (``host:port``) likewise; none if it is unreachable, or the build lacks RPC.

    llama.cpp exits the process if the peer is not an RPC server, or has another version.
    """
    host, _, port = server.rpartition(":")
    if not (rpc := _backend_by_name(b"RPC")):
        return []
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return []
    backend = _server_backend(rpc, server)
    found = map(_described, (_device_of(backend, number) for number in range(_device_count_of(backend))))
    return [
        (pointer, msgspec.structs.replace(device, name=f"RPC{number}[{server}]"))
        for number, (pointer, device) in enumerate(found)
    ]


def served_devices() -> list[int]:
    """Return llama.cpp's pointers to the devices that this machine offers to others: its GPUs, or its processor."""
    return [pointer for pointer, device in devices() if device.is_gpu] or [_device_by_type(_CPU_TYPE)]


def serve(address: str, pointers: Sequence[int], *, n_threads: int) -> None:
    """Serve devices by RPC until the process ends; return if llama.cpp lacks RPC or cannot listen at the address."""
    if not (rpc := _backend_by_name(b"RPC")):
        return
    signature = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    )
    start_server = signature(_function(rpc, b"ggml_backend_rpc_start_server"))
    start_server(address.encode(), None, n_threads, len(pointers), (ctypes.c_void_p * len(pointers))(*pointers))


@cache
def _server_backend(rpc: int, server: str) -> int | None:
    """Connect llama.cpp to an RPC server and register its devices."""
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_function(rpc, b"ggml_backend_rpc_add_server"))
    backend: int | None = add_server(server.encode())
    _register(backend)
    return backend


def _described(pointer: int | None) -> tuple[int, GgmlDevice]:
    assert pointer is not None, "the device count matches the number of devices"
    properties = _Properties()
    _get_properties(pointer, ctypes.byref(properties))
    return pointer, GgmlDevice(
        name=_text(properties.name),
        description=_text(properties.description),
        id=_text(properties.device_id),
        is_gpu=properties.type in _GPU_TYPES,
        free_bytes=properties.memory_free,
        total_bytes=properties.memory_total,
    )


def pointers(wanted: tuple[str, ...]) -> list[int]:
    """Return llama.cpp's pointers to GPUs named by their bus address or by llama.cpp's name; connect to their servers.

    Raises:
        InferenceCenterError: ``invalid_config`` when one is not present.
    """
    known: dict[str, int] = {}
    servers = dict.fromkeys(found["server"] for name in wanted if (found := _RPC_NAME.fullmatch(name)))
    for pointer, device in chain(devices(), *map(server_devices, servers)):
        if device.is_gpu:
            # Two drivers may list one GPU twice; llama.cpp also takes the first.
            known.setdefault(device.name, pointer)
            known.setdefault(device.id, pointer)
    missing = [name for name in wanted if name not in known]
    if missing:
        there = ", ".join(f"{device.name} ({device.id})" for _, device in devices() if device.is_gpu) or "none"
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"llama.cpp does not find the GPU {missing[0]}; it finds: {there}.",
            hint="The driver may not match the build: `inferencecenter doctor` checks both.",
            field="devices",
        )
    return [known[name] for name in wanted]


def present(options: EngineOptions, *, on_log: Callable[[str, str], None]) -> EngineOptions:
    """Return the options adapted to the devices present: without GPUs if optional ones are missing.

    Raises:
        InferenceCenterError: ``invalid_config`` when a required GPU is missing.
    """
    try:
        pointers(options.devices)
    except InferenceCenterError as error:
        if not options.gpu_optional:
            raise
        on_log("warning", f"runs without a GPU: {error.message}")
        return options.replace(
            devices=(),
            n_gpu_layers=0,
            split_mode="none",
            main_gpu=-1,
            tensor_split=(),
            cpu_tensors=(),
            draft_device="",
            mmproj_device="",
        )
    return options


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", errors="replace")


def main() -> None:
    """Write all devices of this machine, or those of the RPC servers named, to standard output as one line of JSON."""
    load_backends()
    lib.llama_backend_init()
    servers = sys.argv[1:]
    found = chain(*map(server_devices, servers)) if servers else devices()
    sys.stdout.buffer.write(msgspec.json.encode([device for _, device in found]) + b"\n")


if __name__ == "__main__":
    main()
