"""Tools of declared MCP servers in responses.

The model's call becomes a request for an approval, which ends the response. The next request carries the decision: an
approved call runs in the session of the previous response, before the turn, and its result is a message there. So a
request that is sent again finds the result, and a call whose outcome is unknown does not run again.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from inferencecenter.api.body import invalid_field
from inferencecenter.api.responses.request_mapping import conversation_of, load_context, previous_note
from inferencecenter.api.responses.request_schemas import (
    CreateResponse,
    McpPart,
    OfferedMcpTool,
    approval_request_id,
    mcp_call_id,
)
from inferencecenter.api.responses.response_schemas import ListedMcpTool, McpCallFailure, OutputMcpCall, OutputMcpList
from inferencecenter.api.responses.serializers import mcp_call_of, read_response_id
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.requests import CallMcpTool
from inferencecenter.protocol.values import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferencecenter.api.request_context import RequestContext
    from inferencecenter.api.responses.request_schemas import DeclaredMcpServer
    from inferencecenter.api.responses.response_schemas import McpOutputItem, McpToolName, Note
    from inferencecenter.api.responses.serializers import ResponseRef
    from inferencecenter.mcp.gateway import ServerTool
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import ToolCall
    from inferencecenter.server.context import ServerContext

_RequestT = TypeVar("_RequestT", bound=CreateResponse)


class McpAdditions(NamedTuple):
    """What a response has from MCP servers: the first items of its output, and warnings.

    The items are lists of tools that are new in the conversation, and the approved calls with their outcomes.
    """

    items: tuple[McpOutputItem, ...] = ()
    warnings: tuple[str, ...] = ()


def uses_mcp(request: CreateResponse) -> bool:
    """Return whether a request asks for tools of MCP servers, or approves a call."""
    return bool(request.mcp_servers or request.approved_calls)


async def with_mcp_tools(
    context: ServerContext, request_context: RequestContext, request: _RequestT, *, run: bool = True
) -> tuple[_RequestT, McpAdditions]:
    """Return a request with the tools that it is offered and the results of calls that it approves, and additions.

    Without ``run`` no call runs, as only the prompt is wanted.

    Raises:
        InferenceCenterError: ``invalid_request`` for an approval of no call, and what refuses a call or a list of
            tools; see also ``conversation_of``.
    """
    if not uses_mcp(request):
        return request, McpAdditions()
    known = previous_note(context, request_context.client, request)
    servers, warnings = _usable(context, request_context, request)
    listed = () if known is None else known.mcp_tools
    shown = request.listed_servers | {tool.server_label for tool in listed}
    tools: list[OfferedMcpTool] = []
    lists: list[OutputMcpList] = []
    for server in servers:
        found = await _tools_of(context, request_context, server.server_label)
        allowed = () if isinstance(found, str) else tuple(tool for tool in found if server.allows(tool.name))
        tools += [OfferedMcpTool(server.server_label, tool.name, tool.description, tool.parameters) for tool in allowed]
        if server.server_label not in shown:
            lists.append(_list_item(server.server_label, allowed, error=found if isinstance(found, str) else None))
    ran = await _approved(context, request_context, request, known) if run else []
    ran.sort(key=lambda each: not each.is_stored)
    part = McpPart(
        tools=tuple(tools),
        results=tuple(each.message for each in ran),
        n_stored=sum(each.is_stored for each in ran),
    )
    return request.with_mcp(part), McpAdditions((*lists, *(each.item for each in ran)), warnings)


class _Result(NamedTuple):
    """An approved call: its item, and the message with its result, which the session has if it ``is_stored``."""

    item: OutputMcpCall
    message: ChatMessage
    is_stored: bool


class _CallSink:
    """Receives the events of a session while one of its calls runs; ``ended`` gets the last one of the call."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self.ended: asyncio.Future[events.McpCall] = asyncio.get_running_loop().create_future()

    def send(self, event: Event) -> None:
        """Take the end of the call, or of the session."""
        if self.ended.done():
            return
        match event:
            case events.McpCall(call_id=self._call_id) if event.call_state != "running":
                self.ended.set_result(event)
            case events.SessionClosed() | events.SessionExpired() | events.SessionDetached():
                self.ended.set_exception(
                    InferenceCenterError(
                        ErrorCode.SESSION_NOT_FOUND, "The session was closed or attached elsewhere while a call ran."
                    )
                )
            case _:
                pass


def _usable(
    context: ServerContext, request_context: RequestContext, request: CreateResponse
) -> tuple[tuple[DeclaredMcpServer, ...], tuple[str, ...]]:
    """Return the servers whose tools are offered, and warnings about the others.

    Raises:
        InferenceCenterError: ``invalid_request`` for one that is not offered, where dialects are strict.
    """
    client = request_context.client
    names = context.mcp.servers_for(client.client_id, client.scopes)
    usable: list[DeclaredMcpServer] = []
    warnings: list[str] = []
    for server in request.mcp_servers:
        name = server.server_label
        if request.conversation_name is not None:
            warnings.append(f"tools[] (mcp {name}) has no effect: a conversation cannot have calls of MCP servers")
        elif name not in names:
            warnings.append(
                f"tools[] (mcp {name}) has no effect: the operator declared no such server for this account"
            )
        else:
            usable.append(server)
    if warnings and context.settings.strict_dialects:
        raise invalid_field("tools", warnings[0])
    return tuple(usable), tuple(warnings)


