"""A GPU for llama.cpp that has no memory and computes nothing: it counts allocations.

llama.cpp puts layers, KV and buffers on it as on any other and says how much; what it computes is zeros. It is made of
ggml's interface of backends (ggml-backend-impl.h, version 2) in ctypes, and stays registered as long as the process
lives: to be used in a process of its own. ``python -m tests.engine.llama.counting_gpu OPTIONS.json N`` registers N of
them, loads the model that the engine options in the file name, and writes what llama.cpp took as JSON.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.backend import LlamaBackend
from inferencecenter.engine.llama.devices import host_buffer_type
from inferencecenter.ipc.engine_options import EngineOptions

MEMORY_BYTES: Final = 2**36
_P, _SIZE, _TEXT, _BOOL = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_bool
_BASE: Final = 0x10000
_ALIGNMENT: Final = 128
_GPU: Final = 1
_VERSION: Final = 2
_LEAST_OFFLOADED_ROWS: Final = 32
# Keeps functions and structures alive that C has pointers to.
_kept: list[Any] = []


def _slots(names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _P) for name in names.split())


class _BufferType(ctypes.Structure):
    _fields_ = (
        *_slots("get_name alloc get_alignment get_max_size get_alloc_size is_host"),
        ("device", _P),
        ("own", _P),
    )


class _BufferInterface(ctypes.Structure):
    _fields_ = _slots("free get_base init memset set get set_2d get_2d copy clear reset")


class _Backend(ctypes.Structure):
    _fields_ = (
        ("guid", _P),
        *_slots(
            "get_name free set get set_2d get_2d copy synchronize plan_create plan_free plan_update plan_compute "
            "compute event_record event_wait optimize"
        ),
        ("device", _P),
        ("own", _P),
    )


class _Device(ctypes.Structure):
    _fields_ = (
        *_slots(
            "get_name get_description get_memory get_type get_props init get_buffer_type get_host_buffer_type "
            "from_host_ptr supports_op supports_buft offload_op event_new event_free event_synchronize"
        ),
        ("registry", _P),
        ("own", _P),
    )


class _Registry(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), *_slots("get_name get_count get_device get_address"), ("own", _P))


class _Operation(ctypes.Structure):
    """The first fields of a ``ggml_tensor``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", _P),
        ("shape", ctypes.c_int64 * 4),
        ("strides", _SIZE * 4),
        ("op", ctypes.c_int),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("name", _TEXT),
        ("description", _TEXT),
        ("free", _SIZE),
        ("total", _SIZE),
        ("type", ctypes.c_int),
        ("id", _TEXT),
        ("capabilities", _BOOL * 5),
    )


_operation_name = ctypes.CFUNCTYPE(_TEXT, ctypes.c_int)(("ggml_op_name", lib._lib))


def _function(result: Any, *arguments: Any) -> Any:
    """Return a decorator that makes a C function of a Python one, and keeps it alive."""

    def make(function: Any) -> int:
        callback = ctypes.CFUNCTYPE(result, *arguments)(function)
        _kept.append(callback)
        return ctypes.cast(callback, _P).value or 0

    return make


def _text(value: bytes) -> int:
    """Return a C function that returns a text."""
    buffer = ctypes.create_string_buffer(value)
    _kept.append(buffer)
    answer: int = _function(_P, _P)(lambda _: ctypes.addressof(buffer))
    return answer


def register(count: int) -> None:
    """Add so many GPUs, ``FAKE0`` and on, at the addresses ``0000:00:00.0`` and on."""
    devices = [_Device() for _ in range(count)]
    registry = _Registry(version=_VERSION)
    registry.get_name = _text(b"FAKE")
    registry.get_count = _function(_SIZE, _P)(lambda _: count)
    registry.get_device = _function(_P, _P, _SIZE)(lambda _, index: ctypes.addressof(devices[index]))
    registry.get_address = _function(_P, _P, _TEXT)(lambda _registry, _name: None)
    for number, device in enumerate(devices):
        _fill(device, number)
        device.registry = ctypes.addressof(registry)
    _kept.extend([registry, devices])
    add = lib._lib.ggml_backend_register
    add.argtypes, add.restype = [_P], None
    add(ctypes.addressof(registry))


