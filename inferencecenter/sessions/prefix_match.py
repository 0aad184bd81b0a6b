"""Finds the session whose history is the longest prefix of the messages that a client sends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferencecenter.protocol.values import ChatMessage, ToolCall
    from inferencecenter.sessions.history import History

UNNAMED: Final = "unnamed_"
"""Start of the ids of tool calls that a client sends without one.

A session has ids of its own for these calls, so they match by their order, and are renamed in the rest of the
conversation.
"""

MAX_COMPARED: Final = 100_000
"""Brackets, braces, colons and commas of arguments that are compared as JSON in one search, which takes about 25 ms."""
_STRUCTURE: Final = "[{:,"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A session whose history matches the first ``n_messages`` of a conversation.

    The match ends after ``turn``, and the session has different messages behind it; ``None`` if the whole history
    matches. ``call_ids`` are the session's ids of unnamed calls.
    """

    session_id: str
    turn: str | None
    n_messages: int
    call_ids: Mapping[str, str] = field(default_factory=dict)


def find_longest_prefix(
    histories: Iterable[tuple[str, History]], messages: Sequence[ChatMessage]
) -> PrefixMatch | None:
    """Return the session that matches the longest prefix of ``messages``, by its id and history; the first of equals.

    At least one message must remain unmatched. A match that ends before the session's first turn does not count.
    """
    best: PrefixMatch | None = None
    arguments = ArgumentComparison()
    for session_id, history in histories:
        if best is not None and not _may_match_better(history.messages, messages, best, arguments):
            continue
        match = _match(session_id, history, messages, arguments)
        if match is not None and (best is None or _rank(match) > _rank(best)):
            best = match
    return best


def begins_like(history: History, messages: Sequence[ChatMessage]) -> bool:
    """Return whether the first messages match: a cheap check, as a client may have many sessions."""
    if not history.messages:
        return False
    held, sent = history.messages[0], messages[0]
    return held.role == sent.role and held.content == sent.content


class ArgumentComparison:
    """Compares arguments of tool calls as JSON: those of one search, up to a number of characters of structure in all.

    They are parsed on the event loop, and how many values a text has is the client's choice.
    """

    def __init__(self) -> None:
        self._left = MAX_COMPARED

    def equal(self, one: str, other: str) -> bool:
        """Return whether two texts are equal as JSON; different texts beyond the limit are not."""
        if one == other:
            return True
        if self._left >= 0:
            self._left -= sum(text.count(mark) for text in (one, other) for mark in _STRUCTURE)
        if self._left < 0:
            return False
        try:
            return bool(orjson.loads(one) == orjson.loads(other))
        except (orjson.JSONDecodeError, RecursionError):
            return False


def same_message(held: ChatMessage, sent: ChatMessage, arguments: ArgumentComparison) -> bool:
    """Return whether two messages are equal as far as clients can see.

    Reasoning is ignored because clients do not send it back, and arguments of tool calls are compared as JSON. An
    unnamed call may be any.
    """
    return (
        held.role == sent.role
        and held.content == sent.content
        and held.images == sent.images
        and (held.tool_call_id == sent.tool_call_id or is_unnamed(sent.tool_call_id))
        and (held.tool_calls is sent.tool_calls or _same_calls(held.tool_calls or (), sent.tool_calls or (), arguments))
    )


def is_unnamed(call_id: str | None) -> bool:
    """Return whether the client sent a call without an id."""
    return call_id is not None and call_id.startswith(UNNAMED)


def _may_match_better(
    held: Sequence[ChatMessage], sent: Sequence[ChatMessage], best: PrefixMatch, arguments: ArgumentComparison
) -> bool:
    """Compare one message only, since a client may have many long and similar sessions."""
    n = best.n_messages
    if len(held) > n:
        return n < len(sent) - 1 and same_message(held[n], sent[n], arguments)
    return len(held) == n and best.turn is not None


def _rank(match: PrefixMatch) -> tuple[int, bool]:
    return match.n_messages, match.turn is None


def _match(
    session_id: str, history: History, messages: Sequence[ChatMessage], arguments: ArgumentComparison
) -> PrefixMatch | None:
    held = history.messages
    most = min(len(held), len(messages) - 1)
    call_ids: dict[str, str] = {}
    n_messages = next((n for n in range(most) if not _continues(held[n], messages[n], call_ids, arguments)), most)
    if n_messages == len(held):
        return PrefixMatch(session_id, None, n_messages, call_ids) if held else None
    turn = next((turn for turn in reversed(history.turns) if turn.n_messages <= n_messages), None)
    return None if turn is None else PrefixMatch(session_id, turn.turn_id, turn.n_messages, call_ids)


def _continues(held: ChatMessage, sent: ChatMessage, call_ids: dict[str, str], arguments: ArgumentComparison) -> bool:
    """Return whether two messages are equal, results being those of the same call; add ids of unnamed calls."""
    if not same_message(held, sent, arguments):
        return False
    if held.tool_calls and sent.tool_calls:
        pairs = zip(sent.tool_calls, held.tool_calls, strict=True)
        call_ids |= {call.call_id: own.call_id for call, own in pairs if is_unnamed(call.call_id)}
    return sent.tool_call_id is None or call_ids.get(sent.tool_call_id, sent.tool_call_id) == held.tool_call_id


def _same_calls(held: Sequence[ToolCall], sent: Sequence[ToolCall], arguments: ArgumentComparison) -> bool:
    return len(held) == len(sent) and all(
        (one.call_id == other.call_id or is_unnamed(other.call_id))
        and one.name == other.name
        and arguments.equal(one.arguments, other.arguments)
        for one, other in zip(held, sent, strict=True)
    )
