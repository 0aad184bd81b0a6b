"""Plans a turn's prompt, the history after the turn, and context shifts. Pure.

A session keeps the exact tokens that were submitted and generated. A turn renders the whole conversation and submits,
after the cached tokens, only the text that they do not cover yet. If the rendering no longer starts with the covered
text (the template rewrites earlier messages, or a context shift dropped some), everything is submitted again and the
engine reuses the KV cache of the common prefix. Invariant: ``tokens`` always spell ``covered``, and the next rendering
either extends ``covered`` or replaces both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, prompt_too_long
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.history import TOKEN_BYTES, History, HistoryView, chars_of, plain_messages
from inferencecenter.sessions.prompt.renderer import RenderInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from inferencecenter.ipc.messages import Finished, ModelInfo
    from inferencecenter.protocol.requests import Infer
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.renderer import RenderedPrompt
    from inferencecenter.sessions.turn import TurnSpec


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn submits: cached ``tokens`` followed by ``pieces``; together they spell ``text``.

    The cached tokens may have empty reasoning that the text lacks.

    ``messages`` is the full conversation and ``view`` the part that was rendered. The first ``shared_pieces`` pieces
    spell exactly the system prompt. The text ends with ``prefix``, the given start of the answer. ``begun`` is its
    text as later prompts will have it: a template may leave out the empty reasoning with which it begins an answer.
    """

    messages: tuple[ChatMessage, ...]
    view: HistoryView
    text: str
    tokens: bytes
    pieces: tuple[PromptSegment, ...]
    shared_pieces: int = 0
    prefix: str = ""
    begun: str = ""


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """Output of the engine for one turn: text, packed tokens, and the packed prompt tokens if prefill started.

    ``message`` is the form stored in the conversation, where that is not just the text.
    """

    turn_id: str
    text: str
    tokens: bytes
    prompt_tokens: bytes | None
    message: ChatMessage | None = None


def messages_of(request: Infer) -> tuple[ChatMessage, ...]:
    """Return the messages of a turn's request; none if it is to answer the last message of the history."""
    if request.messages is not None:
        return plain_messages(request.messages)
    if request.prompt is None:
        return ()
    return (ChatMessage(role="user", content=request.prompt),)


def n_kept(messages: tuple[ChatMessage, ...], n_keep: int) -> int:
    """Return how many leading messages are never dropped: the system prompt and ``n_keep`` more."""
    n_system = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    return min(n_system + n_keep, len(messages))


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The messages of a prompt, of which the ``view`` is rendered; ``rerender`` discards the history's tokens."""

    messages: tuple[ChatMessage, ...]
    view: HistoryView
    rerender: bool = False


