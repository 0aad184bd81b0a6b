"""Chat completions in OpenAI's shape: stream and document have equal content, and the openai package parses both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion as TheirCompletion
from openai.types.chat import ChatCompletionChunk as TheirChunk

from inferencecenter.api.openai.answers import FINISHES
from inferencecenter.api.openai.chat import ChatChunkWriter, ChatCollector, ChatHead
from inferencecenter.api.openai.chat_schemas import ChatCompletion, ChatCompletionChunk
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability
from tests.api.openai.events import data_of, end, failure, reasoning_token, token, tool_call_delta

HEAD = ChatHead(completion_id="chatcmpl-1", created=1, model="demo")


def chunks_of(turn_events: list[Any], head: ChatHead = HEAD) -> list[Any]:
    """Return the chunks of a stream of one choice, validated against both packages' types."""
    chunks = ChatChunkWriter(head)
    found = data_of(b"".join(chunks.write(0, event) for event in turn_events) + chunks.last())
    assert found.pop() == "[DONE]"
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
        TheirChunk.model_validate(chunk)
    return found


def document_of(turn_events: list[Any], head: ChatHead = HEAD) -> Any:
    """Return the document of one choice, validated against both packages' types."""
    gathered = ChatCollector(head)
    for event in turn_events:
        gathered.take(0, event)
    found = gathered.document()
    ChatCompletion.model_validate(found)
    TheirCompletion.model_validate(found)
    return found


TURN_EVENTS = st.lists(
    st.one_of(
        st.builds(reasoning_token, st.text(max_size=5)),
        st.builds(token, st.text(max_size=5)),
        st.builds(tool_call_delta, st.text(max_size=5), index=st.just(0)),
    ),
    max_size=12,
)


@given(turn_events=TURN_EVENTS)
def test_stream_and_document_have_equal_content(turn_events: list[Any]) -> None:
    """Concatenated deltas equal the message; the first has the role and the last the finish reason."""
    if any(isinstance(event, events.ToolCall) for event in turn_events):
        turn_events = [tool_call_delta("", index=0, name="f"), *turn_events]
    all_events = [*turn_events, end("stop")]
    choices = [chunk["choices"][0] for chunk in chunks_of(all_events)]
    message = document_of(all_events)["choices"][0]["message"]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get("reasoning_content", "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_tool_calls_have_openai_shape() -> None:
    """The first delta of a call has its name, later ones its index; a message with only calls has null content."""
    turn_events = [
        tool_call_delta("", index=0, name="f"),
        tool_call_delta('{"a":', index=0),
        tool_call_delta("1}", index=0),
        tool_call_delta("{}", index=1, name="g"),
        end("tool_calls"),
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(turn_events)]
    assert deltas[1]["tool_calls"] == [
        {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}
    ]
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": '{"a":'}}]
    choice = document_of(turn_events)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]


def test_logprobs_are_limited_to_the_requested_number() -> None:
    """Each token has its bytes unless they are an incomplete character, and the requested alternatives."""
    top = (TokenProbability(token="é", token_id=1, logprob=-0.5), TokenProbability(token="b", token_id=2, logprob=-2))
    first = TokenLogprobs(token="é", token_id=1, logprob=-0.5, top=top)
    second = TokenLogprobs(token="\N{REPLACEMENT CHARACTER}", token_id=3, logprob=float("-inf"), top=top)
    head = ChatHead(completion_id="chatcmpl-1", created=1, model="demo", top_logprobs=1)
    content = document_of([token("é", logprobs=(first, second)), end("stop")], head)["choices"][0]["logprobs"][
        "content"
    ]
    likeliest = {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    assert content == [
        {**likeliest, "top_logprobs": [likeliest]},
        {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -9999.0, "bytes": None, "top_logprobs": [likeliest]},
    ]
    chunk = chunks_of([token("é", logprobs=(first, second)), end("stop")], head)[1]
    assert chunk["choices"][0]["logprobs"]["content"] == content


@pytest.mark.parametrize(("ours", "theirs"), FINISHES.items())
def test_finish_reasons_map_to_openai_values(ours: Any, theirs: str) -> None:
    """Every end reason maps to one of OpenAI's."""
    turn_events = [token("x"), end(ours)]
    assert document_of(turn_events)["choices"][0]["finish_reason"] == theirs
    assert chunks_of(turn_events)[-1]["choices"][0]["finish_reason"] == theirs


def test_usage_is_in_the_last_chunk_when_requested() -> None:
    """Earlier chunks have null usage, and the last has no choices."""
    head = ChatHead(completion_id="chatcmpl-1", created=1, model="demo", include_usage=True)
    chunks = chunks_of([token("a"), token("b"), end("stop")], head)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_prompt_tokens_of_several_choices_are_counted_once() -> None:
    """Completion tokens are summed over the choices, prompt tokens are not."""
    gathered = ChatCollector(ChatHead(completion_id="chatcmpl-1", created=1, model="demo", n=3))
    for index in range(3):
        gathered.take(index, end("stop"))
    usage = gathered.document()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 6, 16)


def test_warnings_are_reported() -> None:
    """Warnings are in the document, and in a stream beside its end."""
    turn_events = [token("x"), end("stop", warnings=("seed has no effect",))]
    assert document_of(turn_events)["warnings"] == ["seed has no effect"]
    assert chunks_of(turn_events)[-1]["warnings"] == ["seed has no effect"]
    assert "warnings" not in chunks_of([token("x"), end("stop")])[-1]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (failure("prompt_too_long"), ErrorCode.PROMPT_TOO_LONG),
        (failure("no such code"), ErrorCode.INTERNAL),
        (end("aborted"), ErrorCode.ENGINE_UNAVAILABLE),
        (events.SessionClosed(session_id="s_1"), ErrorCode.SESSION_NOT_FOUND),
    ],
)
def test_failed_turn_is_an_error(event: Any, code: ErrorCode) -> None:
    """A failed or externally ended turn raises an error instead of a finish reason."""
    for take in (ChatChunkWriter(HEAD).write, ChatCollector(HEAD).take):
        with pytest.raises(InferenceCenterError) as caught:
            take(0, event)
        assert caught.value.code is code
