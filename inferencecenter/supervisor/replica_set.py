"""The replicas of a model: several engines that serve one queue of sessions.

A replica is a supervisor with its engine, its request queue and its parked KV. Within it everything is as for a model
with one engine; this module decides which replica a turn goes to (``replica_placement``), and moves turns.

When an engine is lost, its turns go to another replica that is ready, without waiting for the restart: they are
recalled and submitted again, with what they have generated, as after any loss. Those that may have crashed it stay:
they wait for their replica's next engine, and the others are safe from them (``poison_turns``). If the engine is not
started again they leave too.

When the model's entry changes, its replicas are replaced one after the other (``ReplicaSet.roll``, decision 54). The
former one leaves its place to the new one at once, moves its turns to other replicas, and keeps only those that would
continue with the weights of another file: they end on it. Then its engine ends and the next is started, so that all
others serve meanwhile, and no memory is needed for one more. A replica whose file has other tokens or another chat
template than the model that the set shows gets no turns, until the set shows its model: when half are replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.model_fingerprint import fingerprint
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.supervisor.engine_options import cache_key
from inferencecenter.supervisor.engine_status import StatusListeners
from inferencecenter.supervisor.replica_placement import (
    ASSUMED_HELD_S,
    ASSUMED_LOAD_S,
    ASSUMED_PREFILL_TOKEN_S,
    ReplicaLoad,
    ReplicaRates,
    choose_replica,
)
from inferencecenter.supervisor.request_queue import queue_full
from inferencecenter.supervisor.rolling_change import RollingChange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import (
        Detokenized,
        ModelInfo,
        PromptSegment,
        Tokenized,
        TokensCounted,
    )
    from inferencecenter.ipc.port import EngineTurn, SessionKv
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.supervisor.nodes import HostConnection
    from inferencecenter.supervisor.planning import Planner
    from inferencecenter.supervisor.rpc_nodes import RpcNodes
    from inferencecenter.supervisor.supervisor import Supervisor
    from inferencecenter.telemetry.engine_metrics import PlacementKind

MAX_REPLICAS: Final = 64
_MOST_SESSIONS: Final = 100_000
"""Sessions whose replica is remembered; those that ran longest ago are placed as new ones."""
_USABLE: Final = (EngineState.READY, EngineState.STARTING, EngineState.SUSPENDING, EngineState.ASLEEP)
_BY_USE: Final = (
    EngineState.READY,
    EngineState.STARTING,
    EngineState.SUSPENDING,
    EngineState.ASLEEP,
    EngineState.BACKOFF,
    EngineState.DRAINING,
    EngineState.FAILED,
    EngineState.STOPPED,
)
"""The states, most usable first."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of a model, for the entry ``spec``.

    For another machine, ``host`` has the connection to it; ``rpc`` are those whose devices it uses. ``losses`` counts
    its engines that were lost, and with them their KV; ``sessions`` those whose KV it has. One that is ``drained`` gets
    no turns and is not started. Replicas of equal ``weights`` continue each other's turns; those of equal ``tokens``
    (empty before the first load) take each other's turns that have not begun.
    """

    supervisor: Supervisor
    planner: Planner
    spec: ModelSpec
    rates: ReplicaRates = field(default_factory=ReplicaRates)
    host: HostConnection | None = None
    rpc: RpcNodes | None = None
    losses: int = 0
    sessions: int = 0
    drained: bool = False
    starting_since_s: float | None = None
    tokens: str = ""
    weights: str = field(init=False)

    def __post_init__(self) -> None:
        self.weights = cache_key(self.spec)

    @property
    def node(self) -> str:
        """Its machine."""
        return self.supervisor.node

    @property
    def state(self) -> EngineState:
        return self.supervisor.status.state


def loaded_siblings(replicas: Sequence[Replica], index: int) -> list[Planner]:
    """Return the planners of the other replicas that are loaded."""
    return [
        each.planner for position, each in enumerate(replicas) if position != index and each.state is EngineState.READY
    ]


@dataclass(frozen=True, slots=True)
class _KvHolder:
    """The replica that ran a session's last turn, with its losses and its weights then."""

    index: int
    losses: int
    weights: str


