"""Converts turns to responses and items, and encodes their ids. Pure.

A response's id contains the ids of its session and its turn, so that no lookup is needed. Its items are named after the
turn.
"""

from __future__ import annotations

import re
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from inferencecenter.api.custom_tools import input_of
from inferencecenter.api.responses.request_schemas import (
    CustomTool,
    approval_request_id,
    mcp_call_id,
)
from inferencecenter.api.responses.response_schemas import (
    CachedTokens,
    ConversationRef,
    Echo,
    Incomplete,
    ItemList,
    Logprob,
    McpToolName,
    Note,
    OutputApprovalRequest,
    OutputCall,
    OutputCustomCall,
    OutputMcpCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningTokens,
    Response,
    ResponseError,
    ResponseUsage,
    ThoughtText,
    TopLogprob,
)
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import IMAGE_MARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferencecenter.api.responses.request_schemas import CallableTool, CreateResponse, ListItems
    from inferencecenter.api.responses.response_schemas import (
        ItemState,
        McpOutputItem,
        OutputCompaction,
        OutputItem,
        Status,
    )
    from inferencecenter.protocol.events import Error
    from inferencecenter.protocol.values import ChatMessage, TokenLogprobs, ToolCall, Usage


_PART: Final = r"[A-Za-z0-9_-]{22}"
_NAME: Final = re.compile(rf"resp_({_PART})({_PART})")


class ResponseRef(NamedTuple):
    """Session and turn of a response."""

    session_id: str
    turn_id: str


def response_id(place: ResponseRef) -> str:
    """Return the id of the response of a turn."""
    return f"resp_{place.session_id.removeprefix('s_')}{place.turn_id.removeprefix('t_')}"


def read_response_id(name: str) -> ResponseRef:
    """Decode the id of a response.

    Raises:
        InferenceCenterError: ``turn_not_found`` for an invalid id.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InferenceCenterError(ErrorCode.TURN_NOT_FOUND, "No such response.")
    session, turn = match.groups()
    return ResponseRef(f"s_{session}", f"t_{turn}")


def item_id(kind: str, turn_id: str, index: int = 0) -> str:
    """Return the id of an item: ``kind`` is ``msg``, ``rs``, ``fc`` or ``ctc``, ``index`` counts items of a kind."""
    return f"{kind}_{turn_id.removeprefix('t_')}_{index}"


MAX_NOTE_BYTES: Final = 256 * 1024
"""Maximum size of a turn's note, which limits the echoed part of a request."""

_CUT_BY_LENGTH: Final = ("length", "context_full")
_COMPLETE: Final = ("stop", "tool_calls")
_TOO_MANY: Final = 429
_NO_TOOLS: Final[Mapping[str, CallableTool]] = MappingProxyType({})
NO_MCP_TOOLS: Final[Mapping[str, McpToolName]] = MappingProxyType({})
_TIERS: Final[dict[str, Literal["default", "flex", "priority"]]] = {
    "auto": "default",
    "default": "default",
    "flex": "flex",
    "priority": "priority",
    "fast": "priority",
}


def echo_of(request: CreateResponse, *, model: str, created_at: float, warnings: Iterable[str] = ()) -> Echo:
    """Return the fields that the response echoes from ``request``, with the ``warnings`` about it.

    ``created_at`` is Unix seconds.
    """
    return Echo(
        created_at=int(created_at),
        model=model,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        conversation=None if request.conversation_name is None else ConversationRef(id=request.conversation_name),
        background=request.background,
        store=request.store,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        temperature=request.temperature,
        top_p=request.top_p,
        top_logprobs=request.top_logprobs or 0,
        text=request.text,
        tools=tuple(request.tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=request.reasoning,
        truncation=request.truncation,
        service_tier=_TIERS[request.service_tier],
        metadata=request.metadata,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        warnings=tuple(warnings),
    )


def note_of(
    echo: Echo,
    *,
    generate: bool = True,
    compaction: OutputCompaction | None = None,
    mcp_items: tuple[McpOutputItem, ...] = (),
    mcp_tools: Mapping[str, McpToolName] = NO_MCP_TOOLS,
) -> str:
    """Return the note stored with the turn of a response.

    Raises:
        InferenceCenterError: ``invalid_request`` if it is too large or nested too deep.
    """
    field = "tools" if echo.tools else "instructions"
    try:
        note = Note(
            **dict(echo),
            generate=generate,
            compaction=compaction,
            mcp_items=mcp_items,
            mcp_tools=tuple(mcp_tools.values()),
        )
        text = note.model_dump_json()
    except PydanticSerializationError as error:  # it writes 255 levels of lists and objects, and reads more
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "tools, text and metadata are nested too deep to be stored", field=field
        ) from error
    n_bytes = len(text.encode())
    if n_bytes > MAX_NOTE_BYTES:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "instructions, tools and those of MCP servers, text, metadata and a summary have"
            f" {n_bytes} bytes in total;"
            f" at most {MAX_NOTE_BYTES} are stored with a response",
            field=field,
        )
    return text


