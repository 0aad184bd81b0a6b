"""End of a turn in OpenAI's terms. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferencecenter.protocol.base import Event

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


def warnings_of(ends: Iterable[events.End]) -> list[str]:
    """Return the distinct warnings of turns."""
    return list(dict.fromkeys(warning for end in ends for warning in end.warnings))


def finite(logprob: float) -> float:
    """Return a log probability as a number that JSON can represent."""
    return max(LEAST_LOGPROB, logprob)
