"""Components in WebAssembly text: limits, imports and resources. A component that chats is in test_command."""

from __future__ import annotations

import pytest

from inferencecenter.core.errors import ErrorCode
from inferencecenter.wasm.component import VERSION
from tests.wasm.conftest import GuestRunner

COMMAND = """(component
    {imports}
    (core module $memory (memory (export "memory") 2)
        (data (i32.const 16) "default")
        (global $free (mut i32) (i32.const 4096))
        (func (export "realloc") (param i32 i32 i32 i32) (result i32)
            (global.get $free)
            (global.set $free (i32.add (global.get $free) (local.get 3)))))
    (core instance $memory (instantiate $memory))
    {lowered}
    (core module $main
        (import "host" "memory" (memory 2))
        {core_imports}
        (func (export "run") (result i32) (local $i i32) {body}))
    (core instance $main (instantiate $main (with "host" (instance
        (export "memory" (memory $memory "memory"))
        {core_exports}))))
    (func $run (result (result)) (canon lift (core func $main "run")))
    (instance $command (export "run" (func $run)))
    (export "wasi:cli/run@0.2.0" (instance $command)))"""

GRAPH_IMPORTS = f"""
    (import "wasi:nn/errors@{VERSION}" (instance $errors (export "error" (type (sub resource)))))
    (alias export $errors "error" (type $error))
    (import "wasi:nn/inference@{VERSION}" (instance $inference
        (export "graph-execution-context" (type (sub resource)))))
    (alias export $inference "graph-execution-context" (type $context))
    (import "wasi:nn/graph@{VERSION}" (instance $graph
        (export "graph" (type $graph (sub resource)))
        (export "load-by-name" (func (param "name" string) (result (result (own $graph) (error (own $error))))))
        (export "[method]graph.init-execution-context"
            (func (param "self" (borrow $graph)) (result (result (own $context) (error (own $error))))))))"""
GRAPH_LOWERED = """
    (alias export $graph "graph" (type $graph_type))
    (core func $load (canon lower (func $graph "load-by-name")
        (memory (core memory $memory "memory")) (realloc (core func $memory "realloc"))))
    (core func $init (canon lower (func $graph "[method]graph.init-execution-context")
        (memory (core memory $memory "memory")) (realloc (core func $memory "realloc"))))
    (core func $drop (canon resource.drop $graph_type))
    (core func $close (canon resource.drop $context))"""
GRAPH_CORE_IMPORTS = """
    (import "host" "load" (func $load (param i32 i32 i32)))
    (import "host" "init" (func $init (param i32 i32)))
    (import "host" "drop" (func $drop (param i32)))
    (import "host" "close" (func $close (param i32)))"""
GRAPH_CORE_EXPORTS = " ".join(f'(export "{name}" (func ${name}))' for name in ("load", "init", "drop", "close"))
LOAD = "(call $load (i32.const 16) (i32.const 7) (i32.const 64))"
"""Writes 0 and the handle of a graph, or 1 and that of an error, to 64 and 68."""


def command(body: str, imports: str = "") -> str:
    """Return a component that only computes."""
    return COMMAND.format(imports=imports, lowered="", core_imports="", core_exports="", body=body)


def user(body: str) -> str:
    """Return a component that loads graphs."""
    return COMMAND.format(
        imports=GRAPH_IMPORTS,
        lowered=GRAPH_LOWERED,
        core_imports=GRAPH_CORE_IMPORTS,
        core_exports=GRAPH_CORE_EXPORTS,
        body=body,
    )


def repeated(body: str, n: int) -> str:
    """Return a loop."""
    count = "(local.set $i (i32.add (local.get $i) (i32.const 1)))"
    return f"(loop $on {body} {count} (br_if $on (i32.lt_u (local.get $i) (i32.const {n}))))"


@pytest.mark.parametrize("code", [0, 1])
def test_result_is_the_exit_code(runner: GuestRunner, code: int) -> None:
    """An error of `run` is exit code 1."""
    assert runner.run(command(f"(i32.const {code})")).code == code


