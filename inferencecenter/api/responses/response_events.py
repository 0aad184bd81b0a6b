"""Maps events of a turn to stream events of a response, from which clients assemble the same object. Pure.

An answer is a list of items: reasoning, text, calls. At most one of them is open; content of another item closes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
from pydantic import BaseModel

from inferencecenter.api.custom_tools import InputReader
from inferencecenter.api.errors import error_object
from inferencecenter.api.responses.response_schemas import (
    Logprob,
    OutputApprovalRequest,
    OutputCall,
    OutputCustomCall,
    OutputMcpCall,
    OutputMcpList,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ResponseError,
    ThoughtText,
)
from inferencecenter.api.responses.serializers import (
    NO_MCP_TOOLS,
    ResponseRef,
    approval_request,
    error_of,
    is_custom,
    item_id,
    logprobs_of,
    names_of,
    response_of,
    status_of,
)
from inferencecenter.protocol import events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.api.responses.response_schemas import (
        Echo,
        ItemState,
        McpToolName,
        OutputItem,
        Response,
    )
    from inferencecenter.core.errors import InferenceCenterError
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import ChatMessage

_MESSAGE: Final = "msg"
_THOUGHTS: Final = "rs"
_CALL: Final = "fc"
_CUSTOM_CALL: Final = "ctc"
_APPROVAL: Final = "mcpr"
_CALLS: Final = (_CALL, _CUSTOM_CALL, _APPROVAL)
_DELTAS: Final = {
    _MESSAGE: b"response.output_text.delta",
    _THOUGHTS: b"response.reasoning_text.delta",
    _CALL: b"response.function_call_arguments.delta",
    _CUSTOM_CALL: b"response.custom_tool_call_input.delta",
}


class ResponseEvent(NamedTuple):
    """A stream event: its type and its JSON."""

    type: str
    data: bytes


class _Item:
    """The item in progress."""

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        kind: str,
        name: str,
        place: int,
        *,
        call_id: str = "",
        names: Mapping[str, str] | None = None,
        of_server: McpToolName | None = None,
    ) -> None:
        self.kind = kind
        self.of_server = of_server
        self.name = name
        self.place = place
        self.call_id = call_id
        self.names = names or {}
        self.input = InputReader()
        self.text: list[str] = []
        self.logprobs: list[Logprob] = []
        where = b'"item_id":%b,"output_index":%d' % (orjson.dumps(name), place)
        content = b"" if kind in _CALLS else b',"content_index":0'
        self.head = where + content + b',"delta":'

    def output_item(self, state: ItemState, *, empty: bool = False) -> OutputItem:
        """Return the item with all of its text, or without its parts."""
        text = "".join(self.text)
        if self.of_server is not None:
            return approval_request(self.of_server, self.call_id, text)
        if self.kind == _CALL:
            return OutputCall(id=self.name, call_id=self.call_id, **self.names, arguments=text, status=state)
        if self.kind == _CUSTOM_CALL:
            return OutputCustomCall(id=self.name, call_id=self.call_id, **self.names, input=text, status=state)
        if self.kind == _THOUGHTS:
            thoughts = () if empty else (ThoughtText(text=text),)
            return OutputReasoning(id=self.name, status=state, content=thoughts)
        content = () if empty else (OutputText(text=text, logprobs=tuple(self.logprobs)),)
        return OutputMessage(id=self.name, status=state, content=content)


class ResponseEventBuilder:
    """Builds the stream events of one response; an event of its turn yields any number of them.

    Args:
        echo: Fields that the response echoes from its request.
        top_logprobs: Number of most likely tokens to return per position.
        clock: Unix seconds.
        stream_id: The stream named in each frame.
        generate: Whether text is generated; otherwise the model's output is discarded.
        first_items: The first items of the output.
        mcp_tools: Tools of MCP servers by the names that the model calls them by.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        echo: Echo,
        *,
        top_logprobs: int,
        clock: Callable[[], float],
        stream_id: str | None = None,
        generate: bool = True,
        first_items: tuple[OutputItem, ...] = (),
        mcp_tools: Mapping[str, McpToolName] = NO_MCP_TOOLS,
    ) -> None:
        self._echo = echo
        self._tools = echo.tools_by_name
        self._first_items = first_items
        self._mcp_tools = mcp_tools
        self._top = top_logprobs
        self._clock = clock
        self._generate = generate
        self.stream_id = stream_id
        self._stream_field = {} if stream_id is None else {"stream_id": stream_id}
        self._stream_tail = b"" if stream_id is None else b',"stream_id":' + orjson.dumps(stream_id)
        self._number = 0
        self._place: ResponseRef | None = None
        self._running = False
        self._item: _Item | None = None
        self._output: list[OutputItem] = []
        self._counts: dict[str, int] = {}
        self._final: Response | None = None

    @property
    def place(self) -> ResponseRef | None:
        """The turn; ``None`` before its first event."""
        return self._place

    @property
    def final(self) -> Response | None:
        """The final response; ``None`` while it is in progress."""
        return self._final

    def feed(self, event: Event) -> list[ResponseEvent]:
        """Process an event of the turn and return the stream events."""
        if self._final is not None:
            return []
        frames: list[ResponseEvent] = []
        match event:
            case events.Token():
                frames = self._append_text(_MESSAGE, event.content, event)
            case events.Reasoning():
                frames = self._append_text(_THOUGHTS, event.content, event)
            case events.ToolCall():
                frames = self._call(event)
            case events.Queued():
                frames = self._queued(event)
            case events.Progress():
                frames = self._begin()
            case events.End():
                frames = self._end(event)
            case _:
                frames = self._fail(event)
        return frames

    def rebuild(self, place: ResponseRef, answer: ChatMessage | None, final: Response) -> list[ResponseEvent]:
        """Return all events of a response that has ended, from its stored ``answer``: each item's text is one delta."""
        self._place = place
        frames = [self._frame("response.created", response=self._snapshot(waits=False)), *self._begin()]
        turn: dict[str, Any] = {"session_id": place.session_id, "turn_id": place.turn_id, "seq": 1}
        if answer is not None and self._generate:
            if answer.reasoning:
                frames += self.feed(events.Reasoning(**turn, content=answer.reasoning))
            if answer.content or not answer.tool_calls:
                frames += self.feed(events.Token(**turn, content=answer.content))
            for index, call in enumerate(answer.tool_calls or ()):
                fields = {"index": index, "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
                frames += self.feed(events.ToolCall(**turn, **fields))
        frames += self._close("completed" if final.status == "completed" else "incomplete")
        self._final = final
        ends = {"completed": "response.completed", "failed": "response.failed"}
        return [*frames, self._frame(ends.get(final.status, "response.incomplete"), response=final)]

    def broken(self, error: InferenceCenterError) -> ResponseEvent:
        """Return the last event of a stream that ends before its turn."""
        failure = error_object(error)
        return self._frame("error", code=failure["code"], message=failure["message"], param=failure["param"])

    def _queued(self, event: events.Queued) -> list[ResponseEvent]:
        frames = []
        waits = event.position > 0
        if self._place is None:
            self._place = ResponseRef(event.session_id, event.turn_id)
            frames.append(self._frame("response.created", response=self._snapshot(waits=waits)))
            if waits:
                frames.append(self._frame("response.queued", response=self._snapshot(waits=True)))
        return frames if waits else [*frames, *self._begin()]

    def _begin(self) -> list[ResponseEvent]:
        """Return, once, the events of a response that starts."""
        if self._running or self._place is None:
            return []
        self._running = True
        frames = [self._frame("response.in_progress", response=self._snapshot(waits=False))]
        for item in self._first_items:
            frames += self._whole(item)
        return frames

    def _whole(self, item: OutputItem) -> list[ResponseEvent]:
        """Return the events of an item that is there at once."""
        index = len(self._output)
        self._output.append(item)
        added: OutputItem = item
        steps: list[tuple[str, dict[str, Any]]] = []
        match item:
            case OutputMcpList():
                added = item.model_copy(update={"tools": (), "error": None})
                outcome = "completed" if item.error is None else "failed"
                steps = [(f"response.mcp_list_tools.{step}", {}) for step in ("in_progress", outcome)]
            case OutputMcpCall():
                added = item.model_copy(update={"output": None, "error": None, "status": "in_progress"})
                steps = [
                    ("response.mcp_call.in_progress", {}),
                    ("response.mcp_call_arguments.done", {"arguments": item.arguments}),
                    (f"response.mcp_call.{item.status}", {}),
                ]
        return [
            self._frame("response.output_item.added", output_index=index, item=added),
            *(self._frame(kind, item_id=item.id, output_index=index, **more) for kind, more in steps),
            self._frame("response.output_item.done", output_index=index, item=item),
        ]

    def _append_text(self, kind: str, text: str, event: events.Token | events.Reasoning) -> list[ResponseEvent]:
        frames = self._begin()
        if not self._generate:
            return frames
        item = self._item
        if item is None or item.kind != kind:
            frames += self._close("completed")
            item, opening = self._open(kind)
            frames += opening
        item.text.append(text)
        if event.logprobs is None or kind != _MESSAGE:
            logprobs = b"" if kind != _MESSAGE else b',"logprobs":[]'
        else:
            entries = logprobs_of(event.logprobs, top=self._top)
            item.logprobs += entries
            logprobs = b',"logprobs":' + orjson.dumps(_plain(entries))
        frames.append(self._delta(item, text, logprobs))
        return frames

    def _call(self, event: events.ToolCall) -> list[ResponseEvent]:
        frames = self._begin()
        if not self._generate:
            return frames
        item = self._item
        if item is None or item.call_id != event.call_id:
            frames += self._close("completed")
            name = event.name or ""
            offered, of_server = self._tools.get(name), self._mcp_tools.get(name)
            kind = _APPROVAL if of_server is not None else _CUSTOM_CALL if is_custom(offered) else _CALL
            item, opening = self._open(kind, call_id=event.call_id, names=names_of(name, offered), of_server=of_server)
            frames += opening
        text = item.input.feed(event.arguments) if item.kind == _CUSTOM_CALL else event.arguments
        if text:
            item.text.append(text)
            if item.kind != _APPROVAL:
                frames.append(self._delta(item, text, b""))
        return frames

    def _open(
        self,
        kind: str,
        *,
        call_id: str = "",
        names: Mapping[str, str] | None = None,
        of_server: McpToolName | None = None,
    ) -> tuple[_Item, list[ResponseEvent]]:
        assert self._place is not None
        index = self._counts.get(kind, 0)
        self._counts[kind] = index + 1
        name = item_id(kind, self._place.turn_id, index)
        item = self._item = _Item(kind, name, len(self._output), call_id=call_id, names=names, of_server=of_server)
        output = item.output_item("in_progress", empty=True)
        frames = [self._frame("response.output_item.added", output_index=item.place, item=output)]
        if kind not in _CALLS:
            part = ThoughtText(text="") if kind == _THOUGHTS else OutputText(text="")
            frames.append(self._part("response.content_part.added", item, part=part))
        return item, frames

    def _close(self, state: ItemState) -> list[ResponseEvent]:
        """Close the open item, if there is one."""
        item = self._item
        if item is None:
            return []
        self._item = None
        text, output = "".join(item.text), item.output_item(state)
        self._output.append(output)
        where: dict[str, Any] = {"item_id": item.name, "output_index": item.place}
        frames: list[ResponseEvent] = []
        match output:
            case OutputApprovalRequest():
                pass  # it has no parts
            case OutputCall():
                frames = [self._frame("response.function_call_arguments.done", **where, arguments=text)]
            case OutputCustomCall():
                frames = [self._frame("response.custom_tool_call_input.done", **where, input=text)]
            case OutputReasoning(content=(part,)):
                frames = [
                    self._part("response.reasoning_text.done", item, text=text),
                    self._part("response.content_part.done", item, part=part),
                ]
            case OutputMessage(content=(part,)):
                logprobs = _plain(tuple(item.logprobs))
                frames = [
                    self._part("response.output_text.done", item, text=text, logprobs=logprobs),
                    self._part("response.content_part.done", item, part=part),
                ]
        return [*frames, self._frame("response.output_item.done", output_index=item.place, item=output)]

    def _end(self, event: events.End) -> list[ResponseEvent]:
        if self._place is None:
            self._place = ResponseRef(event.session_id, event.turn_id)
        status = status_of(event.finish_reason) if self._generate else "completed"
        state: ItemState = "completed" if status == "completed" else "incomplete"
        frames = self._begin()
        if self._generate and self._item is None and not self._counts.keys() & {_MESSAGE, *_CALLS}:
            frames += self._open(_MESSAGE)[1]
        frames += self._close(state)
        complete = status == "completed"
        final = self._final = response_of(
            self._echo,
            self._place,
            status=status,
            output=tuple(self._output),
            finish_reason=event.finish_reason,
            usage=event.usage,
            completed_at=self._clock() if complete else None,
            warnings=event.warnings,
        )
        # There is no event type for a cancelled response; this one ends it for every client.
        return [*frames, self._frame("response.completed" if complete else "response.incomplete", response=final)]

    def _fail(self, event: Event) -> list[ResponseEvent]:
        """Return the events of a failed response, if the event is a failure."""
        match event:
            case events.Error(session_id=str(session_id), turn_id=str(turn_id)):
                place, error = ResponseRef(session_id, turn_id), error_of(event)
            case events.SessionClosed() | events.SessionExpired() | events.SessionDetached():
                place = self._place or ResponseRef(event.session_id, "")
                error = ResponseError(code="server_error", message="Its session was closed, or is attached elsewhere.")
            case _:
                return []
        self._place = place
        frames = self._begin() + self._close("incomplete")
        final = self._final = response_of(self._echo, place, status="failed", output=tuple(self._output), error=error)
        return [*frames, self._frame("response.failed", response=final)]

    def _snapshot(self, *, waits: bool) -> Response:
        assert self._place is not None
        return response_of(self._echo, self._place, status="queued" if waits else "in_progress")

    def _part(self, kind: str, item: _Item, **fields: Any) -> ResponseEvent:
        return self._frame(kind, item_id=item.name, output_index=item.place, content_index=0, **fields)

    def _frame(self, kind: str, **fields: Any) -> ResponseEvent:
        message = {"type": kind, "sequence_number": self._count(), **fields, **self._stream_field}
        return ResponseEvent(kind, orjson.dumps(message, default=_dumped))

    def _delta(self, item: _Item, text: str, logprobs: bytes) -> ResponseEvent:
        """Encode a text delta; most frames are deltas, which differ in few bytes."""
        kind = _DELTAS[item.kind]
        data = b'{"type":"%b","sequence_number":%d,%b%b%b%b}' % (
            kind,
            self._count(),
            item.head,
            orjson.dumps(text),
            logprobs,
            self._stream_tail,
        )
        return ResponseEvent(kind.decode(), data)

    def _count(self) -> int:
        number = self._number
        self._number += 1
        return number


def _plain(entries: tuple[Logprob, ...]) -> list[dict[str, Any]]:
    """Return token probabilities as events have them, without bytes."""
    return [entry.model_dump(exclude={"bytes": True, "top_logprobs": {"__all__": {"bytes"}}}) for entry in entries]


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(type(value).__name__)
