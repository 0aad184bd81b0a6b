"""Tests of the log set-up."""

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
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the loggers of other tests as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_stream_that_is_no_terminal_gets_json_lines() -> None:
    """Each line is an object with an ISO time in UTC, level and event first, then the fields."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("turn", session="s1", tokens=3)
    (line,) = _lines(stream)
    assert list(line) == ["timestamp", "level", "event", "session", "tokens"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["tokens"]) == ("info", "turn", 3)


def test_a_terminal_gets_text() -> None:
    """On a terminal the line is no JSON and carries the fields."""
    stream = Terminal()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("turn", session="s1")
    assert "turn" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_the_format_can_be_forced() -> None:
    """``json`` on a terminal writes JSON, ``pretty`` elsewhere writes text without colours."""
    terminal, pipe = Terminal(), io.StringIO()
    logs.configure(log_format="json", stream=terminal)
    structlog.get_logger("x").info("turn")
    assert _lines(terminal)[0]["event"] == "turn"
    logs.configure(log_format="pretty", stream=pipe)
    structlog.get_logger("x").info("turn")
    assert "turn" in pipe.getvalue()
    assert "\x1b" not in pipe.getvalue()


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio", "anything.else"])
def test_standard_loggers_are_written_the_same_way(name: str) -> None:
    """A record of the standard library becomes a line with the logger's name and its arguments filled in."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    logging.getLogger(name).warning("port %d", 3000)
    (line,) = _lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("port 3000", "warning", name)


def test_the_level_holds_for_both_kinds_of_logger() -> None:
    """Lines below the level are not written, whichever logger they come from."""
    stream = io.StringIO()
    logs.configure(level="warning", stream=stream)
    structlog.get_logger("x").info("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    structlog.get_logger("x").warning("loud")
    logging.getLogger("uvicorn.error").error("louder")
    assert [line["event"] for line in _lines(stream)] == ["loud", "louder"]


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_secrets_are_not_written(log_format: logs.LogFormat) -> None:
    """A token is replaced under a telling key, inside text, in an exception and in a foreign record."""
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


def test_numbers_of_tokens_are_kept() -> None:
    """Redaction goes by text: a count under ``token`` is no secret."""
    assert logs.redact(None, "info", {"token": 3, "tokens": 4}) == {"token": 3, "tokens": 4}


def test_an_exception_becomes_one_json_line() -> None:
    """The traceback is a field, so that a line stays a line."""
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


def test_warnings_are_logged() -> None:
    """A Python warning goes to the log and not to the bare stream."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest shows warnings its own way inside a test; capturing again puts the log's way back.
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", stacklevel=1)
        logging.captureWarnings(capture=False)
    (line,) = _lines(stream)
    assert line["logger"] == "py.warnings"


def test_values_that_json_lacks_become_text() -> None:
    """A path or an odd key does not lose the line."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    structlog.get_logger("x").info("a", value={1: {2}})
    assert _lines(stream)[0]["value"] == {"1": "{2}"}


class GoneTerminal(Terminal):
    """A terminal that was closed: whatever is written to it fails."""

    def write(self, _text: str) -> int:
        """Fail as the kernel does."""
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        """Fail as the kernel does."""
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_gone_stops_nobody() -> None:
    """A line that cannot be written is dropped; the caller continues."""
    logs.configure(stream=GoneTerminal())
    structlog.get_logger().info("stopping", signal="SIGTERM")


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_lines_of_the_journal_have_their_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_format: logs.LogFormat
) -> None:
    """Each line of a traceback too, and of foreign loggers; what the journal does not read has none."""
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
