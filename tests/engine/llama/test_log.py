"""Tests of ``engine.llama.log``."""

from __future__ import annotations

import ctypes

import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.engine.llama.log import BufferSizes, LlamaLog

DEBUG, INFO, WARNING, ERROR, CONTINUES = range(1, 6)


@pytest.fixture
def lines() -> list[tuple[str, str]]:
    """The lines forwarded so far."""
    return []


@pytest.fixture
def log(lines: list[tuple[str, str]]) -> LlamaLog:
    """A log that is not installed."""
    return LlamaLog(lambda level, line: lines.append((level, line)))


def test_continuations_join_their_line(log: LlamaLog, lines: list[tuple[str, str]]) -> None:
    """Fragments at level CONT are appended to the previous line and take its level."""
    log.write(WARNING, "load: ")
    log.write(CONTINUES, "..")
    log.write(CONTINUES, ".\nnext\n")
    assert lines == [("warning", "load: ..."), ("warning", "next")]


def test_unfinished_line_ends_where_the_next_begins(log: LlamaLog, lines: list[tuple[str, str]]) -> None:
    """A line without a line feed is forwarded when another one starts."""
    log.write(ERROR, "half")
    log.write(INFO, "whole\n\n")
    assert lines == [("error", "half"), ("debug", "whole")]


@pytest.mark.parametrize(
    ("level", "name"), [(DEBUG, "debug"), (INFO, "debug"), (WARNING, "warning"), (ERROR, "error"), (0, "debug")]
)
def test_log_levels_are_mapped(log: LlamaLog, lines: list[tuple[str, str]], level: int, name: str) -> None:
    """Only warnings and errors keep their level; llama.cpp's information is logged at debug."""
    log.write(level, "text\n")
    assert lines == [(name, "text")]


def test_problems_are_returned_once(log: LlamaLog) -> None:
    """The latest warnings and errors can be taken once."""
    log.write(INFO, "fine\n")
    for number in range(10):
        log.write(ERROR, f"error {number}\n")
    assert log.take_problems() == tuple(f"error {number}" for number in range(4, 10))
    assert log.take_problems() == ()


def test_installed_log_receives_llama_cpp_and_never_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """An exception of the callback does not reach C or stderr, and bad UTF-8 is replaced."""
    heard: list[str] = []

    def forward(_level: str, line: str) -> None:
        heard.append(line)
        raise OSError("broken pipe")

    log = LlamaLog(forward)
    log.install()
    callback, user_data = lib.llama_log_callback(), ctypes.c_void_p()
    lib.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
    callback(WARNING, b"caf\xe9\n", None)
    log.close()
    lib.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
    callback(WARNING, b"unheard\n", None)
    assert heard == ["caf\ufffd"]
    assert capfd.readouterr() == ("", "")


def test_buffers_of_several_models_add_up() -> None:
    """A compute buffer that grows counts once per model, at its last size."""
    sizes = BufferSizes()
    for line in ("CPU model buffer size = 5.00 MiB", "CPU compute buffer size = 1.00 MiB"):
        sizes.read(f"load: {line}")
    sizes.read("reserve:   CPU compute buffer size = 2.00 MiB")
    sizes.begin_model()
    sizes.read("load: CPU model buffer size = 3.00 MiB")
    sizes.read("reserve: CPU compute buffer size = 4.00 MiB")
    (use,) = sizes.uses()
    assert (use.name, use.weight_bytes, use.compute_bytes) == ("CPU", 8 * 2**20, 6 * 2**20)
