"""Answers in OpenAI's shape: a stream says the same as the document, and both are what the openai package reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion as TheirCompletion
from openai.types.chat import ChatCompletionChunk as TheirChunk

from inferencecenter.api.openai.chat import ChatChunkWriter, ChatCollector, ChatHead
from inferencecenter.api.openai.chat_schemas import ChatCompletion, ChatCompletionChunk
from inferencecenter.api.openai.finish_reason import FINISHES
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability
from tests.api.openai.told import argument, data_of, end, failure, thought, token

HEAD = ChatHead(completion_id="chatcmpl-1", created=1, model="demo")


def chunks_of(said: list[Any], head: ChatHead = HEAD) -> list[Any]:
    """Return the chunks of a stream of one choice, checked against both packages' types."""
    chunks = ChatChunkWriter(head)
    found = data_of(b"".join(chunks.write(0, event) for event in said) + chunks.last())
    assert found.pop() == "[DONE]"
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
        TheirChunk.model_validate(chunk)
    return found


def document_of(said: list[Any], head: ChatHead = HEAD) -> Any:
    """Return the document of one choice, checked against both packages' types."""
    gathered = ChatCollector(head)
    for event in said:
        gathered.take(0, event)
    found = gathered.document()
    ChatCompletion.model_validate(found)
    TheirCompletion.model_validate(found)
    return found


SAID = st.lists(
    st.one_of(
        st.builds(thought, st.text(max_size=5)),
        st.builds(token, st.text(max_size=5)),
        st.builds(argument, st.text(max_size=5), index=st.just(0)),
    ),
    max_size=12,
)


@given(said=SAID)
def test_a_stream_says_what_the_document_says(said: list[Any]) -> None:
    """Put together, the deltas are the message; the first has the role and the last why it ends."""
    if any(isinstance(event, events.ToolCall) for event in said):
        said = [argument("", index=0, name="f"), *said]
    all_said = [*said, end("stop")]
    choices = [chunk["choices"][0] for chunk in chunks_of(all_said)]
    message = document_of(all_said)["choices"][0]["message"]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get("reasoning_content", "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_calls_are_told_as_openai_does() -> None:
    """The first delta of a call names it, later ones have its index; a message that only calls has no content."""
    said = [
        argument("", index=0, name="f"),
        argument('{"a":', index=0),
        argument("1}", index=0),
        argument("{}", index=1, name="g"),
        end("tool_calls"),
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(said)]
    assert deltas[1]["tool_calls"] == [
        {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}
    ]
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": '{"a":'}}]
    choice = document_of(said)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]


def test_probabilities_are_cut_to_what_was_asked_for() -> None:
    """Each token has its bytes, unless they are no whole character, and as many others as wanted."""
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
def test_reasons_have_their_names(ours: Any, theirs: str) -> None:
    """Every way in which an answer ends is one of OpenAI's."""
    said = [token("x"), end(ours)]
    assert document_of(said)["choices"][0]["finish_reason"] == theirs
    assert chunks_of(said)[-1]["choices"][0]["finish_reason"] == theirs


def test_usage_is_the_last_chunk_where_it_is_asked_for() -> None:
    """All chunks before have a null, and the last has no choices."""
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


def test_a_prompt_with_several_answers_is_counted_once() -> None:
    """Tokens of all answers are counted, those of the prompt once."""
    gathered = ChatCollector(ChatHead(completion_id="chatcmpl-1", created=1, model="demo", n=3))
    for index in range(3):
        gathered.take(index, end("stop"))
    usage = gathered.document()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 6, 16)


def test_what_had_no_effect_is_told() -> None:
    """Warnings stand beside the answer, and in a stream beside its end."""
    said = [token("x"), end("stop", warnings=("seed has no effect",))]
    assert document_of(said)["warnings"] == ["seed has no effect"]
    assert chunks_of(said)[-1]["warnings"] == ["seed has no effect"]
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
def test_what_is_no_answer_is_an_error(event: Any, code: ErrorCode) -> None:
    """A turn that fails, or that others end, is not told as an answer."""
    for take in (ChatChunkWriter(HEAD).write, ChatCollector(HEAD).take):
        with pytest.raises(InferenceCenterError) as caught:
            take(0, event)
        assert caught.value.code is code
