"""Tool calls of a session that the daemon runs on MCP servers.

A mark is recorded before a call is sent, and removed when its result is recorded or it certainly did not run. A mark
left by an earlier daemon or by an abort is a call with an unknown outcome: it is shown to the client, and only the
client can run it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import McpCallStatus, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferencecenter.mcp.gateway import ToolOutcome
    from inferencecenter.protocol.requests import CallMcpTool
    from inferencecenter.protocol.values import ChatMessage
    from inferencecenter.sessions.context import ScheduledCall


class ToolCallRunner(Protocol):
    """Runs one call on the chosen server and tool; access was checked before."""

    def start(self, arguments: str, on_end: Callable[[ToolOutcome], None], /) -> ScheduledCall:
        """Start the call with the arguments as JSON; ``on_end`` receives its outcome once, also after ``cancel``."""

    def release(self) -> None:
        """Give up the place of a call that does not start."""


def pending_calls(messages: Sequence[ChatMessage]) -> dict[str, ToolCall]:
    """Return the tool calls of the last answer that have no result yet, by id."""
    answered = set()
    for message in reversed(messages):
        if message.role != "tool":
            return {call.call_id: call for call in message.tool_calls or () if call.call_id not in answered}
        answered.add(message.tool_call_id)
    return {}


@dataclass(slots=True)
class _Run:
    """A running call; it is sent once its record is committed, unless it was ``stopped`` before."""

    handle: ScheduledCall | None = None
    stopped: bool = False


@dataclass(slots=True)
class McpCalls:
    """The calls of a session that are running or have an unknown outcome."""

    _marks: dict[str, McpCallStatus] = field(default_factory=dict)
    _runs: dict[str, _Run] = field(default_factory=dict)

    @classmethod
    def restored(cls, marks: Iterable[McpCallStatus], messages: Sequence[ChatMessage]) -> McpCalls:
        """Return the calls of an earlier daemon without those whose result is in the messages."""
        pending = pending_calls(messages)
        return cls({each.call_id: _unknown(each) for each in marks if each.call_id in pending})

    @property
    def n_running(self) -> int:
        return len(self._runs)

    @property
    def statuses(self) -> tuple[McpCallStatus, ...]:
        """The calls, in the order in which they started."""
        return tuple(self._marks.values())

    def check_free(self, hint: str) -> None:
        """Refuse changes of the history while calls run.

        Raises:
            InferenceCenterError: ``session_busy``.
        """
        if self._runs:
            raise InferenceCenterError(ErrorCode.SESSION_BUSY, "a tool call of this session is running", hint=hint)

    def begin(self, request: CallMcpTool, messages: Sequence[ChatMessage]) -> tuple[ToolCall, McpCallStatus]:
        """Mark a call of the last answer as running, and return it with its status.

        Raises:
            InferenceCenterError: ``session_busy`` if it is already running, or ``invalid_request`` if there is none.
        """
        call_id = request.call_id
        if call_id in self._runs:
            raise InferenceCenterError(
                ErrorCode.SESSION_BUSY, "this tool call is running", hint="mcp_call follows when it has ended."
            )
        if (call := pending_calls(messages).get(call_id)) is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"call_id is {call_id}, which is no tool call of the last answer without a result",
                field="call_id",
                hint="get_session has the transcript.",
            )
        self._runs[call_id] = _Run()
        status = self._marks[call_id] = McpCallStatus(
            call_id=call_id, server=request.server, tool=request.tool or call.name, call_state="running"
        )
        return call, status

    def send(self, call_id: str, start: Callable[[], ScheduledCall]) -> bool:
        """Start a recorded call; return ``False`` if it was stopped before."""
        run = self._runs.get(call_id)
        if run is None or run.stopped:
            return False
        run.handle = start()
        return True

    def stop(self) -> None:
        """Stop all running calls; those that were sent end as unknown."""
        for run in self._runs.values():
            run.stopped = True
            if run.handle is not None:
                run.handle.cancel()

    def end(self, call_id: str, *, is_known: bool) -> McpCallStatus | None:
        """Return the status of a call that ended, and forget it if its outcome ``is_known``.

        ``None`` if the session no longer has the call.
        """
        self._runs.pop(call_id, None)
        status = self._marks.get(call_id)
        if status is not None and is_known:
            del self._marks[call_id]
        elif status is not None:
            self._marks[call_id] = _unknown(status)
        return status

    def prune(self, messages: Sequence[ChatMessage]) -> bool:
        """Drop the calls that are no longer pending; return whether there were any."""
        if not self._marks:
            return False
        pending, before = pending_calls(messages), len(self._marks)
        self._marks = {call_id: mark for call_id, mark in self._marks.items() if call_id in pending}
        return len(self._marks) < before


def _unknown(status: McpCallStatus) -> McpCallStatus:
    return status.model_copy(update={"call_state": "unknown"})