def read_note(text: str) -> Note | None:
    """Decode the note of a turn; ``None`` if the turn is of another API."""
    try:
        return Note.model_validate_json(text)
    except ValidationError:
        return None


def response_of(  # noqa: PLR0913 - keyword-only
    echo: Echo,
    place: ResponseRef,
    *,
    status: Status,
    output: tuple[OutputItem, ...] = (),
    finish_reason: str | None = None,
    usage: Usage | None = None,
    error: ResponseError | None = None,
    completed_at: float | None = None,
    warnings: tuple[str, ...] = (),
) -> Response:
    """Return the current state of a response; ``warnings`` are those of its turn."""
    return Response.model_construct(
        **{**dict(echo), "warnings": tuple(dict.fromkeys((*echo.warnings, *warnings)))},
        id=response_id(place),
        status=status,
        completed_at=None if completed_at is None else int(completed_at),
        error=error,
        incomplete_details=Incomplete(reason=_reason(finish_reason))
        if finish_reason and status == "incomplete"
        else None,
        output=output,
        usage=None if usage is None else usage_of(usage),
    )


def status_of(finish_reason: str) -> Status:
    """Return the status of a response by its turn's finish reason."""
    if finish_reason in _COMPLETE:
        return "completed"
    return "cancelled" if finish_reason == "aborted" else "incomplete"


def usage_of(usage: Usage) -> ResponseUsage:
    """Return a turn's token usage."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def error_of(error: Error) -> ResponseError:
    """Return the error of a failed turn in OpenAI's terms."""
    status = ERRORS[ErrorCode(error.code)].http_status if error.code in ERRORS else 500
    if status == _TOO_MANY:
        return ResponseError(code="rate_limit_exceeded", message=error.message)
    return ResponseError(code="invalid_prompt" if status < 500 else "server_error", message=error.message)


def logprobs_of(entries: tuple[TokenLogprobs, ...], *, top: int) -> tuple[Logprob, ...]:
    """Return token probabilities with the ``top`` most likely ones at each position."""
    return tuple(
        Logprob(
            token=entry.token,
            bytes=tuple(entry.token.encode()),
            logprob=entry.logprob,
            top_logprobs=tuple(
                TopLogprob(token=each.token, bytes=tuple(each.token.encode()), logprob=each.logprob)
                for each in entry.top[:top]
            ),
        )
        for entry in entries
    )


def output_of(
    answer: ChatMessage,
    turn_id: str,
    *,
    state: ItemState,
    tools: Mapping[str, CallableTool] = _NO_TOOLS,
    mcp_tools: Mapping[str, McpToolName] = NO_MCP_TOOLS,
) -> tuple[OutputItem, ...]:
    """Return the items of a stored answer; ``state`` is that of the last item, unless that asks for an approval."""
    items: list[OutputItem] = []
    if answer.reasoning:
        thoughts = (ThoughtText(text=answer.reasoning),)
        items.append(OutputReasoning(id=item_id("rs", turn_id), status="completed", content=thoughts))
    if answer.content or not answer.tool_calls:
        content = (OutputText(text=answer.content),)
        items.append(OutputMessage(id=item_id("msg", turn_id), status="completed", content=content))
    counts: Counter[str] = Counter()
    for call in answer.tool_calls or ():
        if (of_server := mcp_tools.get(call.name)) is not None:
            items.append(approval_request(of_server, call.call_id, call.arguments))
            continue
        offered = tools.get(call.name)
        kind = "ctc" if is_custom(offered) else "fc"
        items.append(_call_item(item_id(kind, turn_id, counts[kind]), call, offered))
        counts[kind] += 1
    if isinstance(items[-1], OutputApprovalRequest):
        return tuple(items)
    return (*items[:-1], items[-1].model_copy(update={"status": state}))


