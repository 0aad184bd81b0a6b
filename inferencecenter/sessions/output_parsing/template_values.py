"""Messages and tools in the form that chat templates expect.

Every text of users and models goes through ``mark``, so that none of it becomes a special token. That includes names,
keys and values inside arguments and schemas, which templates write as JSON. Images are written as marks too, which
``RenderedText.of_marked`` finds again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import IMAGE_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from inferencecenter.protocol.values import ChatMessage, MessageImage, Tool, ToolCall

_MAX_DEPTH: Final = 100
_SHORT_ID_CHARS: Final = 9

Values = dict[str, Any]
"""Variables of a template; untyped, since templates differ in what they read."""


def tool_values(tools: Sequence[Tool], *, mark: Callable[[str], str]) -> list[Values]:
    """Return tools in the form of OpenAI's functions, which most templates expect.

    Raises:
        InferenceCenterError: ``invalid_request`` if a schema is nested too deep.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": mark(tool.name),
                **({} if tool.description is None else {"description": mark(tool.description)}),
                "parameters": marked(schema_of(tool), mark=mark, field="tools"),
            },
        }
        for tool in tools
    ]


def schema_of(tool: Tool) -> Values:
    """Return the JSON Schema of a tool's arguments; a tool without one takes none."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.parameters


def message_values(
    messages: Sequence[ChatMessage],
    *,
    mark: Callable[[str], str],
    mark_image: Callable[[MessageImage], str],
    text_arguments: bool,
    short_ids: bool,
) -> list[Values]:
    """Return messages with their calls and results for native templates.

    Args:
        messages: The conversation.
        mark: Breaks special tokens in a text.
        mark_image: Returns the mark of an image.
        text_arguments: Whether the template takes arguments as JSON text, exactly as the model wrote them; others
            take an object.
        short_ids: Whether the template requires ids of nine letters and digits, as Mistral's do.

    Raises:
        InferenceCenterError: ``invalid_request`` if the template takes objects and arguments are not one.
    """
    names: dict[str, str] = {}
    written = []
    for message in messages:
        content = mark(message.content)
        for image in message.images or ():
            content = content.replace(IMAGE_MARK, mark_image(image), 1)
        values: Values = {"role": message.role, "content": content}
        if message.reasoning is not None:
            thought = mark(message.reasoning)
            values |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
        if message.tool_calls is not None:
            names |= {call.call_id: call.name for call in message.tool_calls}
            values["tool_calls"] = [
                _call_values(call, mark=mark, text_arguments=text_arguments, short_ids=short_ids)
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            values["tool_call_id"] = _id(message.tool_call_id, mark=mark, short=short_ids)
            if message.tool_call_id in names:
                values["name"] = mark(names[message.tool_call_id])
        written.append(values)
    return written


def _call_values(call: ToolCall, *, mark: Callable[[str], str], text_arguments: bool, short_ids: bool) -> Values:
    text = call.arguments if call.arguments.strip() else "{}"
    arguments = mark(text) if text_arguments else _parsed(call, text, mark=mark)
    return {
        "id": _id(call.call_id, mark=mark, short=short_ids),
        "type": "function",
        "function": {"name": mark(call.name), "arguments": arguments},
    }


def _id(call_id: str, *, mark: Callable[[str], str], short: bool) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS] if short else mark(call_id)


def _parsed(call: ToolCall, text: str, *, mark: Callable[[str], str]) -> Values:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_object(call) from error
    if not isinstance(parsed, dict):
        raise _no_object(call)
    values: Values = marked(parsed, mark=mark, field="messages")
    return values


def _no_object(call: ToolCall) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"the arguments of the call {call.call_id} of {call.name} are not a JSON object",
        field="messages",
        hint="The model's chat template needs an object.",
    )


def marked(value: Any, *, mark: Callable[[str], str], field: str) -> Any:
    """Return a JSON value with all its texts and keys marked.

    Raises:
        InferenceCenterError: See ``check_depth``.
    """
    check_depth(value, field=field)
    return _marked(value, mark)


def check_depth(value: Any, *, field: str, max_values: int | None = None) -> int:
    """Refuse a JSON value that is nested too deep or has more values than allowed; return their number.

    Raises:
        InferenceCenterError: ``invalid_request`` for ``field``.
    """
    level, n_values = [value], 0
    for _ in range(_MAX_DEPTH):
        n_values += sum(len(_items(parent)) for parent in level)
        if max_values is not None and n_values > max_values:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "the schemas have too many values",
                field=field,
                hint="Send fewer tools, or smaller schemas.",
            )
        level = [item for parent in level for item in _items(parent)]
        if not level:
            return n_values
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST, f"a JSON value is nested more than {_MAX_DEPTH} deep", field=field
    )


def _items(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, mark) for item in value]
    return value
