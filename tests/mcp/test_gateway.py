"""The gateway with stub connections and a clock of the test: access, back-off, connections and their limits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest

from inferencecenter.config.sections import McpServerSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.mcp.gateway import (
    MAX_ARGUMENTS_CHARS,
    MAX_LISTINGS,
    ListedTool,
    McpGateway,
    McpLostError,
    McpRefusedError,
    McpUnreachableError,
    ToolCallReservation,
    ToolOutcome,
    ToolResult,
)
from inferencecenter.telemetry.metrics import DaemonMetrics
from tests.e2e.harness import MetricsPage
from tests.telemetry.all_series import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.core.tasks import TaskGroup

USER = frozenset({"user"})


def declare(**settings: Any) -> McpServerSettings:
    """A server that every account may use."""
    return McpServerSettings(**{"url": "http://localhost/mcp", "scope": "user"} | settings)


class StubClient:
    """A connection whose failures a test sets."""

    def __init__(self, world: World, tools_changed: Callable[[], None]) -> None:
        self.world = world
        self.tools_changed = tools_changed
        self.is_lost = False
        self.closed = False
        self.calls: list[tuple[str, Mapping[str, Any]]] = []

    async def open(self) -> None:
        """Open, or fail as the test says."""
        await asyncio.sleep(0)
        if self.world.unreachable:
            self.is_lost = True
            raise McpUnreachableError("down")

    async def close(self) -> None:
        """Record that it was closed."""
        self.closed = self.is_lost = True

    async def list_tools(self) -> tuple[ListedTool, ...]:
        """Three tools, one with a name that no turn can offer."""
        self.world.n_listings += 1
        await self.world.may_list.wait()
        return tuple(ListedTool(name, "", {"type": "object"}) for name in ("a", "b", "a name"))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Fail as the test says, or wait until it lets calls end."""
        self.calls.append((name, arguments))
        self.world.has_called.set()
        if self.world.errors:
            error = self.world.errors.pop(0)
            self.is_lost = isinstance(error, McpUnreachableError | McpLostError)
            raise error
        await self.world.may_end.wait()
        return ToolResult("result", is_error=False)


class World:
    """A gateway with one server, its clock and its connections."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.unreachable = False
        self.errors: list[Exception] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.has_called = asyncio.Event()
        self.n_listings = 0
        self.may_list = asyncio.Event()
        self.may_list.set()
        self.clients: list[StubClient] = []
        self.metrics = DaemonMetrics()
        self.gateway = McpGateway(
            {"s": declare(**settings)}, connect=self._connect, metrics=self.metrics.mcp, monotonic=lambda: self.now
        )

    def _connect(
        self, _settings: McpServerSettings, _tasks: TaskGroup, tools_changed: Callable[[], None]
    ) -> StubClient:
        self.clients.append(StubClient(self, tools_changed))
        return self.clients[-1]

    def start(self, tool: str = "a", arguments: str = "{}", client_id: str = "me") -> asyncio.Future[ToolOutcome]:
        """Start an allowed call."""
        ended: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()
        self.reserve(tool, client_id).start(arguments, ended.set_result)
        return ended

    def reserve(self, tool: str = "a", client_id: str = "me") -> ToolCallReservation:
        """Reserve an allowed call."""
        return self.gateway.reserve_call("s", tool, client_id=client_id, scopes=USER)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    while not condition():  # noqa: ASYNC110 - some conditions have no event
        await asyncio.sleep(0)


async def test_defect_while_tools_are_listed_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request does not wait without an end, and the next one may succeed."""

    async def fail(_client: StubClient) -> tuple[ListedTool, ...]:
        raise ZeroDivisionError

    world = World()
    with monkeypatch.context() as patched:
        patched.setattr(StubClient, "list_tools", fail)
        found: list[object] = []
        world.gateway.list_later("s", client_id="me", scopes=USER, on_end=found.append)
        await until(lambda: bool(found))
        assert found == [{"s": "an internal error"}]
    assert len(await world.gateway.list_tools("s", client_id="me")) == 2


