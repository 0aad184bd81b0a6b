"""What a conversation gives up when its context is full. Pure: whole turns, the oldest first, down to about half."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.history import View, chars_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.protocol.values import ChatMessage
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.prompt import Prompt

_LEFT: Final = 1 / 2
_MOST_LEFT: Final = 7 / 8
# What a template writes around a message weighs about as much as so many characters of it.
_AROUND_CHARS: Final = 16


@dataclass(frozen=True, slots=True)
class Shift:
    """A shorter ``view`` of the messages, and what it gives up; ``dropped_tokens`` is an estimate."""

    view: View
    dropped_turns: int
    dropped_tokens: int


def plan_shift(history: History, prompt: Prompt, *, total: int, answered: int, n_ctx: int) -> Shift | None:
    """Return how a turn goes on whose prompt and answer fill the context, ``None`` if it cannot.

    A turn is given up with all that followed a message of the user. The first messages of the view stay, and so do the
    question being answered and its answer. If too little room were won, nothing is given up.

    Args:
        history: As it was before the turn.
        prompt: What does not fit.
        total: Tokens of it and of what was generated for it so far.
        answered: The latter alone.
        n_ctx: Tokens that both may take.
    """
    kept = min(prompt.view.kept, len(prompt.messages))
    n_hidden = prompt.view.n_dropped
    messages = prompt.view.of(prompt.messages)
    costs = _message_tokens(messages, _known_tokens(history, prompt, n_hidden=n_hidden, total=total - answered))
    left = float(total)
    shift, asked = None, 0
    for index in range(kept, len(messages)):
        if messages[index].role == "user":
            if index > kept:
                shift = Shift(View(kept, index + n_hidden), asked, round(total - left))
                if left <= n_ctx * _LEFT:
                    return shift
            asked += 1
        left -= costs[index]
    if shift is None or total - shift.dropped_tokens > n_ctx * _MOST_LEFT:
        return None
    return shift


def _known_tokens(history: History, prompt: Prompt, *, n_hidden: int, total: int) -> list[tuple[int, int]]:
    """Return how many tokens the first so many messages of the view take, as far as that is known, ascending."""
    known = [(0, 0)]
    if prompt.tokens:
        for mark in history.turns:
            n_messages = mark.n_messages - n_hidden
            if mark.n_tokens > known[-1][1] and known[-1][0] < n_messages < len(prompt.messages) - n_hidden:
                known.append((n_messages, mark.n_tokens))
    return [*known, (len(prompt.messages) - n_hidden, total)]


def _message_tokens(messages: Sequence[ChatMessage], known: list[tuple[int, int]]) -> list[float]:
    """Return about how many tokens each message takes; between two known places they follow the characters."""
    costs: list[float] = []
    for (start, before), (end, after) in pairwise(known):
        chars = [chars_of(message) + _AROUND_CHARS for message in messages[start:end]]
        costs.extend(max(0, after - before) * n_chars / sum(chars) for n_chars in chars)
    return costs
