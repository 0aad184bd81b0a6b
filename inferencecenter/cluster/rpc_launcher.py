"""Engines of this machine that also use devices of other machines, through tunnels to RPC servers of llama.cpp there.

Each launch starts a server on each node, plans with the devices that these offer, and starts the engine. The servers
end with it. An engine cannot outlive one of its servers: llama.cpp aborts when the connection breaks.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from inferencecenter.cluster.rpc_tunnel import (
    ExpectHost,
    ForgetHost,
    HostConnected,
    HostLost,
    TunnelEvent,
    TunnelListening,
    TunnelSettings,
)
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc.link import LinkTicket
from inferencecenter.supervisor.process import Engine, EngineExit, NodeUnreachableError
from inferencecenter.supervisor.remote import START_TIMEOUT_S
from inferencecenter.supervisor.rpc_nodes import RpcServerStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from inferencecenter.cluster.certificates import ClusterCertificates
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import FromEngine
    from inferencecenter.supervisor.planning import RpcPlanner
    from inferencecenter.supervisor.process import EngineLink, EngineProcess, LocalLauncher
    from inferencecenter.supervisor.remote import HostStarter

TUNNEL: Final = "inferencecenter.cluster.rpc_tunnel"
_KEY_BYTES: Final = 32
_MAX_EVENT_BYTES: Final = 2**20
_LOSS_S: Final = 1.0
"""How long the report of a lost server may come after the engine's death from it."""
_log = structlog.get_logger(__name__)


