"""A model with reasoning and tool calls, and its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.protocol import events
from inferencecenter.protocol.values import ToolCall
from tests.sessions.conftest import FakeSink, SessionHarness, make_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.protocol.base import Event

HERMES: Final = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ "\\n" }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that leaves generated text unchanged in later prompts."""

WEATHER: Final = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THOUGHT: Final = "<think>\nNorth or south?\n</think>\n\n"
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER_CALL: Final = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER: Final = f"{THOUGHT}Let me see.\n{CALL}{OTHER_CALL}"
"""An answer with all kinds of parts."""


def tool_world() -> SessionHarness:
    """Sessions with such a model."""
    world = SessionHarness()
    world.engine.status = EngineStatus(EngineState.READY, model=make_model(chat_template=HERMES))
    return world


class Heard:
    """Collects the events of one turn as a client does."""

    def __init__(self, events_of_turn: Iterable[Event] = ()) -> None:
        self.content = ""
        self.reasoning = ""
        self.names: list[str] = []
        self.ids: list[str] = []
        self.arguments: list[str] = []
        self.ends: list[Event] = []
        for event in events_of_turn:
            self.take(event)

    def take(self, event: Event) -> None:
        """Apply an event."""
        match event:
            case events.Token():
                self.content += event.content
            case events.Reasoning():
                self.reasoning += event.content
            case events.ToolCall(name=str(name)):
                assert event.index == len(self.names), "calls are counted"
                self.names.append(name)
                self.ids.append(event.call_id)
                self.arguments.append(event.arguments)
            case events.ToolCall():
                assert self.ids[event.index] == event.call_id
                self.arguments[event.index] += event.arguments
            case events.End() | events.Error():
                self.ends.append(event)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls as a conversation contains them."""
        return tuple(
            ToolCall(call_id=call_id, name=name, arguments=arguments)
            for call_id, name, arguments in zip(self.ids, self.names, self.arguments, strict=True)
        )

    def same_as(self, other: Heard) -> bool:
        """Whether both have the same text in the same parts."""
        return (self.content, self.reasoning, self.calls) == (other.content, other.reasoning, other.calls)


def heard(sink: FakeSink) -> Heard:
    """Collect all turns from the events of a socket."""
    return Heard(sink.events)
