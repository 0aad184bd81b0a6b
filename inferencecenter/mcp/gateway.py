"""The declared MCP servers: access, connections, and running calls.

Each account has its own connections, opened on demand and closed when idle, and its own queue of calls. Failed
connections are retried with exponential backoff. The outcome of a call that was sent but not answered is unknown: it
may have taken effect, so it is never repeated here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

import orjson
import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from inferencecenter.config.sections import McpApproval, McpServerSettings
    from inferencecenter.telemetry.metrics import McpMetrics

IDLE_S: Final = 300.0
"""Idle seconds after which a connection is closed."""
LISTING_S: Final = 30.0
"""Seconds for which a server's list of tools is cached, unless the server announces another one."""
MAX_LISTINGS: Final = 32
"""Maximum number of requests for lists of tools of one account, waiting ones included."""
MAX_ARGUMENTS_CHARS: Final = 262_144
"""Maximum length of a call's arguments, which are parsed on the event loop: 30 ms if they are nothing but lists."""
_BACKOFF_MIN_S: Final = 1.0
_BACKOFF_MAX_S: Final = 60.0
_USABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class McpUnreachableError(Exception):
    """There is no connection: the request was not sent, or the server did not know the session."""


class McpLostError(Exception):
    """The connection was lost during a request, or the response was invalid: the outcome is unknown."""


class McpRefusedError(Exception):
    """The server refused the request without running it; the message has its reason."""


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server describes it; ``parameters`` is the JSON Schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text of a result; ``is_error`` if the tool reported an error."""

    text: str
    is_error: bool


class McpClient(Protocol):
    """A connection to a server, opened by the first ``open`` and closed once.

    Its requests raise ``McpUnreachableError``, ``McpLostError`` or ``McpRefusedError``.
    """

    @property
    def is_lost(self) -> bool:
        """Whether no further request can succeed."""

    async def open(self) -> None:
        """Wait until the handshake is done; any number of tasks may wait."""

    async def close(self) -> None:
        """End the connection."""

    async def list_tools(self) -> tuple[ListedTool, ...]:
        """Return the tools of the server, up to the limits."""

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool and return its result; cancellation is forwarded to the server."""


Connect: TypeAlias = "Callable[[McpServerSettings, TaskGroup, Callable[[], None]], McpClient]"
"""Creates a connection whose tasks belong to the group, and which calls the function when the server's tools change."""


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool that an account may call; ``parameters`` is the JSON Schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    approval: McpApproval


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """How a call ended.

    ``done``: the tool returned ``text``, which describes an error if ``is_error``. ``failed``: it did not run.
    ``unknown``: it may have run. ``detail`` is the reason where there is no text.
    """

    state: Literal["done", "failed", "unknown"]
    text: str = ""
    is_error: bool = False
    detail: str = ""


class _PooledConnection:
    """An account's connection, and the number of requests that use it."""

    def __init__(self, connection: McpClient) -> None:
        self.connection = connection
        self.n_users = 0
        self.last_used_s = 0.0
        self.idle_timer: asyncio.TimerHandle | None = None


class _Backoff:
    """When a server may be tried again after ``n_failures`` consecutive failures."""

    def __init__(self) -> None:
        self.n_failures = 0
        self.until_s = 0.0
        self.reason = ""


class _AccountQueue:
    """Order of an account's requests to a server: slots for its calls, and a lock for its lists of tools."""

    def __init__(self, n_slots: int) -> None:
        self.slots = asyncio.Semaphore(n_slots)
        self.listing = asyncio.Lock()
        self.n_users = 0


