"""From messages to the text a model was trained on: the model's own chat template, or plain concatenation."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.output_parsing.call_format import PLAIN
from inferencecenter.sessions.output_parsing.detection import as_text, detect
from inferencecenter.sessions.output_parsing.template_values import message_values, tool_values
from inferencecenter.sessions.prompt.sandbox import TemplateRefusalError, TemplateSandbox
from inferencecenter.sessions.prompt.special_tokens import RenderedText, SpecialTokenEscaper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.values import ChatMessage, Tool
    from inferencecenter.sessions.output_parsing.call_format import TemplateCapabilities
    from inferencecenter.sessions.output_parsing.detection import TemplateForm
    from inferencecenter.sessions.prompt.template_frames import TemplateSource

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What is used for a model that has no template of its own."""

_SOME_DAY: Final = datetime(2026, 1, 1, tzinfo=UTC)
_TRIAL_OPERATIONS: Final = 20_000
_SWITCHES: Final = frozenset(("enable_thinking", "thinking"))


class ConversationRenderer(Protocol):
    """Turns a conversation into text that asks for the next answer."""

    implied_bos: str
    """Text of the token that the engine puts first by itself, empty when it does not."""
    keeps_end: bool
    """Whether the token that ended an answer is part of the rendered history."""

    written: TemplateCapabilities
    """How the model writes calls of tools and what it thinks."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        now: datetime,
        asks: bool = True,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
    ) -> RenderedText:
        """Return the whole conversation as text, which ``asks`` for an answer or just ends.

        The model may ask for ``tools``; ``thinking`` says whether it thinks before it answers, ``None`` leaves it to
        the template.

        Raises:
            InferenceCenterError: ``invalid_request`` when the conversation does not suit the template, ``internal``
                when the template is in error.
        """


class RawText:
    """Conversations in raw mode: one text that grows, in which nothing is special."""

    implied_bos = ""
    keeps_end = False
    written = PLAIN

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        now: datetime,
        asks: bool = True,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
    ) -> RenderedText:
        """Return all contents one after the other.

        Raises:
            InferenceCenterError: ``invalid_request`` for tools and for a choice of thinking: it knows neither.
        """
        if tools:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, 'sessions with mode "raw" know no tools', field="tools"
            )
        if thinking is not None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, 'sessions with mode "raw" let nobody choose thinking', field="thinking"
            )
        return RenderedText("".join(message.content for message in messages), special=False)


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises:
        InferenceCenterError: ``internal`` when the template does not compile.
    """

    keeps_end = True

    def __init__(self, model: ModelInfo | TemplateSource) -> None:
        source = model.chat_template or CHATML
        self._special = SpecialTokenEscaper(model.special_tokens)
        self._sandbox = TemplateSandbox()
        self._constants = {"bos_token": model.bos_token, "eos_token": model.eos_token, "documents": None}
        self.implied_bos = model.bos_token if model.add_bos else ""
        try:
            self._template = self._sandbox.from_string(source)
            self._switches = _SWITCHES & find_undeclared_variables(self._sandbox.parse(source))
        except (TemplateError, RecursionError) as error:
            raise _broken(error) from error
        self._form, self.written = detect(self._try, source=source, control=model.special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        now: datetime,
        asks: bool = True,
        tools: Sequence[Tool] = (),
        thinking: bool | None = None,
    ) -> RenderedText:
        """Return the conversation as the template writes it, up to where the model answers if it ``asks``.

        Raises:
            InferenceCenterError: See ``ConversationRenderer``.
        """
        values = {
            **self._given(messages, tools, self._form),
            **self._switched(thinking),
            "add_generation_prompt": asks,
        }
        try:
            return RenderedText.of_marked(
                self._sandbox.run(self._template, values, now=now), tokens=self._special.texts
            )
        except TemplateRefusalError as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"the model's chat template refuses the conversation: {error.message}",
                field="messages",
                hint="The order of roles must suit the model; some know no system prompt.",
            ) from error
        # The border to a program from a model file, which can fail in any way a program can.
        except Exception as error:
            raise _unsuitable(error, messages, tools) or _broken(error) from error

    def _given(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], form: TemplateForm) -> dict[str, object]:
        """Return what the template gets of a conversation in the form that it wants."""
        mark = self._special.mark
        offered = tool_values(tools, mark=mark)
        if not form.native:
            messages, offered = as_text(messages, tools, knows_system=form.knows_system), []
        return {
            **self._constants,
            "messages": message_values(
                messages, mark=mark, text_arguments=form.text_arguments, short_ids=form.short_ids
            ),
            "tools": offered or None,
        }

    def _try(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], form: TemplateForm) -> str:
        """Return what the template writes, nothing if it fails or does much."""
        values = {**self._given(messages, tools, form), "add_generation_prompt": False}
        try:
            return self._sandbox.run(self._template, values, now=_SOME_DAY, max_operations=_TRIAL_OPERATIONS)
        except Exception:  # noqa: BLE001 - the same border as above; what fails is not how the model writes
            return ""

    def _switched(self, thinking: bool | None) -> dict[str, bool]:
        """Return the template's variables that say whether the model thinks."""
        if thinking is None:
            return {}
        if not self._switches:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "the model's chat template does not let one choose whether it thinks",
                field="thinking",
            )
        return dict.fromkeys(self._switches, thinking)


def _unsuitable(
    error: Exception, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> InferenceCenterError | None:
    """Return why tools or their results were too much for a template, if there are any: it knows some forms of them."""
    if tools:
        field = "tools"
    elif any(message.role == "tool" or message.tool_calls is not None for message in messages):
        field = "messages"
    else:
        return None
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"the model's chat template cannot write these {field}: {type(error).__name__}: {str(error)[:200]}",
        field=field,
        hint="Give tools an object's schema as parameters, and results the tool_call_id of their call.",
    )


def _broken(error: Exception) -> InferenceCenterError:
    what = "it takes more memory than it may" if isinstance(error, MemoryError) else type(error).__name__
    return InferenceCenterError(
        ErrorCode.INTERNAL,
        f"the model's chat template is in error: {what}: {str(error)[:200]}",
        hint='Sessions with mode "raw" use no template.',
    )
