"""A changed entry of a model, which replaces its replicas one after the other; see decision 54."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.ipc.port import EngineState, RollStatus
from inferencecenter.supervisor.engine_options import cache_key

if TYPE_CHECKING:
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.supervisor.replica_set import Replica, ReplicaSet

_ENDED: Final = (EngineState.FAILED, EngineState.DRAINING, EngineState.STOPPED)
_ON_ITS_WAY: Final = (EngineState.STARTING, EngineState.BACKOFF)
_log = structlog.get_logger(__name__)


class RollingChange:
    """Changes a set's replicas to those of another entry.

    Meanwhile the set makes replicas of the new entry, also for machines that join or return.

    Args:
        replica_set: The set; its machines are those of the entry as far as both have any.
        spec: The entry.
    """

    def __init__(self, replica_set: ReplicaSet, spec: ModelSpec) -> None:
        self._set = replica_set
        self._before, replica_set.spec = replica_set.spec, spec
        n_steps = len(self._outdated()) + abs(self._n_wanted - len(replica_set.replicas))
        self._status: RollStatus | None = RollStatus(done=0, total=n_steps)

    @property
    def status(self) -> RollStatus | None:
        """Its progress, or its failure; ``None`` when all is done."""
        status, turns = self._status, sum(each.supervisor.n_turns for each in self._set.leaving)
        if status is None or status.failed or not turns:
            return status
        words = f"{turns} turn{'s' * (turns > 1)} of the former engine on {self._set.leaving[0].node} to end or move"
        return replace(status, detail=f"Waits for {words}.")

    async def run(self) -> str | None:
        """Replace the replicas, one after the other, and change their number.

        A step begins when all others that can serve do. The machine of a replica that cannot be reached gets the new
        one too, and is not waited for. If a new one cannot be loaded, the former ones are put back.

        Returns:
            Why a new one could not be loaded.
        """
        assert self._status is not None, "it has just begun"
        model = self._set.name
        _log.info("replicas_roll", model=model, steps=self._status.total)
        self._set.notify()
        failure = await self._take_steps()
        if failure is None:
            self._status = None
        else:
            self._status = status = replace(self._status, failed=True, detail=failure)
            _log.error("roll_failed", model=model, reason=failure, done=status.done, total=status.total)
            self._set.spec = self._before
            if (again := await self._take_steps()) is not None:
                _log.error("roll_not_undone", model=model, reason=again)
        self._set.notify()
        return failure

    @property
    def _n_wanted(self) -> int:
        """The replicas of the entry; on all machines there are those that have joined too."""
        spec = self._set.spec
        return max(len(self._set.replicas), spec.replicas) if spec.on_all_nodes else spec.replicas

    def _outdated(self) -> list[int]:
        """Return the replicas that are to be replaced; one that is being drained is replaced by that."""
        return [
            index
            for index, each in enumerate(self._set.replicas[: self._n_wanted])
            if not _needs_no_change(each.spec, self._set.spec, each.node)
            and (not each.drained or each.state is EngineState.STOPPED)
        ]

    async def _take_steps(self) -> str | None:
        """Make the replicas those of the set's entry; return why that failed."""
        replicas = self._set.replicas
        while self._set.is_started and len(replicas) > self._n_wanted:
            leaving = self._set.pop()
            await self._set.leave(leaving)
            self._count("replica_removed", len(replicas), leaving)
        while self._set.is_started and (outdated := self._outdated()):
            # Those that do not serve first.
            index = min(outdated, key=lambda each: replicas[each].state is EngineState.READY)
            if (failure := await self._renew(index)) is not None:
                return failure
            self._count("replica_replaced", index, replicas[index])
        while self._set.is_started and (index := len(replicas)) < self._n_wanted:
            replicas.append(self._set.new_replica(index, self._set.spec.nodes[index]))
            if (failure := await self._start(replicas[index], loads=self._set.holds_memory)) is not None:
                return failure
            self._count("replica_added", index, replicas[index])
        self._set.show(cache_key(self._set.spec))
        return None

    def _count(self, event: str, index: int, replica: Replica) -> None:
        if self._status is not None and not self._status.failed:
            self._status = status = replace(self._status, done=self._status.done + 1)
            progress = {"done": status.done, "total": status.total}
            _log.info(event, model=self._set.name, replica=index, on=replica.node, **progress)
        self._set.notify()

    async def _renew(self, index: int) -> str | None:
        """Replace a replica, and wait until the new one is ready if the former was loaded or has failed."""
        replicas, old = self._set.replicas, self._set.replicas[index]
        if old.drained:
            self._set.replace_drained(index, node=old.node)
            return None
        await self._set.until(lambda: all(each is old or not _is_on_its_way(each) for each in replicas))
        loads = old.supervisor.holds_memory or old.state is EngineState.FAILED
        fresh = self._set.put_new(index)
        await self._set.leave(old)
        return await self._start(fresh, loads=loads)

    async def _start(self, fresh: Replica, *, loads: bool) -> str | None:
        """Start a new replica; if it ``loads``, wait until it is ready, and return why it will not be."""
        if not self._set.is_started:
            return None
        if self._set.is_drained(fresh.node):
            fresh.drained = True
            return None
        supervisor = fresh.supervisor
        if fresh.state is EngineState.STOPPED:
            supervisor.start(asleep=True)
        supervisor.pause(paused=False)
        if loads:
            supervisor.wake(urgent=True)
            await self._set.until(lambda: supervisor.loads > 0 or supervisor.unreachable or fresh.state in _ENDED)
            if fresh.state is EngineState.FAILED:
                return supervisor.status.detail or "its engine has failed"
        n_new = sum(each.weights == fresh.weights for each in self._set.replicas)
        if 2 * n_new >= len(self._set.replicas) and supervisor.loads:
            self._set.show(fresh.weights)
        return None


def _is_on_its_way(replica: Replica) -> bool:
    """Return whether a replica is to be ready soon."""
    return replica.state in _ON_ITS_WAY and not replica.supervisor.unreachable


def _needs_no_change(spec: ModelSpec, other: ModelSpec, node: str) -> bool:
    """Return whether a replica on a machine is the same for two entries: replicas share the machine's memory."""
    engines = [replace(each, params={}, matryoshka=False, nodes=()) for each in (spec, other)]
    return spec.nodes.count(node) == other.nodes.count(node) and engines[0] == engines[1]
