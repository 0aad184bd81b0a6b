"""Which nodes an engine with ``rpc_nodes`` uses, and when it is planned anew because one leaves or is back.

A running engine cannot gain or lose devices, so each change ends it between turns and starts the next one. A node that
is drained must be left soon: running turns have ``engine.swap_patience_s``, as if another model needed the memory. A
node that is back only makes the engine better, so it waits until there are no turns, and is probed first: an engine is
not ended for a node that cannot run a server. Attempts back off, so that a node that comes and goes costs few loads.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import structlog

from inferencecenter.ipc.port import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inferencecenter.supervisor.supervisor import Supervisor

RETRY_MIN_S: Final = 30.0
RETRY_MAX_S: Final = 1800.0
"""Seconds between two attempts to use nodes that are back; each attempt doubles them."""
FORGET_S: Final = 2 * RETRY_MAX_S
"""Seconds after which an attempt no longer counts."""
RpcServerState: TypeAlias = Literal["stopped", "starting", "ready", "missing"]
"""``ready``: the engine uses it; ``missing``: the engine runs, or waits, without it."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcServerStatus:
    """The RPC server of a model on a node; ``running`` turns of the model use it while it is ready."""

    node: str
    model: str
    state: RpcServerState = "stopped"
    detail: str = ""
    running: int = 0

    @property
    def is_used(self) -> bool:
        """Whether an engine uses it, or is about to."""
        return self.state in ("starting", "ready")


class RpcServers(Protocol):
    """The RPC servers of a model."""

    @property
    def servers(self) -> tuple[RpcServerStatus, ...]:
        """One for each node, as the last launch found it."""

    async def can_start(self, nodes: Collection[str]) -> bool:
        """Return whether a server can be started on any of these nodes, by starting one."""


class RpcNodes:
    """Has a model's engine leave nodes that are drained, and return to those that are back.

    Args:
        supervisor: Of the engine.
        servers: Its RPC servers.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self, supervisor: Supervisor, servers: RpcServers, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._supervisor = supervisor
        self._servers = servers
        self._monotonic = monotonic
        self._changing = asyncio.Lock()
        self._tried_s = -math.inf
        self._pause_s = 0.0

    @property
    def statuses(self) -> tuple[RpcServerStatus, ...]:
        """The RPC server on each node."""
        running = self._supervisor.status.running
        return tuple(
            replace(each, running=running) if each.state == "ready" else each for each in self._servers.servers
        )

    async def drain(self, node: str) -> None:
        """Wait until the engine does without a node; running turns have ``swap_patience_s``.

        New turns wait meanwhile. No engine is started with the node, because its launcher knows that it is drained.
        """
        async with self._changing:
            while self._supervisor.holds_memory and self._uses(node):
                _log.info("engine_leaves_node", model=self._supervisor.name, node=node)
                await self._supervisor.restart()

    def undrain(self) -> None:
        """Forget earlier attempts: an operator wants the node to be used."""
        self._tried_s = -math.inf

    async def rejoin(self, usable: Collection[str]) -> None:
        """Start the engine anew if it is idle, runs without one of the ``usable`` nodes, and can use it again."""
        missing = {each.node for each in self._servers.servers if each.state == "missing"} & set(usable)
        now_s = self._monotonic()
        if not missing or not self._is_idle or self._changing.locked() or now_s - self._tried_s < self._pause_s:
            return
        async with self._changing:
            self._pause_s = RETRY_MIN_S if now_s - self._tried_s >= FORGET_S else min(2 * self._pause_s, RETRY_MAX_S)
            self._tried_s = now_s
            if not await self._servers.can_start(missing):
                return
            if not self._is_idle:
                self._pause_s = RETRY_MIN_S
                return
            _log.info("engine_returns_to_nodes", model=self._supervisor.name, nodes=sorted(missing))
            await self._supervisor.restart()

    @property
    def _is_idle(self) -> bool:
        return self._supervisor.status.state is EngineState.READY and not self._supervisor.has_turns

    def _uses(self, node: str) -> bool:
        return any(each.node == node and each.is_used for each in self._servers.servers)
