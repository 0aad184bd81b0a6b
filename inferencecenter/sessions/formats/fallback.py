"""Tools for models whose templates know none: described in the system prompt, asked for and answered in plain text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from inferencecenter.protocol.values import ChatMessage
from inferencecenter.sessions.formats.json_calls import JsonCalls
from inferencecenter.sessions.formats.values import schema_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.protocol.values import Tool, ToolCall

FALLBACK: Final = JsonCalls(opens="<tool_call>", closes="</tool_call>", lead="\n", trail="\n", between="\n")
"""How such a model is asked to write its calls."""

_BEFORE: Final = "You can have these functions called, each given as JSON with a schema of its arguments:\n"
_AFTER: Final = (
    "\nTo have one called, write nothing but a JSON object with its name and arguments between tags, as here:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
    "What it returns comes between <tool_response> and </tool_response>. "
    "When you need no function, answer as you always do."
)


def as_text(messages: Sequence[ChatMessage], tools: Sequence[Tool], *, knows_system: bool) -> list[ChatMessage]:
    """Return the conversation with tools, calls and results as text.

    Results that follow each other, and what the user says behind them, are one message, since many templates want user
    and assistant to take turns. A template that ``knows_system`` prompts has the tools there, others before the first
    message.
    """
    written: list[ChatMessage] = []
    joined: list[str] = []  # what the message being put together consists of
    for message in messages:
        plain = _as_plain(message)
        if joined and plain.role != "user":
            written.append(_of_user(joined))
        if message.role == "tool" or (joined and plain.role == "user"):
            joined.append(plain.content)
            if message.role != "tool":
                written.append(_of_user(joined))
        else:
            written.append(plain)
    if joined:
        written.append(_of_user(joined))
    return _with_tools(written, tools, knows_system=knows_system) if tools else written


def _of_user(texts: list[str]) -> ChatMessage:
    """Return the message of these texts, which are taken out of the list."""
    message = ChatMessage(role="user", content="\n".join(texts))
    texts.clear()
    return message


def _as_plain(message: ChatMessage) -> ChatMessage:
    if message.role == "tool":
        return ChatMessage(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if message.tool_calls is not None:
        texts = [message.content] if message.content else []
        texts += map(_call_text, message.tool_calls)
        return ChatMessage(role="assistant", content="\n".join(texts), reasoning=message.reasoning)
    return message


def _call_text(call: ToolCall) -> str:
    arguments = call.arguments if call.arguments.strip() else "{}"
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def _with_tools(messages: list[ChatMessage], tools: Sequence[Tool], *, knows_system: bool) -> list[ChatMessage]:
    offer = _BEFORE + "\n".join(map(_description, tools)) + _AFTER
    if messages and messages[0].role == "system":
        first = messages[0].content
        return [ChatMessage(role="system", content=f"{first}\n\n{offer}" if first else offer), *messages[1:]]
    if knows_system:
        return [ChatMessage(role="system", content=offer), *messages]
    place = next((index for index, message in enumerate(messages) if message.role == "user"), None)
    if place is None:
        return [ChatMessage(role="user", content=offer), *messages]
    told = ChatMessage(role="user", content=f"{offer}\n\n{messages[place].content}")
    return [*messages[:place], told, *messages[place + 1 :]]


def _description(tool: Tool) -> str:
    described = {"name": tool.name, "description": tool.description or "", "parameters": schema_of(tool)}
    return json.dumps(described, ensure_ascii=False)
