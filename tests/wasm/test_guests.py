"""Guests with the demo model: memory, outputs, streams, configuration, and what they may reach."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.wasm.guests import CONTEXT, GRAPH, OTHER, Guest, loaded

if TYPE_CHECKING:
    from pathlib import Path

    from tests.wasm.conftest import GuestRunner

GREEDY = {"sampling": {"temp": 0}, "stopping": {"max_tokens": 30}}
ENDLESS = {"sampling": {"temp": 0, "ignore_eos": True}}


def test_context_remembers(runner: GuestRunner) -> None:
    """A later turn of a context knows the earlier ones; another context does not."""
    guest = Guest().load(config=GREEDY).open().open(OTHER)
    guest.ask("My name is Ada.").ask("What is my name?").ask("What is my name?", context=OTHER)
    ended = runner.run(guest)
    assert ended.error is None
    assert ended.code == 0
    assert "Ada" in ended.lines[1]
    assert "Ada" not in ended.lines[2]
    assert ended.log == []


def test_stream_yields_the_same_text_in_pieces(runner: GuestRunner) -> None:
    """The pieces make the text, several come, and the end is errno 100."""
    guest = Guest().load(config=GREEDY).open().ask("What is the capital of France?")
    guest.open(OTHER).input("What is the capital of France?", context=OTHER).stream(context=OTHER)
    ended = runner.run(guest.print_output(context=OTHER))
    whole, pieces, errno, again = ended.lines
    assert whole == again
    assert pieces[1:-1].replace("][", "") == whole
    assert pieces.count("][") >= 2
    assert errno == "100"


def test_two_contexts_stream_at_once(runner: GuestRunner) -> None:
    """One guest may read two answers in turn."""
    guest = Guest().load(config=GREEDY).open().open(OTHER)
    guest.input("What is the capital of France?").input("What is the capital of Italy?", context=OTHER)
    guest.must("compute_single", loaded(CONTEXT)).must("compute_single", loaded(OTHER))
    guest.stream(label="a").stream(context=OTHER, label="b")
    guest.print_output().print_output(context=OTHER)
    lines = runner.run(guest).lines
    assert "Paris" in lines[-2]
    assert "Rome" in lines[-1]


def test_fini_single_aborts(runner: GuestRunner) -> None:
    """An endless answer ends, and the next turn of the context is answered."""
    guest = Guest().load(config=ENDLESS).open().input("Tell me a story.")
    for _ in range(3):
        guest.must("compute_single", loaded(CONTEXT))
    guest.must("fini_single", loaded(CONTEXT))
    guest.input(json.dumps({"ignore_eos": False, "max_tokens": 30}), index=1).ask("What is the capital of France?")
    ended = runner.run(guest)
    assert ended.code == 0
    assert "Paris" in ended.out


def test_closing_aborts(runner: GuestRunner) -> None:
    """A context with a running answer may be closed, explicitly or by its graph."""
    guest = Guest().load(config=ENDLESS)
    for name, handle in (("finalize_execution_context", CONTEXT), ("unload", GRAPH)):
        guest.open().input("Tell me a story.").must("compute_single", loaded(CONTEXT)).must(name, loaded(handle))
    guest.errno("compute", loaded(CONTEXT))
    ended = runner.run(guest)
    assert ended.lines == ["1"]


def test_metadata_counts_tokens(runner: GuestRunner) -> None:
    """Output 1 has the tokens of the turn and why it ended."""
    guest = Guest().load(config={"n_predict": 3, "temp": 0}).open().ask("Tell me a story.").print_output(1)
    metadata = json.loads(runner.run(guest).lines[-1])
    assert metadata["output_tokens"] == 3
    assert metadata["finish_reason"] == "length"
    assert metadata["input_tokens"] > 3


def test_output_larger_than_the_buffer_is_measured(runner: GuestRunner) -> None:
    """The size is written, nothing else, and the errno is 7; a buffer of that size gets the text."""
    guest = Guest().load(config=GREEDY).open().input("What is the capital of France?").must("compute", loaded(CONTEXT))
    guest.errno("get_output", loaded(CONTEXT), 0, 65_536, 4, 28).must(
        "get_output", loaded(CONTEXT), 0, 65_536, loaded(28), 28
    )
    ended = runner.run(guest.add(f"(call $print (i32.const 65536) {loaded(28)})"))
    assert ended.lines[0] == "7"
    assert "Paris" in ended.lines[1]


def test_configuration_of_the_original_is_obeyed(runner: GuestRunner) -> None:
    """Groups set the session and its parameters; each key without effect is named once."""
    config = {
        "model": {"n_gpu_layers": 98, "ctx_size": 2048, "n_predict": 8},
        "sampling": {"temp": 0.0, "top_k": 1},
        "stopping": {"stop": ["Paris"], "max_time_ms": 60_000},
        "memory": {"context_shifting": False, "cache_prompt": True},
        "backend": {"max_sessions": 2, "idle_timeout_ms": 60_000, "auto_cleanup": True, "queue_size": 50},
        "logging": {"level": "info"},
        "performance": {"batch_processing": True, "batch_size": 512},
    }
    guest = Guest().load(config=config).load(config=config).open().ask("What is the capital of France?")
    ended = runner.run(guest)
    assert ended.code == 0
    assert "Paris" not in ended.out
    named = [line.split()[1] for line in ended.log]
    assert sorted(named) == [
        "backend.queue_size",
        "memory.cache_prompt",
        "model.ctx_size",
        "model.n_gpu_layers",
        "performance.batch_processing",
        "performance.batch_size",
    ]


def test_keys_of_wasmedge_are_obeyed(runner: GuestRunner) -> None:
    """Hyphens are underscores, and the text may be written as it comes."""
    config = {"n-predict": 30, "temp": 0, "reverse-prompt": "###", "stream-stdout": True, "enable-log": True}
    guest = Guest().load(config=config).open().ask("What is the capital of France?")
    ended = runner.run(guest)
    assert ended.code == 0
    assert [line.split()[1] for line in ended.log] == ["enable_log"]


def test_system_prompt_and_constraints(runner: GuestRunner) -> None:
    """A regular expression constrains the answer; metadata of a context changes it."""
    guest = Guest().load(config={"regex": "(yes|no)", "temp": 0, "system": "Be brief."}).open().ask("Is it?")
    guest.input(json.dumps({"regex": "[ab]{3}"}), index=1).ask("And now?")
    first, second = runner.run(guest).lines
    assert first in {"yes", "no"}
    assert set(second) <= {"a", "b"}


def test_idle_contexts_are_recycled(runner: GuestRunner) -> None:
    """With auto_cleanup the least recently used context is closed for a new one."""
    guest = Guest().load(config={**GREEDY, "backend": {"max_sessions": 1, "auto_cleanup": True}})
    guest.open().open(OTHER).errno("compute", loaded(CONTEXT)).ask("What is the capital of France?", context=OTHER)
    errno, text = runner.run(guest).lines
    assert errno == "1"
    assert "Paris" in text


@pytest.mark.parametrize(("name", "errno"), [("chat", "0"), ("default", "8"), ("elsewhere", "8"), ("demo", "8")])
def test_models_are_those_of_the_option(runner: GuestRunner, name: str, errno: str) -> None:
    """With names given, a guest finds these and no others."""
    guest = Guest()
    guest.errno("load_by_name", *guest.text(name), GRAPH)
    assert runner.run(guest, models={"chat": "demo", "elsewhere": "absent"}).lines == [errno]


def test_exit_code_is_the_guests(runner: GuestRunner) -> None:
    """As a native program's."""
    assert runner.run(Guest().exit(7)).code == 7


