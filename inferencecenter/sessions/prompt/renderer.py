"""Rendering a conversation as its model reads it: the port that sessions use, and what crosses it.

A chat template is a program from a model file, so a conversation is rendered in another process (``template_process``)
and the result arrives later. What needs no template is rendered at once, behind the same port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.values import ChatMessage, Tool
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.special_tokens import RenderedText
    from inferencecenter.sessions.prompt.template import ConversationRenderer


@dataclass(frozen=True, slots=True)
class RenderInput:
    """What is rendered: messages, as of the time ``now``; ``thinking`` is left to the template where it is ``None``."""

    messages: tuple[ChatMessage, ...]
    now: datetime
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation. Its first ``system_end`` characters come from the system prompt alone.

    ``written`` is how the model writes calls of tools and what it thinks.
    """

    rendering: RenderedText
    system_end: int
    written: TemplateCapabilities


RenderResult: TypeAlias = RenderedPrompt | InferenceCenterError
"""What became of a rendering."""


class PromptRenderer(Protocol):
    """Renders the conversations of one model. Called on the event loop; nothing here blocks."""

    @property
    def implied_bos(self) -> str:
        """Text of the token that the engine puts first by itself, empty when it does not."""

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Have a conversation rendered, and ``done`` called once with the result, perhaps before this returns.

        Clients that wait at the same time take turns. What is returned withdraws the request: ``done`` is not called
        any more.
        """


class PromptRenderers(Protocol):
    """The renderers of all models."""

    def of(self, model: ModelInfo) -> PromptRenderer:
        """Return the renderer of a model's chat template, and have it made ready.

        Raises:
            InferenceCenterError: ``internal`` when it is known that the template does not compile.
        """


class InlineRenderer:
    """Renders at once. Implements ``PromptRenderer``.

    Args:
        renderer: What does it, in a time that is proportional to the conversation's length.
    """

    def __init__(self, renderer: ConversationRenderer) -> None:
        self._renderer = renderer
        self.implied_bos = renderer.implied_bos

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Render a conversation."""
        try:
            result: RenderResult = render_prompt(self._renderer, conversation)
        except InferenceCenterError as error:
            result = error
        done(result)
        return _nothing


def render_prompt(renderer: ConversationRenderer, conversation: RenderInput) -> RenderedPrompt:
    """Return a conversation as ``renderer`` writes it, and how much of it the system prompt alone accounts for.

    Raises:
        InferenceCenterError: See ``ConversationRenderer.render``.
    """
    rendering = _render(renderer, conversation, conversation.messages)
    return RenderedPrompt(rendering, _system_end(renderer, conversation, rendering), renderer.written)


def _render(
    renderer: ConversationRenderer, conversation: RenderInput, messages: tuple[ChatMessage, ...], *, asks: bool = True
) -> RenderedText:
    return renderer.render(
        messages, now=conversation.now, asks=asks, tools=conversation.tools, thinking=conversation.thinking
    )


def _system_end(renderer: ConversationRenderer, conversation: RenderInput, rendering: RenderedText) -> int:
    """Return how many characters at the beginning come from the system prompt alone, 0 when that cannot be told.

    A template may need more than a system prompt, or write it elsewhere. And what is cut where no special token begins
    might be other tokens than it is uncut.
    """
    messages = conversation.messages
    if not messages or messages[0].role != "system" or len(messages) == 1:
        return 0
    try:
        alone = _render(renderer, conversation, messages[:1], asks=False).text
    except InferenceCenterError:
        return 0
    return len(alone) if rendering.text.startswith(alone) and rendering.begins_special(len(alone)) else 0


def _nothing() -> None:
    pass
