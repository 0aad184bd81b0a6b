"""Requests of the Messages API as conversations, and events of a turn as blocks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.anthropic import messages
from inferencecenter.api.anthropic.message_schemas import MESSAGE_FIELDS, MessagesRequest
from inferencecenter.api.anthropic.messages import (
    MessageCollector,
    MessageEventWriter,
    conversation_of,
    infer_of,
)
from inferencecenter.api.body import checked
from inferencecenter.api.foreign_fields import FieldReport
from inferencecenter.api.message_images import user_message
from inferencecenter.api.session_match import SessionMatch
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage, MessageImagePart, MessageInParts, MessageTextPart, NamedTool
from inferencecenter.sessions.history import plain_messages
from tests.api.openai.events import end, reasoning_token, token, tool_call_delta

if TYPE_CHECKING:
    from inferencecenter.protocol.base import Event

USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
WEATHER = {"name": "weather", "description": "Weather", "input_schema": {"type": "object"}}


def request(**fields: Any) -> MessagesRequest:
    """Return a validated request."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return checked(MessagesRequest, body, context=FieldReport(MESSAGE_FIELDS, strict=False))


def told(*messages: Any, **fields: Any) -> list[tuple[str, str]]:
    """Return the roles and contents of a conversation."""
    return [
        (said.role, said.content)
        for said in plain_messages(conversation_of(request(messages=list(messages), **fields)))
    ]


def test_text_blocks_are_joined_as_lines() -> None:
    """Text blocks of the system prompt and of messages become lines; a document begins with its title."""
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    assert told(
        {"role": "user", "content": [{"type": "text", "text": "a"}, document]},
        system=[{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    ) == [("system", "one\ntwo"), ("user", "a\nT\nbody")]


def test_results_of_a_search_are_text() -> None:
    """A search result becomes text with its title and source, in a message and in a tool result."""
    found = {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "body"}]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [found]}
    assert told(
        {"role": "user", "content": [found, {"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result]},
    ) == [("user", "T\ns\nbody\nWhy?"), ("assistant", ""), ("tool", "T\ns\nbody")]


def test_message_of_the_assistant_at_the_end_is_the_start_of_the_answer() -> None:
    """It is not part of the conversation, and an empty one begins nothing."""
    blocks = [{"type": "text", "text": "The "}, {"type": "text", "text": "capital"}]
    for content, expected in ((blocks, "The capital"), ("{", "{"), ("", None)):
        asked = request(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}])
        conversation = plain_messages(conversation_of(asked))
        assert [(said.role, said.content) for said in conversation] == [("user", "Hi")]
        assert infer_of(asked, SessionMatch("s", conversation)).prefix == expected


@pytest.mark.parametrize("config", [{}, {"output_config": {"effort": "high"}}, {"output_config": {"format": "FORM"}}])
def test_format_may_have_its_first_name(config: dict[str, Any]) -> None:
    """The field ``output_config`` takes precedence."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    if "format" in config.get("output_config", {}):
        config = {"output_config": {"format": {**form, "schema": {"type": "array"}}}}
    asked = request(output_format=form, **config)
    infer = infer_of(asked, SessionMatch("s", plain_messages(conversation_of(asked))))
    assert infer.json_schema == {"type": "array" if "format" in config.get("output_config", {}) else "object"}


def test_billing_header_is_not_part_of_the_prompt() -> None:
    """A system prompt that contains nothing else is dropped."""
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"}
    assert told({"role": "user", "content": "Hi"}, system=[header]) == [("user", "Hi")]


def test_system_message_at_the_end_is_the_users() -> None:
    """Claude Code ends a conversation with one; what follows a message of the user is part of it."""
    question, agents = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Agents: none"}
    assert told(question, agents) == [("user", "Hi\nAgents: none")]
    answer = {"role": "assistant", "content": "Yes?"}
    assert told(question, answer, agents) == [("user", "Hi"), ("assistant", "Yes?"), ("user", "Agents: none")]


def test_results_of_one_message_become_separate_messages() -> None:
    """They keep their order and precede the message's text; the result of a failed tool is marked."""
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "21 degrees"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Let me see."},
        USE,
        {**USE, "id": "c2"},
    ]
    asked = request(
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
        ]
    )
    said = plain_messages(conversation_of(asked))
    assert [(one.role, one.content, one.tool_call_id) for one in said] == [
        ("user", "Hi", None),
        ("assistant", "Let me see.", None),
        ("tool", "21 degrees", "c1"),
        ("tool", "Error: no", "c2"),
        ("user", "Go on.", None),
    ]
    assert said[1].reasoning == "hm"
    assert [json.loads(call.arguments) for call in said[1].tool_calls or ()] == [{"city": "Paris"}] * 2


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}],
            "messages.0.content.0.tool_use_id",
        ),
        ([{"role": "user", "content": [USE]}], "messages.0.content.0"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [USE]}], "messages.1.role"),
        ([{"role": "assistant", "content": "b"}], "messages.0.role"),
    ],
)
def test_misplaced_blocks_are_refused(messages: list[Any], field: str) -> None:
    """The error names their place."""
    with pytest.raises(InferenceCenterError) as refused:
        conversation_of(request(messages=messages))
    assert refused.value.field == field


