"""The machines that run engines, as this daemon sees them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, reason_of
from inferencecenter.core.json_file import JsonFile
from inferencecenter.core.private_file import write_private
from inferencecenter.hardware.memory import machine_memory
from inferencecenter.ipc.link import NodeGpu, NodeResources
from inferencecenter.models.registry import LOCAL_NODE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from inferencecenter.hardware.nvml import Gpus
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.supervisor.rpc_nodes import RpcServerStatus

NodeState: TypeAlias = Literal["up", "down", "unknown"]
"""``unknown``: the cluster does not answer, and no engine there is connected."""
DrainState: TypeAlias = Literal["none", "draining", "drained"]


@dataclass(frozen=True, slots=True)
class HostLink:
    """The connection to an engine on another machine.

    ``beat_age_s`` are the seconds since its last heartbeat. ``resources`` are those of its machine, once it sent them.
    """

    beat_age_s: float
    version: str
    resources: NodeResources | None


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What the connections to an engine have carried, in bytes before encryption, and how often they were made again.

    It includes connections that were lost, so that it only grows.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    reconnects: int = 0

    def __add__(self, other: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.reconnects + other.reconnects,
        )


class HostConnection(Protocol):
    """The connections to the hosts of an engine on another machine."""

    @property
    def link(self) -> HostLink | None:
        """The connection, if there is one."""

    @property
    def traffic(self) -> LinkTraffic:
        """What all connections have carried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEngine:
    """An engine of a machine: the number of the replica of ``model``, and of the sessions whose KV it has."""

    node: str
    model: str
    replica: int
    status: EngineStatus
    sessions: int = 0
    link: HostLink | None = None
    traffic: LinkTraffic = LinkTraffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A snapshot of a machine.

    ``address`` is unknown for one that has not joined. ``beat_age_s`` (the seconds since any of its engines sent a
    heartbeat), ``version`` and ``resources`` are those of connected engines; the daemon's own machine has none of them.
    """

    name: str
    address: str | None
    state: NodeState
    drain: DrainState = "none"
    engines: tuple[NodeEngine, ...] = ()
    rpc_servers: tuple[RpcServerStatus, ...] = ()
    beat_age_s: float | None = None
    version: str | None = None
    resources: NodeResources | None = None

    @property
    def sessions(self) -> int:
        """The sessions whose KV is there."""
        return sum(engine.sessions for engine in self.engines)

    @property
    def drain_waits_for(self) -> tuple[str, ...]:
        """What is not done yet while the machine is being drained, as text."""
        if self.drain != "draining":
            return ()
        running = [(each.model, each.status.running) for each in self.engines]
        used = [(each.model, each.running) for each in self.rpc_servers if each.state == "ready"]
        turns = [f"{n} running turn{'s' * (n > 1)} of {model}" for model, n in running + used if n]
        loading = [f"the engine of {each.model}, which loads" for each in self.rpc_servers if each.state == "starting"]
        return (*turns, *loading)

    @property
    def traffic(self) -> LinkTraffic:
        """What the connections to its engines have carried."""
        return sum((engine.traffic for engine in self.engines), LinkTraffic())


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A machine as the cluster lists it; the daemon's ``own`` one is ``local`` among the nodes of models."""

    address: str
    alive: bool
    own: bool = False


def machine_resources(gpus: Gpus) -> NodeResources:
    """Return the main memory of this machine, and its GPUs as they were read."""
    memory = machine_memory()
    return NodeResources(
        ram_used_bytes=None if memory is None else memory.used_bytes,
        ram_total_bytes=None if memory is None else memory.total_bytes,
        gpus=tuple(
            NodeGpu(
                gpu.name or "",
                gpu.vram_used_bytes or 0,
                gpu.vram_total_bytes or 0,
                gpu.utilization_percent,
                gpu.temperature_c,
            )
            for gpu in gpus.readings
        ),
    )