async def test_account_needs_the_scope_or_its_name() -> None:
    """By default only operators may use a server; a listed account needs no scope."""
    servers = {"s": McpServerSettings(url="https://x/", accounts=("listed",))}
    gateway = McpGateway(servers, metrics=DaemonMetrics().mcp)
    assert gateway.servers_for("me", {"user"}) == ()
    assert gateway.servers_for("me", {"user", "operator"}) == ("s",)
    assert gateway.servers_for("listed", {"user"}) == ("s",)
    with pytest.raises(InferenceCenterError) as caught:
        gateway.reserve_call("s", "a", client_id="me", scopes=USER)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "server")


async def test_listed_tools_are_those_that_may_be_called() -> None:
    """Each has the operator's setting for approval; the list is cached for a while."""
    world = World(allowed_tools=("a",), approvals={"a": "never"})
    for _ in range(2):
        tools = await world.gateway.list_tools("s", client_id="me")
        assert [(tool.name, tool.approval) for tool in tools if not isinstance(tool, str)] == [("a", "never")]
    assert world.n_listings == 1
    world.now += 31
    await world.gateway.list_tools("s", client_id="me")
    assert world.n_listings == 2
    with pytest.raises(InferenceCenterError, match="b, which may not be called"):
        world.start("b")
    found = await World().gateway.list_tools("s", client_id="me")
    assert [tool.name for tool in found if not isinstance(tool, str)] == ["a", "b"]


async def test_server_that_is_down_is_left_alone_for_longer_each_time() -> None:
    """A call meanwhile fails without an attempt; a success resets the wait."""
    world = World()
    world.unreachable = True
    for wait_s in (1, 2, 4):
        n_attempts = len(world.clients)
        assert (await world.start()).state == "failed"
        assert (await world.start()).detail == f"s cannot be reached: down; the next attempt is possible in {wait_s} s"
        assert len(world.clients) == n_attempts + 1
        world.now += wait_s
    world.unreachable = False
    assert (await world.start()).state == "done"
    world.clients[-1].is_lost = True
    world.unreachable = True
    await world.start()
    assert (await world.start()).detail.endswith("in 1 s")


async def test_call_is_repeated_only_if_it_was_not_delivered() -> None:
    """A session that the server forgot is opened anew; after a lost connection the outcome is unknown."""
    world = World()
    world.errors = [McpUnreachableError("forgotten")]
    assert (await world.start()).state == "done"
    assert [len(client.calls) for client in world.clients] == [1, 1]
    world.errors = [McpLostError("lost")]
    assert await world.start() == ToolOutcome("unknown", detail="lost")
    assert [len(client.calls) for client in world.clients] == [1, 2]
    world.errors = [McpRefusedError("no such tool")]
    assert await world.start() == ToolOutcome("failed", detail="s refused it: no such tool")
    world.errors = [McpUnreachableError("forgotten"), McpUnreachableError("forgotten")]
    assert (await world.start()).state == "failed"


async def test_arguments_must_be_an_object() -> None:
    """Other arguments are refused before anything is sent."""
    world = World()
    for arguments in ("[1]", "{", '"a"'):
        assert (await world.start(arguments=arguments)).state == "failed"
    assert not world.clients


async def test_calls_of_an_account_wait_in_order() -> None:
    """Their number is limited; another account does not wait for them."""
    world = World(max_calls=1, max_queued_calls=2)
    world.may_end.clear()
    order: list[int] = []
    calls = [world.start(tool, f'{{"n": {n}}}') for n, tool in enumerate("aba")]
    for n, call in enumerate(calls):
        call.add_done_callback(partial(lambda n, _: order.append(n), n))
    with pytest.raises(InferenceCenterError) as caught:
        world.start()
    assert caught.value.code is ErrorCode.QUEUE_FULL
    await world.has_called.wait()
    other = world.start(client_id="other")
    await until(lambda: len(world.clients) == 2 and bool(world.clients[1].calls))
    assert [len(client.calls) for client in world.clients] == [1, 1]
    world.may_end.set()
    assert {(await call).state for call in (*calls, other)} == {"done"}
    assert order == [0, 1, 2]
    assert [arguments["n"] for _, arguments in world.clients[0].calls] == [0, 1, 2]
    assert (await world.start()).state == "done"