class RpcLink:
    """A tunnel to the RPC server on one node, from the ticket of its host to its loss."""

    def __init__(self, node: str, *, close: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.node = node
        self.address: asyncio.Future[str] = loop.create_future()
        self.lost: asyncio.Future[HostLost] = loop.create_future()
        self.close = close

    async def settled(self) -> None:
        """Wait until the server can be reached, or cannot be."""
        settled = asyncio.Event()
        for future in (self.address, self.lost):
            future.add_done_callback(lambda _: settled.set())
        await settled.wait()


class RpcTunnels:
    """The process through which engines reach RPC servers, started when it is needed.

    Args:
        certificates: Those of this daemon and its hosts.
        listen: The address to which hosts connect.
        port: Its port; 0 for a free one.
        lost_after_s: A host is lost after this time without a message.
    """

    def __init__(self, certificates: ClusterCertificates, *, listen: str, port: int, lost_after_s: float) -> None:
        self._certificates = certificates
        self._listen = listen
        self._port = port
        self._lost_after_s = lost_after_s
        self._process: asyncio.subprocess.Process | None = None
        self._address = ("", 0)
        self._links: dict[str, RpcLink] = {}
        self._starting = asyncio.Lock()
        self._tasks = TaskGroup("rpc-tunnels")

    async def open(self, name: str, node: str, starter: HostStarter) -> RpcLink:
        """Start an RPC server on a node, in place of an earlier one of this name, and return the tunnel to it.

        Raises:
            NodeUnreachableError: The node cannot be reached, or no server runs there.
        """
        async with self._starting:
            if self._process is None:
                await self._start()
        key = secrets.token_hex(_KEY_BYTES)
        link = RpcLink(node, close=partial(self._forget, name))
        self._links[name] = link
        self._send(ExpectHost(name, hashlib.sha256(key.encode()).hexdigest()))
        certificate, certificate_key = self._certificates.issue(name)
        ticket = LinkTicket(
            engine=name,
            epoch=0,
            key=key,
            address=self._address,
            authority=self._certificates.authority,
            certificate=certificate,
            certificate_key=certificate_key,
            lost_after_s=self._lost_after_s,
            orphan_s=0,
        )
        try:
            await starter.start(ticket)
            async with asyncio.timeout(START_TIMEOUT_S):
                await link.settled()
        except TimeoutError:
            link.close()
            raise NodeUnreachableError(f"its RPC server has not connected within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            link.close()
            raise
        if link.lost.done():
            raise NodeUnreachableError(_how(link.lost.result()))
        return link

    async def close(self) -> None:
        """End the process, and with it all RPC servers."""
        await self._end_process()
        await self._tasks.cancel()

    async def _start(self) -> None:
        certificate, key = self._certificates.issue_server()
        settings = TunnelSettings(
            host=self._listen,
            port=self._port,
            authority=self._certificates.authority,
            certificate=certificate,
            certificate_key=key,
            lost_after_s=self._lost_after_s,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            TUNNEL,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_EVENT_BYTES,
        )
        self._process = process
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "it was started with pipes"
        try:
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            line = await process.stdout.readline()
            listening = msgspec.json.decode(line, type=TunnelEvent) if line else None
        except BaseException:
            await self._end_process()
            raise
        if not isinstance(listening, TunnelListening) or listening.error:
            await self._end_process()
            why = listening.error if isinstance(listening, TunnelListening) else "its process has ended"
            raise NodeUnreachableError(
                f"hosts of RPC servers cannot connect to {self._listen}:{self._port}, see cluster.rpc_port: {why}"
            )
        self._address = (self._listen, listening.port)
        self._tasks.spawn(self._read(process.stdout), name="read")

    async def _read(self, events: asyncio.StreamReader) -> None:
        while line := await events.readline():
            match msgspec.json.decode(line, type=TunnelEvent):
                case HostConnected(name=name, port=port) if name in self._links:
                    self._links[name].address.set_result(f"127.0.0.1:{port}")
                case HostLost(name=name) as lost if name in self._links:
                    self._links.pop(name).lost.set_result(lost)
        if self._process is not None:
            _log.warning("rpc_tunnels_lost")
        while self._links:
            name, link = self._links.popitem()
            link.lost.set_result(HostLost(name, "the process of the tunnels has ended"))
        await self._end_process()

    def _send(self, command: ExpectHost | ForgetHost) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")

    def _forget(self, name: str) -> None:
        if self._links.pop(name, None) is not None:
            self._send(ForgetHost(name))

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _how(lost: HostLost) -> str:
    return lost.server.detail if lost.server is not None else f"the connection was lost: {lost.reason}"


class RpcEngine(Engine):
    """An engine of this machine with the RPC servers that it uses, which end with it.

    Its exit is explained by the server that was lost, if one was: llama.cpp only aborts. A server that has crashed is a
    crash of the engine, and suspects its turns; a lost node says nothing about them.
    """

    def __init__(self, engine: EngineProcess, links: Sequence[RpcLink], *, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._engine = engine
        self._links = links
        self._on_end = on_end
        self._is_ending = False
        self._exit: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()
        self._tasks = TaskGroup("rpc-engine")
        self._tasks.spawn(self._until_gone(), name="until-gone")

    @property
    def channel(self) -> EngineLink:
        return self._engine.channel

    @property
    def pid(self) -> int:
        return self._engine.pid

    @property
    def ticks(self) -> int:
        return self._engine.ticks

    def close(self) -> None:
        self._is_ending = True
        self._engine.close()

    def kill(self, *, because: str = "") -> None:
        self._is_ending = True
        self._engine.kill(because=because)

    async def gone(self) -> EngineExit:
        return await asyncio.shield(self._exit)

    async def _until_gone(self) -> None:
        if self._links:
            self._tasks.spawn(self._kill_without_server(), name="kill-without-server")
        ended = await self._engine.gone()
        if self._links and not self._is_ending:
            await self._loss(timeout_s=_LOSS_S)
        lost = next(((link.node, link.lost.result()) for link in self._links if link.lost.done()), None)
        for link in self._links:
            link.close()
        self._on_end()
        self._quiet.set()
        self._exit.set_result(ended if lost is None or self._is_ending else _explained(ended, *lost))
        await self._tasks.cancel()

    async def _kill_without_server(self) -> None:
        """End an engine that has lost a server and is about to find out, or computes without it."""
        await self._loss()
        self._engine.kill(because="an RPC server was lost")

    async def _loss(self, *, timeout_s: float | None = None) -> None:
        """Wait for the loss of a server."""
        await asyncio.wait([link.lost for link in self._links], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _explained(ended: EngineExit, node: str, lost: HostLost) -> EngineExit:
    if lost.server is None:
        detail = f"the RPC server on {node} was lost: {lost.reason}"
        return EngineExit(detail, by_itself=False, from_outside=True, unreachable=True)
    return EngineExit(f"on {node}: {lost.server.detail}", ended.suspects, from_outside=lost.server.from_outside)


@dataclass(frozen=True, slots=True)
class RpcNode:
    """A node whose devices a model uses, and what starts RPC servers there."""

    name: str
    starter: HostStarter


class RpcLauncher:
    """Starts the engines of a model that uses devices of other machines; implements ``EngineLauncher``.

    An engine is started without a node that cannot be reached, or is drained, if the model fits into the memory of the
    others. It implements ``RpcServers`` too.

    Args:
        name: The model's.
        nodes: Those whose devices it uses.
        tunnels: The tunnels to them.
        planner: Plans each start.
        local: Starts the engine.
        is_drained: Returns whether a node is drained, or being drained.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it is about
        self,
        name: str,
        nodes: Sequence[RpcNode],
        *,
        tunnels: RpcTunnels,
        planner: RpcPlanner,
        local: LocalLauncher,
        is_drained: Callable[[str], bool],
    ) -> None:
        self._name = name
        self._nodes = nodes
        self._tunnels = tunnels
        self._planner = planner
        self._local = local
        self._is_drained = is_drained
        self._servers = {node.name: RpcServerStatus(node=node.name, model=name) for node in nodes}

    @property
    def servers(self) -> tuple[RpcServerStatus, ...]:
        """One for each node, as the last launch found it."""
        return tuple(self._servers.values())

    async def can_start(self, nodes: Collection[str]) -> bool:
        """See ``RpcServers``."""
        wanted = [node for node in self._nodes if node.name in nodes]
        links, _ = await open_links(f"{self._name}/probe", wanted, self._tunnels)
        for link in links:
            link.close()
        return bool(links)

    async def launch(
        self,
        options: EngineOptions,
        *,
        is_first: bool,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None],
    ) -> RpcEngine:
        """Start an engine; see ``EngineLauncher``."""
        links, missing = await self._open()
        try:
            servers = {link.node: link.address.result() for link in links}
            without = [f"the node {node} {why}" for node, why in missing.items()]
            try:
                options = await asyncio.to_thread(self._planner.at_launch, options, servers)
            except InferenceCenterError as error:
                raise NodeUnreachableError("; ".join([error.message, *without])) from error
            if missing and not self._planner.fits_host:
                raise NodeUnreachableError(f"{'; '.join(without)}; the model does not fit without it")
            engine = await self._local.launch(options, is_first=is_first, on_message=on_message, on_drain=on_drain)
        except BaseException:
            self._close(links)
            raise
        for link in links:
            self._servers[link.node] = replace(self._servers[link.node], state="ready")
        return RpcEngine(engine, links, on_end=self._servers_ended)

    async def _open(self) -> tuple[list[RpcLink], Mapping[str, str]]:
        """Start the RPC servers; return the tunnels, and by name why other nodes have none."""
        drained = {node.name: "is drained" for node in self._nodes if self._is_drained(node.name)}
        wanted = [node for node in self._nodes if node.name not in drained]
        for node in wanted:
            self._servers[node.name] = RpcServerStatus(node=node.name, model=self._name, state="starting")
        try:
            links, failed = await open_links(self._name, wanted, self._tunnels)
        except BaseException:
            self._servers_ended()
            raise
        missing = drained | {node: f"has no RPC server: {why}" for node, why in failed.items()}
        for name, why in missing.items():
            self._servers[name] = RpcServerStatus(node=name, model=self._name, state="missing", detail=f"it {why}")
        return links, missing

    def _close(self, links: Sequence[RpcLink]) -> None:
        for link in links:
            link.close()
            self._servers[link.node] = RpcServerStatus(node=link.node, model=self._name)

    def _servers_ended(self) -> None:
        self._servers = {node: RpcServerStatus(node=node, model=self._name) for node in self._servers}


async def open_links(name: str, nodes: Sequence[RpcNode], tunnels: RpcTunnels) -> tuple[list[RpcLink], dict[str, str]]:
    """Start an RPC server on each node; return the tunnels, and by node why others could not be opened."""
    links: list[RpcLink] = []
    failed: dict[str, str] = {}

    async def open_link(node: RpcNode) -> None:
        try:
            links.append(await tunnels.open(f"{name}/rpc/{node.name}", node.name, node.starter))
        except OSError as error:
            _log.warning("rpc_node_unavailable", node=node.name, reason=str(error))
            failed[node.name] = str(error)

    try:
        async with asyncio.TaskGroup() as opening:
            for node in nodes:
                opening.create_task(open_link(node))
    except BaseException:
        for link in links:
            link.close()
        raise
    order = [node.name for node in nodes]
    return sorted(links, key=lambda link: order.index(link.node)), failed
