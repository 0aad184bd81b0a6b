"""The models of this daemon, each with its own engine: which are loaded, and which is the default."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input, reason_of
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.placement import MIB
from inferencecenter.ipc.port import EngineState
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.protocol.events import Swap
from inferencecenter.protocol.values import ModelRoll, ModelSummary, ReplicaSummary
from inferencecenter.supervisor.engine_options import cache_key
from inferencecenter.supervisor.engine_status import StatusListeners
from inferencecenter.supervisor.model_cache import ModelCache
from inferencecenter.supervisor.nodes import LinkTraffic, NodeEngine
from inferencecenter.supervisor.replica_set import ReplicaSet
from inferencecenter.supervisor.request_queue import unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from inferencecenter.config.sections import ModelKind
    from inferencecenter.ipc.messages import EngineLimits, ModelInfo
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.models.registry import ModelSpec, Registry
    from inferencecenter.protocol.values import EnginePlan
    from inferencecenter.supervisor.nodes import NodeStatus, NodeTable
    from inferencecenter.supervisor.planning import Planner
    from inferencecenter.supervisor.rpc_nodes import RpcNodes
    from inferencecenter.supervisor.supervisor import Supervisor

ModelEngine: TypeAlias = "Supervisor | ReplicaSet"
"""What serves a model: its one engine, or its replicas."""

_STATES: Final[Mapping[EngineState, Literal["loading", "loaded", "failed"]]] = {
    EngineState.STARTING: "loading",
    EngineState.BACKOFF: "loading",
    EngineState.READY: "loaded",
    EngineState.FAILED: "failed",
}
_ON_ITS_WAY: Final = (EngineState.STARTING, EngineState.BACKOFF, EngineState.SUSPENDING, EngineState.ASLEEP)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ManagedModel:
    """A requested model, with what plans and runs its engines; of several replicas, the planner of the first.

    ``rpc`` are the machines whose devices its one engine uses, if there are any.
    """

    spec: ModelSpec
    planner: Planner
    supervisor: ModelEngine
    rpc: RpcNodes | None = None

    @property
    def engines(self) -> tuple[tuple[Supervisor, Planner], ...]:
        """Each engine, loaded or not, with its planner."""
        if isinstance(self.supervisor, ReplicaSet):
            return tuple((each.supervisor, each.planner) for each in self.supervisor.all_replicas)
        return ((self.supervisor, self.planner),)

    @property
    def on_nodes(self) -> Iterator[NodeEngine]:
        """The engines with their machines."""
        if not isinstance(self.supervisor, ReplicaSet):
            status = self.supervisor.status
            yield NodeEngine(
                node=LOCAL_NODE, model=self.spec.name, replica=0, status=status, sessions=status.parked_sessions
            )
            return
        for index, each in enumerate(self.supervisor.replicas):
            yield NodeEngine(
                node=each.node,
                model=self.spec.name,
                replica=index,
                status=each.supervisor.status,
                sessions=each.sessions,
                link=each.host.link if each.host is not None else None,
                traffic=each.host.traffic if each.host is not None else LinkTraffic(),
            )

    def revive(self) -> None:
        """Start replicas again that failed for good; a model of which nothing serves is renewed instead."""
        if isinstance(self.supervisor, ReplicaSet):
            self.supervisor.revive()


def _not_planned(name: str, reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_MODEL_FILE, f"{name} cannot be planned for: {reason}.", field=f"models.{name}"
    )


def summary(name: str, model: ManagedModel | None, *, default: bool, kind: ModelKind, vision: bool) -> ModelSummary:
    """Return a model's entry in a list; ``None`` is a model that was never requested."""
    status = model.supervisor.status if model else None
    if status is None:
        return ModelSummary(name=name, default=default, kind=kind, vision=vision, state="unloaded")
    loaded = status.model
    fraction = round(status.load_fraction, 2) if _STATES.get(status.state) == "loading" else None
    replicas = tuple(map(_replica_summary, status.replicas)) or None
    roll = None if status.roll is None else ModelRoll.model_validate(asdict(status.roll))
    if loaded is None:
        return ModelSummary(
            name=name,
            default=default,
            kind=kind,
            vision=vision,
            state=_STATES.get(status.state, "unloaded"),
            detail=status.description,
            load_fraction=fraction,
            replicas=replicas,
            roll=roll,
        )
    return ModelSummary(
        name=name,
        default=default,
        kind=kind,
        vision=vision,
        state=_STATES.get(status.state, "asleep"),
        detail=status.description,
        n_ctx=loaded.n_ctx,
        slots=loaded.slots,
        parameters=loaded.n_params,
        size_mb=round(loaded.size_bytes / MIB, 1),
        has_chat_template=bool(loaded.chat_template),
        load_fraction=fraction,
        replicas=replicas,
        roll=roll,
    )