class ReplicaSet:
    """Implements ``ipc.port.EnginePort`` and ``model_cache.ResidentModel`` for a model with several replicas.

    Until it is started the first replica keeps all turns, so that suspicions of an earlier daemon find them.

    Args:
        spec: The model's entry.
        make: Makes the replica of a number on a machine, for an entry.
        is_drained: Returns whether a machine is drained.
        placed: Called with how each turn was placed.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        make: Callable[[ModelSpec, int, str], Replica],
        is_drained: Callable[[str], bool] = lambda _: False,
        placed: Callable[[PlacementKind], None] = lambda _: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._make = make
        self.is_drained = is_drained
        self.replicas: list[Replica] = []
        # Replicas that have left their places and still have turns.
        self.leaving: list[Replica] = []
        self._placed = placed
        self._monotonic = monotonic
        self._listeners = StatusListeners()
        self._holders: OrderedDict[str, _KvHolder] = OrderedDict()
        # Turns on their way from one replica to another, with the weights that began them.
        self._moving: dict[str, str] = {}
        self.is_started = False
        self._model: ModelInfo | None = None
        self._model_key: tuple[ModelInfo, ...] = ()
        # What the replicas have whose model the set shows.
        self._weights, self._tokens = cache_key(spec), ""
        self._change: RollingChange | None = None
        self._state_event = asyncio.Event()
        for index, node in enumerate(spec.nodes):
            self.replicas.append(self.new_replica(index, node))
            self.replicas[index].drained = is_drained(node)

    def __repr__(self) -> str:
        states = ", ".join(each.state.value for each in self.replicas)
        return f"{type(self).__name__}({self.name!r}, {states})"

    # State.

    @property
    def all_replicas(self) -> tuple[Replica, ...]:
        """The replicas, and those that have left their places and still have turns."""
        return (*self.replicas, *self.leaving)

    @property
    def supervisors(self) -> tuple[Supervisor, ...]:
        """The supervisors of all these replicas."""
        return tuple(each.supervisor for each in self.all_replicas)

    @property
    def status(self) -> EngineStatus:
        """The status of all replicas together; see ``EngineStatus``."""
        each = tuple(replica.supervisor.status for replica in self.replicas)
        every = (*each, *(replica.supervisor.status for replica in self.leaving))
        first = min(each, key=lambda status: _BY_USE.index(status.state))
        return replace(
            first,
            model=self.model,
            restarts=sum(status.restarts for status in every),
            running=sum(status.running for status in every),
            waiting=sum(status.waiting for status in every),
            rss_bytes=sum(status.rss_bytes for status in every),
            parked_sessions=sum(status.parked_sessions for status in every),
            parked_bytes=sum(status.parked_bytes for status in every),
            parked_ram_bytes=sum(status.parked_ram_bytes for status in every),
            replicas=each,
            roll=None if self._change is None else self._change.status,
        )

    @property
    def _undrained(self) -> Sequence[Replica]:
        """The replicas that are not drained, or all if there are none."""
        return [each for each in self.replicas if not each.drained] or self.replicas

    @property
    def model(self) -> ModelInfo | None:
        """The model, with the slots of the replicas that have not failed and the shortest of their contexts."""
        shown = [each for each in self._undrained if self._takes_new_turns(each)]
        working = [each.supervisor for each in shown if each.state is not EngineState.FAILED]
        loaded = tuple(model for each in working or self.supervisors if (model := each.model) is not None)
        if loaded != self._model_key or self._model is None:
            self._model_key = loaded
            self._model = (
                msgspec.structs.replace(
                    loaded[0],
                    slots=sum(model.slots for model in loaded),
                    n_ctx=min(model.n_ctx for model in loaded),
                )
                if loaded
                else None
            )
        return self._model

    @property
    def name(self) -> str:
        """The model's name."""
        return self.replicas[0].supervisor.name

    @property
    def options(self) -> EngineOptions:
        """The options of the first replica's engine."""
        return self.replicas[0].supervisor.options

    @property
    def load_failure(self) -> InferenceCenterError | None:
        """Why the model could not be loaded, when that is final for all replicas."""
        failures = [each.supervisor.load_failure for each in self._undrained]
        return failures[0] if all(failure is not None for failure in failures) else None

    @property
    def given_up(self) -> bool:
        """Whether no engine is started again, one or all because they were lost too often."""
        supervisors = [each.supervisor for each in self._undrained]
        final = [each.given_up or each.load_failure is not None for each in supervisors]
        return all(final) and any(each.given_up for each in supervisors)

    @property
    def wanted(self) -> bool:
        """Whether there is work for a replica that is not loaded."""
        return any(each.wanted for each in self.supervisors if not each.holds_memory)

    @property
    def has_turns(self) -> bool:
        """Whether there are turns that have not ended."""
        return any(each.has_turns for each in self.supervisors)

    @property
    def clients(self) -> frozenset[str]:
        """The clients whose turns have not ended, and those that requested an engine that is not ready."""
        return frozenset[str]().union(*(each.clients for each in self.supervisors))

    @property
    def users(self) -> frozenset[str]:
        """The clients whose turns the engines have had; see ``Supervisor``."""
        return frozenset[str]().union(*(each.users for each in self.supervisors))

    @property
    def loads(self) -> int:
        """How often an engine got ready."""
        return sum(each.loads for each in self.supervisors)

    @property
    def loaded_at_s(self) -> float | None:
        """When the first of the loaded engines got ready; see ``Supervisor``."""
        return min((at_s for each in self.supervisors if (at_s := each.loaded_at_s) is not None), default=None)

    @property
    def is_urgent(self) -> bool:
        """Whether an operator has requested the engines."""
        return any(each.is_urgent for each in self.supervisors)

    @property
    def holds_memory(self) -> bool:
        """Whether there is an engine, or one is about to be started."""
        return any(each.holds_memory for each in self.supervisors)

    @property
    def busy(self) -> bool:
        """Whether an engine has turns."""
        return any(each.busy for each in self.supervisors)

    @property
    def last_used_s(self) -> float:
        """When a replica was last used, in monotonic seconds."""
        return max(each.last_used_s for each in self.supervisors)

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` when the state of a replica changes, and at each tenth of its load progress."""
        self._listeners.add(listener)

    # The model cache and the model manager.

    def start(self, *, asleep: bool = False, after_crash: bool = False) -> None:
        """Start all engines, or leave them ``asleep``; see ``Supervisor``."""
        for each in self.replicas:
            if not each.drained:
                each.supervisor.start(asleep=asleep, after_crash=after_crash)
        self.is_started = True
        for session_id in tuple(self._holders):
            self._forget_holder(session_id)  # no engine of this daemon has run a turn
        self._hand_off(self.replicas[0], suspects=False)

    def inherit(self, model: ModelInfo | None) -> None:
        """Take over a failed set's knowledge of the model; see ``Supervisor``."""
        slots = 0 if model is None else max(1, model.slots // len(self.replicas))
        for each in self.supervisors:
            each.inherit(None if model is None else msgspec.structs.replace(model, slots=slots))

    def wake(self, caller: str = "", *, urgent: bool = False) -> None:
        """Start all engines that sleep."""
        for each in self.supervisors:
            each.wake(caller, urgent=urgent)

    def revive(self) -> None:
        """Start the replicas again that failed for good, while others serve."""
        for each in self.supervisors:
            each.revive()

    def delay(self, seconds: float) -> None:
        """Notify the waiting turns how long they have to wait at least."""
        for each in self.supervisors:
            each.delay(seconds)

    async def evict(self, *, interrupts: bool = True) -> None:
        """End all engines; see ``Supervisor``."""
        await asyncio.gather(*(each.evict(interrupts=interrupts) for each in self.supervisors))

    def pause(self, *, paused: bool) -> None:
        """While ``paused``, start no engine for waiting turns."""
        for each in self.supervisors:
            each.pause(paused=paused)

    def recall(self, *, begun: bool = False) -> None:
        """Have the turns that no engine has resubmitted to their models' engines; see ``Supervisor``."""
        for each in self.supervisors:
            each.recall(begun=begun)

    async def retire(self) -> None:
        """Stop permanently once there are no turns; see ``Supervisor``."""
        await asyncio.gather(*(each.retire() for each in self.supervisors))

    async def stop(self, *, leave: bool = False) -> None:
        """End all engines for good; see ``Supervisor``."""
        self.is_started = False
        await asyncio.gather(*(each.stop(leave=leave) for each in self.supervisors))

    # Machines that are drained.

    async def drain(self, node: str) -> None:
        """Move the turns of a machine's replicas to the others, and end their engines; new turns go elsewhere.

        Running turns have ``engine.swap_patience_s`` to end, and continue on another replica after that.
        """
        leaving = [index for index, each in enumerate(self.replicas) if each.node == node and not each.drained]
        await asyncio.gather(*map(self._drain, leaving))
        await self.until(lambda: all(each.node != node for each in self.leaving))

    async def _drain(self, index: int) -> None:
        replica = self.replicas[index]
        replica.drained = True
        self._hand_off(replica, suspects=False)
        await replica.supervisor.withdraw(lambda: self._hand_off(replica, suspects=True, begun=True))
        if replica in self.replicas:
            self.replace_drained(index, node=replica.node)

    def replace_drained(self, index: int, *, node: str) -> None:
        """Put a new replica into the place of one that was stopped; it is not started yet."""
        fresh = self.new_replica(index, node)
        fresh.drained, fresh.losses = True, self.replicas[index].losses + 1
        self.replicas[index] = fresh
        self.notify()

    def new_replica(self, index: int, node: str) -> Replica:
        """Return a new replica of the present entry, which is not started yet."""
        fresh = self._make(self.spec, index, node)
        fresh.supervisor.subscribe(partial(self._on_status, fresh))
        return fresh

    def undrain(self, node: str) -> None:
        """Run engines on a machine again."""
        for each in self.replicas:
            if each.node == node and each.drained:
                each.drained = False
                if self.is_started:
                    is_loaded = self.holds_memory
                    each.supervisor.start(asleep=True)
                    if is_loaded:
                        each.supervisor.wake()
        if self.is_started and not all(each.drained for each in self.replicas):
            for each in self.replicas:
                if each.drained:
                    self._hand_off(each, suspects=True)

    # Machines that join and leave.

    async def follow(self, joined: Collection[str], is_drained: Callable[[str], bool]) -> None:
        """Run a replica on each machine that has joined, and give up those of machines that have left.

        An engine that is connected stays, whatever the cluster says of its machine.
        """
        gone = [
            each.node
            for each in self.replicas
            if not each.drained and each.node not in (*joined, LOCAL_NODE) and each.state is EngineState.BACKOFF
        ]
        for node in gone:
            await self.drain(node)
        for node in sorted(joined):
            if all(each.node != node for each in self.replicas):
                self._add(node, joined)
            if not is_drained(node):
                self.undrain(node)

    def _add(self, node: str, joined: Collection[str]) -> None:
        """Add a replica that is not started yet, in the place of one whose machine has left if there are many."""
        if len(self.replicas) < MAX_REPLICAS:
            fresh = self.new_replica(len(self.replicas), node)
            fresh.drained = True
            self.replicas.append(fresh)
            return
        free = (index for index, each in enumerate(self.replicas) if each.drained and each.node not in joined)
        if (index := next(free, None)) is not None:
            self.replace_drained(index, node=node)

    # A changed entry.

    def can_roll(self, spec: ModelSpec) -> bool:
        """Return whether ``roll`` can change the replicas to those of an entry: none would go to another machine."""
        return (
            spec.is_on_nodes
            and spec.on_all_nodes == self.spec.on_all_nodes
            and all(each.node == node for each, node in zip(self.replicas, spec.nodes, strict=False))
        )

    async def roll(self, spec: ModelSpec) -> str | None:
        """Replace the replicas by those of another entry, one after the other; see ``RollingChange.run``."""
        self._change = RollingChange(self, spec)
        return await self._change.run()

    def put_new(self, index: int) -> Replica:
        """Put a new replica of the present entry into the place of one that is to leave; it is not started yet.

        If no other replica serves it is asleep already, so that new turns wait for it; else it would only delay them.
        """
        old = self.replicas[index]
        fresh = self.replicas[index] = self.new_replica(index, old.node)
        fresh.losses = old.losses + 1
        if not any(each.state in _USABLE and not each.drained for each in self.replicas if each is not fresh):
            fresh.supervisor.pause(paused=True)
            fresh.supervisor.start(asleep=True)
        return fresh

    def pop(self) -> Replica:
        """Take the last replica out, which is to leave."""
        index = len(self.replicas) - 1
        for session_id in [each for each, holder in self._holders.items() if holder.index == index]:
            self._forget_holder(session_id)
        return self.replicas.pop()

    async def leave(self, old: Replica) -> None:
        """End a replica that has left its place.

        Turns that others continue have the patience of a swap. Those that no other may continue end here.
        """
        self.leaving.append(old)
        try:
            self._hand_off(old, suspects=False)
            if self._n_like(old) == 0:
                await old.supervisor.finish()
            await old.supervisor.withdraw(lambda: self._hand_off(old, suspects=True, begun=True))
        finally:
            self.leaving.remove(old)
            self._notify_waiters()

    def show(self, weights: str) -> None:
        """Show the model of the replicas with these weights; turns that wait for others with other tokens move."""
        if weights == self._weights:
            return
        self._weights = weights
        self._tokens = next((each.tokens for each in self.replicas if each.weights == weights and each.tokens), "")
        for each in self.replicas:
            if not self._takes_new_turns(each):
                self._hand_off(each, suspects=False, begun=False)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on the replicas."""
        while not holds():
            await self._state_event.wait()

    def notify(self) -> None:
        """Tell all that listen of the present status."""
        self._listeners.notify(self.status)

    def _notify_waiters(self) -> None:
        self._state_event.set()
        self._state_event.clear()

    # The engine port.

    def submit(self, turn: EngineTurn) -> int:
        """Submit a turn to a replica; its position is one in the queue of that replica.

        Raises:
            InferenceCenterError: See ``Supervisor.submit``; ``engine.max_queue`` limits the waiting turns of all
                replicas together.
        """
        is_moved = turn.turn_id in self._moving
        weights = self._begun_with(turn)
        if weights is not None and (last := self._last_with(weights)) is not None:
            return last.supervisor.submit(turn, accepted=True)
        index, kind = self._place(turn, weights)
        chosen = self.replicas[index]
        if not is_moved and chosen.supervisor.n_turns >= chosen.supervisor.slots:
            waiting = sum(max(0, each.n_turns - each.slots) for each in self.supervisors)
            if waiting >= self.options.max_queue:
                raise queue_full(self.options.max_queue)
        position = chosen.supervisor.submit(turn, accepted=is_moved)
        if (kv := turn.session_kv) is not None:
            self._forget_holder(kv.session_id)
            self._holders[kv.session_id] = _KvHolder(index, chosen.losses, chosen.weights)
            chosen.sessions += 1
            if len(self._holders) > _MOST_SESSIONS:
                self._forget_holder(next(iter(self._holders)))
        self._placed(kind)
        return position

    def abort(self, turn_id: str) -> None:
        """Request the turn's end; replicas that do not have it ignore that."""
        self._moving.pop(turn_id, None)
        for each in self.supervisors:
            each.abort(turn_id)

    def release(self, session_id: str) -> None:
        """Have the engines drop a session's KV: it may have run on several."""
        self._forget_holder(session_id)
        for each in self.supervisors:
            each.release(session_id)

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Request the tokens of a text; see ``EnginePort``."""
        return self._least_loaded().tokenize(pieces, first=first, client_id=client_id)

    def count_tokens(
        self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str
    ) -> asyncio.Future[TokensCounted]:
        """Request the number of tokens of a text; see ``EnginePort``."""
        return self._least_loaded().count_tokens(pieces, first=first, client_id=client_id)

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Request the text of tokens; see ``EnginePort``."""
        return self._least_loaded().detokenize(tokens, client_id=client_id)

    # Placement.

    def _least_loaded(self) -> Supervisor:
        usable = self._usable()
        loads = [self._load(self.replicas[index]) for index in usable]
        return self.replicas[usable[choose_replica(loads)]].supervisor

    def _begun_with(self, turn: EngineTurn) -> str | None:
        """Return the weights that began a turn, which is moved here or has shifted its context; ``None`` for a new one.

        A turn that an earlier daemon began has the present ones.
        """
        moved = self._moving.pop(turn.turn_id, None)
        if not turn.n_tokens or moved is not None or (kv := turn.session_kv) is None:
            return moved if turn.n_tokens else None
        holder = self._holders.get(kv.session_id)
        return None if holder is None else holder.weights

    def _last_with(self, weights: str) -> Replica | None:
        """Return the last replica with certain weights if it has left its place and ends its turns."""
        if any(each.weights == weights for each in self._undrained):
            return None
        ending = (each for each in self.leaving if each.weights == weights)
        return next((each for each in ending if each.state not in (EngineState.DRAINING, EngineState.STOPPED)), None)

    def _place(self, turn: EngineTurn, weights: str | None) -> tuple[int, PlacementKind]:
        """Return the replica for a turn and why; ``weights`` are those that began it."""
        kv = turn.session_kv
        holder = None if kv is None else self._holder(kv)
        if holder is not None and self._confines(self.replicas[holder.index], turn, weights):
            return holder.index, "kv"  # it shifts its context, and would crash the others too
        usable = self._usable(weights)
        last = usable.index(holder.index) if holder is not None and holder.index in usable else None
        holds = last if holder is not None and holder.losses == self.replicas[holder.index].losses else None
        index = usable[
            choose_replica(
                [self._load(self.replicas[each]) for each in usable],
                holder=holds,
                n_tokens=kv.n_tokens if kv is not None else 0,
                preferred=last,
            )
        ]
        if holder is None:
            return index, "new"
        if holder.losses != self.replicas[holder.index].losses or last is None:
            return index, "lost"
        return index, "kv" if index == holder.index else "moved"

    @staticmethod
    def _confines(replica: Replica, turn: EngineTurn, weights: str | None) -> bool:
        may_run = not replica.drained and weights in (None, replica.weights)
        return may_run and replica.supervisor.is_suspect(turn.turn_id)

    def _holder(self, kv: SessionKv) -> _KvHolder | None:
        holder = self._holders.get(kv.session_id)
        return holder if holder is not None or kv.forked_from is None else self._holders.get(kv.forked_from)

    def _forget_holder(self, session_id: str) -> None:
        holder = self._holders.pop(session_id, None)
        if holder is not None and holder.losses == self.replicas[holder.index].losses:
            self.replicas[holder.index].sessions -= 1

    def _takes_new_turns(self, replica: Replica) -> bool:
        """Return whether it has the tokens and the chat template of the model that the set shows."""
        return replica.weights == self._weights or (self._tokens != "" and replica.tokens == self._tokens)

    def _n_like(self, replica: Replica) -> int:
        """Return how many other replicas may continue the turns of one, also those that have begun."""
        return sum(
            each.weights == replica.weights and each is not replica and not each.drained and self._takes_new_turns(each)
            for each in self.replicas
        )

    def _usable(self, weights: str | None = None) -> Sequence[int]:
        """Return the replicas to choose from: those that serve, else those that will, else the first.

        One that isolates a suspect serves no other turn. A turn that was begun with certain ``weights`` continues only
        with them.

        Raises:
            InferenceCenterError: ``engine_unavailable`` if there are none with these weights.
        """
        if not self.is_started:
            return (0,)
        undrained = self._undrained
        numbered = [(index, each) for index, each in enumerate(self.replicas) if each in undrained]
        if weights is not None:
            numbered = [(index, each) for index, each in numbered if each.weights == weights]
            if not numbered:
                raise InferenceCenterError(
                    ErrorCode.ENGINE_UNAVAILABLE,
                    "The model was replaced, and the engine that began this answer is lost.",
                )
        else:
            numbered = [each for each in numbered if self._takes_new_turns(each[1])] or numbered
        serving = [i for i, each in numbered if each.state in _USABLE and not each.supervisor.isolates]
        return (
            serving
            or [i for i, each in numbered if each.state in (*_USABLE, EngineState.BACKOFF)]
            or [i for i, each in numbered if each.state is EngineState.FAILED]
            or [index for index, _ in numbered]
        )

    def _load(self, replica: Replica) -> ReplicaLoad:
        own, supervisor = replica.rates, replica.supervisor
        load_s = self._measured(lambda rates: rates.load_s) or ASSUMED_LOAD_S
        match replica.state:
            case EngineState.READY:
                startup_s = 0.0
            case EngineState.STARTING:
                startup_s = load_s * (1 - supervisor.status.load_fraction)
            case _:
                startup_s = load_s
        return ReplicaLoad(
            turns=supervisor.n_turns,
            slots=supervisor.slots,
            startup_s=startup_s,
            held_s=own.held_s or self._measured(lambda rates: rates.held_s) or ASSUMED_HELD_S,
            prefill_token_s=own.prefill_token_s
            or self._measured(lambda rates: rates.prefill_token_s)
            or ASSUMED_PREFILL_TOKEN_S,
        )

    def _measured(self, rate: Callable[[ReplicaRates], float | None]) -> float | None:
        """Return the rate of the first replica that has one."""
        return next((value for each in self.replicas if (value := rate(each.rates))), None)

    # Loss.

    def _on_status(self, replica: Replica, status: EngineStatus) -> None:
        self._notify_waiters()
        match status.state:
            case EngineState.STARTING if replica.starting_since_s is None:
                replica.starting_since_s = self._monotonic()
            case EngineState.READY:
                self._on_ready(replica)
            case EngineState.BACKOFF | EngineState.FAILED:
                replica.losses, replica.sessions = replica.losses + 1, 0
                replica.starting_since_s = None
                self._on_lost(replica)
            case EngineState.SUSPENDING | EngineState.ASLEEP | EngineState.DRAINING | EngineState.STOPPED:
                replica.starting_since_s = None
        self.notify()

    def _on_ready(self, replica: Replica) -> None:
        if replica.starting_since_s is not None:
            replica.rates.loaded(self._monotonic() - replica.starting_since_s)
            replica.starting_since_s = None
        model = replica.supervisor.model
        assert model is not None, "it is ready"
        replica.tokens = fingerprint(model)
        if replica.weights == self._weights:
            self._tokens = replica.tokens
        if self.is_started and not replica.supervisor.isolates:
            for each in self.replicas:
                if each is not replica and (each.state is EngineState.BACKOFF or each.supervisor.isolates):
                    self._hand_off(each, suspects=False)

    def _on_lost(self, replica: Replica) -> None:
        """Move the turns of a lost replica: at once if another is ready, and in any case if it gets no engine."""
        has_failed = replica.state is EngineState.FAILED
        takes_over = (*_USABLE, EngineState.BACKOFF) if has_failed else (EngineState.READY,)
        if self.is_started and any(each.state in takes_over for each in self.replicas if each is not replica):
            self._hand_off(replica, suspects=has_failed)

    def _hand_off(self, replica: Replica, *, suspects: bool, begun: bool | None = None) -> None:
        """Move the turns that no engine has; those that have begun too if another replica may continue them."""
        begun = self._n_like(replica) > 0 if begun is None else begun
        leaving = replica.supervisor.hand_off(suspects=suspects, begun=begun)
        self._moving.update(dict.fromkeys(leaving, replica.weights))
