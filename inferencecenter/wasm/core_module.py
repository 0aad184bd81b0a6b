"""Imports of core modules: ``wasi_ephemeral_nn``, and ``inferencecenter`` for the message of the last error.

Functions are defined through the C API: those that wasmtime's Python package defines convert types anew for each call,
which takes about 14 us, and a streamed token has two calls.

Every pointer and length of the guest is checked against its memory before it is used. A failed call returns the number
of its error, and changes no memory of the guest but the size of an output that does not fit.
"""

from __future__ import annotations

import ctypes
import struct
import time
from typing import TYPE_CHECKING, Any, Final

from wasmtime import Caller, FuncType, Linker, Memory, Trap, ValType
from wasmtime import _bindings as bindings

from inferencecenter.wasm.errors import SUCCESS, NnErrorKind, WasiNnError
from inferencecenter.wasm.host import model_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from wasmtime import Store

    from inferencecenter.wasm.host import GuestLog, InferenceHost

MODULE: Final = "wasi_ephemeral_nn"
EXTENSION: Final = "inferencecenter"

_NO_FINALIZER: Final = ctypes.cast(0, ctypes.CFUNCTYPE(None, ctypes.c_void_p))
_VALUE_BYTES: Final = ctypes.sizeof(bindings.wasmtime_val_raw_t)
_U32: Final = struct.Struct("<I")
_TENSOR_BYTES: Final = 20
_U8_TYPES: Final = frozenset({2, 3, 4})
"""Numbers of the type u8: in the first specification, in those with f64, and in the latest."""
_GGML: Final = 5
_AUTODETECT: Final = (6, 7, 8)
_ENCODINGS: Final = 9
_TARGETS: Final = 4


class GuestMemory:
    """The linear memory of the module, bounds-checked.

    Its address and size are those of the latest ``refresh``. They change while the guest runs only, and only together.
    """

    def __init__(self, memory: Memory, store: Store) -> None:
        self._memory = memory
        self._store = store
        self._context = store._context()
        self._reference = ctypes.byref(memory._memory)
        self._bytes = memoryview(b"")
        self._size = 0

    def refresh(self) -> None:
        """Read the size, at the start of each call, and the address if the memory has grown since."""
        size = bindings.wasmtime_memory_data_size(self._context, self._reference)
        if size != self._size:
            self._size = size
            address = ctypes.addressof(self._memory.data_ptr(self._store).contents)
            self._bytes = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")

    def read(self, pointer: int, length: int, what: str) -> bytes:
        """Return a copy of ``length`` bytes.

        Raises:
            WasiNnError: They are not all in the memory.
        """
        self.check(pointer, length, what)
        return self._bytes[pointer : pointer + length].tobytes()

    def check(self, pointer: int, length: int, what: str) -> None:
        """Check that a range is in the memory, before anything is done for its sake.

        Raises:
            WasiNnError: It is not.
        """
        if pointer + length > self._size:
            raise WasiNnError(
                NnErrorKind.INVALID_ARGUMENT,
                f"{what}: {length} bytes at {pointer} are outside of the memory of {self._size} bytes",
            )

    def write(self, pointer: int, data: bytes, what: str) -> None:
        """Copy ``data`` into the memory.

        Raises:
            WasiNnError: The range is not in the memory.
        """
        self.check(pointer, len(data), what)
        self._bytes[pointer : pointer + len(data)] = data

    def read_u32(self, pointer: int, what: str) -> int:
        return int.from_bytes(self.read(pointer, 4, what), "little")

    def write_u32(self, pointer: int, value: int, what: str) -> None:
        self.check(pointer, 4, what)
        _U32.pack_into(self._bytes, pointer, value)


