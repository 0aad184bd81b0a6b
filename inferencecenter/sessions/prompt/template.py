"""Renders messages as model input: with the model's chat template, or by plain concatenation in raw mode."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.output_parsing.detection import as_text, detect
from inferencecenter.sessions.output_parsing.template_values import message_values, tool_values
from inferencecenter.sessions.prompt.special_tokens import RenderedText, SpecialTokenEscaper, mark_image

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.protocol.values import Tool
    from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities
    from inferencecenter.sessions.output_parsing.detection import TemplateForm
    from inferencecenter.sessions.prompt.renderer import RenderInput
    from inferencecenter.sessions.prompt.template_frames import TemplateSource


# Sandbox for chat templates, which are untrusted code from model files.
#
# A template cannot reach anything but the conversation. Its output and its work are bounded; work is counted in
# operations instead of seconds, so the limits are deterministic. Loops over long texts without calls or lookups are not
# counted; the process limits of ``template_process`` cover them.

MAX_OPERATIONS: Final = 2_000_000
MAX_CHARS: Final = 32 * 1024 * 1024
_MAX_NUMBER: Final = 10_000_000
_MAX_EXPONENT: Final = 64
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f\ud800-\udfff]")
_WIDE_FORMAT: Final = re.compile(r"\d{5}|\*")  # a format width produces arbitrarily long text


class TemplateRefusalError(TemplateError):
    """The template itself rejects the conversation (``raise_exception``)."""


class TemplateLimitError(TemplateError):
    """The template exceeds a limit on work or output."""


class GenerationBlock(Extension):
    """``{% generation %}``, which marks the model's own output for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an attribute of instances

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A bounded jinja2 environment with the extensions that model files expect. Not thread-safe."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            keep_trailing_newline=False,
        )
        self._operations_left = MAX_OPERATIONS
        self.filters["tojson"] = _tojson
        for name in ("center", "format"):  # they produce text of any length, unseen by the limits
            del self.filters[name]
        self.globals["raise_exception"] = _refuse

    def run(
        self,
        template: Template,
        values: Mapping[str, object],
        *,
        now: datetime,
        max_operations: int = MAX_OPERATIONS,
    ) -> str:
        """Return the output of ``template``, limited to ``max_operations``.

        Raises:
            TemplateError: The template rejects the conversation, exceeds a limit, or fails.
        """
        self._operations_left = max_operations
        parts: list[str] = []
        chars_left = MAX_CHARS
        for part in template.generate(**values, strftime_now=now.strftime):
            self._spend(1)
            chars_left -= len(part)
            if chars_left < 0:
                raise TemplateLimitError(f"the chat template writes more than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """Call ``__obj`` for the template and count it."""
        __self._spend(1)
        if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in (*args, *kwargs.values())):
            raise TemplateLimitError(f"the chat template calls something with a number above {_MAX_NUMBER}")
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, range):
            __self._spend(len(result))
        return result

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._spend(1)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._spend(1)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator for the template; refuse results that would be huge."""
        self._spend(1)
        if _is_huge(operator, left, right):
            raise TemplateLimitError(f"the chat template calculates something huge with {operator}")
        return super().call_binop(context, operator, left, right)

    def _spend(self, operations: int) -> None:
        self._operations_left -= operations
        if self._operations_left < 0:
            raise TemplateLimitError("the chat template exceeds its limit of operations")


def _is_huge(operator: str, left: Any, right: Any) -> bool:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if operator == "%":
        return isinstance(left, str) and _WIDE_FORMAT.search(left) is not None
    if operator == "**":
        return not numbers or bool(abs(left) > _MAX_NUMBER or abs(right) > _MAX_EXPONENT)
    if numbers:
        return bool(max(abs(left), abs(right)) > _MAX_NUMBER**2)
    size: float = _size(left) * _size(right) if operator == "*" else _size(left) + _size(right)
    return size > MAX_CHARS


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else len(value) if hasattr(value, "__len__") else 1


def _refuse(message: str) -> None:
    raise TemplateRefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as model files expect it: without the HTML escaping of jinja2's own filter.

    Lone surrogates are kept: they are the marks of ``special_tokens``.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


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
                messages,
                mark=mark,
                mark_image=mark_image,
                text_arguments=form.text_arguments,
                short_ids=form.short_ids,
            ),
            "tools": offered or None,
        }

    def _omits_empty_thinking(self, tags: ReasoningTags | None) -> bool:
        """Return whether the tags of reasoning do not precede an earlier answer, where thinking is disabled."""
        question, answer = ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="probe_answer")
        text = self._probe((question, answer, question), (), self._form, thinking=False)
        before, match, _ = text.partition(answer.content)
        return tags is not None and bool(match) and not before.rstrip().endswith(tags.closes)

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
