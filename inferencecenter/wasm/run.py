"""Runs one guest within its limits: fuel, memory, time, files, and the models it may load.

The guest has a thread of its own, which can be interrupted in three ways: WebAssembly code by the epoch, waits of host
functions by ``InferenceHost.stop``, and waits within WASI (sleeping, reading standard input) not at all: the thread is
then left behind, as a daemon thread that the end of the process ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wasmtime import (
    Config,
    Engine,
    ExitTrap,
    Func,
    Linker,
    Memory,
    Module,
    Store,
    Trap,
    WasiConfig,
    WasmtimeError,
    wat2wasm,
)
from wasmtime import component as wasm_component

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.wasm.component import ComponentImports
from inferencecenter.wasm.core_module import CoreModuleImports
from inferencecenter.wasm.host import GuestLog, InferenceHost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.client import Client
    from inferencecenter.wasm.guest_loop import GuestLoop

MAX_GUEST_BYTES: Final = 128 * 1024 * 1024
_MIB: Final = 1024 * 1024
_TABLE_ELEMENTS: Final = 200_000
_MODULE_TABLES: Final = 8
_CACHED_BYTES: Final = _MIB
"""Size from which on wasmtime keeps the compiled guest in the user's cache: a runtime of Python takes half a minute."""
_MAGIC: Final = b"\0asm"
_COMPONENT_MAGIC: Final = b"\0asm\x0d\0\x01\0"
_IMPORTS_HINT: Final = "docs/wasm.md lists the functions that a guest may import."
_STOP_TIMEOUT_S: Final = 2.0
_SIGNAL_CHECK_S: Final = 0.5
"""Longest wait of the main thread. One that begins just after a signal arrived is not interrupted by it, so a signal
is handled this much later at worst."""
_TTL_MARGIN_S: Final = 60.0
_NEARLY_FULL: Final = 0.9
"""Fraction of the memory from which on a trap counts as a lack of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLimits:
    """What a guest may use.

    Attributes:
        fuel: WebAssembly instructions, about.
        memory_bytes: Size of each linear memory; a core module has one, a component at most four.
        timeout_s: Seconds until its end, waits included.
    """

    fuel: int = 100_000_000_000
    memory_bytes: int = 256 * _MIB
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestOptions:
    """What a guest is given.

    Attributes:
        arguments: Its arguments, after its name.
        directories: Directories of the host that it may read, by the paths under which it finds them.
        models: Models by the names under which it finds them; ``None`` for all of the account's.
        stores: Whether the daemon stores its sessions until it ends, so that they survive a restart of the daemon.
        limits: Its limits.
    """

    arguments: Sequence[str] = ()
    directories: Mapping[str, Path] = field(default_factory=dict)
    models: Mapping[str, str] | None = None
    stores: bool = False
    limits: GuestLimits = field(default_factory=GuestLimits)


def read_guest(path: Path) -> bytes:
    """Return the bytes of a guest's file.

    Raises:
        InferenceCenterError: ``invalid_guest``.
    """
    try:
        with path.open("rb") as file:  # not by its size: a device or a pipe has none
            guest = file.read(MAX_GUEST_BYTES + 1)
    except OSError as error:
        raise _invalid(path.name, error.strerror or str(error)) from None
    if len(guest) > MAX_GUEST_BYTES:
        raise _invalid(path.name, f"it is larger than {MAX_GUEST_BYTES // _MIB} MiB")
    return guest


class GuestRun:
    """One run of a guest.

    Args:
        name: Name of the guest, its first argument.
        guest: A core module or a component, in binary or text form.
        client: An open client, which runs in ``loop``.
        loop: The client's loop.
        options: What it is given.
        log: Receives traced calls, warnings and errors.

    Raises:
        InferenceCenterError: ``invalid_guest``; it is no WebAssembly, or it cannot be compiled.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        name: str,
        guest: bytes,
        client: Client,
        loop: GuestLoop,
        *,
        options: GuestOptions,
        log: GuestLog,
    ) -> None:
        self._name = name
        self._options = options
        self._log = log
        limits = options.limits
        self._host = InferenceHost(
            client,
            loop,
            models=options.models,
            stores=options.stores,
            ttl_s=limits.timeout_s + _TTL_MARGIN_S,
            log=log,
        )
        if not guest.startswith(_MAGIC):
            guest = _assembled(name, guest)
        self._is_component = guest.startswith(_COMPONENT_MAGIC)
        self._engine = Engine(_config(is_component=self._is_component, is_large=len(guest) >= _CACHED_BYTES))
        self._memory_used = 0
        self._code: int | None = None
        self._failure: BaseException | None = None
        self._stopped: InferenceCenterError | None = None
        try:
            self._compiled: Module | wasm_component.Component = (
                wasm_component.Component(self._engine, guest) if self._is_component else Module(self._engine, guest)
            )
        except WasmtimeError as error:
            raise _invalid(name, _last_line(error)) from None

    def run(self) -> int:
        """Run the guest to its end and return its exit code.

        Raises:
            InferenceCenterError: ``guest_timeout``, ``guest_out_of_fuel``, ``guest_out_of_memory``, ``guest_trapped``,
                or ``invalid_guest`` if an import or the start function is missing.
        """
        limits = self._options.limits
        thread = threading.Thread(target=self._execute, name=f"guest {self._name}", daemon=True)
        deadline = time.monotonic() + limits.timeout_s
        thread.start()
        try:
            while thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                thread.join(min(left_s, _SIGNAL_CHECK_S))
            if thread.is_alive():
                self._stopped = InferenceCenterError(
                    ErrorCode.GUEST_TIMEOUT,
                    f"{self._name} ran for more than {limits.timeout_s:g} s",
                    hint="--timeout-s sets the limit.",
                )
        finally:
            self._host.stop()
            self._engine.increment_epoch()
            thread.join(_STOP_TIMEOUT_S)
            self._host.close()
        if self._stopped is not None:
            raise self._stopped
        if self._failure is not None:
            raise self._failure
        assert self._code is not None, "the thread has ended"
        return self._code

    def _execute(self) -> None:
        try:
            self._code = self._call_start()
        except BaseException as error:  # noqa: BLE001 - it is raised by `run`
            self._failure = error

    def _call_start(self) -> int:
        limits = self._options.limits
        store = Store(self._engine)
        store.set_limits(
            memory_size=limits.memory_bytes,
            table_elements=_TABLE_ELEMENTS,
            instances=100,
            tables=100 if self._is_component else _MODULE_TABLES,
            memories=4 if self._is_component else 1,
        )
        store.set_fuel(limits.fuel)
        store.set_epoch_deadline(1)
        store.set_wasi(self._wasi())
        try:
            if isinstance(self._compiled, Module):
                return self._run_module(store, self._compiled)
            return self._run_component(store, self._compiled)
        except ExitTrap as exit_trap:
            return exit_trap.code
        except (Trap, WasmtimeError) as error:
            raise self._ended_by(error) from None
        finally:
            store.close()

    def _run_module(self, store: Store, module: Module) -> int:
        linker = Linker(self._engine)
        linker.define_wasi()
        imports = CoreModuleImports(store, self._host, self._log)
        imports.define(linker)
        memory = None
        try:
            exports = linker.instantiate(store, module).exports(store)
            start, memory = exports.get("_start"), exports.get("memory")
            if not isinstance(start, Func):
                raise _invalid(self._name, "it exports no function _start; build it as a WASI command")
            start(store)
        except Trap:
            if imports.failure is not None:
                raise imports.failure from None
            raise
        finally:
            if isinstance(memory, Memory):
                self._memory_used = memory.data_len(store)
        return 0

    def _run_component(self, store: Store, component: wasm_component.Component) -> int:
        linker = wasm_component.Linker(self._engine)
        linker.add_wasip2()
        ComponentImports(self._host, self._log).define(linker)
        command = next((name for name in component.type.exports(self._engine) if name.startswith("wasi:cli/run@")), "")
        index = component.get_export_index("run", component.get_export_index(command)) if command else None
        instance = linker.instantiate(store, component)
        start = instance.get_func(store, index) if index is not None else None
        if start is None:
            raise _invalid(self._name, "it exports no wasi:cli/run; build it as a command")
        return 0 if start(store).tag == "ok" else 1

    def _wasi(self) -> WasiConfig:
        wasi = WasiConfig()
        wasi.argv = [self._name, *self._options.arguments]
        wasi.inherit_stdin()
        wasi.inherit_stdout()
        wasi.inherit_stderr()
        for inside, directory in self._options.directories.items():
            wasi.preopen_dir(str(directory), inside, fs_mutable=False)
        return wasi

    def _ended_by(self, error: Trap | WasmtimeError) -> InferenceCenterError:
        """Return why the guest ended, from wasmtime's report, whose last line has the cause."""
        report, limits = str(error), self._options.limits
        cause = _last_line(error)
        if "all fuel consumed" in cause:
            message = f"{self._name} used up its fuel of {limits.fuel}"
            return InferenceCenterError(ErrorCode.GUEST_OUT_OF_FUEL, message, hint="--fuel sets the limit.")
        mib = limits.memory_bytes / _MIB
        if "exceeds memory limits" in cause or self._memory_used >= _NEARLY_FULL * limits.memory_bytes:
            message = f"{self._name} ran out of its {mib:g} MiB of memory: {cause}"
            return InferenceCenterError(ErrorCode.GUEST_OUT_OF_MEMORY, message, hint="--memory-mib sets the limit.")
        if isinstance(error, Trap) or "wasm trap" in cause:
            return InferenceCenterError(ErrorCode.GUEST_TRAPPED, f"{self._name} trapped: {cause}")
        if "import" in cause or "import" in report.partition("\n")[0]:
            return _invalid(self._name, report.partition("\n")[0], hint=_IMPORTS_HINT)
        return InferenceCenterError(ErrorCode.GUEST_TRAPPED, f"{self._name} failed: {cause}")


def _assembled(name: str, text: bytes) -> bytes:
    try:
        return bytes(wat2wasm(text))
    except WasmtimeError as error:
        raise _invalid(name, str(error).partition("\n")[0]) from None


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


def _config(*, is_component: bool, is_large: bool) -> Config:
    config = Config()
    if is_large:
        with contextlib.suppress(WasmtimeError):  # the user has no directory for caches
            config.cache = True
    config.consume_fuel = True
    config.epoch_interruption = True
    # Memory beside the limited linear ones, or threads beside the interrupted one.
    config.wasm_threads = False
    config.wasm_memory64 = False
    if not is_component:
        config.wasm_multi_memory = False
    return config


def _invalid(name: str, why: str, *, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_GUEST, f"{name} is not a guest that can be run: {why}", hint=hint)
