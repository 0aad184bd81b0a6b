"""The front's side of a cluster: the listener for hosts, and what starts them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, Self

import structlog

from inferencecenter.cluster.certificates import ClusterCertificates
from inferencecenter.cluster.file_transfer import FileServer
from inferencecenter.cluster.ray_cluster import ENGINE_HOST, RPC_HOST, RayCluster, RayStarter
from inferencecenter.cluster.rpc_launcher import RpcLauncher, RpcNode, RpcTunnels, open_links
from inferencecenter.core.errors import ErrorCode, InferenceCenterError, reason_of
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.devices import node_devices
from inferencecenter.hardware.placement import MIB
from inferencecenter.supervisor.nodes import JoinedNode, NodeTable
from inferencecenter.supervisor.process import NodeUnreachableError
from inferencecenter.supervisor.remote import HostListener, HostRegistry, RemoteLauncher

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.config.settings import ClusterSettings
    from inferencecenter.hardware.placement import Device
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.supervisor.planning import RpcPlanner
    from inferencecenter.supervisor.process import LocalLauncher

LOST_AFTER_S: Final = 3.0
"""A machine whose host is silent for this time is lost."""
_POLL_S: Final = 5.0
"""Seconds between two readings of which machines have joined."""
_MAX_POLL_S: Final = 60.0
_CERTIFICATES: Final = "cluster"
_HOSTS_FILE: Final = "hosts.json"
_DRAINED_FILE: Final = "drained_nodes.json"
_log = structlog.get_logger(__name__)


class EngineCluster:
    """Engines on other machines.

    Args:
        settings: The address of the cluster, and where hosts connect.
        state_dir: Has the authority of the certificates and the hosts that may connect again.

    Raises:
        InferenceCenterError: ``invalid_config``; the files of the authority cannot be used.
    """

    def __init__(self, settings: ClusterSettings, state_dir: Path) -> None:
        assert settings.address is not None, "the daemon is in a cluster"
        self._settings = settings
        self._listen = settings.listen or settings.address.rsplit(":", 1)[0]
        try:
            certificates = ClusterCertificates(state_dir / _CERTIFICATES)
        except (OSError, ValueError) as error:
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"{state_dir / _CERTIFICATES} cannot be used: {reason_of(error)}",
                hint="Without the directory new certificates are made; engines on other machines are loaded again.",
                field="state_dir",
            ) from error
        registry = HostRegistry(state_dir / _HOSTS_FILE)
        self._files = FileServer(certificates, registry, bytes_per_s=settings.copy_mib_per_s * MIB)
        self._listener = HostListener(
            certificates,
            registry,
            lost_after_s=LOST_AFTER_S,
            orphan_s=settings.orphan_s,
        )
        self._tunnels = RpcTunnels(certificates, listen=self._listen, port=settings.rpc_port, lost_after_s=LOST_AFTER_S)
        self._ray = RayCluster(settings.address, token_file=settings.token_file)
        self._tasks = TaskGroup("cluster")
        self.nodes = NodeTable(state_dir / _DRAINED_FILE)
        """The machines."""

    async def __aenter__(self) -> Self:
        """Listen for hosts.

        Raises:
            InferenceCenterError: ``invalid_config``; the address is in use or not one of this machine.
        """
        settings = self._settings
        try:
            await self._listener.open(self._listen, settings.port)
            self._files.open(self._listen, settings.files_port)
        except OSError as error:
            await self._listener.close()
            raise InferenceCenterError(
                ErrorCode.INVALID_CONFIG,
                f"hosts cannot connect to {self._listen}, port {settings.port} and {settings.files_port}: "
                f"{reason_of(error)}",
                hint="Set cluster.listen to an address of this machine, and the two ports to free ones.",
                field="cluster.listen",
            ) from error
        self._tasks.keep_running(self._follow_nodes, name="nodes")
        return self

    async def _follow_nodes(self) -> None:
        """Read again and again which machines have joined; less often while the cluster does not answer."""
        pause_s = _POLL_S
        while True:
            try:
                joined = await self._ray.nodes()
            except NodeUnreachableError as error:
                if pause_s == _POLL_S:
                    _log.warning("cluster_not_reached", reason=str(error))
                self.nodes.update(None)
                pause_s = min(2 * pause_s, _MAX_POLL_S)
            else:
                self.nodes.update({each.name: JoinedNode(each.address, each.alive, each.own) for each in joined})
                pause_s = _POLL_S
            await asyncio.sleep(pause_s)

    async def __aexit__(self, *_: object) -> None:
        """Drop the connections to hosts, which keep their engines for a while, and to the cluster."""
        await self._tasks.cancel()
        self._files.close()
        await self._listener.close()
        await self._tunnels.close()
        await self._ray.close()

    def launcher(self, spec: ModelSpec, index: int, node: str) -> RemoteLauncher:
        """Return what starts the engines of a replica."""
        starter = RayStarter(self._ray, node, module=ENGINE_HOST)
        # The machines of a model on all of them have other numbers after a restart.
        name = f"{spec.name}@{node}" if spec.on_all_nodes else f"{spec.name}/{index}"
        return RemoteLauncher(name, spec.engine, listener=self._listener, starter=starter, files=self._files)

    def rpc_launcher(self, spec: ModelSpec, planner: RpcPlanner, local: LocalLauncher) -> RpcLauncher:
        """Return what starts the engines of a model that uses devices of other machines."""
        return RpcLauncher(
            spec.name,
            self._rpc_nodes(spec),
            tunnels=self._tunnels,
            planner=planner,
            local=local,
            is_drained=self.nodes.is_drained,
        )

    async def rpc_devices(self, spec: ModelSpec) -> tuple[tuple[Device, ...], dict[str, str]]:
        """Return the devices of a model's nodes as they are now, and by name why other nodes have none.

        It is for a process beside the daemon, and starts RPC servers of its own.
        """
        links, failed = await open_links(f"{spec.name}/{os.getpid()}", self._rpc_nodes(spec), self._tunnels)
        try:
            servers = {link.node: link.address.result() for link in links}
            return await asyncio.to_thread(node_devices, servers), failed
        finally:
            await self._tunnels.close()
            await self._ray.close()

    def _rpc_nodes(self, spec: ModelSpec) -> tuple[RpcNode, ...]:
        return tuple(RpcNode(node, RayStarter(self._ray, node, module=RPC_HOST)) for node in spec.rpc_nodes)
