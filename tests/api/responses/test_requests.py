"""Responses requests: accepted fields, refused fields and their mapping to a session."""

from __future__ import annotations

from typing import Any

import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.responses.request_schemas import CancelOnSocket, CreateOnSocket, CreateResponse
from inferencecenter.api.responses.serializers import ResponseRef, item_id, read_response_id, response_id
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, NamedTool, ToolCall

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
LOGPROBS = ["message.output_text.logprobs"]


def read(**fields: Any) -> CreateResponse:
    """Return a validated request."""
    return checked(CreateResponse, {"input": "Hello", **fields})


def test_plain_text_input_is_a_user_message() -> None:
    """A text as input is one message of the user."""
    assert read().messages == (ChatMessage(role="user", content="Hello"),)


def test_input_items_become_messages() -> None:
    """Message items may be short or full, with or without a type; the role developer becomes system."""
    request = read(
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "msg_1"},
            {"role": "user", "content": "c"},
        ]
    )
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ([{"role": "user", "content": "a"}] * 10_001, "input", "list should have at most"),
        ([{"type": "frob"}], "input.0", "input.0 has the type 'frob', which is none of 'message', "),
        (5, "input", "input should be a valid string"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text", "is missing"),
    ],
)
def test_error_is_about_the_branch_that_was_meant(given: Any, field: str, message: str) -> None:
    """Input is a text or a list; a list is not refused for being no text."""
    with pytest.raises(InferenceCenterError) as refused:
        checked(CreateResponse, {"input": given})
    assert refused.value.field == field
    assert message in refused.value.message


def test_reasoning_text_and_calls_become_one_message() -> None:
    """A response sent back as input equals the stored message."""
    request = read(
        input=[
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        ]
    )
    calls = tuple(ToolCall(call_id=name, name="look", arguments="{}") for name in ("c1", "c2"))
    assert request.messages == (
        ChatMessage(role="user", content="a"),
        ChatMessage(role="assistant", content="Let me see.", reasoning="hm", tool_calls=calls),
        ChatMessage(role="tool", content="x", tool_call_id="c1"),
        ChatMessage(role="tool", content="y", tool_call_id="c2"),
    )


def test_consecutive_answers_stay_separate() -> None:
    """Reasoning without an answer is dropped."""
    request = read(
        input=[
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"role": "user", "content": "c"},
        ]
    )
    assert [message.content for message in request.messages] == ["a", "b", "c"]
    assert request.messages[1].reasoning is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_image"}]}]},
            "input.1.content.0",
        ),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input.0",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"service_tier": "ultrafast"}, "service_tier"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"truncation": "always"}, "truncation"),
        ({"tools": [{**TOOL, "name": "look\nat"}]}, "tools.0.name"),
    ],
)
def test_unsupported_field_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    """No field is parsed and ignored."""
    with pytest.raises(InferenceCenterError) as refusal:
        read(**fields)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
    assert refusal.value.field == named


def test_null_means_absent() -> None:
    """This includes unknown and nested fields."""
    request = read(conversation=None, temperature=None, text={"format": None}, tools=[{**TOOL, "description": None}])
    assert (request.temperature, request.json_schema) == (None, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
        ({"include": LOGPROBS}, 1),
        ({"include": LOGPROBS, "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_are_requested_in_two_ways(fields: dict[str, Any], expected: int | None) -> None:
    """Logprobs of the sampled tokens alone need one internal alternative, which is not returned."""
    assert read(**fields).n_probs == expected


def test_text_formats_are_mapped() -> None:
    """``json_object`` allows any JSON object, ``json_schema`` what its schema accepts."""
    assert read(text={"format": {"type": "json_object"}}).json_schema == {"type": "object"}
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "array"}, "strict": True}
    assert read(text={"format": schema}).json_schema == {"type": "array"}


def test_tool_choice_is_mapped() -> None:
    """A choice names one function or a set of allowed tools; an allowed tool that is not offered is refused."""
    other = {**TOOL, "name": "wait"}
    named = read(tools=[TOOL], tool_choice={"type": "function", "name": "look"})
    assert named.wire_tool_choice == NamedTool(name="look")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]}
    some = read(tools=[TOOL, other], tool_choice=allowed)
    assert some.wire_tool_choice == "required"
    assert [tool.name for tool in some.wire_tools or ()] == ["wait"]
    with pytest.raises(InferenceCenterError, match="not among the tools"):
        read(tools=[TOOL], tool_choice=allowed)


def test_background_requires_store() -> None:
    """A background response that is not stored could not be retrieved."""
    with pytest.raises(InferenceCenterError, match="background requires store"):
        read(background=True, store=False)


def test_websocket_refuses_background() -> None:
    """WebSocket requests stream whether ``stream`` is given or not."""
    assert checked(CreateOnSocket, {"type": "response.create", "stream": True, "background": False}).stream
    for name, value in (("background", True), ("stream", False), ("stream_id", ""), ("stream_id", "x" * 65)):
        with pytest.raises(InferenceCenterError, match=name):
            checked(CreateOnSocket, {"type": "response.create", name: value})
    assert checked(CancelOnSocket, {"type": "response.cancel"}).response_id is None


def test_response_id_encodes_its_location() -> None:
    """Ids round-trip, and other texts are no ids."""
    ref = ResponseRef("s_" + "a-_b" * 5 + "cd", "t_" + "e" * 22)
    assert read_response_id(response_id(ref)) == ref
    assert item_id("msg", ref.turn_id, 1) == "msg_" + "e" * 22 + "_1"
    for name in ("", "resp_", "resp_" + "a" * 43, "resp_" + "a" * 45, "resp_" + "ä" * 44, response_id(ref) + "\n"):
        with pytest.raises(InferenceCenterError) as refusal:
            read_response_id(name)
        assert refusal.value.code is ErrorCode.TURN_NOT_FOUND


def test_more_calls_than_a_message_can_hold_are_refused() -> None:
    """Consecutive calls are one message."""
    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    with pytest.raises(InferenceCenterError) as refused:
        read(input=[{**call, "call_id": f"c{n}"} for n in range(129)])
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "input")
