"""Parts that OpenAI's answers share: their head, the chunks of their streams, and the end of a turn."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import orjson

from inferencecenter.api import sse
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferencecenter.api.endpoint import Call
    from inferencecenter.api.openai.sampling import Sampling
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import TurnStats

FINISHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stop": "stop",
        "repetition": "stop",
        "tool_calls": "tool_calls",
        "length": "length",
        "context_full": "length",
        "time": "length",
        "quota_exceeded": "length",
    }
)
"""OpenAI's ``finish_reason`` by the turn's; others are errors."""

LEAST_LOGPROB: Final = -9999.0
"""Replacement of the logarithm of 0, which JSON cannot represent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """Fields common to all chunks of a response with ``n`` choices; ``warnings`` concern the request."""

    completion_id: str
    created: int
    model: str
    n: int = 1
    include_usage: bool = False
    warnings: Sequence[str] = ()

    def common(self, kind: str) -> dict[str, Any]:
        """Return the fields of a document or chunk of a kind, without its choices."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


def head_fields(call: Call, prefix: str) -> dict[str, Any]:
    """Return the fields of a response's head that any request has; its id begins with ``prefix``."""
    request: Sampling = call.body
    return {
        "completion_id": f"{prefix}-{secrets.token_urlsafe(16)}",
        "created": int(call.context.clock()),
        "model": request.model or call.context.models.default,
        "include_usage": request.stream_options is not None and request.stream_options.include_usage,
        "warnings": call.warnings,
    }


class ChunkWriter:
    """Encodes the chunks of a stream of a ``kind``; the ends of its turns are given to ``end_choice``."""

    def __init__(self, head: ResponseHead, kind: str, *, n_choices: int) -> None:
        self._n = head.n
        self._include_usage = head.include_usage
        self._warnings = head.warnings
        self._prefix = b"data: " + orjson.dumps(head.common(kind))[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._ends: list[events.End | None] = [None] * n_choices

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        """Return a chunk with an increment of a choice."""
        return self._prefix + orjson.dumps(choice) + self._suffix

    def end_choice(self, index: int, end: events.End, choice: Mapping[str, Any]) -> bytes:
        """Return the last chunk of a choice."""
        self._ends[index] = end
        chunk, more = self.chunk(choice), more_fields(self._warnings, [end])
        return b"%b,%b\n\n" % (chunk[: -len(b"}\n\n")], orjson.dumps(more)[1:])

    def last(self) -> bytes:
        """Return the end of a stream whose turns have all ended."""
        if not self._include_usage:
            return sse.DONE
        usage = usage_of([end for end in self._ends if end is not None], n=self._n)
        return b'%b],"usage":%b}\n\n%b' % (self._prefix, orjson.dumps(usage), sse.DONE)


def finish_of(end: events.End) -> str:
    """Return why a turn ended.

    Raises:
        InferenceCenterError: ``engine_unavailable`` if the turn was ended by another party.
    """
    finish = FINISHES.get(end.finish_reason)
    if finish is None:
        raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "the response was ended before it was complete")
    return finish


def raise_failure(event: Event) -> None:
    """Raise the error of an event that reports a failed turn.

    Raises:
        InferenceCenterError: As in the event; ``session_not_found`` if the turn's session was closed.
    """
    if isinstance(event, events.Error):
        code = ErrorCode(event.code) if event.code in ERRORS else ErrorCode.INTERNAL
        raise InferenceCenterError(
            code, event.message, hint=event.hint, field=event.field, retry_after_ms=event.retry_after_ms
        )
    if isinstance(event, events.SessionClosed | events.SessionExpired | events.SessionDetached):
        raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND, "the conversation was closed before its response")


def usage_of(ends: Iterable[events.End], *, n: int = 1) -> dict[str, Any]:
    """Return the token usage of a request.

    Args:
        ends: Ends of its turns, in order.
        n: Turns that share a prompt, which is counted once.
    """
    all_ends = list(ends)
    prompts = all_ends[::n]
    prompt_tokens = sum(end.usage.prompt_tokens for end in prompts)
    completion_tokens = sum(end.usage.completion_tokens for end in all_ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.usage.cached_tokens for end in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.usage.reasoning_tokens for end in all_ends)},
    }


def merged_warnings(warnings: Iterable[str], ends: Iterable[events.End]) -> list[str]:
    """Return the distinct warnings about a request and of its turns."""
    return list(dict.fromkeys([*warnings, *(warning for end in ends for warning in end.warnings)]))


def more_fields(warnings: Iterable[str], ends: Sequence[events.End]) -> dict[str, Any]:
    """Return this daemon's additional fields of a response.

    Args:
        warnings: Warnings about the request.
        ends: Ends of its turns.

    Returns:
        The ``timings`` of the first turn, and the distinct ``warnings`` if there are any.
    """
    distinct = merged_warnings(warnings, ends)
    return {
        **({"timings": timings_of(ends[0].stats)} if ends else {}),
        **({"warnings": distinct} if distinct else {}),
    }


def timings_of(stats: TurnStats) -> dict[str, Any]:
    """Return the speed of a turn in the terms of llama-server."""
    prompt_n = stats.prompt_tokens - stats.cached_tokens
    prompt_ms = max(0.0, stats.ttft_ms - stats.queue_ms)
    predicted_ms = max(0.0, stats.total_ms - stats.ttft_ms)
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(1000 * prompt_n, prompt_ms),
        "predicted_n": stats.tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, stats.tokens),
        "predicted_per_second": stats.tps,
    }


def _ratio(amount: float, of: float) -> float:
    return round(amount / of, 3) if of else 0.0


def finite(logprob: float) -> float:
    """Return a log probability as a number that JSON can represent."""
    return max(LEAST_LOGPROB, logprob)
