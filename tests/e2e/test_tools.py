"""Tool calls and structured output of the demo model, through the client."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.client import Answer, Client, result
from inferencecenter.protocol.events import End, ToolCall
from inferencecenter.protocol.values import Tool
from tests.e2e.harness import connect_client, run_daemon, start_daemon

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

WEATHER = Tool(
    name="get_weather",
    description="Get the current weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
GREEDY = {"temperature": 0.0, "max_tokens": 64}
QUESTION = "What is the weather in Oslo?"


async def test_tool_call_and_result(daemon: Daemon) -> None:
    """One turn ends in the call, the next uses the result, and only the new tokens are prefilled."""
    async with Client(daemon.url, token=daemon.admin_token) as client:
        session = await client.create_session()
        asked = await session.ask(QUESTION, params=GREEDY, tools=[WEATHER])
        assert asked.end is not None
        assert (asked.content, asked.end.finish_reason) == ("", "tool_calls")
        (call,) = asked.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
        returned = [result(call, '{"temperature": 21, "sky": "sunny"}')]
        answer = await session.ask(messages=returned, params=GREEDY, tools=[WEATHER])
        assert answer.end is not None
        assert "21" in answer.content
        assert answer.end.usage.cached_tokens >= asked.end.usage.prompt_tokens - 1
    async with connect_client(daemon) as socket:
        kept = await socket.ask(op="get_session", session_id=session.session_id)
    assert [message["role"] for message in kept["transcript"]] == ["user", "assistant", "tool", "assistant"]
    assert kept["transcript"][1]["tool_calls"] == [call.model_dump()]


async def test_answers_match_schema_and_regex(daemon: Daemon) -> None:
    """Answers follow a JSON Schema and a regular expression."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    async with Client(daemon.url, token=daemon.admin_token) as client:
        session = await client.create_session()
        answer = await session.ask("Tell me a short story.", params=GREEDY, json_schema=schema)
        assert set(json.loads(answer.content)) == {"n", "ok"}
        answer = await session.ask("Tell me more.", params=GREEDY, regex="(yes|no), [0-9]{3}")
    assert answer.content[:3] in ("yes", "no,")


@pytest.mark.slow
async def test_tool_call_resumes_in_the_next_daemon(tmp_path: Path, demo_model_path: Path) -> None:
    """After a kill during a call the next daemon completes it; no part is lost or repeated."""
    state_dir = tmp_path / "state"
    whole = Answer()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(run_daemon(state_dir, demo_model_path))
        second: Daemon | None = None
        async with Client(first.url, token=first.admin_token) as client:
            session = await client.create_session()
            stream = session.infer(QUESTION, params=GREEDY, tools=[WEATHER])
            async for event in stream.events():
                whole.apply(event)
                if isinstance(event, ToolCall) and event.arguments and second is None:
                    first.process.kill()
                    first.process.wait()
                    port = {"INFERENCECENTER_SERVER__PORT": str(first.port)}
                    second = replace(start_daemon(state_dir, demo_model_path, **port), port=first.port)
                    stack.callback(second.process.wait)
                    stack.callback(second.process.kill)
    (call,) = whole.tool_calls
    assert json.loads(call.arguments) == {"city": "Oslo"}
    assert isinstance(whole.end, End)
    assert whole.end.finish_reason == "tool_calls"
