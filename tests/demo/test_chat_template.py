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
    """The template in a sandbox whose `tojson` keeps the key order."""
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


def test_template_matches_the_training_rendering(template: jinja2.Template) -> None:
    """They are equal to the character, tools included."""
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


def test_tools_without_system_message(template: jinja2.Template) -> None:
    """Tools create a system prompt."""
    rendered = template.render(messages=conversation()[1:], tools=TOOLS)
    assert rendered.startswith("<|im_start|>system\n# Tools")


def test_arguments_given_as_text_are_unchanged(template: jinja2.Template) -> None:
    """JSON text is not encoded again."""
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"arguments": {"a":1}}' in template.render(messages=messages)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_longer_conversation_extends_the_shorter_one(
    template: jinja2.Template, tools: list[dict[str, Any]] | None
) -> None:
    """The KV cache stays usable when messages are appended."""
    messages = conversation()
    whole = template.render(messages=messages, tools=tools)
    for length in range(1, len(messages)):
        assert whole.startswith(template.render(messages=messages[:length], tools=tools))
