"""The machines of a Ray cluster as the front uses them: to start hosts there."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
import structlog

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.link import ModelFile
from inferencecenter.supervisor.process import NodeUnreachableError

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.ipc.link import LinkTicket

NAMESPACE: Final = "inferencecenter"
ENGINE_HOST: Final = "inferencecenter.cluster.engine_host"
RPC_HOST: Final = "inferencecenter.cluster.rpc_host"
REQUEST_TIMEOUT_S: Final = 90.0
PROBE_TIMEOUT_S: Final = 20.0
DRIVER: Final = "inferencecenter.cluster.ray_driver"
"""The module of the child that talks to Ray."""
_PROBE: Final = "inferencecenter.cluster.ray_probe"
_MAX_REPLY_BYTES: Final = 2**20
_log = structlog.get_logger(__name__)


def node_resource(name: str) -> str:
    """Return the resource by which Ray finds a node."""
    return f"inferencecenter-node-{name}"


def ray_environment(token_file: Path | None) -> dict[str, str]:
    """Return the environment of a process that uses Ray with token authentication."""
    token = {} if token_file is None else {"RAY_AUTH_TOKEN_PATH": str(token_file)}
    return {
        **os.environ,
        **token,
        "RAY_AUTH_MODE": "token",
        # Without these Ray hides GPUs from workers that reserve none, and asks its maker's server for versions.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A node that ends would wait for its actors to leave; the front moves their turns when they are gone.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


class RayNode(msgspec.Struct, frozen=True):
    """A machine that has joined."""

    name: str
    address: str
    alive: bool
    own: bool = False
    """Whether it is that of the process which asks."""


FileVerdict: TypeAlias = Literal["same", "different", "missing"]


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine reports about itself for ``doctor``; only ``error`` if it cannot be asked.

    Its clock is ``clock_offset_s`` before this machine's, known to ``clock_error_s``. ``files`` are the verdicts on
    those of the request, in their order, none from another version. ``unreachable`` says for each of the request's
    listeners why it cannot connect to it, empty if it can.
    """

    name: str
    version: str = ""
    llama_cpp: str = ""
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0
    files: tuple[FileVerdict, ...] = ()
    unreachable: tuple[str, ...] = ()
    error: str = ""


class RayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Start a host on a node, in place of an earlier one of the engine, list the nodes, or examine all of them.

    To be examined are ``files``, and whether ``listeners`` can be reached. The reply has the same ``number``.
    """

    number: int = 0
    op: Literal["start", "nodes", "examine"]
    engine: str = ""
    node: str = ""
    module: str = ""
    ticket: str = ""
    files: tuple[ModelFile, ...] = ()
    listeners: tuple[tuple[str, int], ...] = ()


class RayReply(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes, and what was found out about them, or why the request failed."""

    number: int
    nodes: tuple[RayNode, ...] = ()
    facts: tuple[NodeFacts, ...] = ()
    error: str = ""


class ProbeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the head answers a process that is no node: its nodes, or an error.

    With ``refused`` it refuses the token, or its absence.
    """

    nodes: tuple[RayNode, ...] = ()
    refused: bool = False
    error: str = ""


class RayCluster:
    """A connection to a cluster, through a child process that is started again when it ends.

    Requests are independent: one about a machine that does not answer delays no other.

    Args:
        address: Of the cluster's head.
        token_file: The cluster's token; ``None`` for Ray's default file.
    """

    def __init__(self, address: str, *, token_file: Path | None = None) -> None:
        self._address = address
        self._token_file = token_file
        self._driver: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        # The requests that the running child has not answered.
        self._replies: dict[int, asyncio.Future[RayReply]] = {}
        self._tasks = TaskGroup("ray-cluster")

    async def nodes(self) -> tuple[RayNode, ...]:
        """Return the machines that have joined.

        Raises:
            NodeUnreachableError: The cluster cannot be reached.
        """
        return (await self._request(RayRequest(op="nodes"))).nodes

    async def examine(
        self, *, files: tuple[ModelFile, ...] = (), listeners: tuple[tuple[str, int], ...] = ()
    ) -> tuple[NodeFacts, ...]:
        """Return what the machines that have joined report about themselves; see ``RayRequest``.

        Raises:
            NodeUnreachableError: The cluster cannot be reached.
        """
        return (await self._request(RayRequest(op="examine", files=files, listeners=listeners))).facts

    async def start_host(self, node: str, ticket: LinkTicket, *, module: str) -> None:
        """Start a host, which is this ``module``, on a machine, in place of an earlier one of the same engine.

        Raises:
            NodeUnreachableError: The cluster cannot be reached, the machine has not joined, or nothing starts there.
        """
        text = msgspec.json.encode(msgspec.structs.replace(ticket, node=node)).decode()
        await self._request(RayRequest(op="start", engine=ticket.engine, node=node, module=module, ticket=text))

    async def close(self) -> None:
        """End the child; hosts keep running."""
        async with self._lock:
            await self._end_driver()
            await self._tasks.cancel()

    async def _request(self, request: RayRequest) -> RayReply:
        reply: asyncio.Future[RayReply] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async with self._lock:
                    driver = await self._running_driver()
                    self._replies[number] = reply
                    await self._send(driver, msgspec.structs.replace(request, number=number))
                found = await reply
        except TimeoutError:
            await self.close()  # it answers within its own timeouts, or hangs
            raise NodeUnreachableError(f"no reply within {REQUEST_TIMEOUT_S:g} s") from None
        if found.error:
            raise NodeUnreachableError(found.error)
        return found

    async def _running_driver(self) -> asyncio.subprocess.Process:
        driver = self._driver
        if driver is None or driver.returncode is not None:
            driver = self._driver = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                DRIVER,
                self._address,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=ray_environment(self._token_file),
                limit=_MAX_REPLY_BYTES,
            )
            self._replies = {}
            self._tasks.spawn(self._read(driver, self._replies), name="read")
        return driver

    @staticmethod
    async def _send(driver: asyncio.subprocess.Process, request: RayRequest) -> None:
        assert driver.stdin is not None, "it was started with pipes"
        driver.stdin.write(msgspec.json.encode(request) + b"\n")
        with suppress(ConnectionError):  # it has ended, which the end of its output reports
            await driver.stdin.drain()

    async def _read(self, driver: asyncio.subprocess.Process, replies: dict[int, asyncio.Future[RayReply]]) -> None:
        """Pass replies on until the driver ends; what it has not answered then fails."""
        assert driver.stdout is not None, "it was started with pipes"
        try:
            while line := await driver.stdout.readline():
                if line.startswith(b"{"):  # Ray writes lines of its own
                    reply = msgspec.json.decode(line, type=RayReply)
                    waiting = replies.pop(reply.number)
                    if not waiting.done():  # it may have been cancelled
                        waiting.set_result(reply)
        finally:
            if self._driver is driver:
                self._driver = None
            error = f"the Ray cluster at {self._address} cannot be reached, or refuses the token"
            for number, waiting in replies.items():
                if not waiting.done():
                    waiting.set_result(RayReply(number=number, error=error))

    async def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None or driver.returncode is not None:
            return
        with suppress(ProcessLookupError):
            driver.kill()
        await driver.wait()


async def probe_head(address: str, *, token_file: Path | None, authenticates: bool = True) -> ProbeReply:
    """Return what the head answers to a process with the token, or without one."""
    environment = ray_environment(token_file)
    if not authenticates:
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_TOKEN")}
        environment["RAY_AUTH_MODE"] = "disabled"
    probe = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        _PROBE,
        address,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            output, _ = await probe.communicate()
    except TimeoutError:
        return ProbeReply(error=f"no reply within {PROBE_TIMEOUT_S:g} s")
    finally:
        with suppress(ProcessLookupError):
            probe.kill()
        await probe.wait()
    lines = [line for line in output.splitlines() if line.startswith(b"{")]
    if not lines:
        return ProbeReply(error="Ray cannot be used")
    return msgspec.json.decode(lines[-1], type=ProbeReply)


class RayStarter:
    """Starts hosts on one machine; implements ``supervisor.remote.HostStarter``."""

    def __init__(self, cluster: RayCluster, node: str, *, module: str) -> None:
        self._cluster = cluster
        self._node = node
        self._module = module

    async def start(self, ticket: LinkTicket) -> None:
        """Start a host; see ``HostStarter``."""
        await self._cluster.start_host(self._node, ticket, module=self._module)
        _log.info("host_started", engine=ticket.engine, node=self._node)
