"""Custom tools in chat completions, through the openai package on a server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from inferencecenter.api.body import checked
from inferencecenter.api.openai.chat import check, infer_of
from inferencecenter.api.openai.chat_schemas import ChatRequest
from inferencecenter.api.session_match import SessionMatch
from inferencecenter.protocol.values import NamedTool
from tests.api.openai.conversations import conversation
from tests.api.streaming import send_answer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

PATCH = '*** Begin Patch\n+say("hé 😀\\n")\n*** End Patch\n'
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: begin"}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "shell"}},
    {"type": "custom", "custom": {"name": "patch", "description": "Edit.", "format": GRAMMAR}},
]
PATCHED = f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>'
SHELL = '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'
ASKED: Any = [{"role": "user", "content": "Go"}]


def infer(**body: Any) -> Any:
    """Return the turn that a request maps to."""
    request = checked(ChatRequest, {"messages": ASKED, "tools": TOOLS, **body})
    check(request)
    return infer_of(request, SessionMatch("s_1", conversation(request).messages), 0)


def test_custom_tool_is_offered_and_chosen_as_a_function() -> None:
    """A request chooses it by its name, or allows it among others."""
    turn = infer(tool_choice={"type": "custom", "custom": {"name": "patch"}})
    assert turn.tools[1].parameters["required"] == ["input"]
    assert turn.tools[1].description == "Edit.\n\nThe input is text that matches this Lark grammar:\n\nstart: begin"
    assert turn.tool_choice == NamedTool(name="patch")
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    turn = infer(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [tool.name for tool in turn.tools] == ["patch"]


async def test_call_has_its_input_and_continues_its_session(server: Running, ada: AsyncOpenAI) -> None:
    """A history with the call that was answered is that of the session."""
    answer, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, tools=TOOLS), send_answer(server, SHELL, PATCHED)
    )
    message: Any = answer.choices[0].message
    assert [call.type for call in message.tool_calls] == ["function", "custom"]
    custom = message.tool_calls[1].custom
    assert (custom.name, custom.input) == ("patch", PATCH)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Done"} for call in message.tool_calls]
    said: Any = [*ASKED, message.to_dict(), *results]
    again, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=said, tools=TOOLS), send_answer(server, "It is done.")
    )
    assert again.choices[0].message.content == "It is done."
    assert len(server.context.sessions.session_ids()) == 1


async def test_input_is_streamed_unescaped(server: Running, ada: AsyncOpenAI) -> None:
    """The first delta of a custom call has its name, and the deltas join to the input; each call has its index."""

    async def stream() -> list[Any]:
        chunks = await ada.chat.completions.create(model="stub", messages=ASKED, tools=TOOLS, stream=True)
        deltas = [chunk.choices[0].delta.tool_calls or [] async for chunk in chunks if chunk.choices]
        return [each.to_dict() for calls in deltas for each in calls]

    deltas, _ = await asyncio.gather(stream(), send_answer(server, *PATCHED, *SHELL))
    first, *more = (delta for delta in deltas if delta["index"] == 0)
    assert (first["type"], first["custom"]["name"]) == ("custom", "patch")
    assert len(more) > 5
    assert "".join(delta["custom"]["input"] for delta in (first, *more)) == PATCH
    (shell, *_) = (delta for delta in deltas if delta["index"] == 1)
    assert (shell["type"], shell["function"]["name"]) == ("function", "shell")
