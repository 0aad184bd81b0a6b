"""Mapping of chat completion requests: every field is applied, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.openai.chat import check, conversation_of, infer_of
from inferencecenter.api.openai.chat_schemas import ChatRequest
from inferencecenter.api.session_match import SessionMatch
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params_model import MAX_SEED
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, NamedTool, Tool, ToolCall

HI = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "null", "default": None}}}


def read(**body: Any) -> ChatRequest:
    """Return a validated request."""
    request = checked(ChatRequest, {"messages": [HI], **body})
    check(request)
    return request


def infer(*, choice: int = 0, **body: Any) -> Infer:
    """Return the turn that a request maps to."""
    request = read(**body)
    return infer_of(request, SessionMatch("s_1", conversation_of(request).messages[-1:]), choice)


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.5, "top_p": 0.5}, {"temperature": 1.5, "top_p": 0.5}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": MAX_SEED}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
        ({"logprobs": True}, {"n_probs": 1}),
        ({"logprobs": True, "top_logprobs": 5}, {"n_probs": 5}),
        ({"logprobs": False}, {}),
        ({"params": {"min_p": 0.1}, "top_p": 0.5}, {"min_p": 0.1, "top_p": 0.5}),
        ({"params": {"stopping": {"max_time_ms": 5}}}, {"stopping": {"max_time_ms": 5}}),
        ({"temperature": None, "stop": None, "n": None, "tools": None, "audio": None, "stream": None}, {}),
    ],
)
def test_sampling_parameters_are_mapped(body: dict[str, Any], params: dict[str, Any]) -> None:
    """OpenAI's parameters become the daemon's, and null means absent."""
    assert infer(**body).params == params


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "x", "name": "ada"}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages.0.refusal"),
        ({"messages": [HI, {"role": "assistant", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c9"}]}, "messages.0.tool_call_id"),
        (
            {"messages": [HI, CALLED, {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "sub"}]},
            "messages.2.name",
        ),
        ({"functions": []}, "functions"),
        ({"temperature": 5.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": True}, "top_p"),
        ({"temperature": 1, "params": {"temperature": 1}}, "params.temperature"),
        ({"max_tokens": 5, "params": {"n_predict": 5}}, "params.max_tokens"),
        ({"params": {"min_p": 7}}, "params.min_p"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"store": True}, "store"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(16)}, "user": "x"}, "metadata"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"regex": "a", "tools": [ADD]}, "regex"),
        ({"response_format": {"type": "json_object"}, "tools": [ADD]}, "response_format"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"}'}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "function": {"name": "add"}}, "tools": [ADD]}, "tool_choice"),
    ],
)
def test_unsupported_field_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    """The error names the field as the client wrote it."""
    with pytest.raises(InferenceCenterError) as caught:
        conversation_of(read(**body))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, field)


def test_messages_of_all_roles_are_mapped() -> None:
    """Developer becomes system, content parts become lines, and reasoning and tool calls are kept."""
    mapped = read(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {**CALLED, "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
        ]
    )
    assert conversation_of(mapped).messages == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="one\ntwo"),
        ChatMessage(
            role="assistant",
            content="",
            reasoning="hm",
            tool_calls=(ToolCall(call_id="c1", name="add", arguments='{"a":1}'),),
        ),
        ChatMessage(role="tool", content="3", tool_call_id="c1"),
    )


def test_user_is_stored_as_metadata() -> None:
    """OpenAI's user identifiers are stored beside the metadata."""
    request = read(user="u", safety_identifier="s", prompt_cache_key="k", metadata={"topic": "x"})
    assert conversation_of(request).metadata == {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "topic": "x",
    }


def test_each_choice_has_its_own_seed() -> None:
    """Choices of one seeded request differ, and are reproducible."""
    assert [infer(seed=MAX_SEED, n=3, choice=choice).params for choice in range(3)] == [
        {"seed": MAX_SEED},
        {"seed": 0},
        {"seed": 1},
    ]


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": False}}, {"type": "object"}),
    ],
)
def test_response_format_is_mapped_to_a_schema(wanted: dict[str, Any], schema: object) -> None:
    """A schema is taken verbatim, including its nulls; JSON mode accepts any object."""
    assert infer(response_format=wanted).json_schema == schema


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "add"}}, NamedTool(name="add")),
    ],
)
def test_tools_and_tool_choice_are_mapped(choice: Any, meant: object) -> None:
    """Functions become tools, and the tool choice is kept."""
    turn = infer(tools=[ADD], tool_choice=choice, parallel_tool_calls=False)
    assert turn.tools == [Tool(name="add", parameters={"type": "object"})]
    assert (turn.tool_choice, turn.parallel_tool_calls) == (meant, False)


@pytest.mark.parametrize(
    ("body", "thinking", "priority"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none", "service_tier": "auto"}, False, None),
        ({"reasoning_effort": "minimal", "service_tier": "flex"}, True, "batch"),
        ({"reasoning_effort": "high", "service_tier": "priority"}, True, "interactive"),
    ],
)
def test_reasoning_effort_and_service_tier_are_mapped(
    body: dict[str, Any], thinking: bool | None, priority: str | None
) -> None:
    """They decide whether the model thinks, and the priority."""
    turn = infer(**body)
    assert (turn.thinking, turn.priority) == (thinking, priority)


def test_grammar_is_allowed_with_tool_choice_none() -> None:
    """A grammar excludes tools only if a call is possible."""
    assert infer(regex="a+", tools=[ADD], tool_choice="none").regex == "a+"
