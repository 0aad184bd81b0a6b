"""The answer to a request for a chat completion: chunks of a stream, or one document. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from inferencecenter.dialects import sse
from inferencecenter.dialects.openai.ending import finish_of, finite, raise_failure, usage_of, warnings_of
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TokenLogprobs, TokenProbability


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of an answer say. ``top_logprobs`` are those asked for, ``None`` for none at all."""

    completion_id: str
    created: int
    model: str
    n: int = 1
    include_usage: bool = False
    top_logprobs: int | None = None


class Chunks:
    """Writes the chunks of a stream; most bytes of those with plain text are always the same."""

    def __init__(self, head: Head) -> None:
        self._head = head
        common = {
            "id": head.completion_id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
        }
        self._prefix = b"data: " + orjson.dumps(common)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._begun = [False] * head.n
        self._ends: list[events.End | None] = [None] * head.n
        self._texts = [b'%b{"index":%d,"delta":{"content":' % (self._prefix, index) for index in range(head.n)]
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._suffix

    def write(self, index: int, event: Event) -> bytes:
        """Return what a stream says of an event, which may be nothing.

        Raises:
            InferenceCenterError: The turn failed.
        """
        if type(event) is events.Token and event.logprobs is None and self._begun[index]:
            return b"%b%b%b" % (self._texts[index], orjson.dumps(event.content), self._after_text)
        match event:
            case events.Token():
                return self._begin(index) + self._chunk(index, {"content": event.content}, event.logprobs)
            case events.Reasoning():
                return self._begin(index) + self._chunk(index, {"reasoning_content": event.content}, event.logprobs)
            case events.ToolCall():
                return self._begin(index) + self._chunk(index, {"tool_calls": [_call_delta(event)]}, event.logprobs)
            case events.End():
                self._ends[index] = event
                chunk = self._chunk(index, {}, None, finish=finish_of(event))
                return self._begin(index) + _with_warnings(chunk, event.warnings)
            case _:
                raise_failure(event)
                return b""

    def last(self) -> bytes:
        """Return the end of a stream whose turns have all ended."""
        if not self._head.include_usage:
            return sse.DONE
        usage = usage_of([end for end in self._ends if end is not None], n=self._head.n)
        return b'%b],"usage":%b}\n\n%b' % (self._prefix, orjson.dumps(usage), sse.DONE)

    def _begin(self, index: int) -> bytes:
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Iterable[TokenLogprobs] | None, *, finish: str | None = None
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else _logprobs(logprobs, self._head.top_logprobs or 0),
            "finish_reason": finish,
        }
        return self._prefix + orjson.dumps(choice) + self._suffix


def _with_warnings(chunk: bytes, warnings: tuple[str, ...]) -> bytes:
    return b'%b,"warnings":%b}\n\n' % (chunk[: -len(b"}\n\n")], orjson.dumps(warnings)) if warnings else chunk


@dataclass(slots=True)
class _Choice:
    """One answer as far as it has come; ``calls`` are by their index."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: events.End | None = None


class Gathered:
    """Gathers an answer that is sent as one document."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._choices = [_Choice() for _ in range(head.n)]

    def take(self, index: int, event: Event) -> None:
        """Take an event.

        Raises:
            InferenceCenterError: The turn failed.
        """
        choice = self._choices[index]
        match event:
            case events.Token():
                choice.content.append(event.content)
                choice.logprobs += event.logprobs or ()
            case events.Reasoning():
                choice.reasoning.append(event.content)
                choice.logprobs += event.logprobs or ()
            case events.ToolCall():
                call = choice.calls.setdefault(event.index, {"id": event.call_id, "name": "", "arguments": []})
                call["name"] = event.name or call["name"]
                call["arguments"].append(event.arguments)
                choice.logprobs += event.logprobs or ()
            case events.End():
                finish_of(event)
                choice.end = event
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the whole answer."""
        head = self._head
        ends = [choice.end for choice in self._choices if choice.end is not None]
        said = {
            "id": head.completion_id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage_of(ends, n=head.n),
            "system_fingerprint": None,
        }
        warnings = warnings_of(ends)
        return {**said, "warnings": warnings} if warnings else said

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        assert choice.end is not None, "all turns have ended"
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not content else content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [_call(call) for call in choice.calls.values()]
        top = self._head.top_logprobs
        return {
            "index": index,
            "message": message,
            "logprobs": None if top is None else _logprobs(choice.logprobs, top),
            "finish_reason": finish_of(choice.end),
        }


def _call_delta(event: events.ToolCall) -> dict[str, Any]:
    if event.name is None:
        return {"index": event.index, "function": {"arguments": event.arguments}}
    return {
        "index": event.index,
        "id": event.call_id,
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": "".join(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


def _logprobs(entries: Iterable[TokenLogprobs], top: int) -> dict[str, Any]:
    content = [
        {**_probability(entry), "top_logprobs": [_probability(each) for each in entry.top[:top]]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def _probability(entry: TokenLogprobs | TokenProbability) -> dict[str, Any]:
    # What is no whole character is shown as U+FFFD, and its bytes are not known here.
    known = "\N{REPLACEMENT CHARACTER}" not in entry.token
    return {
        "token": entry.token,
        "logprob": finite(entry.logprob),
        "bytes": list(entry.token.encode()) if known else None,
    }
