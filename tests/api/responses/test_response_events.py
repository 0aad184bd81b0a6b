"""Events of responses, as the openai package reads them."""

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
from tests.api.responses import told

SESSION = "s_" + "s" * 22
TURN = "t_" + "t" * 22
USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)
STATS = TurnStats(
    ttft_ms=1.0, total_ms=2.0, tokens=5, tps=3.0, prompt_tokens=7, cached_tokens=3, queue_ms=0.0, preempted=0
)


def echo(**request: Any) -> Echo:
    """Return what a response repeats of a request."""
    return echo_of(CreateResponse(input="Hello", **request), model="demo", created_at=100.5)


def queued(position: int = 0) -> events.Queued:
    """The turn's acknowledgement."""
    return events.Queued(session_id=SESSION, seq=1, turn_id=TURN, position=position)


def token(text: str, **fields: Any) -> events.Token:
    """Text of the answer."""
    return events.Token(session_id=SESSION, seq=2, turn_id=TURN, content=text, **fields)


def thought(text: str) -> events.Reasoning:
    """Text of thoughts."""
    return events.Reasoning(session_id=SESSION, seq=2, turn_id=TURN, content=text)


def call(index: int, arguments: str, name: str | None = None) -> events.ToolCall:
    """Text of a call."""
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


def tell(*heard: Any, stream_id: str | None = None, top: int = 0, **request: Any) -> list[dict[str, Any]]:
    """Return what is told of a turn, each event checked."""
    builder = ResponseEventBuilder(echo(**request), top_logprobs=top, clock=lambda: 101.5, stream_id=stream_id)
    frames: list[ResponseEvent] = [frame for event in heard for frame in builder.feed(event)]
    messages = [json.loads(frame.data) for frame in frames]
    assert [message["type"] for message in messages] == [frame.type for frame in frames]
    for message in messages:
        told.event(message)
    return messages


def types(messages: list[dict[str, Any]]) -> list[str]:
    """Return what kinds of events there are, without what all have in common."""
    return [message["type"].removeprefix("response.") for message in messages]


def test_text_is_told_as_one_message() -> None:
    """Deltas, the text they make and the object at the end agree, and each event is one that openai knows."""
    messages = tell(queued(), token("Hel"), token("lo"), end())
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
    final = told.response(messages[-1]["response"])
    assert final.output_text == messages[6]["text"] == "Hello"
    assert final.id == "resp_" + "s" * 22 + "t" * 22
    assert (final.status, final.created_at, final.completed_at) == ("completed", 100, 101)
    assert final.usage is not None
    assert (final.usage.total_tokens, final.usage.input_tokens_details.cached_tokens) == (12, 3)


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    """Each has its place in the output, and the calls have the arguments that their deltas made."""
    messages = tell(
        queued(), thought("Hm"), thought("m."), token("Let me see."), call(0, "", "look"), call(0, '{"x":1}'),
        call(1, "{}", "wait"), end("tool_calls"),
    )  # fmt: skip
    final = told.response(messages[-1]["response"])
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [message["output_index"] for message in messages if message["type"].endswith("item.done")] == [0, 1, 2, 3]
    done = [message for message in messages if message["type"] == "response.function_call_arguments.done"]
    assert [message["arguments"] for message in done] == ['{"x":1}', "{}"]
    assert [message["text"] for message in messages if message["type"] == "response.reasoning_text.done"] == ["Hmm."]
    assert final.status == "completed"


def test_a_turn_that_waits_is_queued_first() -> None:
    """It is in progress once it runs, which is told once."""
    messages = tell(queued(2), queued(1), queued(0), token("x"), end())
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
def test_how_a_turn_ends_is_the_status(reason: str, status: str, details: Any, last: str) -> None:
    """The message that was cut off is not complete either."""
    messages = tell(queued(), token("x"), end(reason))
    final = messages[-1]["response"]
    assert (final["status"], final["incomplete_details"], types(messages)[-1]) == (status, details, last)
    assert final["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")


