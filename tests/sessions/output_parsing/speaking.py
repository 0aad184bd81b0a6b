"""Shared helpers of the format tests: tools, models by their templates, and merged answers."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.protocol.requests import Infer
from inferencecenter.protocol.values import ChatMessage, Tool, ToolCall
from inferencecenter.sessions.output_parsing.output_spec import OutputSpec, enforceable_schemas, output_spec
from inferencecenter.sessions.output_parsing.parts import ArgumentsDelta, ReasoningDelta, TextDelta, ToolCallStart
from inferencecenter.sessions.prompt.renderer import RenderInput
from inferencecenter.sessions.prompt.template import ChatTemplate
from tests.sessions.conftest import make_model
from tests.sessions.output_parsing import templates
from tools.demo_model.chatml import CHAT_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.sessions.output_parsing.parts import Part

NOW: Final = datetime(2026, 2, 3, tzinfo=UTC)
CONTROL: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")

WEATHER: Final = Tool(
    name="get_weather",
    description="The weather now.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK: Final = Tool(name="get_weather_clock")
TOOLS: Final = (WEATHER, CLOCK)

CALLS: Final = (
    ToolCall(call_id="call_a", name="get_weather", arguments='{"city": "Oslo", "days": 2}'),
    ToolCall(call_id="call_b", name="get_weather_clock", arguments="{}"),
)
CONVERSATION: Final = (
    ChatMessage(role="user", content="How is the weather?"),
    ChatMessage(role="assistant", content="", tool_calls=CALLS[:1]),
    ChatMessage(role="tool", content="sunny", tool_call_id="call_a"),
)

ANSWERS: Final = {
    "DEMO": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "QWEN25": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "QWEN3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "HERMES": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "GEMMA": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "LLAMA31": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
    "MISTRAL3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
    "MISTRAL11": '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo", "days": 2}',
    "FUNCTIONARY31": '<function=get_weather>{"city": "Oslo", "days": 2}</function>',
    "FUNCTIONARY32": 'get_weather\n{"city": "Oslo", "days": 2}',
    "QWEN_CODER": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
}
"""The first call of ``CALLS`` in each format."""

SECOND: Final = {
    **dict.fromkeys(
        ("DEMO", "QWEN25", "QWEN3", "HERMES", "GEMMA"),
        '\n<tool_call>\n{"name": "get_weather_clock", "arguments": {}}\n</tool_call>',
    ),
    "MISTRAL11": "[TOOL_CALLS]get_weather_clock[CALL_ID]012345678[ARGS]{}",
    "FUNCTIONARY31": "<function=get_weather_clock>{}</function>",
    "FUNCTIONARY32": ">>>get_weather_clock\n{}",
    "QWEN_CODER": "\n<tool_call>\n<function=get_weather_clock>\n</function>\n</tool_call>",
}
"""The second call, following it."""


@cache
def model(name: str, *, control: tuple[str, ...] = CONTROL) -> ChatTemplate:
    """The template of a model in ``templates``, or of the bundled one."""
    source = CHAT_TEMPLATE if name == "DEMO" else getattr(templates, name)
    return ChatTemplate(make_model(chat_template=source, bos_token="<s>", eos_token="</s>", special_tokens=control))


def speech(name: str, *, control: tuple[str, ...] = CONTROL, **wants: Any) -> OutputSpec:
    """The output format of a model, with ``TOOLS`` by default."""
    request = Infer(op="infer", session_id="s", prompt="Hi", **({"tools": list(TOOLS)} | wants))
    template = model(name, control=control)
    messages = [ChatMessage(role="user", content="Hi")]
    asked = template.render(RenderInput(messages, NOW, tools=request.tools or (), thinking=request.thinking))
    schemas, capabilities = enforceable_schemas(request), template.capabilities
    return output_spec(request, schemas=schemas, capabilities=capabilities, prompt=asked.text)


def read(spoken: OutputSpec, *pieces: str) -> list[Part]:
    """The merged parts of an answer that is fed in chunks."""
    reader = spoken.new_parser()
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return merged([*parts, *reader.finish()])


def merged(parts: Iterable[Part]) -> list[Part]:
    """The parts with adjacent ones of a kind merged."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        match last, part:
            case TextDelta(before), TextDelta(after):
                whole[-1] = TextDelta(before + after)
            case ReasoningDelta(before), ReasoningDelta(after):
                whole[-1] = ReasoningDelta(before + after)
            case ArgumentsDelta(index, before), ArgumentsDelta(same, after) if index == same:
                whole[-1] = ArgumentsDelta(index, before + after)
            case _:
                whole.append(part)
    return whole


def called(index: int, name: str, arguments: str) -> list[Part]:
    """The parts of a call."""
    return [ToolCallStart(index, name), ArgumentsDelta(index, arguments)]
