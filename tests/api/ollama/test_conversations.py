"""Conversations of Ollama's requests as messages, and as the numbers of a context."""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.foreign_fields import FieldReport
from inferencecenter.api.ollama.chat import context_of, messages_in, messages_of
from inferencecenter.api.ollama.chat_schemas import MOST_CONTEXT, OLLAMA_CHAT_FIELDS, OllamaChatRequest
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import plain_messages

if TYPE_CHECKING:
    from types import FrameType

HI = {"role": "user", "content": "Hi"}


def told(*messages: dict[str, Any]) -> tuple[ChatMessage, ...]:
    """Return the messages of a request."""
    report = FieldReport(OLLAMA_CHAT_FIELDS, strict=False)
    request = checked(OllamaChatRequest, {"model": "m", "messages": list(messages)}, context=report)
    return plain_messages(messages_of(request.messages))


def called(*names: str, **more: Any) -> dict[str, Any]:
    """Return a message with calls."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, **more}} for name in names]}


def numbers(text: bytes) -> list[int]:
    """Return a text as the numbers of a context."""
    return array("H", text + b" " * (len(text) % 2)).tolist()


def test_results_belong_to_the_first_open_call_of_their_tool() -> None:
    """A result without a tool, or of one that was not called, belongs to the first open call."""
    results = [{"role": "tool", **more} for more in ({"tool_name": "b"}, {}, {"tool_name": "x"}, {"tool_name": "b"})]
    found = told(HI, called("a", "b", "a", "b"), *results)
    assert [message.tool_call_id for message in found[2:]] == ["unnamed_1", "unnamed_0", "unnamed_2", "unnamed_3"]


def test_work_per_result_is_independent_of_the_calls_without_one() -> None:
    """A client may send tens of thousands of calls with thousands of results."""

    def lines_run(n_calls: int) -> int:
        """Return the lines of the API that run for 19 results of a conversation with this many calls."""
        n_lines = 0

        def count(frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal n_lines
            n_lines += event == "line" and "/inferencecenter/api/" in frame.f_code.co_filename
            return count

        sent = [HI, called(*["f"] * n_calls)]
        sys.settrace(count)
        try:
            told(*sent, *({"role": "tool"},) * 20)
            with_results = n_lines
            n_lines = 0
            told(*sent, {"role": "tool"})
            return with_results - n_lines
        finally:
            sys.settrace(None)

    assert 0 < lines_run(120) < 2 * lines_run(20)


def test_deep_arguments_are_refused() -> None:
    """Arguments that cannot be serialized are an error of the request."""
    with pytest.raises(InferenceCenterError) as refused:
        told(HI, called("f", arguments=orjson.loads('{"a":' * 300 + "{}" + "}" * 300)), HI)
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert refused.value.field == "messages.1.tool_calls.0.function.arguments"


def test_context_restores_its_conversation() -> None:
    """The encoding works for an even and for an odd number of bytes."""
    for content in ("a", "ab"):
        said = (ChatMessage(role="user", content=content), ChatMessage(role="assistant", content="é"))
        context = context_of(said)
        assert context is not None
        assert messages_in(context) == said


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"[" + b'["user",""],' * 10_000 + b'["user",""]]', ErrorCode.INVALID_REQUEST),
        (b"[" + b"[]," * 200_000 + b"[]]", ErrorCode.MESSAGE_TOO_LARGE),
    ],
    ids=["more messages than in a request", "more values than in a request"],
)
def test_context_has_the_limits_of_a_request(text: bytes, code: ErrorCode) -> None:
    """Its numbers are one value each where the request's are counted."""
    with pytest.raises(InferenceCenterError) as refused:
        messages_in(numbers(text))
    assert refused.value.code is code


def test_conversation_that_no_request_could_bring_back_has_no_context() -> None:
    """Numbers of a conversation of megabytes would take longer than its answer's other fields."""
    assert context_of([ChatMessage(role="user", content="a" * (2 * MOST_CONTEXT))]) is None