def _replica_summary(status: EngineStatus) -> ReplicaSummary:
    return ReplicaSummary(
        node=status.node,
        state=_STATES.get(status.state, "asleep"),
        detail=status.description,
        running=status.running,
        waiting=status.waiting,
        restarts=status.restarts,
    )


class ModelManager:
    """Implements ``ipc.port.ModelsPort``. A model that was never requested is only an entry in the registry.

    Where one engine is expected, that of the default model is shown. A swap changes the default when the new model is
    ready, and not before: turns that the old model runs end there, those that wait are submitted to the new one, and a
    model that cannot be loaded changes nothing.

    Args:
        registry: The models by name.
        make: Builds a model from its entry; its supervisor awaits the given function before each start.
        max_resident: Models loaded at once; 0 for as many as fit.
        min_residency_s: Seconds for which a loaded model is evicted only for its own users.
        nodes: The machines of the cluster, if the daemon is in one.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        make: Callable[[ModelSpec, Callable[[ModelEngine], Awaitable[bool]]], ManagedModel],
        max_resident: int,
        min_residency_s: float = 0.0,
        nodes: NodeTable | None = None,
    ) -> None:
        self._registry = registry
        self._nodes = nodes
        self._make = make
        self._default = registry.default
        self._models: dict[str, ManagedModel] = {}
        self._started = False
        self._begun: dict[ModelEngine, ManagedModel] = {}
        self._model_cache: ModelCache[ModelEngine] = ModelCache(
            max_resident=max_resident,
            min_residency_s=min_residency_s,
            fits=self._fits_beside,
            changed=self._state_changed,
        )
        self._listeners = StatusListeners()
        self._model_listeners: list[Callable[[str, EngineStatus], None]] = []
        self._swap_listeners: list[Callable[[ModelInfo], None]] = []
        self._tasks = TaskGroup("models")
        self._retiring = TaskGroup("retired-models")
        self._changing = asyncio.Lock()
        self._follows = False
        self._node_changes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changed_event = asyncio.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._default}, {sorted(self._models)})"

    # State.

    @property
    def default(self) -> str:
        """The model of all sessions that name none."""
        return self._default

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._registry.models))

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names, each with the model's."""
        return self._registry.aliases

    @property
    def status(self) -> EngineStatus:
        """The status of the default's engine."""
        return self._get(self._default).supervisor.status

    @property
    def plan(self) -> EnginePlan | None:
        """How the default was divided between GPUs and host at its last start; of several replicas, the first."""
        return self._get(self._default).engines[0][1].report

    @property
    def statuses(self) -> Mapping[str, EngineStatus]:
        """The engine status of each model that was requested, by name."""
        return {name: model.supervisor.status for name, model in self._models.items()}

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The machines that run engines; none if the daemon is in no cluster."""
        if self._nodes is None:
            return ()
        models = [self._models[name] for name in sorted(self._models)]
        return self._nodes.statuses(
            (engine for model in models for engine in model.on_nodes),
            (server for model in models if model.rpc is not None for server in model.rpc.statuses),
        )

    @property
    def supervisors(self) -> tuple[Supervisor, ...]:
        """The engines of all started models, including those that replace another and those that finish their turns."""
        return tuple(supervisor for model in self._begun.values() for supervisor, _ in model.engines)

    def spec_of(self, name: str) -> ModelSpec:
        """Return a model's configuration.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        return self._registry.get(name)

    def kind_of(self, name: str) -> str:
        """Return a model's kind; see ``ModelsPort``."""
        return self.spec_of(name).kind

    def sees(self, name: str) -> bool:
        """Return whether a model takes images; see ``ModelsPort``."""
        return self.spec_of(name).mmproj is not None

    def params_of(self, name: str) -> Mapping[str, Any]:
        """Return the parameters that a model's entry sets; none for a model that was removed."""
        spec = self._registry.models.get(name)
        return spec.params if spec else {}

    def engine(self, name: str) -> ModelEngine:
        """Return the engine of a model, loaded or not.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        return self._get(name).supervisor

    def describe(self) -> tuple[ModelSummary, ...]:
        """Return all models, by name."""
        return tuple(
            summary(
                name,
                self._models.get(name),
                default=name == self._default,
                kind=self.spec_of(name).kind,
                vision=self.sees(name),
            )
            for name in self.names
        )

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` when the state of the default's engine changes, or another model becomes the default."""
        self._listeners.add(listener)

    def subscribe_models(self, listener: Callable[[str, EngineStatus], None]) -> None:
        """Call ``listener`` with the name and the status of any model whose engine's state changes."""
        self._model_listeners.append(listener)

    def subscribe_swaps(self, listener: Callable[[ModelInfo], None]) -> None:
        """Call ``listener`` with the model that has become the default."""
        self._swap_listeners.append(listener)

    # Commands.

    def rescan(self) -> None:
        """Register models that were added to ``models_dir``; if it cannot be read, nothing changes."""
        try:
            self._registry = self._registry.with_new_files()
        except InferenceCenterError as error:
            _log.warning("models_dir", reason=error.message)

    def forget_removed(self) -> None:
        """Forget models whose files were deleted from ``models_dir``; see ``apply``.

        Raises:
            InferenceCenterError: See ``read_registry``.
        """
        if self._registry.reread is not None:
            self.apply(self._registry.reread())

    def start(self, *, after_crash: bool = False) -> None:
        """Load the default model and those requested before; call once, from the main thread.

        Existing turns were left by an earlier daemon, which died with them if this is ``after_crash``.
        """
        self._get(self._default)
        self._started = True
        if self._nodes is not None:
            self._nodes.subscribe(self._nodes_changed)
        for name, model in self._models.items():
            self._begin(model, asleep=name != self._default, after_crash=after_crash)

    async def stop(self) -> None:
        """End all engines for good."""
        await self._tasks.cancel()
        await asyncio.gather(*(engine.stop(leave=True) for engine in self._begun))
        await self._retiring.cancel()

    def ensure_loaded(self, name: str, client_id: str = "") -> None:
        """Load a model for a client, if it is not loaded, before there is a turn for it.

        Raises:
            InferenceCenterError: ``model_not_found``, or why it could not be loaded. The next call tries again unless
                its engine was lost too often.
        """
        model = self._get(name)
        if (failure := model.supervisor.load_failure) is not None:
            if model.supervisor.has_turns:
                self._renew(model)
            else:
                self._forget(model)
            raise failure
        if model.supervisor.given_up:
            raise unavailable(model.supervisor.status, given_up=True)
        model.supervisor.wake(client_id)

    def release(self, session_id: str) -> None:
        """Have all engines drop a session's KV."""
        for engine in self._begun:
            engine.release(session_id)

    def limit(self, limit_for: Callable[[int], EngineLimits]) -> None:
        """Send every ready engine its limits, which depend on its slots."""
        for supervisor in self.supervisors:
            status = supervisor.status
            if status.state is EngineState.READY and status.model is not None:
                supervisor.send(limit_for(status.model.slots))

    def swap(self, name: str, on_progress: Callable[[Swap], None]) -> None:
        """Load a model and make it the default; ``on_progress`` is called with the progress.

        Raises:
            InferenceCenterError: ``model_not_found``, or ``model_loading`` during another swap.
        """
        self._registry.get(name, field="name")
        if self._changing.locked():
            raise InferenceCenterError(
                ErrorCode.MODEL_LOADING, "another model is being loaded", retry_after_ms=1000, field="name"
            )
        self._tasks.spawn(self._swap(name, on_progress), name="swap")

    def unload(self, name: str) -> None:
        """Unload a model when its turns have ended.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        self._registry.get(name, field="name")
        if (model := self._models.get(name)) is not None:
            self._tasks.spawn(model.supervisor.evict(interrupts=False), name="unload")

    def drain_node(self, name: str) -> None:
        """Begin to move the sessions of a machine to other ones; see ``ReplicaSet.drain``. New ones go elsewhere.

        Engines that only use its devices are started again without them; see ``RpcNodes.drain``.

        Raises:
            InferenceCenterError: ``invalid_request`` for an unknown machine, or one without which a model has none;
                ``storage_unavailable`` if the next daemon would not know of it.
        """
        nodes = self._known_node(name)
        for spec in self._registry.models.values():
            if name in spec.nodes and all(each == name or nodes.is_drained(each) for each in spec.nodes):
                raise InferenceCenterError(
                    ErrorCode.INVALID_REQUEST,
                    f"{spec.name} would have no machine that is not drained",
                    field="node",
                    hint=f"Add another one to `nodes` of {spec.name} first.",
                )
        nodes.drain(name)
        _log.info("node_drains", node=name)
        self._retiring.spawn(self._apply_drain(nodes, name), name="drain")

    def undrain_node(self, name: str) -> None:
        """Use a machine again that was drained.

        Raises:
            InferenceCenterError: ``invalid_request`` for an unknown machine, ``storage_unavailable`` as above.
        """
        nodes = self._known_node(name)
        nodes.undrain(name)
        _log.info("node_returns", node=name)
        self._retiring.spawn(self._apply_drain(nodes, name), name="undrain")

    def _known_node(self, name: str) -> NodeTable:
        if self._nodes is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, "the daemon is in no cluster", field="node", hint="Set cluster.address."
            )
        known = [each.name for each in self.nodes]
        if name not in known:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"node is {name!r}, which is no machine of the cluster",
                field="node",
                hint=f"One of: {', '.join(known)}.",
            )
        return self._nodes

    def _nodes_changed(self) -> None:
        assert self._nodes is not None, "its machines were read"
        usable = frozenset(name for name in self._nodes.joined if not self._nodes.is_drained(name))
        for rpc in self._on_rpc_nodes:
            self._retiring.spawn(rpc.rejoin(usable), name="rejoin")
        if not self._follows:
            self._follows = True
            self._retiring.spawn(self._follow_nodes(), name="follow-nodes")

    @property
    def _on_rpc_nodes(self) -> list[RpcNodes]:
        return [model.rpc for model in self._begun.values() if model.rpc is not None]

    async def _follow_nodes(self) -> None:
        """Have the models with replicas on all machines follow those that join and leave."""
        assert self._nodes is not None, "its machines were read"
        try:
            for engine, model in tuple(self._begun.items()):
                if isinstance(engine, ReplicaSet) and model.spec.on_all_nodes:
                    await engine.follow(self._nodes.joined, self._nodes.is_drained)
        finally:
            self._follows = False

    async def _apply_drain(self, nodes: NodeTable, name: str) -> None:
        """Have the engines that use a machine do what was requested last; one change of a machine at a time."""
        async with self._node_changes[name]:
            sets = [engine for engine in self._begun if isinstance(engine, ReplicaSet)]
            if not nodes.is_drained(name):
                for each in sets:
                    each.undrain(name)
                for rpc in self._on_rpc_nodes:
                    rpc.undrain()
                return
            on_rpc_nodes = (rpc.drain(name) for rpc in self._on_rpc_nodes)
            await asyncio.gather(*(each.drain(name) for each in sets), *on_rpc_nodes)
            nodes.finish_drain(name)
            _log.info("node_drained", node=name)

    def apply(self, registry: Registry) -> None:
        """Apply other entries; a running model whose entry differs is replaced."""
        self._tasks.spawn(self._apply(registry), name="apply")

    # Changes, one at a time.

    async def _swap(self, name: str, on_progress: Callable[[Swap], None]) -> None:
        async with self._changing:
            await self._make_default(name, on_progress)

    async def _make_default(self, name: str, on_progress: Callable[[Swap], None]) -> None:
        try:
            failure = await self._try_default(name, on_progress)
        except Exception as error:  # noqa: BLE001 - a swap ends and is reported, whatever the new model raises
            failure = error.message if isinstance(error, InferenceCenterError) else reason_of(error)
        if failure is not None:
            _log.error("swap_failed", model=name, reason=failure, default=self._default)
            if name != self._default:
                self._get(self._default).supervisor.wake(urgent=True)
                # Answers that have begun wait until the model is requested again.
                if (model := self._models.get(name)) is not None and not model.supervisor.has_turns:
                    self._forget(model)
            on_progress(Swap(model=name, phase="failed", detail=failure))
            return
        on_progress(Swap(model=name, phase="done", done=1.0))
        if (loaded := self._get(name).supervisor.status.model) is not None:
            for listener in self._swap_listeners:
                listener(loaded)

    async def _try_default(self, name: str, on_progress: Callable[[Swap], None]) -> str | None:
        """Load a model and make it the default; return why that failed."""
        model = self._get(name)
        if model.supervisor.status.state is EngineState.FAILED:
            model = self._renew(model)
        model.revive()
        old = self._get(self._default)
        # Turns that wait for the old model go to the new one: they would only request the memory back.
        old.supervisor.pause(paused=old is not model)
        try:
            failure = await self._load(model, on_progress)
            if failure is None:
                self._default = name
                _log.info("model_changed", model=name, before=old.spec.name)
                self._listeners.notify(self.status)
                old.supervisor.recall()
            return failure
        finally:
            old.supervisor.pause(paused=False)

    async def _load(self, model: ManagedModel, on_progress: Callable[[Swap], None]) -> str | None:
        """Wait until a model is ready; return why it will not be."""
        sent: Swap | None = None
        loads_before = model.supervisor.loads
        model.supervisor.wake(urgent=True)
        while True:
            status = model.supervisor.status
            # One that got ready may have been evicted again before this coroutine ran.
            if status.state is EngineState.READY or model.supervisor.loads > loads_before:
                return None
            if status.state not in _ON_ITS_WAY:
                return status.detail or f"its engine is {status.state}"
            phase = "draining" if self._model_cache.waits(model.supervisor) else "loading"
            now = Swap(model=model.spec.name, phase=phase, done=round(status.load_fraction, 2))
            if now != sent:
                on_progress(now)
                sent = now
            await self._changed_event.wait()

    async def _apply(self, registry: Registry) -> None:
        async with self._changing:
            before = self._registry
            self._registry = replace(registry, models={**before.models, **registry.models})
            for name, spec in registry.models.items():
                if (model := self._models.get(name)) is None:
                    continue
                has_failed = model.supervisor.status.state is EngineState.FAILED
                if not _runs_alike(spec, before.models.get(name)):
                    await self._replace(model, spec)
                elif has_failed:
                    self._renew(model)
                else:
                    model.revive()
                if has_failed and name == self._default:
                    self._models[name].supervisor.wake(urgent=True)
            if registry.default not in (before.default, self._default):
                await self._make_default(registry.default, lambda _: None)
            for name in set(before.models) - set(registry.models) - {self._default}:
                if (model := self._models.pop(name, None)) is not None:
                    self._retire(model)
            kept = {self._default: self._registry.models[self._default]}
            changed = {name: self._registry.models[name] for name in registry.models}
            self._registry = replace(registry, models=kept | changed)
            _log.info("models_applied", models=self.names, default=self._default)

    async def _roll(self, old: ManagedModel, replicas: ReplicaSet, spec: ModelSpec) -> None:
        """Replace the replicas of a model one after the other; if a new one cannot be loaded, the old ones stay."""
        failures: list[str | None] = []

        async def roll() -> None:
            failures.append(await replicas.roll(spec))

        # It is not cancelled with this task: an engine that is being ended has to be awaited.
        await asyncio.shield(self._retiring.spawn(roll(), name="roll"))
        if (failure := failures[0]) is not None:
            self._keep(old, failure)
            return
        rolled = ManagedModel(spec, replicas.replicas[0].planner, replicas)
        self._models[spec.name] = self._begun[replicas] = rolled
        _log.info("model_replaced", model=spec.name)
        self._on_status(replicas, replicas.status)

    def _keep(self, old: ManagedModel, reason: str) -> None:
        """Keep a model that could not be replaced."""
        _log.error("model_not_replaced", model=old.spec.name, reason=reason)
        self._registry = replace(self._registry, models={**self._registry.models, old.spec.name: old.spec})

    async def _replace(self, old: ManagedModel, spec: ModelSpec) -> None:
        """Replace a model's engine; if the new one cannot be loaded, the old one stays.

        The new one is loaded beside the old, unless both would keep KV in the same place, or use other machines, where
        one engine would take the place or the RPC servers of the other: then the old one ends first. The new one
        continues its turns if it would generate the same text.
        """
        if isinstance(old.supervisor, ReplicaSet) and old.supervisor.can_roll(spec):
            await self._roll(old, old.supervisor, spec)
            return
        new = self._make(spec, self._model_cache.admit)
        is_alike = cache_key(spec) == cache_key(old.spec)
        same_place = is_alike or spec.uses_other_machines or old.spec.uses_other_machines
        was_loaded = old.supervisor.holds_memory
        if same_place:
            old.supervisor.pause(paused=True)
            await old.supervisor.evict()
        self._begin(new, asleep=True)
        failure = await self._load(new, lambda _: None) if was_loaded else None
        if failure is not None:
            self._keep(old, failure)
            self._retire(new)
            old.supervisor.pause(paused=False)
            old.supervisor.wake(urgent=True)
            return
        self._models[spec.name] = new
        _log.info("model_replaced", model=spec.name)
        old.supervisor.recall(begun=is_alike)
        old.supervisor.pause(paused=False)
        self._retire(old)
        self._on_status(new.supervisor, new.supervisor.status)

    async def _fits_beside(self, engine: ModelEngine, others: Sequence[ModelEngine]) -> bool:
        """Return whether a model gets as much memory beside the loaded ones as it would alone.

        Raises:
            InferenceCenterError: It cannot be planned, whatever the planner raised.
        """
        loaded = [
            planner for each in others for supervisor, planner in self._begun[each].engines if supervisor.holds_memory
        ]
        starting = [(each, planner) for each, planner in self._begun[engine].engines if not each.holds_memory]
        with foreign_input(partial(_not_planned, engine.name)):
            for supervisor, planner in starting:
                if not await asyncio.to_thread(planner.fits_beside, loaded, supervisor.options):
                    return False
        return True

    def _get(self, name: str) -> ManagedModel:
        """Return a model, built at the first request.

        Raises:
            InferenceCenterError: ``model_not_found``.
        """
        if (model := self._models.get(name)) is None:
            model = self._models[name] = self._make(self._registry.get(name), self._model_cache.admit)
            if self._started:
                self._begin(model, asleep=True)
        return model

    def _begin(self, model: ManagedModel, *, asleep: bool, after_crash: bool = False) -> None:
        self._begun[model.supervisor] = model
        self._model_cache.add(model.supervisor)
        model.supervisor.subscribe(partial(self._on_status, model.supervisor))
        model.supervisor.start(asleep=asleep, after_crash=after_crash)

    def _on_status(self, engine: ModelEngine, status: EngineStatus) -> None:
        self._state_changed()
        self._model_cache.reevaluate()
        name = engine.name
        if (model := self._models.get(name)) is None or model.supervisor is not engine:
            return
        for listener in self._model_listeners:
            try:
                listener(name, status)
            # The same border as in ``StatusListeners``.
            except Exception:  # noqa: BLE001
                _log.exception("engine_listener_failed", model=name, state=status.state.value)
        if name == self._default:
            self._listeners.notify(status)

    def _state_changed(self) -> None:
        self._changed_event.set()
        self._changed_event.clear()

    def _forget(self, model: ManagedModel) -> None:
        """Remove a model that could not be loaded; the next request builds it again."""
        if self._models.get(model.spec.name) is model:
            del self._models[model.spec.name]
        self._retire(model)

    def _renew(self, model: ManagedModel) -> ManagedModel:
        """Replace a failed engine by a new one, which is asleep, with the turns that wait for it."""
        _log.info("engine_renewed", model=model.spec.name, detail=model.supervisor.status.detail)
        renewed = self._models[model.spec.name] = self._make(
            self._registry.get(model.spec.name), self._model_cache.admit
        )
        renewed.supervisor.inherit(model.supervisor.status.model)
        self._begin(renewed, asleep=True)
        model.supervisor.recall(begun=True)
        self._retire(model)
        return renewed

    def _retire(self, model: ManagedModel) -> None:
        self._retiring.spawn(self._finish(model), name=model.spec.name)

    async def _finish(self, model: ManagedModel) -> None:
        await model.supervisor.retire()
        del self._begun[model.supervisor]
        self._model_cache.remove(model.supervisor)


def _runs_alike(spec: ModelSpec, other: ModelSpec | None) -> bool:
    # These are looked up for each turn or request, so they need no other engine.
    return other is not None and replace(spec, params={}, matryoshka=other.matryoshka) == replace(other, params={})