class _Server:
    """A declared server: its cached list of tools, and the connections and queues of its accounts.

    A reload replaces a server whose settings changed. Requests that were already sent continue with the old one.
    """

    def __init__(self, name: str, settings: McpServerSettings) -> None:
        self.name = name
        self.settings = settings
        self.backoff = _Backoff()
        self.pool: dict[str, _PooledConnection] = {}
        self.calls: set[RunningToolCall] = set()
        self.n_calls: Counter[str] = Counter()
        """Number of calls of each account, reserved ones included."""
        self.is_retired = False
        self.tools: tuple[ServerTool, ...] = ()
        self._listed_s: float | None = None
        self._n_changes = 0
        self._queues: dict[str, _AccountQueue] = {}

    def tools_changed(self) -> None:
        """Drop the cached list of tools."""
        self._listed_s = None
        self._n_changes += 1

    def has_tools(self, now_s: float) -> bool:
        """Return whether the cached list of tools is current."""
        return self._listed_s is not None and now_s - self._listed_s <= LISTING_S

    async def list_tools(self, connection: McpClient, monotonic: Callable[[], float]) -> tuple[ServerTool, ...]:
        """Request the list of tools, and cache it unless it changed meanwhile."""
        n_changes = self._n_changes
        tools = tuple(
            ServerTool(each.name, each.description, each.parameters, self.settings.approval_of(each.name))
            for each in await connection.list_tools()
            if self.settings.allows_tool(each.name) and _USABLE_NAME.fullmatch(each.name)
        )
        if n_changes == self._n_changes:
            self.tools, self._listed_s = tools, monotonic()
        return tools

    @contextlib.contextmanager
    def queue_of(self, client_id: str) -> Iterator[_AccountQueue]:
        queue = self._queues.setdefault(client_id, _AccountQueue(self.settings.max_calls))
        queue.n_users += 1
        try:
            yield queue
        finally:
            queue.n_users -= 1
            if not queue.n_users:
                del self._queues[client_id]


def no_connection(_settings: McpServerSettings, _tasks: TaskGroup, _tools_changed: Callable[[], None]) -> McpClient:
    """Refuse a connection: no server is declared."""
    raise McpUnreachableError("no MCP server is declared")


