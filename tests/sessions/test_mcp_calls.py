"""The calls of a session on MCP servers: which are pending, and what is left of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.events import McpCall
from inferencecenter.protocol.requests import CallMcpTool
from inferencecenter.protocol.values import ChatMessage, McpCallStatus, ToolCall
from inferencecenter.sessions.event_log import ReplayBuffer
from inferencecenter.sessions.mcp_calls import McpCalls, pending_calls

if TYPE_CHECKING:
    from tests.sessions.conftest import SessionHarness

QUESTION = ChatMessage(role="user", content="?")


def asking(*call_ids: str) -> ChatMessage:
    """An answer with tool calls."""
    calls = tuple(ToolCall(call_id=call_id, name="get", arguments="{}") for call_id in call_ids)
    return ChatMessage(role="assistant", content="", tool_calls=calls)


def result(call_id: str) -> ChatMessage:
    """The result of a call."""
    return ChatMessage(role="tool", content="", tool_call_id=call_id)


def request(call_id: str) -> CallMcpTool:
    """Approval of a call."""
    return CallMcpTool(op="call_mcp_tool", session_id="s", call_id=call_id, server="m")


class Runner:
    """A call that only records what happens to it."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def start(self, _arguments: str, _on_end: object) -> Runner:
        """Record the start; the call never ends."""
        self.happened.append("started")
        return self

    def release(self) -> None:
        """Record the release."""
        self.happened.append("released")

    def cancel(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("messages", "pending"),
    [
        ((), []),
        ((QUESTION,), []),
        ((QUESTION, asking("a", "b")), ["a", "b"]),
        ((QUESTION, asking("a", "b"), result("b")), ["a"]),
        ((QUESTION, asking("a"), result("a")), []),
        ((QUESTION, asking("a"), QUESTION), []),
        ((asking("a"), result("a"), ChatMessage(role="assistant", content="done")), []),
    ],
)
def test_calls_of_the_last_answer_are_pending(messages: tuple[ChatMessage, ...], pending: list[str]) -> None:
    """Calls are pending until they have results or the conversation continues."""
    assert list(pending_calls(messages)) == pending


def test_mark_of_an_earlier_daemon_is_unknown_unless_its_result_is_there() -> None:
    """A crash between the result and the removal of the mark leaves no unknown call."""
    marks = [McpCallStatus(call_id=name, server="m", tool="get", call_state="running") for name in ("a", "b")]
    calls = McpCalls.restored(marks, (QUESTION, asking("a", "b"), result("a")))
    assert [(each.call_id, each.call_state) for each in calls.statuses] == [("b", "unknown")]
    assert calls.n_running == 0
    assert calls.prune((QUESTION, asking("a", "b"), result("a"), result("b")))
    assert calls.statuses == ()


def test_call_runs_once_at_a_time() -> None:
    """While it runs, the history may not change."""
    calls, messages = McpCalls(), (QUESTION, asking("a"))
    calls.begin(request("a"), messages)
    with pytest.raises(InferenceCenterError) as caught:
        calls.begin(request("a"), messages)
    assert caught.value.code is ErrorCode.SESSION_BUSY
    with pytest.raises(InferenceCenterError, match="running"):
        calls.check_free("Wait.")
    assert calls.end("a", is_known=False) is not None
    calls.check_free("Wait.")
    assert [each.call_state for each in calls.statuses] == ["unknown"]
    calls.begin(request("a"), messages)
    calls.end("a", is_known=True)
    assert calls.statuses == ()


def test_call_that_is_stopped_before_its_commit_is_not_sent() -> None:
    """A call that was only recorded is not sent."""
    calls = McpCalls()
    calls.begin(request("a"), (asking("a"),))
    calls.stop()

    def send() -> None:
        raise AssertionError("it was sent")

    assert not calls.send("a", send)  # type: ignore[arg-type]


def test_call_that_is_not_sent_gives_up_its_place(world: SessionHarness) -> None:
    """A refused call and one that is stopped before its record is committed are released, and nothing else is."""
    session_id = world.create()
    said = requests.Append(op="append", session_id=session_id, messages=[QUESTION, asking("a")])
    world.sessions.append(world.client, said, world.sink)
    call = request("a").model_copy(update={"session_id": session_id})
    runner, refused = Runner(), Runner()
    assert world.journal is not None
    world.journal.holding = True
    world.sessions.call_mcp_tool(world.client, call, world.sink, runner)
    with pytest.raises(InferenceCenterError):
        world.sessions.call_mcp_tool(world.client, call, world.sink, refused)
    assert (runner.happened, refused.happened) == ([], ["released"])
    world.abort(session_id)
    world.journal.let_go()
    assert runner.happened == ["released"]
    world.journal.holding = False
    world.journal.let_go()
    runner = Runner()
    world.sessions.call_mcp_tool(world.client, call, world.sink, runner)
    assert runner.happened == ["started"]


def test_results_count_in_the_replay_buffer() -> None:
    """They count by their bytes, so long results displace older events."""
    buffer = ReplayBuffer(10_000)
    for seq in (1, 2):
        buffer.add(
            McpCall(session_id="s", seq=seq, call_id="a", server="m", tool="get", call_state="done", content="ä" * 3000)
        )
    assert buffer.size_bytes < 10_000
    assert buffer.events_after(0) is None
    assert [event.seq for event in buffer.events_after(1) or ()] == [2]
