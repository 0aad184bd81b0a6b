"""Response events, as the openai package parses them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.api.responses.request_schemas import CreateResponse
from inferencecenter.api.responses.response_events import ResponseEvent, ResponseEventBuilder
from inferencecenter.api.responses.response_schemas import Echo
from inferencecenter.api.responses.serializers import echo_of, note_of, output_of, read_note
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.values import ChatMessage, TokenLogprobs, TokenProbability, TurnStats, Usage
from inferencecenter.protocol.values import ToolCall as Call
from tests.api.responses import openai_types

SESSION = "s_" + "s" * 22
TURN = "t_" + "t" * 22
USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)
STATS = TurnStats(
    ttft_ms=1.0, total_ms=2.0, tokens=5, tps=3.0, prompt_tokens=7, cached_tokens=3, queue_ms=0.0, preempted=0
)


def echo(**request: Any) -> Echo:
    """Return the request fields that a response repeats."""
    return echo_of(CreateResponse(input="Hello", **request), model="demo", created_at=100.5)


def queued(position: int = 0) -> events.Queued:
    """The turn's acknowledgment."""
    return events.Queued(session_id=SESSION, seq=1, turn_id=TURN, position=position)


def token(text: str, **fields: Any) -> events.Token:
    """A token of the answer."""
    return events.Token(session_id=SESSION, seq=2, turn_id=TURN, content=text, **fields)


def reasoning_token(text: str) -> events.Reasoning:
    """A token of the reasoning."""
    return events.Reasoning(session_id=SESSION, seq=2, turn_id=TURN, content=text)


def tool_call_delta(index: int, arguments: str, name: str | None = None) -> events.ToolCall:
    """A part of a tool call."""
    return events.ToolCall(
        session_id=SESSION, seq=2, turn_id=TURN, index=index, call_id=f"call_{index}", name=name, arguments=arguments
    )


def end(reason: Any = "stop") -> events.End:
    """The turn's end."""
    return events.End(
        session_id=SESSION, seq=9, turn_id=TURN, finish_reason=reason, warnings=(), usage=USAGE, stats=STATS
    )


def failure(code: str) -> events.Error:
    """The turn's end if it fails."""
    return events.Error(code=code, message="no", error="no", session_id=SESSION, seq=9, turn_id=TURN, retryable=False)


def build_events(*turn_events: Any, stream_id: str | None = None, top: int = 0, **request: Any) -> list[dict[str, Any]]:
    """Return the events built from a turn's events, each validated."""
    builder = ResponseEventBuilder(echo(**request), top_logprobs=top, clock=lambda: 101.5, stream_id=stream_id)
    frames: list[ResponseEvent] = [frame for event in turn_events for frame in builder.feed(event)]
    messages = [json.loads(frame.data) for frame in frames]
    assert [message["type"] for message in messages] == [frame.type for frame in frames]
    for message in messages:
        openai_types.event(message)
    return messages


def types(messages: list[dict[str, Any]]) -> list[str]:
    """Return the event types without their common prefix."""
    return [message["type"].removeprefix("response.") for message in messages]


def test_text_becomes_one_message() -> None:
    """Deltas, their concatenation and the final object agree."""
    messages = build_events(queued(), token("Hel"), token("lo"), end())
    assert types(messages) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [message["sequence_number"] for message in messages] == list(range(10))
    final = openai_types.response(messages[-1]["response"])
    assert final.output_text == messages[6]["text"] == "Hello"
    assert final.id == "resp_" + "s" * 22 + "t" * 22
    assert (final.status, final.created_at, final.completed_at) == ("completed", 100, 101)
    assert final.usage is not None
    assert (final.usage.total_tokens, final.usage.input_tokens_details.cached_tokens) == (12, 3)


def test_reasoning_text_and_calls_are_separate_items() -> None:
    """Each has its output index, and the arguments of a call are its deltas."""
    messages = build_events(
        queued(),
        reasoning_token("Hm"),
        reasoning_token("m."),
        token("Let me see."),
        tool_call_delta(0, "", "look"),
        tool_call_delta(0, '{"x":1}'),
        tool_call_delta(1, "{}", "wait"),
        end("tool_calls"),
    )
    final = openai_types.response(messages[-1]["response"])
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [message["output_index"] for message in messages if message["type"].endswith("item.done")] == [0, 1, 2, 3]
    done = [message for message in messages if message["type"] == "response.function_call_arguments.done"]
    assert [message["arguments"] for message in done] == ['{"x":1}', "{}"]
    assert [message["text"] for message in messages if message["type"] == "response.reasoning_text.done"] == ["Hmm."]
    assert final.status == "completed"