def test_images_keep_their_place_between_texts() -> None:
    """Also in results of tools and over several messages; only files in the request are taken."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image], "is_error": True}
    text = {"type": "text", "text": "Look:"}
    said = conversation_of(
        request(
            messages=[
                {"role": "user", "content": [text, image]},
                {"role": "user", "content": "And?"},
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [result]},
            ]
        )
    )
    picture = MessageImagePart(type="image", data="aGk=")
    parts = [one.content for one in said if isinstance(one, MessageInParts)]
    assert parts == [
        (MessageTextPart(type="text", text="Look:"), picture, MessageTextPart(type="text", text="And?")),
        (MessageTextPart(type="text", text="Error: "), picture),
    ]
    with pytest.raises(InferenceCenterError) as refused:
        request(messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}])
    assert refused.value.field == "messages.0.content.0.source"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, NamedTool(name="weather")),
    ],
)
def test_tool_choice_is_mapped(choice: dict[str, Any], expected: object) -> None:
    """The mapping keeps the tool's schema, and whether calls may be parallel."""
    asked = request(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    infer = infer_of(asked, SessionMatch("s", plain_messages(conversation_of(asked))))
    assert infer.tool_choice == expected
    assert not infer.parallel_tool_calls
    assert infer.tools is not None
    assert infer.tools[0].parameters == {"type": "object"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "any"}},
        {"tools": [WEATHER], "tool_choice": {"type": "tool"}},
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "time"}},
        {"tools": [WEATHER, WEATHER]},
    ],
)
def test_contradictory_tools_are_refused(fields: dict[str, Any]) -> None:
    """A call cannot be required of tools that are not there."""
    asked = request(**fields)
    with pytest.raises(InferenceCenterError, match="tool"):
        infer_of(asked, SessionMatch("s", plain_messages(conversation_of(asked))))


@pytest.mark.parametrize(("kind", "expected"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_and_format_are_mapped(kind: str, expected: bool) -> None:
    """A JSON Schema is that of the answer."""
    schema = {"type": "object"}
    asked = request(thinking={"type": kind}, output_config={"format": {"type": "json_schema", "schema": schema}})
    infer = infer_of(asked, SessionMatch("s", plain_messages(conversation_of(asked))))
    assert (infer.thinking, infer.json_schema) == (expected, schema)


def answer() -> list[Event]:
    """Return the events of an answer that thinks, writes and calls two tools."""
    return [
        reasoning_token("h"),
        reasoning_token("m"),
        token("Let "),
        token("me."),
        tool_call_delta("", name="weather"),
        tool_call_delta('{"city": '),
        tool_call_delta('"Paris"}'),
        tool_call_delta("{}", index=1, name="time"),
        end("tool_calls", warnings=("w",)),
    ]


CONTENT = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "Let me."},
    {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Paris"}},
    {"type": "tool_use", "id": "c1", "name": "time", "input": {}},
]


def test_answer_is_collected_as_blocks() -> None:
    """The message has reasoning, text and calls in their order, the usage and the stop reason."""
    gathered = MessageCollector("m", ["f"])
    for event in answer():
        gathered.take(0, event)
    said = gathered.document()
    assert said["content"] == CONTENT
    assert said["stop_reason"] == "tool_use"
    assert said["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
    }
    assert said["warnings"] == ["f", "w"]


def test_stream_opens_one_block_at_a_time() -> None:
    """The streamed blocks add up to those of the whole message."""
    writer = MessageEventWriter("m", ["f"])
    data = b"".join(writer.write(0, event) for event in answer())
    sent = [json.loads(block.split("data: ")[1]) for block in data.decode().split("\n\n")[:-1]]
    assert sent[0]["type"] == "message_start"
    assert sent[0]["message"]["warnings"] == ["f"]
    assert [event["type"] for event in sent[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in sent[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            kind, text = event["delta"].values()
            if kind == "input_json_delta":
                arguments += text
            else:
                blocks[-1][blocks[-1]["type"]] += text
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments)
    assert blocks == CONTENT


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("context_full", None, "model_context_window_exceeded"),
    ],
)
def test_stop_reason_is_mapped(reason: Any, stop: str | None, expected: str) -> None:
    """The message also names the stop sequence that matched."""
    gathered = MessageCollector("m")
    gathered.take(0, end(reason).model_copy(update={"stop": stop}))
    said = gathered.document()
    assert (said["stop_reason"], said["stop_sequence"], said["content"]) == (expected, stop, [])


def test_arguments_that_were_cut_off_are_empty() -> None:
    """A call that the limit of tokens ended is not valid JSON."""
    gathered = MessageCollector("m")
    for event in answer()[4:6]:
        gathered.take(0, event)
    gathered.take(0, answer()[-1])
    assert gathered.document()["content"] == [{"type": "tool_use", "id": "c0", "name": "weather", "input": {}}]


def test_empty_conversation_message_is_kept() -> None:
    """A message without blocks is an empty one."""
    assert conversation_of(request(messages=[{"role": "user", "content": []}])) == (
        ChatMessage(role="user", content=""),
    )


def test_messages_of_the_user_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining each with those before would copy the first ones again for every other."""
    sent = request(messages=[{"role": "user", "content": f"line {n}"} for n in range(300)])
    joined: list[int] = []

    def noted(parts: list[Any]) -> Any:
        joined.append(len(parts))
        return user_message(parts)

    monkeypatch.setattr(messages, "user_message", noted)
    (said,) = conversation_of(sent)
    assert said.content == "\n".join(f"line {n}" for n in range(300))
    assert joined == [300]


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        ([{**USE, "id": f"c{n}"} for n in range(129)], "messages.0.content"),
        ([{**USE, "input": json.loads('{"a":' * 300 + "{}" + "}" * 300)}], "messages.0.content.0.input"),
    ],
    ids=["too many calls", "arguments too deep"],
)
def test_calls_that_no_message_can_hold_are_refused(blocks: list[Any], field: str) -> None:
    """They are faults of the request, not of the daemon."""
    with pytest.raises(InferenceCenterError) as refused:
        told({"role": "assistant", "content": blocks}, {"role": "user", "content": "Hi"})
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, field)
