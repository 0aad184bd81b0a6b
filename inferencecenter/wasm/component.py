"""Imports of components: ``wasi:nn`` with the resources tensor, error, graph and graph-execution-context.

A resource is a number that the host chose; the component model sees to it that a guest can only name its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from wasmtime import WasmtimeError
from wasmtime.component import Linker, ResourceAny, ResourceHost, ResourceType, Variant

from inferencecenter.wasm.errors import NnErrorKind, WasiNnError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wasmtime import Caller, Store, StoreContext
    from wasmtime.component import LinkerInstance

    from inferencecenter.wasm.host import GuestLog, InferenceHost

    Storelike = Store | Caller | StoreContext

T = TypeVar("T")

PACKAGE: Final = "wasi:nn"
VERSION: Final = "0.2.0-rc-2024-06-25"

_TENSOR, _ERROR, _GRAPH, _CONTEXT = range(1, 5)
_MAX_RESOURCES: Final = 1024
_MAX_TENSOR_BYTES: Final = 64 * 1024 * 1024
_MAX_DIMENSIONS: Final = 16
_MAX_ERROR_CHARS: Final = 4096
_INPUTS: Final = {"0": 0, "prompt": 0, "1": 1, "metadata": 1}
_U8: Final = "U8"


@dataclass(frozen=True, slots=True)
class _Tensor:
    dimensions: list[int]
    kind: str
    data: bytes


class _Table(Generic[T]):
    """Host objects by the number of their resource, of which a guest may hold a bounded number."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._objects: dict[int, T] = {}
        self._n_made = 0

    def __getitem__(self, number: int) -> T:
        return self._objects[number]

    def values(self) -> list[T]:
        return list(self._objects.values())

    def add(self, value: T) -> int:
        if len(self._objects) >= _MAX_RESOURCES:
            raise WasmtimeError(f"a guest may hold {_MAX_RESOURCES} resources of type {self._what}")
        self._n_made += 1
        self._objects[self._n_made] = value
        return self._n_made

    def drop(self, number: int) -> T | None:
        return self._objects.pop(number, None)