def test_waiting_turn_is_queued_first() -> None:
    """It is reported as in progress once, when it starts."""
    messages = build_events(queued(2), queued(1), queued(0), token("x"), end())
    assert types(messages)[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert messages[0]["response"]["status"] == "queued"
    assert types(messages).count("in_progress") == 1


@pytest.mark.parametrize(
    ("reason", "status", "details", "last"),
    [
        ("length", "incomplete", {"reason": "max_output_tokens"}, "incomplete"),
        ("context_full", "incomplete", {"reason": "max_output_tokens"}, "incomplete"),
        ("aborted", "cancelled", None, "incomplete"),
        ("stop", "completed", None, "completed"),
    ],
)
def test_end_reason_decides_the_status(reason: str, status: str, details: Any, last: str) -> None:
    """A truncated message is incomplete too."""
    messages = build_events(queued(), token("x"), end(reason))
    final = messages[-1]["response"]
    assert (final["status"], final["incomplete_details"], types(messages)[-1]) == (status, details, last)
    assert final["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")


def test_own_end_reasons_without_openai_value_are_kept() -> None:
    """A repetition stop is reported under its own name."""
    builder = ResponseEventBuilder(echo(), top_logprobs=0, clock=lambda: 0.0)
    for event in (queued(), token("x"), end("repetition")):
        builder.feed(event)
    assert builder.final is not None
    assert builder.final.incomplete_details is not None
    assert builder.final.incomplete_details.reason == "repetition"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("prompt_too_long", "invalid_prompt"),
        ("quota_exceeded", "rate_limit_exceeded"),
        ("engine_crashed", "server_error"),
        ("of_tomorrow", "server_error"),
    ],
)
def test_failed_turn_is_a_failed_response(code: str, expected: str) -> None:
    """It contains the text so far, and no event follows."""
    messages = build_events(queued(), token("x"), failure(code), token("y"), end())
    assert types(messages)[-1] == "failed"
    assert messages[-1]["response"]["error"]["code"] == expected
    assert messages[-1]["response"]["output"][0]["status"] == "incomplete"


def test_empty_answer_is_an_empty_message() -> None:
    """A reader of the last item's text finds an empty one."""
    final = build_events(queued(), end())[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == ""


def test_every_event_has_its_stream_id() -> None:
    """This includes deltas, which are assembled from bytes."""
    messages = build_events(queued(), token('say "hi"\n'), end(), stream_id='a"b')
    assert {message["stream_id"] for message in messages} == {'a"b'}
    assert [message["delta"] for message in messages if "delta" in message] == ['say "hi"\n']


def test_logprobs_are_in_deltas_and_in_the_final_object() -> None:
    """Only the requested number of alternatives is shown."""
    likeliest = tuple(TokenProbability(token=text, token_id=1, logprob=-0.5) for text in ("é", "b"))
    entry = TokenLogprobs(token="é", token_id=1, logprob=-0.5, top=likeliest)
    messages = build_events(queued(), token("é", logprobs=(entry,)), end(), top=1)
    delta = next(message for message in messages if "delta" in message)
    assert delta["logprobs"] == [{"token": "é", "logprob": -0.5, "top_logprobs": [{"token": "é", "logprob": -0.5}]}]
    part = openai_types.response(messages[-1]["response"]).output[0]
    assert part.type == "message"
    assert part.content[0].type == "output_text"
    assert part.content[0].logprobs is not None
    assert part.content[0].logprobs[0].bytes == [195, 169]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["think", "say", "call"]), max_size=12))
def test_accumulated_events_equal_the_final_object(pieces: list[str]) -> None:
    """Items are added and done in order, and no delta lies outside its item."""
    by_kind = {"think": reasoning_token("t"), "say": token("s")}
    n_calls = 0
    turn_events: list[Any] = [queued()]
    for piece in pieces:
        turn_events.append(by_kind.get(piece) or tool_call_delta(n_calls, "{}", "f"))
        n_calls += piece == "call"
    messages = build_events(*turn_events, end())
    open_item: str | None = None
    output: list[dict[str, Any]] = []
    for message in messages[2:-1]:
        match message["type"].removeprefix("response."):
            case "output_item.added":
                assert open_item is None
                assert message["output_index"] == len(output)
                open_item = message["item"]["id"]
            case "output_item.done":
                assert message["item"]["id"] == open_item
                output.append(message["item"])
                open_item = None
            case _:
                assert message["item_id"] == open_item
    assert output == messages[-1]["response"]["output"]
    assert len({item["id"] for item in output}) == len(output)


def test_stored_answer_has_the_streamed_items() -> None:
    """They have the same ids, so a response retrieved later has the item ids that the stream has named."""
    final = build_events(
        queued(), reasoning_token("Hm"), token("Yes."), tool_call_delta(0, "{}", "look"), end("tool_calls")
    )[-1]["response"]
    stored = ChatMessage(
        role="assistant",
        content="Yes.",
        reasoning="Hm",
        tool_calls=(Call(call_id="call_0", name="look", arguments="{}"),),
    )
    assert [item.model_dump(mode="json") for item in output_of(stored, TURN, state="completed")] == final["output"]


def test_stored_request_fields_round_trip() -> None:
    """A response repeats its request equally after it was stored."""
    repeated = echo(
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "description": None}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        metadata={"a": "b"},
        reasoning={"effort": "high"},
    )
    note = read_note(note_of(repeated))
    assert note is not None
    assert dict(note) == {
        **dict(repeated),
        "generate": True,
        "compaction": None,
        "mcp_items": (),
        "mcp_tools": (),
    }
    assert json.loads(note_of(repeated))["text"]["format"]["schema"] == {"type": "object"}


def test_deeply_nested_tools_are_refused() -> None:
    """The parser accepts more levels than the serializer, and the error is the caller's."""
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(InferenceCenterError, match="nested too deep") as refused:
        note_of(echo(tools=[{"type": "function", "name": "f", "parameters": schema}]))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "tools")
