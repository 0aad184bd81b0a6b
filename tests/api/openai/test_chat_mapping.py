"""Mapping of chat completion requests: every field is applied, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.openai.chat import check, infer_of
from inferencecenter.api.openai.chat_schemas import ChatRequest
from inferencecenter.api.session_match import SessionMatch
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params_model import MAX_SEED
from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, NamedTool, Tool, ToolCall
from tests.api.openai.conversations import conversation

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
    return infer_of(request, SessionMatch("s_1", conversation(request).messages[-1:]), choice)


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
        ({"max_tokens": -1}, {}),
        ({"max_tokens": 1, "max_completion_tokens": 2}, {"max_tokens": 2}),
        ({"n_predict": 4}, {"max_tokens": 4}),
        ({"top_k": -1, "min_p": 0.1, "typical_p": 0.9}, {"top_k": 0, "min_p": 0.1, "typical_p": 0.9}),
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, {"repeat_penalty": 1.2}),
        (
            {"mirostat": 2, "mirostat_tau": 4, "ignore_eos": True},
            {"mirostat": 2, "mirostat_tau": 4, "ignore_eos": True},
        ),
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
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages.0.refusal"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages.0.role"),
        ({"messages": [HI, CALLED]}, "messages.1.role"),
        (
            {"messages": [HI, {"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}]},
            "messages.1.role",
        ),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "c9"}]}, "messages.0.tool_call_id"),
        ({"temperature": 5.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": True}, "top_p"),
        ({"temperature": 1, "params": {"temperature": 1}}, "params.temperature"),
        ({"max_tokens": 5, "params": {"n_predict": 5}}, "params.max_tokens"),
        ({"params": {"min_p": 7}}, "params.min_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
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
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools.0.custom.format",
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "sub"}}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [ADD]}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"}'}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [ADD]}, "tool_choice"),
        (
            {
                "tools": [ADD],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]},
                },
            },
            "tool_choice",
        ),
        ({"functions": [ADD["function"]], "tools": [ADD]}, "functions"),
        ({"functions": [ADD["function"]], "function_call": {"name": "sub"}}, "tool_choice"),
        ({"function_call": "sometimes"}, "function_call"),
        ({"messages": [{"role": "function", "name": "add", "content": "3"}]}, "messages.0.role"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
        ({"top_k": 1.5}, "top_k"),
        ({"mirostat": 3}, "mirostat"),
        ({"tool_choice": {"type": "function"}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "function": {"name": "add"}}, "tools": [ADD]}, "tool_choice"),
    ],
)
def test_unsupported_field_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    """The error names the field as the client wrote it."""
    with pytest.raises(InferenceCenterError) as caught:
        conversation(read(**body))
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
    assert conversation(mapped).messages == (
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
    assert conversation(request).metadata == {
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
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, SCHEMA),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
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
    assert turn.tools == [Tool(name="add", parameters={"type": "object"}, strict=False)]
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


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"json_schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": '{"type": "string"}'}, {"json_schema": {"type": "string"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_grammar": "start: 'a'"}, {"grammar": "start: 'a'"}),
        ({"guided_choice": ["yes", "no."]}, {"regex": r"(yes|no\.)"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"regex": "(a)"}),
        ({"structured_outputs": {"grammar": "start: 'a'"}}, {"grammar": "start: 'a'"}),
    ],
)
def test_forms_of_llama_server_and_vllm_are_mapped(body: dict[str, Any], form: dict[str, Any]) -> None:
    """A schema, an expression, a grammar or a choice constrains the output under any of its names."""
    turn = infer(**body)
    assert {name: getattr(turn, name) for name in form} == form


def test_allowed_tools_are_the_only_ones_offered() -> None:
    """The model is offered the allowed subset, and its mode is the tool choice."""
    other = {"type": "function", "function": {"name": "sub"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "sub"}}]}
    turn = infer(tools=[ADD, other], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (turn.tools, turn.tool_choice) == ([Tool(name="sub", strict=False)], "required")


def test_legacy_functions_are_tools() -> None:
    """Functions are offered as tools, at most one is called, and earlier calls and results refer to each other."""
    body: dict[str, Any] = {
        "functions": [ADD["function"]],
        "function_call": {"name": "add"},
        "messages": [
            HI,
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
            {"role": "function", "name": "add", "content": "3"},
        ],
    }
    turn = infer(**body)
    assert (turn.tools, turn.tool_choice) == (
        [Tool(name="add", parameters={"type": "object"}, strict=False)],
        NamedTool(name="add"),
    )
    assert not turn.parallel_tool_calls
    _, call, result = conversation(read(**body)).messages
    assert call.tool_calls == (ToolCall(call_id="call_1", name="add", arguments="{}"),)
    assert (result.role, result.tool_call_id) == ("tool", "call_1")


@pytest.mark.parametrize(
    ("options", "thinking"), [({"enable_thinking": False}, False), ({"thinking": True}, True), ({}, None)]
)
def test_template_options_decide_on_thinking(options: dict[str, Any], thinking: bool | None) -> None:
    """They are those of vLLM and llama-server; ``reasoning_effort`` takes precedence."""
    assert infer(chat_template_kwargs=options).thinking == thinking
    assert infer(chat_template_kwargs=options, reasoning_effort="high").thinking is True


def test_empty_messages_are_accepted() -> None:
    """A message without content is empty."""
    messages = conversation(read(messages=[{"role": "assistant", "tool_calls": []}, {"role": "user"}])).messages
    assert [message.content for message in messages] == ["", ""]


def test_more_calls_than_a_message_can_hold_are_refused() -> None:
    """A message with 128 calls and a legacy call is refused."""
    calls = [{**CALL, "id": f"c{n}"} for n in range(128)]
    legacy = {"name": "add", "arguments": "{}"}
    request = read(messages=[{"role": "assistant", "tool_calls": calls, "function_call": legacy}, HI])
    with pytest.raises(InferenceCenterError) as refused:
        conversation(request)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "messages.0.tool_calls")


def test_empty_reasoning_of_a_user_is_none() -> None:
    """Some clients send all fields with every message."""
    request = read(messages=[{**HI, "reasoning_content": ""}])
    assert conversation(request).messages == (ChatMessage(role="user", content="Hi"),)


def test_values_of_a_schema_as_text_are_counted() -> None:
    """The body has the schema as a single string, so its values are counted separately."""
    with pytest.raises(InferenceCenterError) as refused:
        read(guided_json='{"enum":[' + "[]," * 200_000 + "1]}")
    assert refused.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize(
    "body", [{"guided_choice": ["a" * 4096] * 17}, {"structured_outputs": {"choice": ["a" * 4096] * 17}}]
)
def test_choices_are_limited_in_total(body: dict[str, Any]) -> None:
    """Each choice that is used is escaped, so their total size is bounded."""
    with pytest.raises(InferenceCenterError, match="characters in total"):
        read(**body)
