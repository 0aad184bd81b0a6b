"""The logging configuration."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from inferencecenter.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "ic_k3x9_" + "Zq-8_s" * 7


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the loggers."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_on_a_stream() -> None:
    """Each line is an object with an ISO time in UTC, level and event first, then the fields."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("turn", session="s1", tokens=3)
    (line,) = _lines(stream)
    assert list(line) == ["timestamp", "level", "event", "session", "tokens"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["tokens"]) == ("info", "turn", 3)


def test_text_on_a_terminal() -> None:
    """The line is no JSON and has the fields."""
    stream = Terminal()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("turn", session="s1")
    assert "turn" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_format_can_be_set() -> None:
    """``json`` on a terminal writes JSON, ``pretty`` elsewhere writes text without colors."""
    terminal, pipe = Terminal(), io.StringIO()
    logs.configure(log_format="json", stream=terminal)
    structlog.get_logger("x").info("turn")
    assert _lines(terminal)[0]["event"] == "turn"
    logs.configure(log_format="pretty", stream=pipe)
    structlog.get_logger("x").info("turn")
    assert "turn" in pipe.getvalue()
    assert "\x1b" not in pipe.getvalue()


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio", "anything.else"])
def test_standard_loggers_use_the_same_format(name: str) -> None:
    """A line has the logger's name and the formatted message."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger(name).warning("port %d", 3000)
    (line,) = _lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("port 3000", "warning", name)


def test_level_applies_to_both_kinds_of_logger() -> None:
    """Lines below it are dropped."""
    stream = io.StringIO()
    logs.configure(level="warning", stream=stream)
    structlog.get_logger("x").info("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    structlog.get_logger("x").warning("loud")
    logging.getLogger("uvicorn.error").error("louder")
    assert [line["event"] for line in _lines(stream)] == ["loud", "louder"]


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_secrets_are_redacted(log_format: logs.LogFormat) -> None:
    """They are under a revealing key, inside text, in an exception and in a library's record."""
    stream = io.StringIO()
    logs.configure(log_format=log_format, stream=stream)
    log = structlog.get_logger("x")
    log.info("a", api_key="hunter2-hunter2", token="plain-secret")
    log.info("b", header=f"Bearer {TOKEN}")
    logging.getLogger("uvicorn.error").warning("refused %s", TOKEN)
    try:
        raise ValueError(TOKEN)
    except ValueError:
        log.exception("c")
    text = stream.getvalue()
    assert "ic_k3x9_***" in text
    for secret in ("hunter2", "plain-secret", TOKEN):
        assert secret not in text


def test_token_counts_are_not_redacted() -> None:
    """Redaction applies to text only."""
    assert logs.redact(None, "info", {"token": 3, "tokens": 4}) == {"token": 3, "tokens": 4}


def test_exception_is_one_json_line() -> None:
    """The traceback is a field."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    try:
        raise KeyError("lost")
    except KeyError:
        structlog.get_logger("x").exception("failed")
        logging.getLogger("other").exception("failed too")
    first, second = _lines(stream)
    assert "KeyError: 'lost'" in first["exception"]
    assert "KeyError: 'lost'" in second["exception"]


def test_python_warnings_are_logged() -> None:
    """They are not written to the bare stream."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest replaces the warnings hook inside a test; capturing again restores the log's.
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", stacklevel=1)
        logging.captureWarnings(capture=False)
    (line,) = _lines(stream)
    assert line["logger"] == "py.warnings"


def test_unserialisable_values_become_text() -> None:
    """A path or an odd key does not lose the line."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("a", value={1: {2}})
    assert _lines(stream)[0]["value"] == {"1": "{2}"}


class GoneTerminal(Terminal):
    """A closed terminal: every write fails."""

    def write(self, _text: str) -> int:
        """Fail as the kernel does."""
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        """Fail as the kernel does."""
        raise OSError(errno.EIO, "Input/output error")


def test_closed_terminal_drops_lines() -> None:
    """The caller continues."""
    logs.configure(stream=GoneTerminal())
    structlog.get_logger().info("stopping", signal="SIGTERM")


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_journal_lines_have_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_format: logs.LogFormat
) -> None:
    """Lines of a traceback and of libraries have one too; lines of other streams have none."""
    path = tmp_path / "journal"
    with path.open("w") as journal:
        found = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        logs.configure(level="debug", log_format=log_format, stream=journal)
        log = structlog.get_logger("x")
        log.debug("a")
        log.info("b")
        logging.getLogger("uvicorn.error").warning("c")
        try:
            raise KeyError("lost")
        except KeyError:
            log.exception("d")
    written = path.read_text().splitlines()
    assert [line[:3] for line in written[:3]] == ["<7>", "<6>", "<4>"]
    assert {line[:3] for line in written[3:]} == {"<3>"}
    assert any("KeyError" in line for line in written[3:])
    elsewhere = io.StringIO()
    logs.configure(log_format=log_format, stream=elsewhere)
    log.error("e")
    assert not elsewhere.getvalue().startswith("<")
