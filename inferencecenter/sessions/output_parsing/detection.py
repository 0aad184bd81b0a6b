"""Detects the tool call format of a chat template, with plain text as the fallback.

A template is probed with a known conversation: what it writes for a call is what the model was trained to write. A
template that renders no tools, calls or results, or renders calls in an unknown format, gets them as plain text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.protocol.values import IMAGE_MARK, ChatMessage, Tool, ToolCall
from inferencecenter.sessions.output_parsing.call_format import ReasoningTags, TemplateCapabilities
from inferencecenter.sessions.output_parsing.json_calls import JsonCalls, NamedCalls
from inferencecenter.sessions.output_parsing.tagged_calls import TaggedCalls
from inferencecenter.sessions.output_parsing.template_values import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from inferencecenter.sessions.output_parsing.call_format import ToolCallFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """The form in which a template expects a conversation.

    A ``native`` template renders tools itself; it takes arguments as ``text_arguments`` or objects, and ``short_ids``
    or any ids. Others get tools as text, in a system prompt if the template ``supports_system`` prompts.
    """

    native: bool = False
    text_arguments: bool = False
    short_ids: bool = False
    supports_system: bool = True


class TemplateProbe(Protocol):
    """Renders a conversation in a form; returns an empty text on failure."""

    def __call__(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], form: TemplateForm) -> str:
        """Return the text."""


_QUESTION: Final = ChatMessage(role="user", content="probe_question")
_SYSTEM: Final = ChatMessage(role="system", content="probe_system")
_TOOL: Final = Tool(
    name="probe_tool",
    description="probe_description",
    parameters={"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe_text"}}},
)
_CALLS: Final = (
    ToolCall(call_id="call_0123456789ab", name="probe_alpha", arguments='{"north": "left"}'),
    ToolCall(call_id="call_ba9876543210", name="probe_beta", arguments='{"south": "right"}'),
)

_ARGUMENTS: Final = r'\{"north": "left"\}'
_OBJECT: Final = r'\{"name": "probe_alpha", "(?P<key>arguments|parameters)": ' + _ARGUMENTS
_IN_TAGS: Final = re.compile(
    rf"(?P<opens><(?P<tag>\|?\w+\|?)>)(?P<lead>\s*){_OBJECT}\}}(?P<trail>\s*)(?P<closes></(?P=tag)>|<\|?/\w+\|?>)"
    r"(?:(?P<between>\s*)(?P=opens))?"
)
_IN_ARRAY: Final = re.compile(
    rf"(?P<opens>\[TOOL_CALLS\]|<\|?\w*tool\w*\|?>)(?P<lead>\s*)\[{_OBJECT}[^{{}}]*\}}"
    r'(?:(?P<between>,\s*)\{"name": "probe_beta"[^\]]*)?\](?P<trail>\s*)(?P<closes><\|?/\w*tool\w*\|?>|)'
)
_IN_PARAMETER_TAGS: Final = re.compile(
    r"<tool_call>\n<function=probe_alpha>\n<parameter=north>\nleft\n</parameter>\n</function>\n</tool_call>"
    r"(?P<between>\n)?"
)
_AFTER_FUNCTION: Final = re.compile(
    rf"<function=probe_alpha>{_ARGUMENTS}</function>(?:(?P<between>\s*)<function=probe_beta>)?"
)
_AFTER_RECIPIENT: Final = re.compile(rf">>>probe_alpha\n{_ARGUMENTS}(?:(?P<between>\s*)>>>probe_beta)?")
_AFTER_TRIGGER: Final = re.compile(
    rf"\[TOOL_CALLS\]probe_alpha(?P<id>\[CALL_ID\]\w+)?\[ARGS\]{_ARGUMENTS}(?:(?P<between>)\[TOOL_CALLS\]probe_beta)?"
)
_BARE: Final = re.compile(rf'{_OBJECT}\}}(?:(?P<between>[\s;,]*)\{{"name": "probe_beta")?')

_THINKING: Final = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


def detect(write: TemplateProbe, *, source: str, control: Collection[str]) -> tuple[TemplateForm, TemplateCapabilities]:
    """Return the form that a template expects and the capabilities that it shows.

    Args:
        write: Renders with the template.
        source: The source of the template.
        control: The texts of the model's control tokens.
    """
    supports_system = "probe_system" in write((_SYSTEM, _QUESTION), (), TemplateForm())
    found = _native(write, supports_system=supports_system)
    form, call_format, parallel = found or (TemplateForm(supports_system=supports_system), FALLBACK, True)
    thinking = next((pair for pair in _THINKING if pair.closes in source or pair.closes in control), None)
    marks = {*call_format.markers, *((thinking.opens, thinking.closes) if thinking is not None else ())}
    return form, TemplateCapabilities(
        call_format=call_format,
        parallel_calls=parallel,
        thinking=thinking,
        control=frozenset(marks.intersection(control)),
    )


def find_call_format(text: str) -> tuple[ToolCallFormat, bool] | None:
    """Return the call format found in the rendered probe conversation, and whether more calls followed."""
    for pattern, call_format in _FORMATS:
        if found := pattern.search(text):
            return call_format(found.groupdict("")), found["between"] is not None
    return None


def _native(write: TemplateProbe, *, supports_system: bool) -> tuple[TemplateForm, ToolCallFormat, bool] | None:
    """Return the form, the call format, and whether it allows parallel calls; ``None`` without native tools."""
    if _TOOL.name not in write((_QUESTION,), (_TOOL,), TemplateForm(native=True)):
        return None
    for calls, short_ids, text_arguments in product((_CALLS, _CALLS[:1]), (False, True), (True, False)):
        form = TemplateForm(
            native=True, text_arguments=text_arguments, short_ids=short_ids, supports_system=supports_system
        )
        text = write(_conversation(calls), (_TOOL,), form)
        found = find_call_format(text) if f"probe_result_{len(calls)}" in text else None
        if found is not None and (found[1] or len(calls) == 1):
            return form, *found
    return None


def _conversation(calls: tuple[ToolCall, ...]) -> tuple[ChatMessage, ...]:
    results = (
        ChatMessage(role="tool", content=f"probe_result_{number}", tool_call_id=call.call_id)
        for number, call in enumerate(calls, 1)
    )
    return _QUESTION, ChatMessage(role="assistant", content="", tool_calls=calls), *results


def _in_tags(found: Mapping[str, str], *, array: bool = False) -> ToolCallFormat:
    return JsonCalls(
        opens=found["opens"],
        closes=found["closes"],
        lead=found["lead"],
        trail=found["trail"],
        between=found["between"] or (", " if array else "\n"),
        key=found["key"],
        array=array,
    )


_FORMATS: Final[tuple[tuple[re.Pattern[str], Callable[[Mapping[str, str]], ToolCallFormat]], ...]] = (
    (_IN_TAGS, _in_tags),
    (_IN_ARRAY, partial(_in_tags, array=True)),
    (_IN_PARAMETER_TAGS, lambda _: TaggedCalls()),
    (
        _AFTER_FUNCTION,
        lambda found: NamedCalls(opens="<function=", then=">", closes="</function>", between=found["between"]),
    ),
    (_AFTER_RECIPIENT, lambda found: NamedCalls(opens=">>>", then="\n", between=found["between"], recipients=True)),
    (_AFTER_TRIGGER, lambda found: NamedCalls(opens="[TOOL_CALLS]", then="[ARGS]", call_ids=bool(found["id"]))),
    (_BARE, lambda found: JsonCalls(key=found["key"], between=found["between"] or "; ")),
)
"""The formats that are detected, in this order, each by what a template writes for the probe's calls."""


