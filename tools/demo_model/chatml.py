"""ChatML as the demo model reads it: messages, their rendering, and the same as a template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and "
    "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

# Each message renders on its own, tool results too, so that the rendering of a longer
# conversation always starts with that of a shorter one and its KV cache can be reused.
CHAT_TEMPLATE = (
    "{%- set first = messages[0] -%}"
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if first.role == 'system' -%}{{- first.content + '\\n\\n' -}}{%- endif -%}"
    "{{- " + json.dumps(_TOOLS_HEAD) + " -}}"
    "{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}"
    "{{- " + json.dumps(_TOOLS_TAIL) + " -}}{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- set content = message.content if message.content is string else '' -%}"
    "{%- if message.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- elif not (tools and loop.first and message.role == 'system') -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + content -}}"
    "{%- if message.tool_calls -%}"
    "{%- for call in message.tool_calls -%}"
    "{%- set function = call.function if call.function else call -%}"
    "{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    '{{- \'<tool_call>\\n{"name": "\' + function.name + \'", "arguments": \' -}}'
    "{%- if function.arguments is string -%}{{- function.arguments -}}"
    "{%- else -%}{{- function.arguments | tojson -}}{%- endif -%}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Message:
    """One message: `role` is `system`, `user` or `assistant`; tool text is in `content`."""

    role: str
    content: str


def tools_prompt(tools: Sequence[Mapping[str, object]], system: str = "") -> str:
    """Returns the system prompt that offers `tools`, after the `system` text if there is any."""
    signatures = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    lead = system + "\n\n" if system else ""
    return lead + _TOOLS_HEAD + signatures + _TOOLS_TAIL


def tool_call(function: str, arguments: Mapping[str, object]) -> str:
    """Returns the assistant's text that calls `function`."""
    call = json.dumps({"name": function, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def tool_response(result: Mapping[str, object]) -> str:
    """Returns the user message's text that carries a tool's result."""
    return f"<tool_response>\n{json.dumps(result, ensure_ascii=False)}\n</tool_response>"


def render(messages: Iterable[Message], *, add_generation_prompt: bool = False) -> str:
    """Returns the text of `messages`, equal to what `CHAT_TEMPLATE` renders."""
    text = "".join(f"{IM_START}{m.role}\n{m.content}{IM_END}\n" for m in messages)
    return text + (f"{IM_START}assistant\n" if add_generation_prompt else "")
