"""Conversations of Ollama's requests: messages whose tool calls may lack ids, and conversations as numbers. Pure."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Final

import orjson

from inferencecenter.api.body import invalid_field
from inferencecenter.api.ollama.chat_schemas import MOST_CONTEXT
from inferencecenter.api.openai.chat_schemas import MOST_MESSAGES
from inferencecenter.api.tool_calls import arguments_text, calls_of_message
from inferencecenter.protocol.json_bounds import check_json_bounds
from inferencecenter.protocol.values import ChatMessage, ToolCall
from inferencecenter.sessions.prefix_match import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.api.ollama.chat_schemas import OllamaMessage

_NUMBER_BYTES: Final = 2
"""Bytes of text per number of a context, which is as large as a token then."""
_ROLES: Final = ("system", "user", "assistant")


def messages_of(sent: Sequence[OllamaMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation; calls without an id are numbered.

    The last one may be the start of the answer.

    Raises:
        InferenceCenterError: ``invalid_request`` for fields of another role, and for results without a call.
    """
    calls = _Calls()
    told = tuple(_message(message, f"messages.{index}", calls) for index, message in enumerate(sent))
    last = len(told) - 1
    if is_begun(told[last]) and last > 0:
        last -= 1
    if told[last].role not in ("user", "tool"):
        raise invalid_field(
            f"messages.{last}.role", "the last message must have role user or tool, or be the start of an answer"
        )
    return told


def is_begun(message: ChatMessage) -> bool:
    """Return whether the last message of a conversation is the start of its answer."""
    return message.role == "assistant" and not message.tool_calls


class _Calls:
    """The tool calls of a conversation, and which of them lack a result."""

    def __init__(self) -> None:
        self._n = 0
        self._known: set[str] = set()
        # All ids with the names of their tools, and the ids for each name; a plain dict takes longer for its first
        # entry with each one deleted before.
        self._open: OrderedDict[str, str] = OrderedDict()
        self._open_by_name: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)

    def add(self, call_id: str | None, name: str) -> str:
        """Add a call, and return its id."""
        call_id = call_id or f"{UNNAMED}{self._n}"
        self._n += 1
        self._known.add(call_id)
        self._close(call_id)
        self._open[call_id] = name
        self._open_by_name[name][call_id] = None
        return call_id

    def answered_by(self, message: OllamaMessage, where: str) -> str:
        """Return the id of the call to which a result message belongs.

        Raises:
            InferenceCenterError: ``invalid_request``.
        """
        call_id = message.tool_call_id
        if call_id is None:
            if not self._open:
                raise invalid_field(f"{where}.role", "there is no earlier tool call without a result")
            named = self._open_by_name.get(message.tool_name or "")
            call_id = next(iter(named or self._open))
        elif call_id not in self._known:
            raise invalid_field(f"{where}.tool_call_id", "tool_call_id is not that of a call in an earlier message")
        self._close(call_id)
        return call_id

    def _close(self, call_id: str) -> None:
        name = self._open.pop(call_id, None)
        if name is not None:
            del self._open_by_name[name][call_id]


def _message(message: OllamaMessage, where: str, calls: _Calls) -> ChatMessage:
    role = message.role
    for name, owner in (("thinking", "assistant"), ("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != owner and getattr(message, name):
            raise invalid_field(f"{where}.{name}", f"{name} belongs to messages of role {owner}")
    called = [
        ToolCall(
            call_id=calls.add(call.id, call.function.name),
            name=call.function.name,
            arguments=arguments_text(call.function.arguments, f"{where}.tool_calls.{place}.function.arguments"),
        )
        for place, call in enumerate(message.tool_calls or ())
    ]
    return ChatMessage(
        role=role,
        content=message.content,
        reasoning=message.thinking or None,
        tool_calls=calls_of_message(called, f"{where}.tool_calls"),
        tool_call_id=calls.answered_by(message, where) if role == "tool" else None,
    )


def context_of(messages: Sequence[ChatMessage]) -> list[int] | None:
    """Return a conversation without tool calls as numbers, from which ``messages_in`` restores it.

    A conversation that takes more numbers than a request may have is none.
    """
    if sum(len(message.content) for message in messages) > MOST_CONTEXT * _NUMBER_BYTES:
        return None
    text = orjson.dumps([[message.role, message.content] for message in messages])
    if len(text) > MOST_CONTEXT * _NUMBER_BYTES:
        return None
    return array("H", text + b" " * (len(text) % _NUMBER_BYTES)).tolist()


def messages_in(context: Sequence[int]) -> tuple[ChatMessage, ...]:
    """Return the conversation in a ``context``.

    Raises:
        InferenceCenterError: ``invalid_request`` for numbers that ``context_of`` never returns, or
            ``message_too_large``.
    """
    text = array("H", context).tobytes() or b"[]"
    check_json_bounds(text)
    try:
        return tuple(_restored(orjson.loads(text)))
    except (orjson.JSONDecodeError, ValueError, TypeError):
        raise invalid_field("context", "context is not that of an answer of this daemon") from None


def _restored(pairs: Sequence[tuple[object, object]]) -> Iterator[ChatMessage]:
    if len(pairs) > MOST_MESSAGES:
        raise ValueError
    for role, content in pairs:
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError
        yield ChatMessage.model_validate({"role": role, "content": content})
