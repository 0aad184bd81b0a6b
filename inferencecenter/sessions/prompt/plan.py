"""Plans the prompt of a turn and the history after it, and what a full context drops. Pure.

A session's tokens stay exactly as they were given and generated. A turn renders the whole conversation and submits,
after the tokens it already has, only the text that they do not spell yet. Where a template rewrites what was there
before, everything is rendered again; the engine then reuses the KV of what is still the same. So it is where the
context was full: what is left of the conversation is rendered again, and positions stay true.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import TOKEN_BYTES, History, HistoryView, chars_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import Finished, PromptSegment
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.sessions.prompt.renderer import RenderedPrompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn submits: kept ``tokens`` and the ``pieces`` after them; together they spell ``text``.

    ``messages`` are all there are, ``view`` is what was rendered of them. The first ``shared_pieces`` pieces spell the
    system prompt and nothing else.
    """

    messages: tuple[ChatMessage, ...]
    view: HistoryView
    text: str
    tokens: bytes
    pieces: tuple[PromptSegment, ...]
    shared_pieces: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """What the engine said in a turn: its text, its packed tokens, and the packed tokens of the prompt if it began.

    ``message`` is how the conversation keeps it, where that is not just the text.
    """

    turn_id: str
    text: str
    tokens: bytes
    prompt_tokens: bytes | None
    message: ChatMessage | None = None


def messages_of(request: Infer) -> tuple[ChatMessage, ...]:
    """Return what a turn says."""
    if request.messages is not None:
        return tuple(request.messages)
    assert request.prompt is not None, "the request model demands one of the two"
    return (ChatMessage(role="user", content=request.prompt),)


def n_kept(messages: tuple[ChatMessage, ...], n_keep: int) -> int:
    """Return how many of the first messages are always read: the system prompt and ``n_keep`` more."""
    n_system = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    return min(n_system + n_keep, len(messages))


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a turn is about to submit: the ``view`` of ``messages``, with the history's tokens unless it is ``anew``."""

    messages: tuple[ChatMessage, ...]
    view: HistoryView
    anew: bool = False


def least_tokens(plan: PromptPlan, *, max_token_bytes: int, may_shift: bool) -> int:
    """Return how many tokens a prompt has at least, by its characters, before it is rendered.

    What users, tools and system prompts say is rendered as it is, but for white space around it; a template may leave
    out what the model has said and thought. Where the context ``may_shift``, older turns may be given up.
    """
    messages = plan.view.of(plan.messages)
    if may_shift:
        asked = max((index for index, message in enumerate(messages) if message.role == "user"), default=0)
        kept = min(plan.view.kept, len(messages))
        messages = messages[:kept] + messages[max(kept, asked) :]
    n_chars = sum(len(message.content.strip()) for message in messages if message.role != "assistant")
    return -(-n_chars // max_token_bytes)


def next_view(history: History, messages: tuple[ChatMessage, ...], *, n_keep: int = 0) -> HistoryView:
    """Return what is read of ``messages``, which go on from those of the history."""
    return HistoryView(n_kept(messages, n_keep), history.view.resumes_at)


def prompt_of(history: History, plan: PromptPlan, rendered: RenderedPrompt, *, implied_bos: str) -> Prompt:
    """Return what to submit to have the last of the plan's messages answered, which go on from those of the history.

    ``implied_bos`` is the text of the token that the engine puts first by itself, empty when it does not.
    """
    messages, view = plan.messages, plan.view
    rendering = rendered.rendering
    if not plan.anew and history.tokens and rendering.text.startswith(history.covered):
        return Prompt(messages, view, rendering.text, history.tokens, rendering.pieces(len(history.covered)))
    # The engine puts the BOS token before what comes first; the template's own would be a second one.
    start = len(implied_bos) if rendering.text.startswith(implied_bos) else 0
    shared: tuple[PromptSegment, ...] = ()
    if rendered.system_end > start:
        shared, start = rendering.pieces(start, rendered.system_end), rendered.system_end
    pieces = shared + rendering.pieces(start)
    return Prompt(messages, view, rendering.text, b"", pieces, len(shared))


def unread_prompt(history: History, new: tuple[ChatMessage, ...], view: HistoryView | None) -> Prompt:
    """Return the prompt of a turn that ends without having been rendered: its messages and nothing for the engine."""
    return Prompt(history.messages + new, view or history.view, "", b"", ())


def after_turn(
    history: History, prompt: Prompt, *, answer: GeneratedAnswer, end: Finished | None, keeps_end: bool
) -> History:
    """Return the history once a turn has ended, with whatever of the answer was shown.

    Args:
        history: As it was before the turn, made for the model that answered.
        prompt: What the turn submitted last.
        answer: What came back.
        end: How it ended; not needed for a prompt that did not begin.
        keeps_end: Whether the token that ended the answer is part of the text.
    """
    messages = (*prompt.messages, answer.message or ChatMessage(role="assistant", content=answer.text))
    if answer.prompt_tokens is None or end is None:
        if prompt.view.n_dropped == history.view.n_dropped:
            now = History(
                messages, history.tokens, history.covered, prompt.view, model_fingerprint=history.model_fingerprint
            )
            return history.after(answer.turn_id, now, goes_on=True)
        now = History(messages, view=prompt.view, model_fingerprint=history.model_fingerprint)
        return history.after(answer.turn_id, now, goes_on=False)
    kept_tokens, end_text = end.kept_tokens, end.end_text
    if end_text and not keeps_end:
        kept_tokens, end_text = kept_tokens - 1, ""
    now = History(
        messages,
        answer.prompt_tokens + answer.tokens[: kept_tokens * TOKEN_BYTES],
        prompt.text + answer.text[: end.kept_chars] + end_text,
        prompt.view,
        model_fingerprint=history.model_fingerprint,
    )
    return history.after(answer.turn_id, now, goes_on=bool(prompt.tokens))


_LEFT: Final = 1 / 2
_MOST_LEFT: Final = 7 / 8
# What a template writes around a message weighs about as much as so many characters of it.
_AROUND_CHARS: Final = 16


@dataclass(frozen=True, slots=True)
class ContextShift:
    """A shorter ``view`` of the messages, and what it gives up; ``dropped_tokens`` is an estimate."""

    view: HistoryView
    dropped_turns: int
    dropped_tokens: int


def plan_context_shift(
    history: History, prompt: Prompt, *, total: int, answered: int, n_ctx: int
) -> ContextShift | None:
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
                shift = ContextShift(HistoryView(kept, index + n_hidden), asked, round(total - left))
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