def approval_request(tool: McpToolName, call_id: str, arguments: str) -> OutputApprovalRequest:
    """Return the item that asks for the approval of a call."""
    name = approval_request_id(call_id)
    return OutputApprovalRequest(id=name, server_label=tool.server_label, name=tool.name, arguments=arguments)


def mcp_call_of(tool: McpToolName, call: ToolCall, output: str) -> OutputMcpCall:
    """Return the item of a call that has a result."""
    return OutputMcpCall(
        id=mcp_call_id(call.call_id),
        server_label=tool.server_label,
        name=tool.name,
        arguments=call.arguments,
        approval_request_id=approval_request_id(call.call_id),
        output=output,
        status="completed",
    )


def is_custom(offered: CallableTool | None) -> bool:
    return offered is not None and isinstance(offered.tool, CustomTool)


def names_of(called: str, offered: CallableTool | None) -> dict[str, str]:
    """Return the fields that name a called tool as the client knows it."""
    if offered is None or offered.namespace is None:
        return {"name": called}
    return {"name": offered.tool.name, "namespace": offered.namespace.name}


def _call_item(name: str, call: ToolCall, offered: CallableTool | None) -> OutputCall | OutputCustomCall:
    """Return the item of a call, with this id."""
    names = names_of(call.name, offered)
    if is_custom(offered):
        text = input_of(call.arguments)
        return OutputCustomCall(id=name, call_id=call.call_id, **names, input=text, status="completed")
    return OutputCall(id=name, call_id=call.call_id, **names, arguments=call.arguments, status="completed")


def input_items(
    messages: tuple[ChatMessage, ...],
    turn_id: str,
    *,
    tools: Mapping[str, CallableTool] = _NO_TOOLS,
    mcp_tools: Mapping[str, McpToolName] = NO_MCP_TOOLS,
) -> tuple[dict[str, Any], ...]:
    """Return messages as items with ids."""
    items: list[dict[str, Any]] = []
    custom_calls: set[str | None] = set()
    mcp_calls: dict[str | None, ToolCall] = {}
    for at, message in enumerate(messages):
        if message.role == "assistant":
            items += [
                item.model_dump(mode="json")
                | ({} if isinstance(item, OutputApprovalRequest) else {"id": f"{item.id}_in{at}"})
                for item in output_of(message, turn_id, state="completed", tools=tools, mcp_tools=mcp_tools)
            ]
            mcp_calls |= {call.call_id: call for call in message.tool_calls or () if call.name in mcp_tools}
            custom_calls |= {call.call_id for call in message.tool_calls or () if is_custom(tools.get(call.name))}
        elif (call := mcp_calls.get(message.tool_call_id)) is not None:
            items.append(mcp_call_of(mcp_tools[call.name], call, message.content).model_dump(mode="json"))
        else:
            name = f"{turn_id.removeprefix('t_')}_in{at}"
            items.append(_given_item(message, name, custom=message.tool_call_id in custom_calls))
    return tuple(items)


def page_of(items: Sequence[dict[str, Any]], query: ListItems) -> ItemList:
    """Return a page of items, which are in ascending order.

    Raises:
        InferenceCenterError: ``invalid_request`` if the page is to begin after an unknown item.
    """
    items = items[::-1] if query.order == "desc" else items
    start = 0
    if query.after is not None:
        names = [item["id"] for item in items]
        if query.after not in names:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "after is not the id of an item", field="after")
        start = names.index(query.after) + 1
    page = tuple(items[start : start + query.limit])
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > start + len(page),
    )


def _given_item(message: ChatMessage, name: str, *, custom: bool) -> dict[str, Any]:
    if message.role == "tool":
        return {
            "type": "custom_tool_call_output" if custom else "function_call_output",
            "id": f"{'ctco' if custom else 'fco'}_{name}",
            "call_id": message.tool_call_id or "",
            "output": message.content if message.images is None else _content_parts(message),
            "status": "completed",
        }
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": message.role,
        "status": "completed",
        "content": _content_parts(message),
    }


def _content_parts(message: ChatMessage) -> list[dict[str, Any]]:
    images = iter(message.images or ())
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(message.content.split(IMAGE_MARK) if message.images else (message.content,)):
        if number:
            parts.append({"type": "input_image", "detail": "auto", "file_id": next(images).digest, "image_url": None})
        if text or message.images is None:
            parts.append({"type": "input_text", "text": text})
    return parts


def _reason(finish_reason: str) -> str:
    return "max_output_tokens" if finish_reason in _CUT_BY_LENGTH else finish_reason