class NodeTable:
    """The machines that have joined the cluster, as it was last read, and those that are drained.

    Args:
        path: Where the drained ones are stored for the next daemon; ``None`` stores nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._listeners: list[Callable[[], None]] = []
        found = None if path is None else JsonFile(path, set[str], name="drained_nodes").read()
        self._drained = found or set()
        self._draining: set[str] = set()
        self._joined: Mapping[str, JoinedNode] = {}
        self._is_current = False

    def update(self, joined: Mapping[str, JoinedNode] | None) -> None:
        """Replace the machines; ``None`` if the cluster does not answer."""
        self._is_current = joined is not None
        if joined is not None:
            self._joined = joined
            for listener in self._listeners:
                listener()

    @property
    def joined(self) -> frozenset[str]:
        """The other machines that are in the cluster, as it was last read."""
        return frozenset(name for name, node in self._joined.items() if node.alive and not node.own)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the machines were read."""
        self._listeners.append(listener)

    def is_drained(self, name: str) -> bool:
        """Return whether a machine is drained or being drained."""
        return name in self._drained

    def drain(self, name: str) -> None:
        """Record that a machine is being drained.

        Raises:
            InferenceCenterError: ``storage_unavailable``; nothing has changed.
        """
        self._store(self._drained | {name})
        self._draining.add(name)

    def finish_drain(self, name: str) -> None:
        """Record that a machine is drained."""
        self._draining.discard(name)

    def undrain(self, name: str) -> None:
        """Record that a machine is used again.

        Raises:
            InferenceCenterError: ``storage_unavailable``; nothing has changed.
        """
        self._store(self._drained - {name})
        self._draining.discard(name)

    def _store(self, drained: set[str]) -> None:
        if self._path is not None:
            try:
                write_private(self._path, msgspec.json.encode(sorted(drained)))
            except OSError as error:
                raise InferenceCenterError(
                    ErrorCode.STORAGE_UNAVAILABLE, f"{self._path} cannot be written: {reason_of(error)}"
                ) from error
        self._drained = drained

    def _drain_state(self, name: str) -> DrainState:
        if name in self._draining:
            return "draining"
        return "drained" if name in self._drained else "none"

    def statuses(
        self, engines: Iterable[NodeEngine], rpc_servers: Iterable[RpcServerStatus] = ()
    ) -> tuple[NodeStatus, ...]:
        """Return all machines with what runs there: this one, those that have joined, and those that models name."""
        by_node: defaultdict[str, list[NodeEngine]] = defaultdict(list)
        for engine in engines:
            by_node[engine.node].append(engine)
        servers: defaultdict[str, list[RpcServerStatus]] = defaultdict(list)
        for server in rpc_servers:
            servers[server.node].append(server)
        others = sorted((self._joined.keys() | by_node.keys() | servers.keys() | self._drained) - {LOCAL_NODE})
        local = NodeStatus(
            name=LOCAL_NODE,
            address=None,
            state="up",
            drain=self._drain_state(LOCAL_NODE),
            engines=tuple(by_node[LOCAL_NODE]),
        )
        return (local, *(self._status(name, by_node[name], servers[name]) for name in others))

    def _status(self, name: str, engines: list[NodeEngine], rpc_servers: list[RpcServerStatus]) -> NodeStatus:
        joined = self._joined.get(name)
        links = sorted((engine.link for engine in engines if engine.link is not None), key=lambda link: link.beat_age_s)
        state: NodeState = "unknown"
        if links or any(server.state == "ready" for server in rpc_servers):
            state = "up"
        elif self._is_current:
            state = "up" if joined is not None and joined.alive else "down"
        return NodeStatus(
            name=name,
            address=None if joined is None else joined.address,
            state=state,
            drain=self._drain_state(name),
            engines=tuple(engines),
            rpc_servers=tuple(rpc_servers),
            beat_age_s=links[0].beat_age_s if links else None,
            version=links[0].version if links else None,
            resources=next((link.resources for link in links if link.resources is not None), None),
        )
