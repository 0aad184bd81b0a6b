"""Custom tools in responses, through the openai package on a server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.responses.request_schemas import CreateResponse
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.values import NamedTool
from inferencecenter.sessions.prefix_match import ArgumentComparison, same_message
from tests.api.responses import openai_types
from tests.api.responses.helpers import begin_turns, receive, send, socket, text_of
from tests.api.streaming import send_answer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

PATCH = '*** Begin Patch\n+say("hé 😀\\n")\n*** End Patch\n'
APPLY_PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
}
SHELL: Any = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
TOOLS: Any = [SHELL, APPLY_PATCH]


def called(name: str, arguments: str) -> list[str]:
    """Return the model's text of a call, a character each."""
    return list(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')


PATCHED = called("apply_patch", json.dumps({"input": PATCH}))


async def respond(server: Running, ada: AsyncOpenAI, texts: list[str], *, reason: str = "stop") -> Any:
    """Create a response that the engine answers with these texts."""
    response, _ = await asyncio.gather(
        ada.responses.create(input="Go", tools=TOOLS), send_answer(server, *texts, reason=reason)
    )
    return response


def read(*items: Any, **fields: Any) -> CreateResponse:
    """Return a validated request."""
    return checked(CreateResponse, {"input": [{"role": "user", "content": "Go"}, *items], "tools": TOOLS, **fields})


def test_custom_tool_is_offered_as_a_function() -> None:
    """The function has one argument, and the grammar in its description."""
    tool = (read().wire_tools or [])[1]
    assert (tool.name, tool.strict) == ("apply_patch", False)
    assert tool.description == (
        "Edit files.\n\nThe input is text that matches this Lark grammar:\n\nstart: begin hunk+ end"
    )
    assert tool.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }


def test_custom_tool_is_chosen_by_its_name() -> None:
    """It is the tool to call, or one of the allowed tools."""
    chosen = {"type": "custom", "name": "apply_patch"}
    assert read(tool_choice=chosen).wire_tool_choice == NamedTool(name="apply_patch")
    allowed = read(tool_choice={"type": "allowed_tools", "mode": "required", "tools": [chosen]})
    assert [tool.name for tool in allowed.wire_tools or ()] == ["apply_patch"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{**APPLY_PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
        ({"tools": [{**APPLY_PATCH, "format": {"type": "json"}}]}, "tools.0.format"),
        ({"tools": [{**APPLY_PATCH, "name": "a b"}]}, "tools.0.name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch"}]}, "input.0.input"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], named: str) -> None:
    """The error has its path in the request."""
    with pytest.raises(InferenceCenterError) as refusal:
        checked(CreateResponse, {"input": "Go", **fields})
    assert refusal.value.field == named


def test_calls_sent_back_equal_those_of_the_session() -> None:
    """They are equal whichever way the model escaped the input."""
    items: list[Any] = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
    ]
    _, call, result = read(*items).messages
    assert call.tool_calls is not None
    escaped = call.tool_calls[0].model_copy(update={"arguments": json.dumps({"input": PATCH}, indent=1)})
    assert same_message(call.model_copy(update={"tool_calls": (escaped,)}), call, ArgumentComparison())
    assert (result.role, result.content, result.tool_call_id) == ("tool", "Done", "c1")


async def test_call_is_an_item_with_its_input(server: Running, ada: AsyncOpenAI) -> None:
    """Calls of functions beside it stay as they are; a response that is retrieved has the same items."""
    made = await respond(server, ada, [*called("shell", "{}"), *PATCHED, *PATCHED])
    assert [item.type for item in made.output] == ["function_call", "custom_tool_call", "custom_tool_call"]
    assert [item.id.partition("_")[0] for item in made.output] == ["fc", "ctc", "ctc"]
    assert (made.output[1].name, made.output[1].input) == ("apply_patch", PATCH)
    openai_types.response(made.to_dict())
    assert made.tools[1].to_dict() == APPLY_PATCH
    assert (await ada.responses.retrieve(made.id)).output == made.output


async def test_streamed_input_is_that_of_the_item(server: Running, ada: AsyncOpenAI) -> None:
    """The deltas are unescaped characters, and the package's own accumulation agrees."""

    async def stream() -> tuple[list[Any], Any]:
        async with ada.responses.stream(model="stub", input="Go", tools=TOOLS) as events:
            return [event async for event in events], await events.get_final_response()

    (events, final), _ = await asyncio.gather(stream(), send_answer(server, *PATCHED))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert len(deltas) > 5
    assert "".join(deltas) == done.input == final.output[0].input == PATCH
    assert {event.item_id for event in events if hasattr(event, "delta")} == {final.output[0].id}


async def test_call_that_is_cut_off_has_the_input_so_far(server: Running, ada: AsyncOpenAI) -> None:
    """It is incomplete."""
    made = await respond(server, ada, PATCHED[:80], reason="length")
    (item,) = made.output
    assert (item.type, item.to_dict()["status"]) == ("custom_tool_call", "incomplete")
    assert item.input
    assert PATCH.startswith(item.input)


async def test_output_of_a_custom_tool_continues_the_response(server: Running, ada: AsyncOpenAI) -> None:
    """The model reads it as the result of its call, and the items of the input are of these types."""
    first = await respond(server, ada, PATCHED)
    output = {"type": "custom_tool_call_output", "call_id": first.output[0].call_id, "output": "Applied."}
    pending = asyncio.get_running_loop().create_task(
        ada.responses.create(input=[output], tools=TOOLS, previous_response_id=first.id)  # type: ignore[list-item]
    )
    (turn,) = await begin_turns(server)
    assert "Applied." in text_of(server.engine.submission(turn))
    server.engine.say(turn, "It is done.")
    server.engine.finish(turn)
    second = await pending
    assert second.output_text == "It is done."
    items: list[Any] = [item async for item in ada.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]
    assert (items[1].input, items[2].output) == (PATCH, "Applied.")


async def test_call_over_a_websocket(server: Running) -> None:
    """Each event has the form that the package knows."""
    async with socket(server) as connection:
        await send(connection, input="Go", tools=TOOLS)
        await send_answer(server, *PATCHED)
        event: dict[str, Any] = {"type": ""}
        deltas = []
        while event["type"] != "response.completed":
            event = await receive(connection)
            openai_types.event(event)
            if event["type"] == "response.custom_tool_call_input.delta":
                deltas.append(event["delta"])
    assert "".join(deltas) == event["response"]["output"][0]["input"] == PATCH


@pytest.mark.parametrize(
    ("definition", "left"),
    [("[0-9]+", []), ("(?=a)b", ["the schema of the tool dial is enforced without pattern at properties.input"])],
)
async def test_regular_expression_is_enforced_or_named(
    server: Running, ada: AsyncOpenAI, definition: str, left: list[str]
) -> None:
    """One that the daemon cannot enforce is left to the model, with a warning."""
    tool: Any = {
        "type": "custom",
        "name": "dial",
        "format": {"type": "grammar", "syntax": "regex", "definition": definition},
    }
    pending = asyncio.get_running_loop().create_task(ada.responses.create(input="Go", tools=[tool]))
    (turn,) = await begin_turns(server)
    grammar = server.engine.submission(turn).grammar
    assert grammar is not None
    assert (json.dumps(f"^(?:{definition})$") in grammar.text) != bool(left)
    server.engine.finish(turn)
    warnings = (await pending).to_dict().get("warnings", [])
    assert [warning.partition(":")[0] for warning in warnings] == left  # type: ignore[attr-defined]
