"""Answers in Ollama's form: lines and document have equal content, and the ollama package parses both."""

from __future__ import annotations

import json
from typing import Any, Final

import ollama
import pytest

from inferencecenter.api.ollama.answers import AnswerHead, AnswerWriter, OllamaCollector
from inferencecenter.api.ollama.chat_schemas import OllamaChatAnswer
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability
from tests.api.openai.events import end, failure, reasoning_token, token, tool_call_delta

HEAD: Final = AnswerHead(model="demo", created_at="2026-11-22T00:00:00Z", kind="message")
EVENTS: Final = [
    reasoning_token("Hm"),
    token("Let me "),
    token("look."),
    tool_call_delta('{"a"', index=0, name="f"),
    tool_call_delta(": 1}", index=0),
    tool_call_delta('{"b": 2}', index=1, name="g"),
    end("tool_calls", warnings=("x has no effect",)),
]
CALLS: Final = [
    {"id": "c0", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}},
    {"id": "c1", "function": {"index": 1, "name": "g", "arguments": {"b": 2}}},
]


def lines_of(turn_events: list[Any], head: AnswerHead = HEAD) -> list[Any]:
    """Return the lines of a stream, validated against both packages' types."""
    writer = AnswerWriter(head)
    lines = [json.loads(line) for line in b"".join(writer.write(0, event) for event in turn_events).splitlines()]
    for line in lines:
        OllamaChatAnswer.model_validate(line)
        ollama.ChatResponse.model_validate(line)
    return lines


def document_of(turn_events: list[Any], head: AnswerHead = HEAD) -> dict[str, Any]:
    """Return the document, validated against both packages' types."""
    gathered = OllamaCollector(head)
    for event in turn_events:
        gathered.take(0, event)
    found = gathered.document()
    OllamaChatAnswer.model_validate(found)
    ollama.ChatResponse.model_validate(found)
    return found


def test_document_has_text_reasoning_calls_and_warnings() -> None:
    """Calls have arguments as objects, and their turn ends as any other."""
    found = document_of(EVENTS)
    assert found["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "thinking": "Hm",
        "tool_calls": CALLS,
    }
    assert (found["done_reason"], found["warnings"]) == ("stop", ["x has no effect"])
    assert (found["prompt_eval_count"], found["eval_count"]) == (10, 2)


def test_stream_has_whole_calls() -> None:
    """A call is sent as one line once it is complete."""
    messages = [line["message"] for line in lines_of(EVENTS)]
    assert [message.get("thinking") for message in messages] == ["Hm", None, None, None, None, None]
    assert [message["content"] for message in messages] == ["", "Let me ", "look.", "", "", ""]
    assert [message.get("tool_calls") for message in messages] == [None, None, None, CALLS[:1], CALLS[1:], None]


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", ""])
def test_arguments_that_are_no_object_are_empty(arguments: str) -> None:
    """The token limit may cut off the arguments of a call."""
    found = document_of([tool_call_delta(arguments, name="f"), end("length")])
    assert found["message"]["tool_calls"][0]["function"]["arguments"] == {}
    assert found["done_reason"] == "length"


def test_probabilities_are_reported_on_request() -> None:
    """Each token has its own, in the stream and in the document."""
    top = (TokenProbability(token="a", token_id=1, logprob=-0.5),)
    entry = TokenLogprobs(token="a", token_id=1, logprob=-0.5, top=top)
    head = AnswerHead(model="demo", created_at=HEAD.created_at, kind="message", top_logprobs=1)
    turn_events = [token("a", logprobs=(entry,)), end("stop")]
    expected = {"token": "a", "logprob": -0.5, "bytes": [97]}
    reported = [{**expected, "top_logprobs": [expected]}]
    assert lines_of(turn_events, head)[0]["logprobs"] == reported
    assert document_of(turn_events, head)["logprobs"] == reported
    assert "logprobs" not in document_of(turn_events)


@pytest.mark.parametrize("turn_events", [[failure("overloaded")], [end("aborted")]])
def test_failed_turn_raises(turn_events: list[Any]) -> None:
    """Its error is the response, or the last line."""
    with pytest.raises(InferenceCenterError):
        lines_of(turn_events)
    with pytest.raises(InferenceCenterError):
        document_of(turn_events)
