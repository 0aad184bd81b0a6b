"""Guests in WebAssembly text: a frame with all imports and helpers, in which a test writes the calls of `_start`."""

from __future__ import annotations

import json
from typing import Any

FUNCTIONS = {
    "load": 5,
    "load_by_name": 3,
    "load_by_name_with_config": 5,
    "unload": 1,
    "init_execution_context": 2,
    "finalize_execution_context": 1,
    "set_input": 3,
    "compute": 1,
    "get_output": 5,
    "compute_single": 1,
    "get_output_single": 5,
    "fini_single": 1,
}
"""Functions of ``wasi_ephemeral_nn`` with the number of their parameters; each returns an errno."""

GRAPH, CONTEXT, OTHER, WRITTEN, TENSOR = 16, 20, 24, 28, 32
STRINGS, BUFFER, BUFFER_BYTES, PAGE = 1024, 65_536, 65_536, 65_536


class Strings:
    """Constants of a guest, one after the other in its memory."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, text: str | bytes) -> tuple[int, int]:
        """Return pointer and length of a text."""
        encoded = text.encode() if isinstance(text, str) else text
        pointer = STRINGS + len(self._data)
        self._data += encoded
        return pointer, len(encoded)

    def segment(self) -> str:
        """Return the data segment."""
        escaped = "".join(f"\\{byte:02x}" for byte in self._data)
        return f'(data (i32.const {STRINGS}) "{escaped}")'


def call(name: str, *arguments: int | str) -> str:
    """Return a call of a host function, whose errno stays on the stack."""
    given = " ".join(f"(i32.const {each})" if isinstance(each, int) else each for each in arguments)
    return f"(call ${name} {given})"


def loaded(address: int) -> str:
    """Return the 32-bit number at an address."""
    return f"(i32.load (i32.const {address}))"


class Guest:
    """Composes a guest from calls, in order."""

    def __init__(self) -> None:
        self._strings = Strings()
        self._body: list[str] = []

    def add(self, wat: str) -> Guest:
        """Append instructions."""
        self._body.append(wat)
        return self

    def must(self, name: str, *arguments: int | str) -> Guest:
        """Append a call that ends the guest with its errno plus 100 if it fails."""
        return self.add(f"(call $must {call(name, *arguments)})")

    def errno(self, name: str, *arguments: int | str) -> Guest:
        """Append a call, and print its errno as a line."""
        return self.add(f"(call $number {call(name, *arguments)})")

    def load(self, name: str = "default", config: dict[str, Any] | None = None, *, graph: int = GRAPH) -> Guest:
        """Load a model."""
        if config is None:
            return self.must("load_by_name", *self._strings.add(name), graph)
        given = self._strings.add(json.dumps(config))
        return self.must("load_by_name_with_config", *self._strings.add(name), *given, graph)

    def open(self, context: int = CONTEXT, *, graph: int = GRAPH) -> Guest:
        """Open an execution context."""
        return self.must("init_execution_context", loaded(graph), context)

    def text(self, text: str | bytes) -> tuple[int, int]:
        """Return pointer and length of a constant."""
        return self._strings.add(text)

    def tensor(self, text: str | bytes, *, kind: int = 2) -> Guest:
        """Write a tensor record for a constant."""
        pointer, length = self._strings.add(text)
        for at, value in enumerate((0, 0, kind, pointer, length)):
            self.add(f"(i32.store (i32.const {TENSOR + 4 * at}) (i32.const {value}))")
        return self

    def input(self, text: str | bytes, *, index: int = 0, context: int = CONTEXT) -> Guest:
        """Set an input."""
        return self.tensor(text).must("set_input", loaded(context), index, TENSOR)

    def ask(self, prompt: str, *, context: int = CONTEXT) -> Guest:
        """Compute a turn, and print its text as a line."""
        return self.input(prompt, context=context).must("compute", loaded(context)).print_output(context=context)

    def print_output(self, index: int = 0, *, context: int = CONTEXT, name: str = "get_output") -> Guest:
        """Print an output as a line."""
        self.must(name, loaded(context), index, BUFFER, BUFFER_BYTES, WRITTEN)
        return self.add(f"(call $print (i32.const {BUFFER}) {loaded(WRITTEN)})(call $newline)")

    def print_last_error(self) -> Guest:
        """Print the message of the last error as a line."""
        self.must("last_error", BUFFER, BUFFER_BYTES, WRITTEN)
        return self.add(f"(call $print (i32.const {BUFFER}) {loaded(WRITTEN)})(call $newline)")

    def stream(self, *, context: int = CONTEXT, label: str = "stream") -> Guest:
        """Print the pieces of a turn as they come, each in brackets, until an errno, which is printed."""
        self.add(f"(block ${label} (loop ${label}_on")
        self.add(f"(local.set $errno {call('compute_single', loaded(context))})")
        self.add(f"(br_if ${label} (local.get $errno))")
        self.must("get_output_single", loaded(context), 0, BUFFER, BUFFER_BYTES, WRITTEN)
        self.add(f"(call $print (i32.const 56) (i32.const 1))(call $print (i32.const {BUFFER}) {loaded(WRITTEN)})")
        self.add(f"(call $print (i32.const 57) (i32.const 1))(br ${label}_on)))")
        return self.add("(call $newline)(call $number (local.get $errno))")

    def exit(self, code: int) -> Guest:
        """End the guest."""
        return self.add(f"(call $exit (i32.const {code}))")

    def wat(self, *, pages: int = 4) -> str:
        """Return the module."""
        imports = "".join(
            f'(import "wasi_ephemeral_nn" "{name}" (func ${name} (param {"i32 " * n}) (result i32)))'
            for name, n in FUNCTIONS.items()
        )
        return f"""(module
            {imports}
            (import "inferencecenter" "last_error" (func $last_error (param i32 i32 i32) (result i32)))
            (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
            (import "wasi_snapshot_preview1" "fd_read" (func $fd_read (param i32 i32 i32 i32) (result i32)))
            (import "wasi_snapshot_preview1" "poll_oneoff" (func $poll_oneoff (param i32 i32 i32 i32) (result i32)))
            (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
            (memory (export "memory") {pages})
            (data (i32.const 56) "[]\\n")
            {self._strings.segment()}
            (func $print (param $pointer i32) (param $length i32)
                (i32.store (i32.const 0) (local.get $pointer))
                (i32.store (i32.const 4) (local.get $length))
                (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8))))
            (func $newline (call $print (i32.const 58) (i32.const 1)))
            (func $digit (param $number i32)
                (i32.store8 (i32.const 62) (i32.add (i32.const 48) (local.get $number)))
                (call $print (i32.const 62) (i32.const 1)))
            (func $number (param $number i32)
                (if (i32.ge_u (local.get $number) (i32.const 100))
                    (then (call $digit (i32.div_u (local.get $number) (i32.const 100)))))
                (if (i32.ge_u (local.get $number) (i32.const 10))
                    (then (call $digit (i32.rem_u (i32.div_u (local.get $number) (i32.const 10)) (i32.const 10)))))
                (call $digit (i32.rem_u (local.get $number) (i32.const 10)))
                (call $newline))
            (func $must (param $errno i32)
                (if (local.get $errno) (then (call $exit (i32.add (i32.const 100) (local.get $errno))))))
            (func (export "_start") (local $errno i32) (local $i i32)
                {"".join(self._body)}))"""