def _fill(device: _Device, number: int) -> None:
    name, place = f"FAKE{number}".encode(), f"0000:0{number}:00.0".encode()
    _kept.extend([name, place])
    buffer_type = _buffer_type(name)
    buffer_type.device = ctypes.addressof(device)
    _kept.append(buffer_type)

    def properties(_device: int, address: int) -> None:
        told = _Properties.from_address(address)
        told.name, told.description, told.id = name, b"counts", place
        told.free = told.total = MEMORY_BYTES
        told.type = _GPU
        told.capabilities = (True, False, False, True, True)

    def memory(_device: int, free: Any, total: Any) -> None:
        free[0] = total[0] = MEMORY_BYTES

    sizes = ctypes.POINTER(_SIZE)
    device.get_name = device.get_description = _text(name)
    device.get_memory = _function(None, _P, sizes, sizes)(memory)
    device.get_type = _function(ctypes.c_int, _P)(lambda _: _GPU)
    device.get_props = _function(None, _P, _P)(properties)
    device.init = _function(_P, _P, _TEXT)(lambda address, _: _backend(name, address))
    device.get_buffer_type = _function(_P, _P)(lambda _: ctypes.addressof(buffer_type))
    device.supports_op = _function(_BOOL, _P, _P)(lambda _device, _op: True)
    device.supports_buft = _function(_BOOL, _P, _P)(lambda _device, other: other == ctypes.addressof(buffer_type))
    device.offload_op = _function(_BOOL, _P, _P)(lambda _device, op: _rows(op) >= _LEAST_OFFLOADED_ROWS)
    device.event_new = _function(_P, _P)(_event)
    device.event_free = _function(None, _P, _P)(lambda _device, _event: None)
    device.event_synchronize = _function(None, _P, _P)(lambda _device, _event: None)


def _event(device: int) -> int:
    event = (_P * 2)(device, None)
    _kept.append(event)
    return ctypes.addressof(event)


def _rows(address: int) -> int:
    """Return the number of an operation's tokens, 0 for an embedding lookup; as llama.cpp's CUDA backend does."""
    operation = _Operation.from_address(address)
    name = _operation_name(operation.op)
    if name == b"GET_ROWS":
        return 0
    if name == b"MUL_MAT":
        return int(operation.shape[1])
    if name in (b"MUL_MAT_ID", b"ROPE"):
        return int(operation.shape[2])
    return int(operation.shape[1] * operation.shape[2] * operation.shape[3])


def _buffer_type(name: bytes) -> _BufferType:
    new_buffer = lib._lib.ggml_backend_buffer_init
    new_buffer.argtypes, new_buffer.restype = [_P, _BufferInterface, _P, _SIZE], _P
    interface = _BufferInterface()
    interface.free = _function(None, _P)(lambda _: None)
    interface.get_base = _function(_P, _P)(lambda _: _BASE)
    interface.memset = _function(None, _P, _P, ctypes.c_uint8, _SIZE, _SIZE)(lambda *_: None)
    interface.set = _function(None, _P, _P, _P, _SIZE, _SIZE)(lambda *_: None)
    interface.get = _function(None, _P, _P, _P, _SIZE, _SIZE)(
        lambda _buffer, _tensor, data, _offset, size: ctypes.memset(data, 0, size) and None
    )
    interface.clear = _function(None, _P, ctypes.c_uint8)(lambda *_: None)
    kind = _BufferType()
    kind.get_name = _text(name)
    kind.alloc = _function(_P, _P, _SIZE)(lambda address, size: new_buffer(address, interface, None, size))
    kind.get_alignment = _function(_SIZE, _P)(lambda _: _ALIGNMENT)
    return kind


def _backend(name: bytes, device: int) -> int:
    backend = _Backend(device=device)
    guid = (ctypes.c_uint8 * 16)(*name.ljust(16))
    backend.guid = ctypes.addressof(guid)
    backend.get_name = _text(name)
    backend.free = _function(None, _P)(lambda _: None)
    backend.synchronize = _function(None, _P)(lambda _: None)
    backend.compute = _function(ctypes.c_int, _P, _P)(lambda _backend, _graph: 0)
    backend.event_record = backend.event_wait = _function(None, _P, _P)(lambda _backend, _event: None)
    _kept.extend([backend, guid])
    return ctypes.addressof(backend)


def main() -> None:
    """Load a model on counting GPUs, and write the memory it uses."""
    options = EngineOptions.model_validate_json(Path(sys.argv[1]).read_bytes())
    assert host_buffer_type(), "llama.cpp is loaded"
    register(int(sys.argv[2]))
    backend = LlamaBackend.load(options, on_progress=lambda _: None, on_log=lambda _level, _line: None)
    sys.stdout.buffer.write(msgspec.json.encode(backend.model.memory) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
