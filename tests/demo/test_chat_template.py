"""The chat template in the shipped file against the rendering the model was trained on."""

import json
from typing import Any

import jinja2.sandbox
import pytest

from tools.demo_model.chatml import CHAT_TEMPLATE, Message, render, tool_call, tools_prompt

TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}


@pytest.fixture
def template() -> jinja2.Template:
    """The template, in a sandbox whose `tojson` keeps the order of keys."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def conversation() -> list[dict[str, Any]]:
    """Messages of every role."""
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"time": "9:30"}'},
        {"role": "assistant", "content": "It is 9:30."},
        {"role": "user", "content": "Thanks!"},
    ]


def test_the_template_renders_what_training_rendered(template: jinja2.Template) -> None:
    """Template and training agree to the character, tools included."""
    rendered = template.render(messages=conversation(), tools=TOOLS, add_generation_prompt=True)
    assert rendered == render(
        [
            Message("system", tools_prompt(TOOLS, "Be brief.")),
            Message("user", "What time is it in Oslo?"),
            Message("assistant", tool_call("get_time", {"city": "Oslo"})),
            Message("user", '<tool_response>\n{"time": "9:30"}\n</tool_response>'),
            Message("assistant", "It is 9:30."),
            Message("user", "Thanks!"),
        ],
        add_generation_prompt=True,
    )


def test_tools_need_no_system_message(template: jinja2.Template) -> None:
    """Offered tools make the system prompt when the client sends none."""
    rendered = template.render(messages=conversation()[1:], tools=TOOLS)
    assert rendered.startswith("<|im_start|>system\n# Tools")


def test_arguments_given_as_text_stay_as_they_are(template: jinja2.Template) -> None:
    """Arguments that arrive as a JSON text are not encoded a second time."""
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"arguments": {"a":1}}' in template.render(messages=messages)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_longer_conversation_starts_with_the_shorter_one(
    template: jinja2.Template, tools: list[dict[str, Any]] | None
) -> None:
    """A KV cache of a conversation stays usable when messages are appended."""
    messages = conversation()
    whole = template.render(messages=messages, tools=tools)
    for length in range(1, len(messages)):
        assert whole.startswith(template.render(messages=messages[:length], tools=tools))
