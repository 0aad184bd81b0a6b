"""Port for rendering conversations with the model's chat template.

A chat template is untrusted code from a model file, so it runs in a separate process (``template_process``) and the
result arrives asynchronously. Renderings that need no template are done inline behind the same port.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.sessions.output_parsing.call_format import PLAIN
from inferencecenter.sessions.prompt.special_tokens import RenderedText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from inferencecenter.ipc.messages import InfillTokens, ModelInfo
    from inferencecenter.protocol.values import ChatMessage, Infill, Tool
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.prompt.template import ConversationRenderer


@dataclass(frozen=True, slots=True)
class RenderInput:
    """A conversation to render at local time ``now``; ``thinking`` ``None`` leaves the choice to the template.

    With ``infill`` the conversation is the text before a gap; only for raw mode.
    """

    messages: Sequence[ChatMessage]
    now: datetime
    tools: Sequence[Tool] = ()
    thinking: bool | None = None
    infill: Infill | None = None


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


class RawText:
    """Raw mode: concatenates all contents; no text of them is special.

    Args:
        infill: Tokens that frame a prompt whose middle is missing; ``None`` if the model has none.
    """

    implied_bos = ""
    capabilities = PLAIN

    def __init__(self, infill: InfillTokens | None = None) -> None:
        self._infill = infill

    def render(self, conversation: RenderInput, *, add_generation_prompt: bool = True) -> RenderedText:
        """Return the concatenated contents.

        Raises:
            InferenceCenterError: ``invalid_request`` for tools, ``thinking`` and images, which are not supported; for
                ``infill`` if the model has no tokens for it.
        """
        if conversation.tools:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, 'sessions with mode "raw" do not support tools', field="tools"
            )
        if conversation.thinking is not None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                'sessions with mode "raw" do not support the choice of thinking',
                field="thinking",
            )
        if any(message.images for message in conversation.messages):
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, 'sessions with mode "raw" do not support images', field="messages"
            )
        text = "".join(message.content for message in conversation.messages)
        if conversation.infill is None:
            return RenderedText(text, special=False)
        if self._infill is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "the model cannot fill in the middle of a text: its vocabulary has no tokens for this",
                field="infill",
                hint="Choose a model made for code completion, or continue the text at its end.",
            )
        return RenderedText.of_segments(_framed(text, conversation.infill, self._infill))


_SNIPPET: Final = "\n\n--- snippet ---\n\n"
_REPOSITORY: Final = "myproject\n"
_FILE: Final = "filename\n"
"""Names in place of those that requests do not carry; llama-server has the same."""


def _framed(prefix: str, infill: Infill, tokens: InfillTokens) -> Iterator[PromptSegment]:
    """Yield the prompt of a gap after ``prefix``, in llama-server's order.

    Other files come first, under the tokens of a repository if the vocabulary has them.
    """

    def special(text: str) -> PromptSegment:
        return PromptSegment(text, special=True)

    if infill.extra:
        if tokens.repository:
            yield from (special(tokens.repository), PromptSegment(_REPOSITORY))
        for file in infill.extra:
            named = (special(tokens.file), PromptSegment(f"{file.filename}\n")) if tokens.file else ()
            yield from named or (PromptSegment(_SNIPPET),)
            yield PromptSegment(file.text)
        if tokens.file:
            yield from (special(tokens.file), PromptSegment(_FILE))
    yield from (special(tokens.prefix), PromptSegment(prefix))
    yield from (special(tokens.suffix), PromptSegment(infill.suffix))
    yield special(tokens.middle)


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
