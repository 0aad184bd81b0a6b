"""The engine process: its end after an unexpected failure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.engine import __main__ as main
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import LoadFailed

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import FromEngine

OPTIONS = EngineOptions(backend="llama", parent_pid=os.getpid(), model_path="/models/odd.gguf")


class Line:
    """A pipe that records messages."""

    def __init__(self) -> None:
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        """Record the call."""
        self.sent.append(message)


@pytest.mark.parametrize("error", [ValueError("NaN"), OverflowError(), UnicodeDecodeError("utf-8", b"x", 0, 1, "?")])
def test_any_model_file_error_is_a_failed_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The front gets the reason, and does not take it for a crash that a restart may fix."""

    def load(*_: Any) -> None:
        raise error

    monkeypatch.setattr(main, "watch", lambda _pipe, _inbox: None)
    monkeypatch.setattr(main, "_load", load)
    line = Line()
    assert main._serve(line, OPTIONS, Heartbeat.create()) == os.EX_NOINPUT  # type: ignore[arg-type]
    (failed,) = line.sent
    assert isinstance(failed, LoadFailed)
    assert failed.code == "invalid_model_file"
    assert "/models/odd.gguf" in failed.message
    assert type(error).__name__ in failed.message