@pytest.mark.parametrize(
    ("body", "limits", "code"),
    [
        ("(loop $on (br $on)) (i32.const 0)", {"fuel": 100_000}, ErrorCode.GUEST_OUT_OF_FUEL),
        ("(loop $on (br $on)) (i32.const 0)", {"timeout_s": 0.2}, ErrorCode.GUEST_TIMEOUT),
        ("unreachable", {}, ErrorCode.GUEST_TRAPPED),
        ("(i32.load (i32.const -4))", {}, ErrorCode.GUEST_TRAPPED),
        ("(i32.const 0)", {"memory_bytes": 65_536}, ErrorCode.GUEST_OUT_OF_MEMORY),
    ],
)
def test_limits_hold(runner: GuestRunner, body: str, limits: dict[str, float], code: ErrorCode) -> None:
    """As for core modules."""
    error = runner.run(command(body), **limits).error
    assert error is not None
    assert error.code is code
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("wat", "message"),
    [
        ("(component)", "wasi:cli/run"),
        (command("(i32.const 0)", '(import "wasi:keyvalue/store@0.2.0" (instance (export "get" (func))))'), "keyvalue"),
        (command("(i32.const 0)", '(import "wasi:nn/graph@9.9.9" (instance (export "load" (func))))'), "graph@9.9.9"),
    ],
    ids=["no command", "other import", "other version"],
)  # fmt: skip
def test_components_that_cannot_run_are_explained(runner: GuestRunner, wat: str, message: str) -> None:
    """With the missing name."""
    error = runner.run(wat).error
    assert error is not None
    assert error.code is ErrorCode.INVALID_GUEST
    assert message in error.message


def test_context_outlives_its_graph(runner: GuestRunner) -> None:
    """Dropped resources close sessions; what is not dropped is closed at the end."""
    opened = "(call $init (i32.load (i32.const 68)) (i32.const 80))"
    body = f"{LOAD} {opened} (call $drop (i32.load (i32.const 68))) (call $close (i32.load (i32.const 84))) {LOAD}"
    ended = runner.run(user(f"{body} {opened} (i32.load (i32.const 80))"), traces=True)
    assert ended.error is None
    assert ended.code == 0
    assert [line.removeprefix("wasi-nn: ") for line in ended.log] == [
        "load-by-name = 1",
        "init-execution-context = 1",
        "drop graph 1",
        "drop graph-execution-context 1",
        "load-by-name = 2",
        "init-execution-context = 2",
    ]


MAKER_IMPORTS = f"""
    (import "wasi:nn/errors@{VERSION}" (instance $errors
        (export "error" (type $error (sub resource)))
        (type $code (enum "invalid-argument" "invalid-encoding" "timeout" "runtime-error" "unsupported-operation"
            "too-large" "not-found" "security" "unknown"))
        (export "error-code" (type $error_code (eq $code)))
        (export "[constructor]error" (func (param "code" $error_code) (param "data" string) (result (own $error))))))
    (import "wasi:nn/tensor@{VERSION}" (instance $tensors
        (export "tensor" (type $tensor (sub resource)))
        (type $type (enum "FP16" "FP32" "FP64" "BF16" "U8" "I32" "I64"))
        (export "tensor-type" (type $tensor_type (eq $type)))
        (export "[constructor]tensor" (func (param "dimensions" (list u32)) (param "ty" $tensor_type)
            (param "data" (list u8)) (result (own $tensor))))))"""
MAKER_LOWERED = """
    (core func $make_error (canon lower (func $errors "[constructor]error")
        (memory (core memory $memory "memory"))))
    (core func $make_tensor (canon lower (func $tensors "[constructor]tensor")
        (memory (core memory $memory "memory"))))"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(drop (call $make_error (i32.const 8) (i32.const 0) (i32.const 4096)))", None),
        ("(call $make_error (i32.const 8) (i32.const 0) (i32.const 4097))", "4096 characters"),
        ("(drop (call $make_tensor (i32.const 0) (i32.const 16) (i32.const 4) (i32.const 0) (i32.const 9)))", None),
        ("(call $make_tensor (i32.const 0) (i32.const 17) (i32.const 4) (i32.const 0) (i32.const 9))", "16 dimensions"),
    ],
)
def test_what_a_guest_makes_is_bounded(runner: GuestRunner, body: str, message: str | None) -> None:
    """The host keeps the texts of errors and the dimensions of tensors."""
    names = ("make_error", "make_tensor")
    wat = COMMAND.format(
        imports=MAKER_IMPORTS,
        lowered=MAKER_LOWERED,
        core_imports='(import "host" "make_error" (func $make_error (param i32 i32 i32) (result i32)))'
        '(import "host" "make_tensor" (func $make_tensor (param i32 i32 i32 i32 i32) (result i32)))',
        core_exports=" ".join(f'(export "{name}" (func ${name}))' for name in names),
        body=body if message else f"{body} (i32.const 0)",
    )
    error = runner.run(wat).error
    assert (error is None) == (message is None), error
    assert error is None or (message or "") in error.message


def test_resources_are_bounded(runner: GuestRunner) -> None:
    """Graphs beyond the limit are errors, and a guest that hoards errors is ended."""
    ended = runner.run(user(f"{repeated(LOAD, 17)} (i32.load (i32.const 64))"))
    assert ended.code == 1
    assert "may load 16 graphs" in ended.log[0]
    error = runner.run(user(f"{repeated(LOAD, 10_000)} (i32.const 0)"), models={"other": "demo"}).error
    assert error is not None
    assert error.code is ErrorCode.GUEST_TRAPPED
    assert "1024 resources of type error" in error.message
