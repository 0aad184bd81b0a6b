"""Finds the session whose history is the longest prefix of the messages that a client sends. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferencecenter.protocol.values import ChatMessage, ToolCall
    from inferencecenter.sessions.history import History


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A session whose history matches the first ``n_messages`` of a conversation.

    The match ends after ``turn``, and the session has different messages behind it; ``None`` if the whole history
    matches.
    """

    session_id: str
    turn: str | None
    n_messages: int


def find_longest_prefix(
    histories: Iterable[tuple[str, History]], messages: Sequence[ChatMessage]
) -> PrefixMatch | None:
    """Return the session that matches the longest prefix of ``messages``, by its id and history; the first of equals.

    At least one message must remain unmatched. A match that ends before the session's first turn does not count.
    """
    best: PrefixMatch | None = None
    for session_id, history in histories:
        if best is not None and not _can_beat(history.messages, messages, best):
            continue
        found = _match(session_id, history, messages)
        if found is not None and (best is None or _rank(found) > _rank(best)):
            best = found
    return best


def same_message(held: ChatMessage, sent: ChatMessage) -> bool:
    """Return whether two messages are equal as far as clients can see.

    Reasoning is ignored because clients do not send it back, and arguments of tool calls are compared as JSON.
    """
    return (
        held.role == sent.role
        and held.content == sent.content
        and held.tool_call_id == sent.tool_call_id
        and (held.tool_calls is sent.tool_calls or _same_calls(held.tool_calls or (), sent.tool_calls or ()))
    )


def _can_beat(held: Sequence[ChatMessage], sent: Sequence[ChatMessage], best: PrefixMatch) -> bool:
    """Compare one message to skip sessions that cannot beat ``best``: a client may have many long, similar ones."""
    n = best.n_messages
    if len(held) > n:
        return n < len(sent) - 1 and same_message(held[n], sent[n])
    return len(held) == n and best.turn is not None


def _rank(found: PrefixMatch) -> tuple[int, bool]:
    return found.n_messages, found.turn is None


def _match(session_id: str, history: History, messages: Sequence[ChatMessage]) -> PrefixMatch | None:
    held = history.messages
    most = min(len(held), len(messages) - 1)
    n_messages = next((n for n in range(most) if not same_message(held[n], messages[n])), most)
    if n_messages == len(held):
        return PrefixMatch(session_id, None, n_messages) if held else None
    turn = next((turn for turn in reversed(history.turns) if turn.n_messages <= n_messages), None)
    return None if turn is None else PrefixMatch(session_id, turn.turn_id, turn.n_messages)


def _same_calls(held: Sequence[ToolCall], sent: Sequence[ToolCall]) -> bool:
    return len(held) == len(sent) and all(
        one.call_id == other.call_id and one.name == other.name and _same_json(one.arguments, other.arguments)
        for one, other in zip(held, sent, strict=True)
    )


def _same_json(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return bool(orjson.loads(one) == orjson.loads(other))
    except orjson.JSONDecodeError:
        return False
