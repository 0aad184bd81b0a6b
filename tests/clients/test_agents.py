"""Agents on the command line do a task: they read a file, change it, run a command and finish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.client_programs import CLAUDE_CODE, CODEX, FIXED, OPENAI_MODEL, PROGRAMS, install, run

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

pytestmark = [pytest.mark.extra, pytest.mark.timeout(1500)]


def events(output: str) -> list[Any]:
    """Return the lines that are JSON objects."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("transport", ["HTTP", "WebSocket"])
def test_codex_does_a_task(transport: str, daemon: Daemon, installed_clients: Path, tmp_path: Path) -> None:
    """Its commands run, their results are answered, and each request finds the one before it in KV."""
    frames = daemon.metric("frames_in_total")
    output = run(
        CODEX, install(CODEX, installed_clients), daemon, tmp_path, str(transport == "WebSocket").lower(), "script"
    )
    items = [event["item"] for event in events(output) if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [command["command"].split("'")[1] for command in commands] == CODEX.expected["tools"]
    assert [command["exit_code"] for command in commands] == [0, 0, 0]
    assert items[-1] == {"id": items[-1]["id"], "type": "agent_message", "text": FIXED}
    assert (tmp_path / "work/notes.txt").read_text() == "Hello, world\n"
    (ended,) = (event for event in events(output) if event["type"] == "turn.completed")
    assert ended["usage"]["cached_input_tokens"] > ended["usage"]["input_tokens"] / 2
    assert (daemon.metric("frames_in_total") > frames) == (transport == "WebSocket")


def test_codex_applies_a_patch(daemon: Daemon, installed_clients: Path, tmp_path: Path) -> None:
    """With a model of OpenAI it changes a file by its free-form tool, whose call and output come back as sent."""
    output = run(CODEX, install(CODEX, installed_clients), daemon, tmp_path, "false", OPENAI_MODEL)
    items = [event["item"] for event in events(output) if event["type"] == "item.completed"]
    (change,) = (item for item in items if item["type"] == "file_change")
    assert [(Path(each["path"]).name, each["kind"]) for each in change["changes"]] == [("notes.txt", "update")]
    assert items[-1]["text"] == FIXED
    assert (tmp_path / "work/notes.txt").read_text() == "Hello, world\n"
    (ended,) = (event for event in events(output) if event["type"] == "turn.completed")
    assert ended["usage"]["cached_input_tokens"] > ended["usage"]["input_tokens"] / 2


def test_codex_calls_a_tool_of_an_mcp_server(daemon: Daemon, installed_clients: Path, tmp_path: Path) -> None:
    """It offers the server's tools in a namespace, and finds its own tool by the namespace and name of the call."""
    program = (PROGRAMS / "codex_mcp.sh").read_text(encoding="utf-8")
    output = run(CODEX, install(CODEX, installed_clients), daemon, tmp_path, text=program)
    items = [event["item"] for event in events(output) if event["type"] == "item.completed"]
    (call,) = (item for item in items if item["type"] == "mcp_tool_call")
    assert (call["server"], call["tool"], call["arguments"]) == ("almanac", "tide", {"harbour": "Bergen"})
    assert (call["status"], call["result"]["content"][0]["text"]) == ("completed", "Bergen: 14:05")
    assert items[-1]["text"] == "At 14:05."


def test_claude_code_does_a_task(daemon: Daemon, installed_clients: Path, tmp_path: Path, work: Path) -> None:
    """Its own tools read, edit and run, and each request finds the one before it in KV."""
    output = run(CLAUDE_CODE, install(CLAUDE_CODE, installed_clients), daemon, tmp_path, str(work))
    *_, result = events(output)
    assert (result["type"], result["is_error"], result["result"]) == ("result", False, FIXED)
    answers = [event["message"]["content"] for event in events(output) if event["type"] == "assistant"]
    blocks = [block for content in answers for block in content]
    assert [block["name"] for block in blocks if block["type"] == "tool_use"] == CLAUDE_CODE.expected["tools"]
    assert (work / "notes.txt").read_text() == "Hello, world\n"
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 2 * usage["input_tokens"]