class CoreModuleImports:
    """The host functions of one guest.

    Args:
        store: The guest's store.
        host: Its graphs and contexts.
        log: Receives errors and traced calls.

    Attributes:
        failure: What a host function raised, for which the guest was ended with a trap.
    """

    def __init__(self, store: Store, host: InferenceHost, log: GuestLog) -> None:
        self._store = store
        self._host = host
        self._log = log
        self._memory: GuestMemory | None = None
        self._last_error = b""
        self._callbacks: list[object] = []
        self.failure: BaseException | None = None

    def define(self, linker: Linker) -> None:
        """Define all functions in a linker."""
        functions: dict[str, tuple[int, Callable[..., None]]] = {
            "load": (5, self._load),
            "load_by_name": (3, self._load_by_name),
            "load_by_name_with_config": (5, self._load_by_name_with_config),
            "unload": (1, self._unload),
            "init_execution_context": (2, self._init_execution_context),
            "finalize_execution_context": (1, self._finalize_execution_context),
            "set_input": (3, self._set_input),
            "compute": (1, self._compute),
            "get_output": (5, self._get_output),
            "compute_single": (1, self._compute_single),
            "get_output_single": (5, self._get_output_single),
            "fini_single": (1, self._fini_single),
        }
        for name, (n_params, function) in functions.items():
            self._define(linker, MODULE, name, n_params, function)
        self._define(linker, EXTENSION, "last_error", 3, self._write_last_error)

    def _define(self, linker: Linker, module: str, name: str, n_params: int, function: Callable[..., None]) -> None:
        call = self._tracing(name, function)
        # An i32 is in the first four bytes of a value.
        unpack, n_bytes = struct.Struct(f"<{'I12x' * n_params}").unpack, n_params * _VALUE_BYTES

        def callback(_: object, caller: Any, values: Any, n_values: int) -> int:
            del n_values
            try:
                given = unpack(ctypes.string_at(values, n_bytes))
                if self._memory is None:
                    self._memory = self._find_memory(Caller(caller))
                if self._memory is not None:
                    self._memory.refresh()
                values[0].i32 = call(given)
            except BaseException as error:  # noqa: BLE001 - it is raised where the guest was called
                self.failure = error
                return int(ctypes.cast(Trap("the host failed")._consume(), ctypes.c_void_p).value or 0)
            return 0

        native = bindings.wasmtime_func_unchecked_callback_t(callback)
        self._callbacks.append(native)
        kind = FuncType([ValType.i32()] * n_params, [ValType.i32()])
        encoded = [ctypes.create_string_buffer(text.encode()) for text in (module, name)]
        error = bindings.wasmtime_linker_define_func_unchecked(
            linker.ptr(), encoded[0], len(module), encoded[1], len(name), kind.ptr(), native, None, _NO_FINALIZER
        )
        assert not error, "each name is defined once"

    def _tracing(self, name: str, function: Callable[..., None]) -> Callable[[tuple[int, ...]], int]:
        """Return a function that returns the errno of a call, and notes and traces it."""
        log = self._log

        def call(given: tuple[int, ...]) -> int:
            start = time.perf_counter() if log.traces else 0.0
            errno, message = SUCCESS, ""
            try:
                if self._memory is None:
                    raise WasiNnError(NnErrorKind.MISSING_MEMORY, "the module exports no memory named memory")
                function(*given)
            except WasiNnError as error:
                errno, message = error.kind.errno, str(error)
                if name != "last_error":
                    self._last_error = message.encode()
                if error.kind is not NnErrorKind.END_OF_SEQUENCE and not name.startswith("get_output"):
                    log.once(f"{name}: {message}")
            if log.traces:
                took_ms = (time.perf_counter() - start) * 1000
                arguments = ", ".join(map(str, given))
                log.trace(f"{name}({arguments}) = {errno} in {took_ms:.3f} ms{message and f': {message}'}")
            return errno

        return call

    def _find_memory(self, caller: Caller) -> GuestMemory | None:
        memory = caller.get("memory")
        return GuestMemory(memory, self._store) if isinstance(memory, Memory) else None

    @property
    def memory(self) -> GuestMemory:
        assert self._memory is not None, "a call without it has failed before"
        return self._memory

    def _load(self, builders: int, n_builders: int, encoding: int, target: int, graph: int) -> None:
        self.memory.check(graph, 4, "graph")
        self.memory.check(builders, 8 * n_builders, "builders")
        if encoding >= _ENCODINGS or target >= _TARGETS:
            raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"encoding {encoding} or target {target} does not exist")
        raise WasiNnError(
            NnErrorKind.UNSUPPORTED_OPERATION, "a guest cannot bring a model; load one of the daemon's by its name"
        )

    def _load_by_name(self, name: int, n_name: int, graph: int) -> None:
        self._load_graph(name, n_name, None, graph)

    def _load_by_name_with_config(self, name: int, n_name: int, config: int, n_config: int, graph: int) -> None:
        self._load_graph(name, n_name, self.memory.read(config, n_config, "config"), graph)

    def _load_graph(self, name: int, n_name: int, config: bytes | None, graph: int) -> None:
        memory = self.memory
        memory.check(graph, 4, "graph")
        model = model_name(memory.read(name, n_name, "name"))
        memory.write_u32(graph, self._host.load_by_name(model, config), "graph")

    def _unload(self, graph: int) -> None:
        self._host.unload(graph)

    def _init_execution_context(self, graph: int, context: int) -> None:
        self.memory.check(context, 4, "context")
        self.memory.write_u32(context, self._host.init_execution_context(graph), "context")

    def _finalize_execution_context(self, context: int) -> None:
        self._host.finalize_execution_context(context)

    def _set_input(self, context: int, index: int, tensor: int) -> None:
        memory = self.memory
        memory.check(tensor, _TENSOR_BYTES, "tensor")
        dimensions, n_dimensions, kind, data, n_data = (
            memory.read_u32(tensor + at, "tensor") for at in range(0, 20, 4)
        )
        memory.check(dimensions, 4 * n_dimensions, "dimensions")
        if kind & 0xFF not in _U8_TYPES:
            raise WasiNnError(
                NnErrorKind.INVALID_ENCODING, f"a tensor of type {kind & 0xFF} is no text; its type must be u8"
            )
        memory.check(data, n_data, "data")
        self._host.check_input_size(context, n_data)
        self._host.set_input(context, index, memory.read(data, n_data, "data"))

    def _compute(self, context: int) -> None:
        self._host.compute(context)

    def _compute_single(self, context: int) -> None:
        self._host.compute_single(context)

    def _fini_single(self, context: int) -> None:
        self._host.fini_single(context)

    def _get_output(self, context: int, index: int, buffer: int, n_buffer: int, written: int) -> None:
        self._copy_out(self._host.output(context, index), buffer, n_buffer, written)

    def _get_output_single(self, context: int, index: int, buffer: int, n_buffer: int, written: int) -> None:
        self._copy_out(self._host.output_single(context, index), buffer, n_buffer, written)

    def _write_last_error(self, buffer: int, n_buffer: int, written: int) -> None:
        self._copy_out(self._last_error, buffer, n_buffer, written)

    def _copy_out(self, output: bytes, buffer: int, n_buffer: int, written: int) -> None:
        """Write an output and its size; the size alone if the buffer is too small."""
        memory = self.memory
        memory.check(buffer, n_buffer, "output buffer")
        memory.write_u32(written, len(output), "written size")
        if len(output) > n_buffer:
            raise WasiNnError(NnErrorKind.TOO_LARGE, f"the output has {len(output)} bytes, the buffer {n_buffer}")
        memory.write(buffer, output, "output buffer")
