"""Renders messages as model input: with the model's chat template, or by plain concatenation in raw mode."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.output_parsing.detection import as_text, detect
from inferencecenter.sessions.output_parsing.template_values import message_values, tool_values
from inferencecenter.sessions.prompt.sandbox import TemplateRefusalError, TemplateSandbox
from inferencecenter.sessions.prompt.special_tokens import RenderedText, SpecialTokenEscaper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities
    from inferencecenter.sessions.output_parsing.detection import TemplateForm
    from inferencecenter.sessions.prompt.renderer import RenderInput
    from inferencecenter.sessions.prompt.template_frames import TemplateSource

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of a model that has none."""

_PROBE_TIME: Final = datetime(2026, 1, 1, tzinfo=UTC)
_PROBE_OPERATIONS: Final = 20_000
_SWITCHES: Final = frozenset(("enable_thinking", "thinking"))


class ConversationRenderer(Protocol):
    """Renders a conversation as text."""

    implied_bos: str
    """Text of the BOS token that the engine prepends, empty if it does not."""
    capabilities: TemplateCapabilities
    """How the model writes tool calls and reasoning."""

    def render(self, conversation: RenderInput, *, add_generation_prompt: bool = True) -> RenderedText:
        """Return the whole conversation as text.

        Raises:
            InferenceCenterError: ``invalid_request`` if the template rejects the conversation, ``internal`` if it
                fails.
        """


class ChatTemplate:
    """A model's chat template, compiled once.

    Raises:
        InferenceCenterError: ``internal`` if the template does not compile.
    """

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
            raise _template_error(error) from error
        self._form, capabilities = detect(self._probe, source=source, control=model.special_tokens)
        self.capabilities = replace(
            capabilities,
            chooses_thinking=bool(self._switches),
            omits_empty_thinking=bool(self._switches) and self._omits_empty_thinking(capabilities.thinking),
        )

    def render(self, conversation: RenderInput, *, add_generation_prompt: bool = True) -> RenderedText:
        """Return the rendered conversation.

        Raises:
            InferenceCenterError: See ``ConversationRenderer``.
        """
        messages, tools = conversation.messages, conversation.tools
        values = {
            **self._variables(messages, tools, self._form),
            **({} if conversation.thinking is None else dict.fromkeys(self._switches, conversation.thinking)),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return RenderedText.of_marked(
                self._sandbox.run(self._template, values, now=conversation.now), tokens=self._special.texts
            )
        except TemplateRefusalError as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"the model's chat template refuses the conversation: {error.message}",
                field="messages",
                hint="The order of roles must suit the model; some support no system prompt.",
            ) from error
        # Boundary to untrusted code from a model file, which can raise any exception.
        except Exception as error:
            raise _tools_error(error, messages, tools) or _template_error(error) from error

    def _variables(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], form: TemplateForm
    ) -> dict[str, object]:
        mark = self._special.mark
        offered = tool_values(tools, mark=mark)
        if not form.native:
            messages, offered = as_text(messages, tools, supports_system=form.supports_system), []
        return {
            **self._constants,
            "messages": message_values(
                messages, mark=mark, text_arguments=form.text_arguments, short_ids=form.short_ids
            ),
            "tools": offered or None,
        }

    def _omits_empty_thinking(self, tags: ReasoningTags | None) -> bool:
        """Return whether the tags of reasoning do not precede an earlier answer, where thinking is disabled."""
        question, answer = ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="probe_answer")
        text = self._probe((question, answer, question), (), self._form, thinking=False)
        before, found, _ = text.partition(answer.content)
        return tags is not None and bool(found) and not before.rstrip().endswith(tags.closes)

    def _probe(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        form: TemplateForm,
        *,
        thinking: bool | None = None,
    ) -> str:
        """Return the output for a probe, empty if the template fails or exceeds the limit."""
        switches = {} if thinking is None else dict.fromkeys(self._switches, thinking)
        values = {**self._variables(messages, tools, form), **switches, "add_generation_prompt": False}
        try:
            return self._sandbox.run(self._template, values, now=_PROBE_TIME, max_operations=_PROBE_OPERATIONS)
        except Exception:  # noqa: BLE001 - the same boundary as above; a failed probe counts as unsupported
            return ""


def _tools_error(
    error: Exception, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> InferenceCenterError | None:
    """Return an error that blames tools or their results, ``None`` if the conversation has none."""
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
        hint="A tool's parameters must be the schema of an object; a result needs the tool_call_id of its call.",
    )


def _template_error(error: Exception) -> InferenceCenterError:
    what = "it exceeds its memory limit" if isinstance(error, MemoryError) else type(error).__name__
    return InferenceCenterError(
        ErrorCode.INTERNAL,
        f"the model's chat template fails: {what}: {str(error)[:200]}",
        hint='Sessions with mode "raw" use no template.',
    )