class RunningToolCall:
    """A waiting or running tool call; ``cancel`` ends it, with an unknown outcome if it was sent."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_sent = False
        self.ended: ToolOutcome | None = None
        self._why = "the call was stopped"

    @property
    def outcome(self) -> ToolOutcome:
        """How the call ended, or would end if it was canceled now."""
        return self.ended or ToolOutcome("unknown" if self.is_sent else "failed", detail=self._why)

    def cancel(self, why: str = "the call was stopped") -> None:
        assert self.task is not None
        self._why = why
        self.task.cancel()


class ToolCallReservation:
    """A place among the calls of an account on a server, from the check of a call until it is sent or not needed.

    A call is sent only once its record is committed, so without its place many could be allowed before one counts.
    """

    def __init__(
        self,
        places: Counter[str],
        client_id: str,
        start: Callable[[str, Callable[[ToolOutcome], None]], RunningToolCall],
    ) -> None:
        self._places = places
        self._client_id = client_id
        self._start = start
        self._is_held = True
        places[client_id] += 1

    def start(self, arguments: str, on_end: Callable[[ToolOutcome], None]) -> RunningToolCall:
        """Start the call with the arguments as JSON; ``on_end`` receives its outcome exactly once."""
        self.release()  # the call has a place of its own
        return self._start(arguments, on_end)

    def release(self) -> None:
        """Give the place back, if that has not happened; the call is not sent."""
        if self._is_held:
            self._is_held = False
            _subtract(self._places, self._client_id)


class McpGateway:
    """All declared servers. All methods are called on the event loop.

    Args:
        servers: The servers by name.
        connect: Creates connections.
        metrics: Where calls and failures are counted.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        servers: Mapping[str, McpServerSettings],
        *,
        connect: Connect = no_connection,
        metrics: McpMetrics,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers = {name: _Server(name, settings) for name, settings in servers.items()}
        self._connect = connect
        self._metrics = metrics
        self._monotonic = monotonic
        self._tasks = TaskGroup("mcp")
        self._retired: set[_Server] = set()
        self._listings: Counter[str] = Counter()

    def replace_servers(self, servers: Mapping[str, McpServerSettings]) -> None:
        """Apply other settings: add, replace and remove servers.

        Calls that were sent to a server with changed settings continue on their connection; those that wait fail. All
        calls of a removed server end.
        """
        before = self._servers
        self._servers = {
            name: before[name] if name in before and before[name].settings == settings else _Server(name, settings)
            for name, settings in servers.items()
        }
        for name, server in before.items():
            if self._servers.get(name) is not server:
                self._retire(server, is_removed=name not in self._servers)

    def servers_for(self, client_id: str, scopes: Collection[str]) -> tuple[str, ...]:
        """Return the names of the servers that an account may use."""
        return tuple(name for name, server in self._servers.items() if _may_use(server.settings, client_id, scopes))

    def reserve_call(
        self,
        server: str,
        tool: str,
        *,
        client_id: str,
        scopes: Collection[str],
        on_start: Callable[[], None] = lambda: None,
    ) -> ToolCallReservation:
        """Return a place for a call, to be started or released, or refuse one that the account may not make.

        At most ``max_calls`` calls of an account run on a server; others wait, in the order in which they started.

        Args:
            server: Name of the server.
            tool: Name of the tool on it.
            client_id: The account.
            scopes: Its scopes.
            on_start: Called when the call starts.

        Raises:
            InferenceCenterError: ``invalid_request``, ``forbidden`` or ``queue_full``; a server of other accounts
                counts as unknown.
        """
        self._check_server(server, client_id=client_id, scopes=scopes)
        found = self._servers[server]
        settings = found.settings
        if not settings.allows_tool(tool):
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                f"tool is {tool}, which may not be called on {server}",
                field="tool",
                hint="list_mcp_tools lists the tools that may be called.",
            )
        if found.n_calls[client_id] >= settings.max_calls + settings.max_queued_calls:
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                f"{settings.max_calls} calls of this account are running on {server}, and {settings.max_queued_calls} "
                "are waiting",
                hint="Wait for one of them.",
            )

        def start(arguments: str, on_end: Callable[[ToolOutcome], None]) -> RunningToolCall:
            on_start()
            return self._start_call(server, tool, arguments, client_id=client_id, on_end=on_end)

        return ToolCallReservation(found.n_calls, client_id, start)

    def _start_call(
        self, server: str, tool: str, arguments: str, *, client_id: str, on_end: Callable[[ToolOutcome], None]
    ) -> RunningToolCall:
        call, found = RunningToolCall(), self._servers.get(server)

        async def run() -> None:
            if found is None or not found.settings.allows_tool(tool):
                call.ended = ToolOutcome("failed", detail=f"{server} was removed, or no longer allows {tool}")
            else:
                call.ended = await self._call(call, found, tool, arguments, client_id)

        def ended(_task: asyncio.Task[None]) -> None:
            outcome = call.outcome
            if found is not None:
                found.calls.discard(call)
                _subtract(found.n_calls, client_id)
                self._metrics.call_ended(server, "error" if outcome.is_error else outcome.state)
            _log.info("mcp_tool_call_ended", server=server, tool=tool, client=client_id, state=outcome.state)
            on_end(outcome)

        if found is not None:
            found.calls.add(call)
            found.n_calls[client_id] += 1
        call.task = self._tasks.spawn(run(), name="call")
        call.task.add_done_callback(ended)
        return call

    def list_later(
        self,
        server: str | None,
        *,
        client_id: str,
        scopes: Collection[str],
        on_end: Callable[[dict[str, tuple[ServerTool, ...] | str]], None],
    ) -> None:
        """List, in the background, the tools of one server or of all that the account may use.

        Args:
            server: Name of the server.
            client_id: The account.
            scopes: Its scopes.
            on_end: Receives the tools of each server, or why they cannot be listed.

        Raises:
            InferenceCenterError: ``invalid_request`` or ``queue_full``.
        """
        if server is not None:
            self._check_server(server, client_id=client_id, scopes=scopes)
        names = self.servers_for(client_id, scopes) if server is None else (server,)
        if self._listings[client_id] >= MAX_LISTINGS:
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                f"{MAX_LISTINGS} requests of this account for lists of tools are already waiting",
                hint="Wait for one of them.",
            )

        async def run() -> None:
            try:
                found = await asyncio.gather(*(self.list_tools(name, client_id=client_id) for name in names))
                on_end(dict(zip(names, found, strict=True)))
            finally:
                _subtract(self._listings, client_id)

        self._listings[client_id] += 1
        self._tasks.spawn(run(), name="list")

    async def list_tools(self, server: str, *, client_id: str) -> tuple[ServerTool, ...] | str:
        """Return the tools that may be called on a server, or why they cannot be listed.

        An account's requests run one after the other, so that the later ones find the cached list.
        """
        if (found := self._servers.get(server)) is None:
            return "the operator removed it"
        try:
            with found.queue_of(client_id) as queue:
                async with asyncio.timeout(found.settings.timeout_s), queue.listing:
                    if found.has_tools(self._monotonic()):
                        return found.tools
                    return await self._use(
                        found, client_id, lambda pooled: found.list_tools(pooled.connection, self._monotonic)
                    )
        except (McpUnreachableError, McpLostError, McpRefusedError) as error:
            reason = str(error)
        except TimeoutError:
            reason = "it did not answer in time"
        except Exception:  # noqa: BLE001 - boundary: after a defect the requests of the account still get an answer
            _log.exception("mcp_listing_failed", server=server)
            reason = "an internal error"
        self._metrics.listing_failed(server)
        return reason

    async def close(self) -> None:
        """End all calls and connections."""
        closing = []
        for server in (*self._servers.values(), *self._retired):
            pooled, server.pool = list(server.pool.values()), {}
            for each in pooled:
                _stop_timer(each)
            closing += [each.connection.close() for each in pooled]
        await asyncio.gather(*closing)
        await self._tasks.cancel()

    def _retire(self, server: _Server, *, is_removed: bool) -> None:
        server.is_retired = True
        self._metrics.server_removed(server.name)
        for call in tuple(server.calls):
            if is_removed or not call.is_sent:
                call.cancel(f"the operator {'removed' if is_removed else 'changed'} the server")
        for client_id, pooled in tuple(server.pool.items()):
            if not pooled.n_users:
                self._drop(server, client_id, pooled)
        if server.pool:
            self._retired.add(server)
        _log.info("mcp_server_retired", server=server.name, removed=is_removed, calls=len(server.calls))

    async def _call(
        self, call: RunningToolCall, server: _Server, tool: str, arguments: str, client_id: str
    ) -> ToolOutcome:
        timeout_s = server.settings.timeout_s
        if len(arguments) > MAX_ARGUMENTS_CHARS:
            return ToolOutcome("failed", detail=f"the arguments have more than {MAX_ARGUMENTS_CHARS} characters")
        try:
            parsed = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            return ToolOutcome("failed", detail="the arguments are not a JSON object")
        with server.queue_of(client_id) as queue:
            try:
                async with asyncio.timeout(timeout_s):
                    await queue.slots.acquire()
            except TimeoutError:
                return ToolOutcome("failed", detail=f"no other call of this account ended within {timeout_s:g} s")
            try:
                return await self._run(call, server, tool, parsed, client_id)
            finally:
                queue.slots.release()

    async def _run(
        self, call: RunningToolCall, server: _Server, tool: str, arguments: dict[str, Any], client_id: str
    ) -> ToolOutcome:
        timeout_s, began_s = server.settings.timeout_s, self._monotonic()

        async def send(pooled: _PooledConnection) -> ToolResult:
            call.is_sent = True
            try:
                return await pooled.connection.call_tool(tool, arguments)
            except (McpUnreachableError, McpRefusedError):
                call.is_sent = False
                raise

        try:
            async with asyncio.timeout(timeout_s):
                result = await self._use(server, client_id, send)
        except TimeoutError:
            state: Literal["unknown", "failed"] = "unknown" if call.is_sent else "failed"
            return ToolOutcome(state, detail=f"no result within {timeout_s:g} s")
        except McpLostError as error:
            return ToolOutcome("unknown", detail=str(error))
        except McpUnreachableError as error:
            return ToolOutcome("failed", detail=f"{server.name} cannot be reached: {error}")
        except McpRefusedError as error:
            return ToolOutcome("failed", detail=f"{server.name} refused it: {error}")
        finally:
            self._metrics.call_s.labels(server.name).observe(self._monotonic() - began_s)
        return ToolOutcome("done", text=result.text, is_error=result.is_error)

    async def _use(self, server: _Server, client_id: str, work: Callable[[_PooledConnection], Awaitable[_T]]) -> _T:
        """Run ``work`` on a connection; repeat it once on a new one if the server no longer knew the session.

        Raises:
            McpUnreachableError: There is no connection.
            McpLostError: The connection was lost while ``work`` ran.
            McpRefusedError: The server refused.
        """
        for is_last in (False, True):
            try:
                pooled = await self._acquire(server, client_id)
                try:
                    return await work(pooled)
                finally:
                    self._release(server, client_id, pooled)
            except McpUnreachableError:
                if is_last or server.backoff.n_failures:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _check_server(self, server: str, *, client_id: str, scopes: Collection[str]) -> None:
        names = self.servers_for(client_id, scopes)
        if server not in names:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"server is {server!r}, which is not an MCP server that this account may use",
                field="server",
                hint=f"One of: {', '.join(names)}." if names else "The operator has declared none for this account.",
            )

    async def _acquire(self, server: _Server, client_id: str) -> _PooledConnection:
        """Return an open connection of an account, and count it as in use until ``_release``.

        Raises:
            McpUnreachableError: There is none.
        """
        backoff, pooled = server.backoff, server.pool.get(client_id)
        if pooled is None or pooled.connection.is_lost:
            if (left_s := backoff.until_s - self._monotonic()) > 0:
                raise McpUnreachableError(f"{backoff.reason}; the next attempt is possible in {left_s:.0f} s")
            if server.is_retired:
                raise McpUnreachableError("the operator changed or removed it")
            self._evict_idle(server)
            connection = self._connect(server.settings, self._tasks, server.tools_changed)
            pooled = server.pool[client_id] = _PooledConnection(connection)
        pooled.n_users += 1
        _stop_timer(pooled)
        try:
            await pooled.connection.open()
        except McpUnreachableError as error:
            self._failed(server, str(error))
            self._release(server, client_id, pooled)
            raise
        except asyncio.CancelledError:
            self._release(server, client_id, pooled)
            raise
        backoff.n_failures, backoff.until_s = 0, 0.0
        if not server.is_retired:
            self._metrics.set_up(server.name, is_up=True)
        return pooled

    def _release(self, server: _Server, client_id: str, pooled: _PooledConnection) -> None:
        """End one request's use of a connection; close it if it is lost, or later if it stays idle."""
        pooled.n_users -= 1
        pooled.last_used_s = self._monotonic()
        if pooled.n_users:
            return
        if pooled.connection.is_lost or server.is_retired:
            self._drop(server, client_id, pooled)
        else:
            pooled.idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._drop, server, client_id, pooled)

    def _drop(self, server: _Server, client_id: str, pooled: _PooledConnection) -> None:
        _stop_timer(pooled)
        if server.pool.get(client_id) is pooled:
            del server.pool[client_id]
        if not server.pool:
            self._retired.discard(server)
        self._tasks.spawn(pooled.connection.close(), name="close")

    def _evict_idle(self, server: _Server) -> None:
        """At the limit of a server's connections, close the one that has been idle longest.

        Raises:
            McpUnreachableError: All are in use.
        """
        if len(server.pool) < server.settings.max_connections:
            return
        idle = [each for each in server.pool.items() if not each[1].n_users]
        if not idle:
            raise McpUnreachableError("all of its connections are in use by other accounts")
        self._drop(server, *min(idle, key=lambda each: each[1].last_used_s))

    def _failed(self, server: _Server, reason: str) -> None:
        backoff, now = server.backoff, self._monotonic()
        if now < backoff.until_s:
            return  # several requests shared the attempt
        backoff.until_s = now + min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2**backoff.n_failures)
        backoff.n_failures += 1
        backoff.reason = reason
        if not server.is_retired:
            self._metrics.set_up(server.name, is_up=False)
        _log.warning("mcp_server_unreachable", server=server.name, reason=reason, failures=backoff.n_failures)


def _may_use(server: McpServerSettings, client_id: str, scopes: Collection[str]) -> bool:
    return client_id in server.accounts or server.scope in scopes


def _subtract(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _stop_timer(pooled: _PooledConnection) -> None:
    if pooled.idle_timer is not None:
        pooled.idle_timer.cancel()
        pooled.idle_timer = None