async def test_waiting_calls_that_time_out_did_not_run() -> None:
    """When the running one times out, at most one of them gets its slot; later calls run."""
    world = World(max_calls=1, timeout_s=0.05)
    world.may_end.clear()
    calls = [world.start() for _ in range(4)]
    outcomes = [await call for call in calls]
    assert outcomes[0].state == "unknown"
    failed = ToolOutcome("failed", detail="no other call of this account ended within 0.05 s")
    assert outcomes.count(failed) >= 2
    assert len(world.clients[0].calls) == sum(outcome.state == "unknown" for outcome in outcomes)
    world.may_end.set()
    assert (await world.start()).state == "done"


async def test_calls_that_are_not_sent_yet_count() -> None:
    """Calls whose records are not committed take places of their account; a released one does not."""
    world = World(max_calls=1, max_queued_calls=1)
    reserved = [world.reserve(), world.reserve()]
    with pytest.raises(InferenceCenterError) as caught:
        world.reserve()
    assert caught.value.code is ErrorCode.QUEUE_FULL
    world.reserve(client_id="other")
    for _ in range(2):
        reserved[0].release()
    ended: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()
    reserved[1].start("{}", ended.set_result)
    world.reserve()
    with pytest.raises(InferenceCenterError):
        world.reserve()
    assert (await ended).state == "done"
    world.reserve()


async def test_length_of_arguments_is_bounded() -> None:
    """A client may append a tool call of any length; it fails without being parsed or sent."""
    world = World()
    longest = '{"a":"' + "x" * (MAX_ARGUMENTS_CHARS - 8) + '"}'
    assert (await world.start(arguments=longest)).state == "done"
    outcome = await world.start(arguments=longest + " ")
    assert (outcome.state, "more than 262144 characters" in outcome.detail) == ("failed", True)
    assert len(world.clients[0].calls) == 1


async def test_sent_and_slow_calls_are_unknown() -> None:
    """A call that is canceled before its task ran was not sent."""
    world = World(timeout_s=0.05)
    world.may_end.clear()
    assert await world.start() == ToolOutcome("unknown", detail="no result within 0.05 s")
    ended: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()
    world.reserve().start("{}", ended.set_result).cancel()
    assert (await ended).state == "failed"
    world.has_called.clear()
    sent: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()
    call = world.reserve().start("{}", sent.set_result)
    await world.has_called.wait()
    call.cancel()
    assert await sent == ToolOutcome("unknown", detail="the call was stopped")


async def test_lists_of_an_account_wait_for_the_first() -> None:
    """They share its result, as does another account later; requests are limited for each account."""
    world = World()
    world.may_list.clear()
    found: list[object] = []
    for _ in range(MAX_LISTINGS):
        world.gateway.list_later("s", client_id="me", scopes=USER, on_end=found.append)
    with pytest.raises(InferenceCenterError) as caught:
        world.gateway.list_later("s", client_id="me", scopes=USER, on_end=found.append)
    assert caught.value.code is ErrorCode.QUEUE_FULL
    await until(lambda: world.n_listings == 1)
    assert world.n_listings == 1
    world.may_list.set()
    await until(lambda: len(found) == MAX_LISTINGS)
    assert all(each == found[0] for each in found)
    await world.gateway.list_tools("s", client_id="other")
    assert (world.n_listings, len(world.clients)) == (1, 1)
    world.gateway.list_later("s", client_id="me", scopes=USER, on_end=found.append)


async def test_announced_tools_are_listed_again() -> None:
    """This holds if the announcement arrives while they are being listed."""
    world = World()
    await world.gateway.list_tools("s", client_id="me")
    world.clients[0].tools_changed()
    world.may_list.clear()
    found: list[object] = []
    world.gateway.list_later("s", client_id="me", scopes=USER, on_end=found.append)
    await until(lambda: world.n_listings == 2)
    world.clients[0].tools_changed()
    world.may_list.set()
    await until(lambda: bool(found))
    await world.gateway.list_tools("s", client_id="me")
    assert world.n_listings == 3
    await world.gateway.list_tools("s", client_id="me")
    assert world.n_listings == 3