def test_trace_names_calls(runner: GuestRunner) -> None:
    """Each call with its arguments, result and time."""
    ended = runner.run(Guest().load().open(), traces=True)
    assert [line.split("(")[0] for line in ended.log] == ["wasi-nn: load_by_name", "wasi-nn: init_execution_context"]
    assert " = 0 in " in ended.log[0]


_READ_FILE = """(module
    (import "wasi_snapshot_preview1" "path_open"
        (func $open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
    (memory (export "memory") 1)
    (data (i32.const 0) "note.txt")
    (func (export "_start")
        (call $exit (call $open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 8) (i32.const {flags})
            (i64.const {rights}) (i64.const 0) (i32.const 0) (i32.const 64)))))"""


def test_directories_are_read_only(runner: GuestRunner, tmp_path: Path) -> None:
    """A given directory can be read but not written; without it there is none."""
    (tmp_path / "note.txt").write_text("note")
    reading, writing = _READ_FILE.format(flags=0, rights=2), _READ_FILE.format(flags=9, rights=64)
    assert runner.run(reading, directories={"/data": tmp_path}).code == 0
    assert runner.run(writing, directories={"/data": tmp_path}).code != 0
    assert runner.run(reading).code != 0
    assert (tmp_path / "note.txt").read_text() == "note"