async def _tools_of(
    context: ServerContext, request_context: RequestContext, server: str
) -> tuple[ServerTool, ...] | str:
    """Return the tools of a server that may be called, or why they cannot be listed.

    Raises:
        InferenceCenterError: ``queue_full``.
    """
    listing: asyncio.Future[tuple[ServerTool, ...] | str] = asyncio.get_running_loop().create_future()

    def end(found: dict[str, tuple[ServerTool, ...] | str]) -> None:
        if not listing.done():
            listing.set_result(found[server])

    client = request_context.client
    context.mcp.list_later(server, client_id=client.client_id, scopes=client.scopes, on_end=end)
    return await request_context.wait_for(listing)


def _list_item(server: str, tools: Iterable[ServerTool], *, error: str | None) -> OutputMcpList:
    listed = (
        ListedMcpTool(name=tool.name, description=tool.description, input_schema=tool.parameters) for tool in tools
    )
    return OutputMcpList(id=f"mcpl_{secrets.token_urlsafe(16)}", server_label=server, tools=tuple(listed), error=error)


async def _approved(
    context: ServerContext, request_context: RequestContext, request: CreateResponse, note: Note | None
) -> list[_Result]:
    """Run the approved calls of the previous response that have no result yet, one after the other."""
    approved = request.approved_calls
    if not approved:
        return []
    if request.previous_response_id is None:
        raise invalid_field("input", "mcp_approval_response requires previous_response_id: that response has the call")
    client, sessions = request_context.client, context.sessions
    await load_context(context, client, request)  # it may have been archived while the tools were listed
    conversation_of(context, client, request)  # it refuses a response that cannot be continued
    place = read_response_id(request.previous_response_id)
    answer = sessions.get_turn(client, *place).answer
    calls = {call.call_id: call for call in (answer.tool_calls if answer is not None else None) or ()}
    tools = {} if note is None else note.mcp_by_name
    chosen = [(calls[call_id], tools[calls[call_id].name]) for call_id in approved if _is_asked(calls, tools, call_id)]
    if len(chosen) < len(approved):
        raise invalid_field("input", "approval_request_id is no id of an mcp_approval_request of the previous response")
    return [await _result_of(context, request_context, place, call, tool) for call, tool in chosen]


def _is_asked(calls: dict[str, ToolCall], tools: dict[str, McpToolName], call_id: str) -> bool:
    return call_id in calls and calls[call_id].name in tools


async def _result_of(
    context: ServerContext, request_context: RequestContext, place: ResponseRef, call: ToolCall, tool: McpToolName
) -> _Result:
    """Return the result of an approved call, which runs unless it has one or its outcome is unknown."""
    await context.load_session(request_context.client, place.session_id)  # an earlier call may have taken long
    session = context.sessions.snapshot(request_context.client, place.session_id)
    n_before = next((mark.n_messages for mark in session.history.turns if mark.turn_id == place.turn_id), 0)
    following = takewhile(lambda message: message.role == "tool", session.history.messages[n_before:])
    for message in following:
        if message.tool_call_id == call.call_id:
            return _Result(mcp_call_of(tool, call, message.content), message, is_stored=True)
    if any(mark.call_id == call.call_id and mark.call_state == "unknown" for mark in session.mcp_calls):
        return _without_result(tool, call, "It was interrupted, and its result is unknown. It may have run.")
    ended = await _run(context, request_context, place, call, tool)
    if ended.call_state == "failed":
        return _without_result(tool, call, f"It did not run: {ended.detail}.")
    if ended.call_state != "done":
        return _without_result(tool, call, f"Its result is unknown, it may have run: {ended.detail}.")
    text = ended.content or ""
    message = ChatMessage(role="tool", content=text, tool_call_id=call.call_id)
    if ended.is_error:
        return _Result(_failed(tool, call, text), message, is_stored=True)
    return _Result(mcp_call_of(tool, call, text), message, is_stored=True)


async def _run(
    context: ServerContext, request_context: RequestContext, place: ResponseRef, call: ToolCall, chosen: McpToolName
) -> events.McpCall:
    """Run a call in the session of its response; it continues when the client disconnects.

    Raises:
        InferenceCenterError: See ``McpGateway.reserve_call`` and ``LiveSession.call_mcp_tool``.
    """
    client, server = request_context.client, chosen.server_label
    what = f"{server}/{chosen.name}"
    reservation = context.mcp.reserve_call(
        server,
        chosen.name,
        client_id=client.client_id,
        scopes=client.scopes,
        on_start=partial(context.audit, client, request_context.address, AuditEvent.MCP_TOOL_CALLED, what),
    )
    request = CallMcpTool(
        op="call_mcp_tool", session_id=place.session_id, call_id=call.call_id, server=server, tool=chosen.name
    )
    sink = _CallSink(call.call_id)
    context.sessions.call_mcp_tool(client, request, sink, reservation)
    try:
        return await request_context.wait_for(sink.ended)
    finally:
        context.sessions.detach(sink)


def _without_result(tool: McpToolName, call: ToolCall, why: str) -> _Result:
    message = ChatMessage(role="tool", content=why, tool_call_id=call.call_id)
    return _Result(_failed(tool, call, why), message, is_stored=False)


def _failed(tool: McpToolName, call: ToolCall, why: str) -> OutputMcpCall:
    return OutputMcpCall(
        id=mcp_call_id(call.call_id),
        server_label=tool.server_label,
        name=tool.name,
        arguments=call.arguments,
        approval_request_id=approval_request_id(call.call_id),
        error=McpCallFailure(content=why),
        status="failed",
    )
