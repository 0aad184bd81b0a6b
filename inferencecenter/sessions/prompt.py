"""What a turn is made of, and what it leaves behind. Pure: plans over values.

A session's tokens stay exactly as they were given and generated. A turn renders the whole conversation and submits,
after the tokens it already has, only the text that they do not spell yet. Where a template rewrites what was there
before, everything is rendered again; the engine then reuses the KV of what is still the same. So it is where the
context was full: what is left of the conversation is rendered again, and positions stay true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import TOKEN_BYTES, History, View

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import Finished, PromptSegment
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.sessions.rendering import RenderedPrompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn submits: kept ``tokens`` and the ``pieces`` after them; together they spell ``text``.

    ``messages`` are all there are, ``view`` is what was rendered of them. The first ``shared_pieces`` pieces spell the
    system prompt and nothing else.
    """

    messages: tuple[ChatMessage, ...]
    view: View
    text: str
    tokens: bytes
    pieces: tuple[PromptSegment, ...]
    shared_pieces: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
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
    view: View
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


def next_view(history: History, messages: tuple[ChatMessage, ...], *, n_keep: int = 0) -> View:
    """Return what is read of ``messages``, which go on from those of the history."""
    return View(n_kept(messages, n_keep), history.view.resumes_at)


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


def unread_prompt(history: History, new: tuple[ChatMessage, ...], view: View | None) -> Prompt:
    """Return the prompt of a turn that ends without having been rendered: its messages and nothing for the engine."""
    return Prompt(history.messages + new, view or history.view, "", b"", ())


def after_turn(history: History, prompt: Prompt, *, answer: Answer, end: Finished | None, keeps_end: bool) -> History:
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
            now = History(messages, history.tokens, history.covered, prompt.view, made_by=history.made_by)
            return history.after(answer.turn_id, now, goes_on=True)
        now = History(messages, view=prompt.view, made_by=history.made_by)
        return history.after(answer.turn_id, now, goes_on=False)
    kept_tokens, end_text = end.kept_tokens, end.end_text
    if end_text and not keeps_end:
        kept_tokens, end_text = kept_tokens - 1, ""
    now = History(
        messages,
        answer.prompt_tokens + answer.tokens[: kept_tokens * TOKEN_BYTES],
        prompt.text + answer.text[: end.kept_chars] + end_text,
        prompt.view,
        made_by=history.made_by,
    )
    return history.after(answer.turn_id, now, goes_on=bool(prompt.tokens))
