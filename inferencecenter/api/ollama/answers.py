"""Answers in Ollama's form: lines of a stream, or one document. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from inferencecenter.api.ollama.errors import line
from inferencecenter.api.openai.answers import finish_of, merged_warnings, raise_failure
from inferencecenter.api.openai.chat import probability
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TokenLogprobs

_NS_PER_MS: Final = 1_000_000
_LENGTH: Final = "length"
_SHIFTED: Final = "the oldest messages were dropped: the conversation exceeds the context"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """Properties of an answer known before its first token.

    Attributes:
        model: The model.
        created_at: Time in RFC 3339.
        kind: Whether the text is a ``message`` or a ``response``.
        top_logprobs: Number of most likely tokens to return; ``None`` without probabilities.
        context_of: Returns the ``context`` of an answer, given its text; ``None``, also as its result, without one.
        warnings: Those of the request.
    """

    model: str
    created_at: str
    kind: Literal["message", "response"]
    top_logprobs: int | None = None
    context_of: Callable[[str], list[int] | None] | None = None
    warnings: Sequence[str] = ()

    def shifted(self) -> AnswerHead:
        """Return the head of an answer to a conversation whose oldest messages were dropped."""
        return replace(self, warnings=(*self.warnings, _SHIFTED))

    def part(
        self, content: str = "", *, thinking: str = "", tool_calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return the fields of the whole text or of a part of it, up to ``done``."""
        common: dict[str, Any] = {"model": self.model, "created_at": self.created_at}
        thought = {"thinking": thinking} if thinking else {}
        if self.kind == "response":
            return {**common, "response": content, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": content, **thought}
        if tool_calls:
            message["tool_calls"] = tool_calls
        return {**common, "message": message}

    def probabilities(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the field of token probabilities, if they were requested."""
        top = self.top_logprobs
        if top is None:
            return {}
        return {
            "logprobs": [
                {**probability(entry), "top_logprobs": [probability(each) for each in entry.top[:top]]}
                for entry in entries
            ]
        }

    def end(self, end: events.End, text: str) -> dict[str, Any]:
        """Return the fields from ``done`` on.

        Raises:
            InferenceCenterError: ``engine_unavailable`` if the turn was ended by another party.
        """
        stats = end.stats
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": _LENGTH if finish_of(end) == _LENGTH else "stop",
            "total_duration": _ns(stats.total_ms),
            "load_duration": _ns(stats.queue_ms),
            "prompt_eval_count": end.usage.prompt_tokens,
            "prompt_eval_duration": _ns(stats.ttft_ms - stats.queue_ms),
            "eval_count": end.usage.completion_tokens,
            "eval_duration": _ns(stats.total_ms - stats.ttft_ms),
        }
        if self.context_of is not None and (context := self.context_of(text)) is not None:
            fields["context"] = context
        if warnings := merged_warnings(self.warnings, [end]):
            fields["warnings"] = warnings
        return fields


class CallCollector:
    """Puts the tool calls of an answer together: Ollama's are never partial."""

    def __init__(self) -> None:
        self._calls: list[tuple[events.ToolCall, list[str]]] = []

    def take(self, event: events.ToolCall) -> list[dict[str, Any]]:
        """Add an event, and return the call that it completes by starting another."""
        if event.name is None:
            self._calls[-1][1].append(event.arguments)
            return []
        done = self.pop()
        self._calls.append((event, [event.arguments]))
        return done

    def pop(self) -> list[dict[str, Any]]:
        """Remove the call in progress and return it, if there is one."""
        calls, self._calls = self._calls, []
        return [
            {
                "id": begun.call_id,
                "function": {"index": begun.index, "name": begun.name, "arguments": _arguments("".join(pieces))},
            }
            for begun, pieces in calls
        ]


class AnswerWriter:
    """Encodes the lines of a stream; those of plain text differ in few bytes."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._calls = CallCollector()
        self._texts: list[str] = []
        before, _, after = orjson.dumps({**head.part(), "done": False}).rpartition(b'""')
        self._before_text, self._after_text = before, line(after)
        self.keepalive = b'%b""%b' % (before, line(after))
        """Keeps an idle connection open: lines must be answers."""

    def write(self, _index: int, event: Event) -> bytes:
        """Return the lines of an event, possibly none.

        Raises:
            InferenceCenterError: The turn failed.
        """
        head = self._head
        if type(event) is events.Token:
            if head.context_of is not None:
                self._texts.append(event.content)
            if event.logprobs is None:
                return b"%b%b%b" % (self._before_text, orjson.dumps(event.content), self._after_text)
        match event:
            case events.Token():
                return self._line(head.part(event.content), event.logprobs)
            case events.Reasoning():
                return self._line(head.part(thinking=event.content), event.logprobs)
            case events.ToolCall():
                return self._called(self._calls.take(event))
            case events.ContextShifted():
                self._head = head.shifted()
            case events.End():
                called = self._called(self._calls.pop())
                return called + line(orjson.dumps({**head.part(), **head.end(event, "".join(self._texts))}))
            case _:
                raise_failure(event)
        return b""

    def _called(self, calls: list[dict[str, Any]]) -> bytes:
        return self._line(self._head.part(tool_calls=calls), None) if calls else b""

    def _line(self, part: dict[str, Any], logprobs: Iterable[TokenLogprobs] | None) -> bytes:
        reported = {} if logprobs is None else self._head.probabilities(logprobs)
        return line(orjson.dumps({**part, **reported, "done": False}))


class OllamaCollector:
    """Collects an answer that is sent as one document."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._collector = CallCollector()
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: events.End | None = None

    def take(self, _index: int, event: Event) -> None:
        """Add an event.

        Raises:
            InferenceCenterError: The turn failed.
        """
        match event:
            case events.Token():
                self._content.append(event.content)
                self._logprobs += event.logprobs or ()
            case events.Reasoning():
                self._thinking.append(event.content)
                self._logprobs += event.logprobs or ()
            case events.ToolCall():
                self._calls += self._collector.take(event)
            case events.ContextShifted():
                self._head = self._head.shifted()
            case events.End():
                self._calls += self._collector.pop()
                self._end = event
            case _:
                raise_failure(event)

    def document(self) -> dict[str, Any]:
        """Return the whole answer.

        Raises:
            InferenceCenterError: See ``AnswerHead.end``.
        """
        assert self._end is not None, "the turn has ended"
        head, content = self._head, "".join(self._content)
        part = head.part(content, thinking="".join(self._thinking), tool_calls=self._calls)
        return {**part, **head.probabilities(self._logprobs), **head.end(self._end, content)}


def timestamp(unix_s: float) -> str:
    """Return a time in RFC 3339."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _ns(milliseconds: float) -> int:
    return max(0, round(milliseconds * _NS_PER_MS))


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; empty if the token limit truncated them."""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