def min_tokens(messages: Sequence[ChatMessage], *, kept: int, max_token_bytes: int, may_shift: bool) -> int:
    """Return a lower bound of the prompt's tokens, computed from its characters before it is rendered.

    Contents of users, tools and system prompts are rendered verbatim except for surrounding white space; a template may
    omit the model's own answers and reasoning. If the context ``may_shift``, older turns may be dropped, except for the
    first ``kept`` messages.
    """
    if may_shift:
        question = max((index for index, message in enumerate(messages) if message.role == "user"), default=0)
        kept = min(kept, len(messages))
        messages = [*messages[:kept], *messages[max(kept, question) :]]
    n_chars = sum(len(message.content.strip()) for message in messages if message.role != "assistant")
    return -(-n_chars // max_token_bytes)


def prompt_of(
    history: History, plan: PromptPlan, rendered: RenderedPrompt, *, implied_bos: str, prefix: str = ""
) -> Prompt:
    """Return the prompt that answers the last of the plan's messages, which extend the history's.

    ``implied_bos`` is the text of the BOS token that the engine prepends, empty if it does not. The answer is begun
    with ``prefix``.
    """
    messages, view = plan.messages, plan.view
    rendering = rendered.rendering
    text, prefixed = rendering.text + prefix, (PromptSegment(prefix),) if prefix else ()
    begun = _without_empty_thinking(text, rendered.capabilities)
    if not plan.rerender and history.tokens and rendering.text.startswith(history.covered):
        pieces = rendering.pieces(len(history.covered)) + prefixed
        return Prompt(messages, view, text, history.tokens, pieces, prefix=prefix, begun=begun)
    # The engine prepends BOS; the template's own would duplicate it.
    start = len(implied_bos) if rendering.text.startswith(implied_bos) else 0
    shared: tuple[PromptSegment, ...] = ()
    if rendered.system_end > start:
        shared, start = rendering.pieces(start, rendered.system_end), rendered.system_end
    pieces = shared + rendering.pieces(start) + prefixed
    return Prompt(messages, view, text, b"", pieces, len(shared), prefix, begun)


def _without_empty_thinking(text: str, capabilities: TemplateCapabilities) -> str:
    """Return a prompt as the start of later ones: without empty reasoning at its end, if the template omits that.

    So the tokens of the answer are kept, and the model goes on seeing what it was given.
    """
    tags = capabilities.thinking
    if tags is None or not capabilities.omits_empty_thinking:
        return text
    closed = text.rstrip()
    opened = closed.removesuffix(tags.closes).rstrip()
    is_empty = closed.endswith(tags.closes) and opened.endswith(tags.opens)
    return opened.removesuffix(tags.opens) if is_empty else text


def plan_prompt(history: History, messages: tuple[ChatMessage, ...], spec: TurnSpec) -> tuple[PromptPlan, RenderInput]:
    """Return the plan of a turn's prompt, which adds ``messages`` to a history, and the conversation to render."""
    request, messages = spec.request, history.messages + messages
    view = spec.view or HistoryView(n_kept(messages, spec.params.n_keep), history.view.resumes_at)
    conversation = RenderInput(
        view.of(messages),
        datetime.fromisoformat(spec.rendered_at),
        tools=tuple(request.tools or ()),
        thinking=request.thinking,
        infill=request.infill,
    )
    rerender = spec.view is not None or request.infill is not None
    return PromptPlan(messages, view, rerender=rerender), conversation


def check_fits(conversation: RenderInput, model: ModelInfo, *, kept: int = 0, may_shift: bool = False) -> None:
    """Reject a prompt that cannot fit the context, before it is rendered; see ``min_tokens``.

    Raises:
        InferenceCenterError: ``prompt_too_long``.
    """
    if not model.max_token_bytes:
        return
    n_tokens = min_tokens(conversation.messages, kept=kept, max_token_bytes=model.max_token_bytes, may_shift=may_shift)
    if n_tokens >= model.n_ctx:
        raise prompt_too_long(f"at least {n_tokens} tokens", n_ctx=model.n_ctx)


def check_sees(conversation: RenderInput, model: ModelInfo, *, seeing: Callable[[], Collection[str]]) -> None:
    """Reject images for a model without a projector; ``seeing`` returns the names of models that have one.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if not model.sees and any(message.images for message in conversation.messages):
        raise blind(model.name, seeing())


def blind(name: str, seeing: Collection[str]) -> InferenceCenterError:
    """Return the error for images given to the model ``name``, which takes none."""
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"the model {name} does not take images",
        field="messages",
        hint=f"These models do: {', '.join(sorted(seeing))}."
        if seeing
        else "None of this daemon's models does; the operator can set mmproj for a model that has a projector file.",
    )


def unrendered_prompt(history: History, new: tuple[ChatMessage, ...], view: HistoryView | None) -> Prompt:
    """Return the prompt of a turn that ends before it is rendered: its messages and nothing to submit."""
    return Prompt(history.messages + new, view or history.view, "", b"", ())


def after_turn(
    history: History, prompt: Prompt, *, answer: GeneratedAnswer, end: Finished | None, keeps_end: bool
) -> History:
    """Return the history after a turn, including the part of the answer that was sent to the client.

    Args:
        history: The history before the turn, of the model that answered.
        prompt: The prompt that was submitted last.
        answer: The engine's output.
        end: How generation ended; ``None`` only if prefill did not start.
        keeps_end: Whether the end-of-turn token is part of the text.
    """
    message = answer.message or ChatMessage(role="assistant", content=answer.text)
    if prompt.prefix:
        message = message.model_copy(update={"content": prompt.prefix + message.content})
    messages = (*prompt.messages, message)
    if answer.prompt_tokens is None or end is None:
        if prompt.view.n_dropped == history.view.n_dropped:
            now = History(
                messages, history.tokens, history.covered, prompt.view, model_fingerprint=history.model_fingerprint
            )
            return history.with_turn(answer.turn_id, now, extends_tokens=True)
        now = History(messages, view=prompt.view, model_fingerprint=history.model_fingerprint)
        return history.with_turn(answer.turn_id, now, extends_tokens=False)
    kept_tokens, end_text = end.kept_tokens, end.end_text
    if end_text and not keeps_end:
        kept_tokens, end_text = kept_tokens - 1, ""
    now = History(
        messages,
        answer.prompt_tokens + answer.tokens[: kept_tokens * TOKEN_BYTES],
        prompt.begun + answer.text[: end.kept_chars] + end_text,
        prompt.view,
        model_fingerprint=history.model_fingerprint,
    )
    return history.with_turn(answer.turn_id, now, extends_tokens=bool(prompt.tokens))


_TARGET_FILL: Final = 1 / 2
_MAX_FILL: Final = 7 / 8
# Estimated characters that a template adds around a message, and that have as many tokens as an image.
_AROUND_CHARS: Final = 16
_IMAGE_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class ContextShift:
    """A shorter ``view`` of the messages and how much it drops; ``dropped_tokens`` is an estimate."""

    view: HistoryView
    dropped_turns: int
    dropped_tokens: int


def plan_context_shift(
    history: History, prompt: Prompt, *, total: int, answered: int, n_ctx: int
) -> ContextShift | None:
    """Return the context shift for a turn whose prompt and answer fill the context, ``None`` if there is none.

    A turn is dropped as a whole: a user message and everything up to the next one. The leading messages of the view,
    the current question and its answer are kept. If too little room would be freed, nothing is dropped.

    Args:
        history: The history before the turn.
        prompt: The prompt that does not fit.
        total: Tokens of the prompt and of the answer so far.
        answered: Tokens of the answer so far.
        n_ctx: Context size in tokens.
    """
    kept = min(prompt.view.kept, len(prompt.messages))
    n_hidden = prompt.view.n_dropped
    messages = prompt.view.of(prompt.messages)
    costs = _message_tokens(messages, _known_tokens(history, prompt, n_hidden=n_hidden, total=total - answered))
    remaining = float(total)
    shift, n_turns = None, 0
    for index in range(kept, len(messages)):
        if messages[index].role == "user":
            if index > kept:
                shift = ContextShift(HistoryView(kept, index + n_hidden), n_turns, round(total - remaining))
                if remaining <= n_ctx * _TARGET_FILL:
                    return shift
            n_turns += 1
        remaining -= costs[index]
    if shift is None or total - shift.dropped_tokens > n_ctx * _MAX_FILL:
        return None
    return shift


def _known_tokens(history: History, prompt: Prompt, *, n_hidden: int, total: int) -> list[tuple[int, int]]:
    """Return the known prefix lengths of the view as pairs (messages, tokens), ascending."""
    known = [(0, 0)]
    if prompt.tokens:
        for mark in history.turns:
            n_messages = mark.n_messages - n_hidden
            if mark.n_tokens > known[-1][1] and known[-1][0] < n_messages < len(prompt.messages) - n_hidden:
                known.append((n_messages, mark.n_tokens))
    return [*known, (len(prompt.messages) - n_hidden, total)]


def _message_tokens(messages: Sequence[ChatMessage], known: list[tuple[int, int]]) -> list[float]:
    """Return the estimated tokens of each message, interpolated by characters between known prefix lengths."""
    costs: list[float] = []
    for (start, before), (end, after) in pairwise(known):
        chars = [
            chars_of(message) + _AROUND_CHARS + _IMAGE_CHARS * len(message.images or ())
            for message in messages[start:end]
        ]
        costs.extend(max(0, after - before) * n_chars / sum(chars) for n_chars in chars)
    return costs