async def test_calls_of_a_removed_server_end() -> None:
    """A running call ends with an unknown outcome; a waiting call and a later one fail without having run."""
    world = World(max_calls=1)
    world.may_end.clear()
    calls = [world.start(), world.start()]
    late_call = world.reserve()
    await world.has_called.wait()
    world.gateway.replace_servers({"t": declare()})
    assert [await call for call in calls] == [
        ToolOutcome("unknown", detail="the operator removed the server"),
        ToolOutcome("failed", detail="the operator removed the server"),
    ]
    await until(lambda: world.clients[0].closed)
    assert world.gateway.servers_for("me", USER) == ("t",)
    late: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()
    late_call.start("{}", late.set_result)
    assert await late == ToolOutcome("failed", detail="s was removed, or no longer allows a")
    assert await world.gateway.list_tools("s", client_id="me") == "the operator removed it"


async def test_calls_of_a_changed_server_continue() -> None:
    """Waiting calls fail, and new ones use a new connection; a server without changes keeps its connection."""
    world = World(max_calls=1)
    world.may_end.clear()
    running, waiting = world.start(), world.start()
    await world.has_called.wait()
    world.gateway.replace_servers({"s": declare(max_calls=1), "t": declare()})
    await asyncio.sleep(0)
    assert (running.done(), waiting.done()) == (False, False)
    world.gateway.replace_servers({"s": declare(max_calls=2, allowed_tools=("a",)), "t": declare()})
    assert await waiting == ToolOutcome("failed", detail="the operator changed the server")
    world.may_end.set()
    assert (await world.start()).state == "done"
    assert (await running).state == "done"
    await until(lambda: world.clients[0].closed)
    assert [client.closed for client in world.clients] == [True, False]
    with pytest.raises(InferenceCenterError, match="b, which may not be called"):
        world.start("b")


async def test_calls_and_failures_are_counted() -> None:
    """They are counted by server and outcome; a removed server is neither up nor down."""
    world = World()

    def value(name: str, **labels: str) -> float:
        return MetricsPage(generate_latest(world.metrics.registry).decode()).value(name, **labels)

    assert "inferencecenter_mcp_server_up" not in samples_of(world.metrics)
    await world.start()
    world.errors = [McpLostError("lost")]
    await world.start()
    assert value("mcp_server_up", server="s") == 1
    world.unreachable = True
    await world.start()
    await world.gateway.list_tools("s", client_id="me")
    assert value("mcp_server_up", server="s") == 0
    counted = {
        outcome: value("mcp_calls_total", server="s", outcome=outcome) for outcome in ("done", "unknown", "failed")
    }
    assert counted == {"done": 1, "unknown": 1, "failed": 1}
    assert value("mcp_listing_failures_total", server="s") == 1
    assert value("mcp_call_seconds_count", server="s") == 3
    world.gateway.replace_servers({})
    assert "inferencecenter_mcp_server_up" not in samples_of(world.metrics)


async def test_accounts_have_connections_of_their_own() -> None:
    """At the limit the one idle for longest is closed; if all are in use, the call fails."""
    world = World(max_connections=2)
    for client_id in ("one", "two", "one", "three"):
        await world.start(client_id=client_id)
        world.now += 1
    await asyncio.sleep(0)
    assert [client.closed for client in world.clients] == [False, True, False]
    world.may_end.clear()
    calls = [world.start(client_id="one"), world.start(client_id="three")]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "in use" in (await world.start(client_id="four")).detail
    world.may_end.set()
    assert {(await call).state for call in calls} == {"done"}


async def test_close_ends_calls_and_connections() -> None:
    """The outcome of a running call is unknown."""
    world = World()
    world.may_end.clear()
    call = world.start()
    await world.has_called.wait()
    await world.gateway.close()
    assert (await call).state == "unknown"
    assert world.clients[0].closed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either url or command"),
        ({"url": "https://x/", "command": "x"}, "either url or command"),
        ({"command": "x", "env": {"1X": "v"}}, "env"),
        ({"url": "ftp://x/"}, "https:// or http://"),
        ({"url": "http://example.org/mcp"}, "http to another machine"),
        ({"url": "https://user:pass@example.org/mcp"}, "must not hold a user"),
        ({"url": "https://x/", "scope": "everyone"}, "scope"),
        ({"url": "https://x/", "headers_env": {"Bad Name": "X"}}, "headers_env"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    """Invalid settings are refused by name."""
    with pytest.raises(ValueError, match=message):
        McpServerSettings(**settings)