class ComponentImports:
    """The host functions of one component.

    Args:
        host: Its graphs and contexts.
        log: Receives errors and traced calls.
    """

    def __init__(self, host: InferenceHost, log: GuestLog) -> None:
        self._host = host
        self._log = log
        self._tensors: _Table[_Tensor] = _Table("tensor")
        self._errors: _Table[tuple[str, str]] = _Table("error")

    def define(self, linker: Linker) -> None:
        """Define all interfaces in a linker."""
        with linker.root() as root:
            with root.add_instance(f"{PACKAGE}/tensor@{VERSION}") as tensor:
                self._define_tensor(tensor)
            with root.add_instance(f"{PACKAGE}/errors@{VERSION}") as errors:
                self._define_errors(errors)
            with root.add_instance(f"{PACKAGE}/inference@{VERSION}") as inference:
                inference.add_resource("graph-execution-context", ResourceType.host(_CONTEXT), self._drop_context)
                inference.add_func("[method]graph-execution-context.compute", self._compute)
            with root.add_instance(f"{PACKAGE}/graph@{VERSION}") as graph:
                graph.add_resource("graph", ResourceType.host(_GRAPH), self._drop_graph)
                graph.add_func("[method]graph.init-execution-context", self._init_execution_context)
                graph.add_func("load", self._load)
                graph.add_func("load-by-name", self._load_by_name)

    def _define_tensor(self, instance: LinkerInstance) -> None:
        instance.add_resource(
            "tensor", ResourceType.host(_TENSOR), lambda _, number: _ignore(self._tensors.drop(number))
        )
        instance.add_func("[constructor]tensor", self._new_tensor)
        instance.add_func("[method]tensor.dimensions", lambda store, it: self._tensors[_number(store, it)].dimensions)
        instance.add_func("[method]tensor.ty", lambda store, it: self._tensors[_number(store, it)].kind)
        instance.add_func("[method]tensor.data", lambda store, it: self._tensors[_number(store, it)].data)

    def _define_errors(self, instance: LinkerInstance) -> None:
        instance.add_resource("error", ResourceType.host(_ERROR), lambda _, number: _ignore(self._errors.drop(number)))
        instance.add_func("[constructor]error", self._new_error)
        instance.add_func("[method]error.code", lambda store, it: self._errors[_number(store, it)][0])
        instance.add_func("[method]error.data", lambda store, it: self._errors[_number(store, it)][1])

    def _new_error(self, _: Storelike, code: str, data: str) -> ResourceHost:
        if len(data) > _MAX_ERROR_CHARS:
            raise WasmtimeError(f"an error that a guest makes has at most {_MAX_ERROR_CHARS} characters")
        return ResourceHost.own(self._errors.add((code, data)), _ERROR)

    def _new_tensor(self, _: Storelike, dimensions: list[int], kind: str, data: bytes) -> ResourceHost:
        if len(dimensions) > _MAX_DIMENSIONS:
            raise WasmtimeError(f"a tensor has at most {_MAX_DIMENSIONS} dimensions")
        return self._own_tensor(_Tensor(dimensions, kind, data))

    def _own_tensor(self, tensor: _Tensor) -> ResourceHost:
        held = sum(len(each.data) for each in self._tensors.values())
        if held + len(tensor.data) > _MAX_TENSOR_BYTES:
            raise WasmtimeError(f"a guest may hold {_MAX_TENSOR_BYTES} bytes of tensors")
        return ResourceHost.own(self._tensors.add(tensor), _TENSOR)

    def _load(self, _: Storelike, builders: list[bytes], encoding: str, target: str) -> Variant:
        del builders, encoding, target
        refusal = WasiNnError(
            NnErrorKind.UNSUPPORTED_OPERATION, "a guest cannot bring a model; load one of the daemon's by its name"
        )
        return Variant("err", self._failed("load", refusal))

    def _load_by_name(self, _: Storelike, name: str) -> Variant:
        return self._handle("load-by-name", _GRAPH, lambda: self._host.load_by_name(name))

    def _init_execution_context(self, store: Storelike, graph: ResourceAny) -> Variant:
        number = _number(store, graph)
        return self._handle("init-execution-context", _CONTEXT, lambda: self._host.init_execution_context(number))

    def _handle(self, name: str, kind: int, call: Callable[[], int]) -> Variant:
        try:
            handle = call()
        except WasiNnError as error:
            return Variant("err", self._failed(name, error))
        self._log.trace(f"{name} = {handle}")
        return Variant("ok", ResourceHost.own(handle, kind))

    def _compute(
        self, store: Storelike, context: ResourceAny, inputs: list[tuple[str, ResourceAny]]
    ) -> list[tuple[str, ResourceHost]] | ResourceHost:
        handle = _number(store, context)
        # An owned resource that is passed in is the host's from here on.
        tensors = [(name, self._tensors.drop(_number(store, resource))) for name, resource in inputs]
        try:
            for name, tensor in tensors:
                assert tensor is not None, "the component model passes existing resources"
                self._host.set_input(handle, *_input(name, tensor))
            self._host.compute(handle)
            outputs = [(str(index), self._host.output(handle, index)) for index in (0, 1)]
        except WasiNnError as error:
            return self._failed("compute", error)
        self._log.trace(f"compute({handle})")
        return [(name, self._own_tensor(_Tensor([len(data)], _U8, data))) for name, data in outputs]

    def _failed(self, name: str, error: WasiNnError) -> ResourceHost:
        self._log.once(f"{name}: {error}")
        return ResourceHost.own(self._errors.add((error.kind.wit, str(error))), _ERROR)

    def _drop_graph(self, _: Storelike, number: int) -> None:
        self._log.trace(f"drop graph {number}")
        self._quietly(lambda: self._host.release(number))

    def _drop_context(self, _: Storelike, number: int) -> None:
        self._log.trace(f"drop graph-execution-context {number}")
        self._quietly(lambda: self._host.finalize_execution_context(number))

    def _quietly(self, close: Callable[[], None]) -> None:
        """Close what is dropped; the guest cannot be told of a failure."""
        try:
            close()
        except WasiNnError as error:
            self._log.once(str(error))


def _input(name: str, tensor: _Tensor) -> tuple[int, bytes]:
    if name not in _INPUTS:
        raise WasiNnError(NnErrorKind.INVALID_ARGUMENT, f"input {name[:64]!r} is not one of {', '.join(_INPUTS)}")
    if tensor.kind != _U8:
        raise WasiNnError(NnErrorKind.INVALID_ENCODING, f"a tensor of type {tensor.kind} is no text; it must be U8")
    return _INPUTS[name], tensor.data


def _number(store: Storelike, resource: ResourceAny) -> int:
    with resource, resource.to_host(store) as host:
        number: int = host.rep
    return number


def _ignore(_: object) -> None:
    """A destructor returns nothing."""