FALLBACK: Final = JsonCalls(opens="<tool_call>", closes="</tool_call>", lead="\n", trail="\n", between="\n")
"""The call format for templates without native tools."""

_BEFORE: Final = "You can have these functions called, each given as JSON with a schema of its arguments:\n"
_AFTER: Final = (
    "\nTo have one called, write nothing but a JSON object with its name and arguments between tags, as here:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
    "What it returns comes between <tool_response> and </tool_response>. "
    "When you need no function, answer as you always do."
)


def as_text(messages: Sequence[ChatMessage], tools: Sequence[Tool], *, supports_system: bool) -> list[ChatMessage]:
    """Return the conversation with tools, calls and results as text.

    Consecutive results and the following user message are merged, since many templates require alternating roles. The
    tools go into the system prompt if the template ``supports_system`` prompts, else into the first user message.
    """
    written: list[ChatMessage] = []
    joined: list[ChatMessage] = []  # what is being merged
    for message in messages:
        plain = _as_plain(message)
        if joined and plain.role != "user":
            written.append(_of_user(joined))
        if message.role == "tool" or (joined and plain.role == "user"):
            joined.append(plain)
            if message.role != "tool":
                written.append(_of_user(joined))
        else:
            written.append(plain)
    if joined:
        written.append(_of_user(joined))
    return _with_tools(written, tools, supports_system=supports_system) if tools else written


def _of_user(joined: list[ChatMessage]) -> ChatMessage:
    """Return messages as one of the user and clear the list."""
    images = tuple(image for message in joined for image in message.images or ())
    texts = (message.content if message.images else _without_marks(message.content) for message in joined)
    content = "\n".join(texts)
    joined.clear()
    return ChatMessage.model_construct(role="user", content=content, images=images or None)


def _without_marks(text: str) -> str:
    """Return a text that stands beside images, without the character that would be taken for one."""
    return text.replace(IMAGE_MARK, "\ufffd")


def _as_plain(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        content = f"<tool_response>\n{message.content}\n</tool_response>"
        return ChatMessage(role="user", content=content, images=message.images)
    if message.tool_calls is not None:
        texts = [message.content] if message.content else []
        texts += map(_call_text, message.tool_calls)
        return ChatMessage(role="assistant", content="\n".join(texts), reasoning=message.reasoning)
    return message


def _call_text(call: ToolCall) -> str:
    arguments = call.arguments if call.arguments.strip() else "{}"
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def _with_tools(messages: list[ChatMessage], tools: Sequence[Tool], *, supports_system: bool) -> list[ChatMessage]:
    offer = _BEFORE + "\n".join(map(_description, tools)) + _AFTER
    if messages and messages[0].role == "system":
        first = messages[0].content
        return [ChatMessage(role="system", content=f"{first}\n\n{offer}" if first else offer), *messages[1:]]
    if supports_system:
        return [ChatMessage(role="system", content=offer), *messages]
    place = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if place is None:
        return [ChatMessage(role="user", content=offer), *messages]
    question = messages[place]
    content = f"{_without_marks(offer)}\n\n{question.content}"
    first_user = ChatMessage(role="user", content=content, images=question.images)
    return [*messages[:place], first_user, *messages[place + 1 :]]


def _description(tool: Tool) -> str:
    described = {"name": tool.name, "description": tool.description or "", "parameters": schema_of(tool)}
    return json.dumps(described, ensure_ascii=False)