def test_reasons_that_openai_has_no_word_for_keep_their_own() -> None:
    """A client hears that an answer went round in circles."""
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
def test_a_turn_that_fails_is_a_response_that_failed(code: str, expected: str) -> None:
    """What was said up to then is shown, and nothing is told after it."""
    messages = tell(queued(), token("x"), failure(code), token("y"), end())
    assert types(messages)[-1] == "failed"
    assert messages[-1]["response"]["error"]["code"] == expected
    assert messages[-1]["response"]["output"][0]["status"] == "incomplete"


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    """Whoever reads the last item's text finds one."""
    final = tell(queued(), end())[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == ""


def test_every_event_names_its_lane() -> None:
    """Deltas, which are put together from bytes, too."""
    messages = tell(queued(), token('say "hi"\n'), end(), stream_id='a"b')
    assert {message["stream_id"] for message in messages} == {'a"b'}
    assert [message["delta"] for message in messages if "delta" in message] == ['say "hi"\n']


def test_probabilities_are_told_with_deltas_and_kept_for_the_end() -> None:
    """No more of the likeliest are shown than were asked for."""
    likeliest = tuple(TokenProbability(token=text, token_id=1, logprob=-0.5) for text in ("é", "b"))
    entry = TokenLogprobs(token="é", token_id=1, logprob=-0.5, top=likeliest)
    messages = tell(queued(), token("é", logprobs=(entry,)), end(), top=1)
    delta = next(message for message in messages if "delta" in message)
    assert delta["logprobs"] == [{"token": "é", "logprob": -0.5, "top_logprobs": [{"token": "é", "logprob": -0.5}]}]
    part = told.response(messages[-1]["response"]).output[0]
    assert part.type == "message"
    assert part.content[0].type == "output_text"
    assert part.content[0].logprobs is not None
    assert part.content[0].logprobs[0].bytes == [195, 169]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["think", "say", "call"]), max_size=12))
def test_what_is_put_together_from_events_is_the_object_at_the_end(pieces: list[str]) -> None:
    """Items are added and done in order, one after the other, and no delta comes outside its item."""
    made = {"think": thought("t"), "say": token("s")}
    n_calls = 0
    heard: list[Any] = [queued()]
    for piece in pieces:
        heard.append(made.get(piece) or call(n_calls, "{}", "f"))
        n_calls += piece == "call"
    messages = tell(*heard, end())
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


def test_an_answer_that_was_kept_has_the_items_that_were_told() -> None:
    """Names included, so that who asks for a response later finds what the stream has named."""
    final = tell(queued(), thought("Hm"), token("Yes."), call(0, "{}", "look"), end("tool_calls"))[-1]["response"]
    kept = ChatMessage(
        role="assistant",
        content="Yes.",
        reasoning="Hm",
        tool_calls=(Call(call_id="call_0", name="look", arguments="{}"),),
    )
    assert [item.model_dump(mode="json") for item in output_of(kept, TURN, state="completed")] == final["output"]


def test_a_note_gives_the_whole_response_back() -> None:
    """What was asked for is repeated the same after it has been on disk."""
    asked = echo(
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "description": None}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        metadata={"a": "b"},
        reasoning={"effort": "high"},
    )
    note = read_note(note_of(asked))
    assert note is not None
    assert dict(note) == {**dict(asked), "generate": True}
    assert json.loads(note_of(asked))["text"]["format"]["schema"] == {"type": "object"}


def test_tools_that_are_nested_too_deep_to_be_kept_are_refused() -> None:
    """The reader takes more levels than the writer, which is the caller's mistake and none of the daemon."""
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"items": schema}
    with pytest.raises(InferenceCenterError, match="nested too deep") as refused:
        note_of(echo(tools=[{"type": "function", "name": "f", "parameters": schema}]))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "tools")
