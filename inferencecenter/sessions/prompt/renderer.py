"""Port for rendering conversations with the model's chat template.

A chat template is untrusted code from a model file, so it runs in a separate process (``template_process``) and the
result arrives asynchronously. Renderings that need no template are done inline behind the same port.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.values import ChatMessage, Tool
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.special_tokens import RenderedText
    from inferencecenter.sessions.prompt.template import ConversationRenderer


@dataclass(frozen=True, slots=True)
class RenderInput:
    """A conversation to render at local time ``now``; ``thinking`` ``None`` leaves the choice to the template."""

    messages: Sequence[ChatMessage]
    now: datetime
    tools: Sequence[Tool] = ()
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation whose first ``system_end`` characters come from the system prompt alone.

    ``capabilities`` describes how the model writes tool calls and reasoning.
    """

    rendering: RenderedText
    system_end: int
    capabilities: TemplateCapabilities


RenderResult: TypeAlias = RenderedPrompt | InferenceCenterError
"""Outcome of a rendering."""


class PromptRenderer(Protocol):
    """Renders the conversations of one model. Called on the event loop; never blocks."""

    @property
    def implied_bos(self) -> str:
        """Text of the BOS token that the engine prepends, empty if it does not."""

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Render a conversation and call ``done`` once with the result, possibly before this returns.

        Waiting clients are served round-robin. Calling the returned function cancels the request: ``done`` is not
        called any more.
        """


class PromptRenderers(Protocol):
    """The renderers of all models."""

    def of(self, model: ModelInfo) -> PromptRenderer:
        """Return the renderer of a model's chat template and start preparing it.

        Raises:
            InferenceCenterError: ``internal`` if the template is known not to compile.
        """


class InlineRenderer:
    """Renders synchronously. Implements ``PromptRenderer``.

    Args:
        renderer: A renderer whose run time is linear in the conversation's length.
    """

    def __init__(self, renderer: ConversationRenderer) -> None:
        self._renderer = renderer
        self.implied_bos = renderer.implied_bos

    def render(
        self, conversation: RenderInput, *, client_id: str, done: Callable[[RenderResult], None]
    ) -> Callable[[], None]:
        """Render a conversation and call ``done`` before returning."""
        try:
            result: RenderResult = render_prompt(self._renderer, conversation)
        except InferenceCenterError as error:
            result = error
        done(result)
        return _nothing


def render_prompt(renderer: ConversationRenderer, conversation: RenderInput) -> RenderedPrompt:
    """Return a rendered conversation and the length of its system prompt.

    Raises:
        InferenceCenterError: See ``ConversationRenderer.render``.
    """
    rendering = renderer.render(conversation)
    return RenderedPrompt(rendering, _system_end(renderer, conversation, rendering), renderer.capabilities)


def _system_end(renderer: ConversationRenderer, conversation: RenderInput, rendering: RenderedText) -> int:
    """Return how many leading characters come from the system prompt alone, 0 if that is not certain.

    A template may refuse a lone system prompt or write it elsewhere, and a cut that is not at a special token could
    change the tokenization.
    """
    messages = conversation.messages
    if not messages or messages[0].role != "system" or len(messages) == 1:
        return 0
    try:
        alone = renderer.render(replace(conversation, messages=messages[:1]), add_generation_prompt=False).text
    except InferenceCenterError:
        return 0
    return len(alone) if rendering.text.startswith(alone) and rendering.begins_special(len(alone)) else 0


def _nothing() -> None:
    pass
