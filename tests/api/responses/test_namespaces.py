"""Tools in namespaces, as agents send them, through the openai package on a server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.responses.request_schemas import CreateResponse, called_name
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.values import NamedTool
from tests.api.responses.helpers import begin_turns, text_of
from tests.api.responses.test_custom_tool_calls import called
from tests.api.streaming import send_answer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
NOTE: Any = {"type": "custom", "name": "note"}
CRM: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [LOOK, NOTE]}


def read(**fields: Any) -> CreateResponse:
    """Return a validated request."""
    return checked(CreateResponse, {"input": "Go", "tools": [LOOK, CRM], **fields})


def test_tools_of_a_namespace_are_offered_by_both_names() -> None:
    """Beside one of the same name that is in none; the description of the namespace is part of each."""
    tools = {tool.name: tool.description for tool in read().wire_tools or ()}
    assert tools == {
        "look": None,
        "crm__look": "Part of crm: Customers.",
        "crm__note": "The input is plain text.\n\nPart of crm: Customers.",
    }


@pytest.mark.parametrize(
    ("namespace", "name", "expected"),
    [(None, "look", "look"), ("crm", "look", "crm__look"), ("mcp__files__", "read", "mcp__files__read")],
)
def test_called_name_has_the_namespace(namespace: str | None, name: str, expected: str) -> None:
    """A namespace that ends with a separator gets no other separator."""
    assert called_name(namespace, name) == expected


def test_long_names_stay_apart() -> None:
    """A name has at most 64 characters."""
    names = {called_name("n" * 60, f"{'x' * 50}{number}") for number in range(3)}
    assert {len(name) for name in names} == {64}
    assert len(names) == 3


def test_tool_of_a_namespace_is_chosen_by_its_name() -> None:
    """The name also works in a list of allowed tools."""
    chosen = {"type": "custom", "name": "note"}
    assert read(tool_choice=chosen).wire_tool_choice == NamedTool(name="crm__note")
    allowed = read(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [chosen]})
    assert [tool.name for tool in allowed.wire_tools or ()] == ["crm__note"]


def test_invalid_tool_of_a_namespace_is_named() -> None:
    """The error has its path in the request; a namespace contains no other namespace."""
    for inner, field in (({**LOOK, "name": "a b"}, "tools.0.tools.0.name"), (CRM, "tools.0.tools.0")):
        with pytest.raises(InferenceCenterError) as refused:
            read(tools=[{**CRM, "tools": [inner]}])
        assert (refused.value.field or "").startswith(field)


async def test_call_names_its_namespace(server: Running, ada: AsyncOpenAI) -> None:
    """The namespace is in the response, retrieved or streamed, and in the prompt of the next request."""
    tools: Any = [LOOK, CRM]
    for name, namespace in (("look", None), ("crm__look", "crm"), ("crm__note", "crm")):
        arguments = json.dumps({"input": "x"} if name == "crm__note" else {})
        response, _ = await asyncio.gather(
            ada.responses.create(input="Go", tools=tools), send_answer(server, *called(name, arguments))
        )
        (call,) = response.output
        assert call.type == ("custom_tool_call" if name == "crm__note" else "function_call")
        assert (call.namespace, call.name) == (namespace, name.removeprefix("crm__"))
        assert ("namespace" in call.to_dict()) == (namespace is not None)
        assert (await ada.responses.retrieve(response.id)).output == response.output
        assert response.tools[1].to_dict()["name"] == "crm"
        stream, _ = await asyncio.gather(
            ada.responses.create(input="Go", tools=tools, stream=True), send_answer(server, *called(name, arguments))
        )
        items = [event.item async for event in stream if event.type == "response.output_item.done"]
        assert [(item.type, getattr(item, "namespace", None)) for item in items] == [(call.type, namespace)]
    items_sent: Any = [
        {"role": "user", "content": "Go"},
        {"type": "function_call", "call_id": "c1", "namespace": "crm", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Nothing"},
    ]
    pending = asyncio.get_running_loop().create_task(ada.responses.create(input=items_sent, tools=tools, store=False))
    (turn,) = await begin_turns(server)
    assert '{"name": "crm__look", "arguments": {}}' in text_of(server.engine.submission(turn))
    server.engine.finish(turn)
    await pending
