"""Plans each engine's start by the memory free at that moment, and reports the plan in the protocol's terms."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input, reason_of
from inferencecenter.hardware import nvml
from inferencecenter.hardware.devices import find_devices, node_devices, select_devices
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.memory import read_host
from inferencecenter.hardware.model_shape import describe, describe_projector, with_adapters
from inferencecenter.hardware.placement import MIB, PlacementConstraints, margin_bytes
from inferencecenter.hardware.split import CONTEXT_BYTES, USUAL_N_UBATCH, plan
from inferencecenter.ipc.port import EngineState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inferencecenter.config.sections import EngineSettings, LoraSettings, ModelKind
    from inferencecenter.config.settings import GpuSettings
    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.placement import Device, Host, PlacementPlan
    from inferencecenter.hardware.vram_calibration import VramCalibration
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse, ModelInfo
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.protocol.values import EnginePlan

_log = structlog.get_logger(__name__)

_PERCENT: Final = 100
_MOST_OFF: Final = 1.5
_MOST_CHARS: Final = 512
_MOST_DEVICES: Final = 64
_MOST_REASONS: Final = 32
_MOST_ADVICE: Final = 128


def placement_constraints(engine: EngineSettings, gpu: GpuSettings) -> PlacementConstraints:
    """Return the constraints that the settings put on a plan."""
    return PlacementConstraints(
        slots=engine.slots,
        n_ctx=engine.n_ctx,
        n_gpu_layers=engine.n_gpu_layers,
        n_batch=engine.n_batch,
        n_ubatch=engine.n_ubatch,
        n_threads=engine.n_threads,
        kv_type_k=engine.kv_type_k,
        kv_type_v=engine.kv_type_v,
        flash_attention=engine.flash_attention,
        split_mode=gpu.split_mode,
        main_gpu=-1 if gpu.main_gpu is None else gpu.main_gpu,
        tensor_split=gpu.tensor_split,
        margin_bytes=None if gpu.margin_mib is None else gpu.margin_mib * MIB,
        quantized_kv=gpu.quantized_kv,
        prefer=gpu.prefer,
        expert_offload=gpu.expert_offload,
    )


USUAL_TEXT_TOKENS: Final = 2048
"""Maximum text length of embedding models that allow longer ones: a text is computed at once, including attention."""


def embedding_constraints(constraints: PlacementConstraints, model: ModelShape) -> PlacementConstraints:
    """Return the constraints of a model that makes embeddings: its longest text is one batch, in one sequence.

    Flash attention pays on processors too, because all rows of a batch are computed together and no history precedes
    them: full batches take 40 % less time.
    """
    n_ctx = min(constraints.n_ctx or USUAL_TEXT_TOKENS, model.n_ctx_train)
    n_batch = max(n_ctx, constraints.n_ubatch or USUAL_N_UBATCH)
    flash_attention = "on" if constraints.flash_attention == "auto" else constraints.flash_attention
    return replace(
        constraints,
        slots=1,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_ubatch=n_batch,
        flash_attention=flash_attention,
        embeds=True,
    )


def constraints_of(
    engine: EngineSettings, gpu: GpuSettings, model: ModelShape, kind: ModelKind
) -> PlacementConstraints:
    """Return the constraints on the plan of a model of this kind."""
    constraints = placement_constraints(engine, gpu)
    return constraints if kind == "chat" else embedding_constraints(constraints, model)


def lora_bytes(paths: Iterable[Path]) -> int:
    """Return the total size of adapter files; a file that cannot be read is left for the engine to refuse."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    return total


def read_shape(
    path: Path, lora: Iterable[LoraSettings] = (), draft: Path | None = None, mmproj: Path | None = None
) -> ModelShape:
    """Read the shape of a model with its adapters, its draft model and its projector from the headers of the files.

    Raises:
        InferenceCenterError: ``invalid_model_file``.
    """
    shape = with_adapters(describe(read_gguf(path)), lora_bytes(each.path for each in lora))
    if draft is not None:
        shape = replace(shape, draft=describe(read_gguf(draft)))
    return shape if mmproj is None else replace(shape, projector=describe_projector(read_gguf(mmproj)))


class ReplicaShare:
    """The part of the machine for which one of several replicas of a model is planned.

    With at least as many GPUs as replicas each has GPUs of its own, unless the settings distribute layers over them
    (``gpu.main_gpu``, ``gpu.tensor_split``). Else each gets an equal part of the free memory of every GPU. Cores and
    the host's memory are divided equally in both cases.

    Args:
        index: The replica's number, from 0.
        count: The number of replicas.
        siblings: Returns the planners of the other replicas that are loaded: their memory is not free, but divided too.
    """

    def __init__(self, index: int, count: int, *, siblings: Callable[[], Sequence[Planner]]) -> None:
        self._index = index
        self._count = count
        self._siblings = siblings

    def devices(self, found: tuple[Device, ...], *, are_divisible: bool) -> tuple[Device, ...]:
        """Return the GPUs of this replica, or all with the memory that it may use."""
        if self.has_own_gpus(len(found), are_divisible=are_divisible):
            begin, end = (len(found) * each // self._count for each in (self._index, self._index + 1))
            return found[begin:end]
        without_siblings = _without(self._plans(), found)
        return tuple(
            replace(device, free_bytes=min(device.free_bytes, whole.free_bytes // self._count))
            for device, whole in zip(found, without_siblings, strict=True)
        )

    def has_own_gpus(self, n_gpus: int, *, are_divisible: bool) -> bool:
        """Return whether no other replica uses the same GPUs."""
        return are_divisible and n_gpus >= self._count

    def host(self, host: Host) -> Host:
        """Return the host with the memory and the cores that this replica may use."""
        cores = max(1, host.cores // self._count)
        if host.available_bytes is None:
            return replace(host, cores=cores)
        whole_bytes = _freed(host, self._plans()).available_bytes or 0
        return replace(host, available_bytes=min(host.available_bytes, whole_bytes // self._count), cores=cores)

    def _plans(self) -> list[PlacementPlan]:
        return [plan for sibling in self._siblings() if (plan := sibling.placement) is not None]


def first_share(
    spec: ModelSpec, gpu: GpuSettings, devices: tuple[Device, ...], host: Host
) -> tuple[tuple[Device, ...], Host]:
    """Return the part of GPUs and host for which the first replica of a model is planned, with none loaded."""
    if spec.replicas == 1:
        return devices, host
    share = ReplicaShare(0, spec.replicas, siblings=tuple)
    are_divisible = gpu.main_gpu is None and not gpu.tensor_split
    return share.devices(devices, are_divisible=are_divisible), share.host(host)


class Planner:
    """Completes the options of each engine, and compares the memory it took with the plan.

    Once an engine has been ready, later ones get the same slots, contexts and KV types, so that waiting turns still fit
    and parked KV stays usable; layers and batches are planned anew.

    Args:
        engine: The engine settings.
        gpu: The GPU settings.
        calibration: How far earlier plans were off.
        share: The part of the machine for this replica; ``None`` if the model has one engine.
        devices: Finds GPUs.
        host: Reads memory and cores.
        used_bytes: Returns what a process (by id) uses of a GPU (by index), if the driver reports it.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; the last three are the surroundings
        self,
        *,
        engine: EngineSettings,
        gpu: GpuSettings,
        calibration: VramCalibration,
        share: ReplicaShare | None = None,
        devices: Callable[[Sequence[str], Sequence[str]], tuple[Device, ...]] = find_devices,
        host: Callable[[], Host] = read_host,
        used_bytes: Callable[[int, int], int | None] = nvml.process_bytes,
    ) -> None:
        self._gpu = gpu
        self._constraints = placement_constraints(engine, gpu)
        self._calibration = calibration
        self._share = share
        self._find_devices = devices
        self._read_host = host
        self._used_bytes = used_bytes
        self._model: ModelShape | None = None
        self._unknown = False
        self._plan: PlacementPlan | None = None
        self._report: Callable[[], EnginePlan] | None = None
        self._planned_layers: int | None = None
        self._compared_pid = 0

    @property
    def report(self) -> EnginePlan | None:
        """The plan of the last start, with measured usage where there is some; ``None`` if no plan was made."""
        return None if self._report is None else self._report()

    @property
    def placement(self) -> PlacementPlan | None:
        """The placement of the last start."""
        return self._plan

    def first(self, options: EngineOptions) -> EngineOptions:
        """Return the options of the first engine.

        Raises:
            InferenceCenterError: ``invalid_config`` for a configured GPU that does not exist.
        """
        return self._completed(options)

    def again(self, options: EngineOptions) -> EngineOptions:
        """Return the options of a further engine; fewer layers than were planned before are a limit from now on.

        Raises:
            InferenceCenterError: ``invalid_config`` for a configured GPU that does not exist.
        """
        if self._planned_layers is not None and 0 <= options.n_gpu_layers < self._planned_layers:
            self._constraints = replace(self._constraints, most_gpu_layers=options.n_gpu_layers)
        return self._completed(options)

    def fits_beside(self, others: Sequence[Planner], options: EngineOptions) -> bool:
        """Return whether the model gets as much memory beside the loaded ones as it would alone. Blocks.

        Raises:
            InferenceCenterError: ``invalid_config`` for a model that was never loaded and does not fit even alone: no
                model is evicted for one that would run out of memory, or take it from other programs.
        """
        if not self._knows_model(options):
            return True
        with foreign_input(partial(_unplannable, options)):
            return self._fits_beside(others)

    def _fits_beside(self, others: Sequence[Planner]) -> bool:
        assert self._model is not None, "its header was read"
        found, host = self._found(), self._read_host()
        placement = plan(self._model, self._devices(found), self._host(host), self._constraints)
        taken = [each for other in others if (each := other.placement) is not None]
        freed_devices, freed_host = self._devices(_without(taken, found)), self._host(_freed(host, taken))
        alone = plan(self._model, freed_devices, freed_host, self._constraints)
        if not alone.fits and self._plan is None:
            raise InferenceCenterError(ErrorCode.INVALID_CONFIG, " ".join(alone.advice))
        return placement.fits and _worth(placement) >= _worth(alone)

    def on_status(self, status: EngineStatus) -> None:
        """Start, in a thread, the comparison for an engine that has become ready; call it on the event loop."""
        if status.state is EngineState.READY and status.model and status.pid and status.pid != self._compared_pid:
            self._compared_pid = status.pid
            asyncio.get_running_loop().run_in_executor(None, self._try_to_compare, status.model, status.pid)

    def _try_to_compare(self, model: ModelInfo, pid: int) -> None:
        try:
            self.compare(model, pid)
        except Exception as error:  # noqa: BLE001 - the driver may fail: without its figures the plan stays as it is
            _log.warning("vram_not_compared", reason=reason_of(error))

    def compare(self, model: ModelInfo, pid: int) -> None:
        """Log what a ready engine took of each GPU, and store how far the plan was off. Blocks."""
        placement, report = self._plan, self._report
        if placement is None or report is None or self._model is None:
            return
        setup = placement.setup
        self._constraints = replace(
            self._constraints,
            slots=setup.slots,
            n_ctx=setup.n_ctx,
            kv_type_k=setup.kv_type_k,
            kv_type_v=setup.kv_type_v,
        )
        taken: dict[str, int] = {}
        for device, demand in zip(placement.devices, placement.demand.devices, strict=True):
            used_bytes = self._used(device, pid, model.memory)
            if used_bytes is None:
                continue
            if not demand.weight_bytes + demand.kv_bytes <= used_bytes <= _MOST_OFF * demand.bytes:
                # Other programs changed the free memory too: the figure is unusable.
                _log.info("vram_not_compared", gpu=device.name, used_mib=used_bytes // MIB)
                continue
            _log.info(
                "vram_compared",
                gpu=device.name,
                planned_mib=demand.bytes // MIB,
                used_mib=used_bytes // MIB,
                off_percent=round(_PERCENT * (used_bytes - demand.bytes) / demand.bytes, 1),
            )
            self._calibration.put(self._model.digest, device.id, estimated_bytes=demand.bytes, used_bytes=used_bytes)
            taken[device.id] = used_bytes
        measured = with_measured_usage(report(), taken)
        if self._report is report:  # no other start was planned meanwhile
            self._report = lambda: measured

    def _knows_model(self, options: EngineOptions) -> bool:
        """Read the model's header once; return whether there is one to plan by."""
        if self._model is None and not self._unknown and options.backend == "llama":
            try:
                with foreign_input(partial(_unplannable, options)):
                    draft = Path(options.draft_path) if options.draft_path else None
                    mmproj = Path(options.mmproj_path) if options.mmproj_path else None
                    self._model = read_shape(Path(options.model_path), options.lora, draft, mmproj)
                    if options.kind != "chat":
                        self._constraints = embedding_constraints(self._constraints, self._model)
            except InferenceCenterError as error:
                # llama.cpp may support files that this parser does not; otherwise the engine reports the error.
                _log.warning("plan_impossible", reason=error.message)
                self._unknown = True
        return self._model is not None

    def _completed(self, options: EngineOptions) -> EngineOptions:
        if not self._knows_model(options):
            return options
        try:
            return self._planned(options)
        except InferenceCenterError as error:
            if error.code is ErrorCode.INVALID_CONFIG:
                raise
            _log.warning("plan_impossible", reason=error.message)
            return options

    def _planned(self, options: EngineOptions) -> EngineOptions:
        with foreign_input(partial(_unplannable, options)):
            return self._make_plan(options)

    def _make_plan(self, options: EngineOptions) -> EngineOptions:
        model, constraints = self._model, self._constraints
        assert model is not None, "its header was read"
        devices, host = self._devices(self._found()), self._host(self._read_host())
        placement = plan(model, devices, host, constraints)
        self._plan = placement
        # When it is first read: the engine's process waits for the options.
        self._report = cache(partial(plan_report, placement, model=model, host=host, constraints=constraints))
        _report(placement)
        if not devices and constraints.n_gpu_layers > 0:
            # Layers are requested, and the engine reports that there is no GPU for them.
            return _with_setup(options, placement)
        self._planned_layers = placement.n_gpu_layers
        return _with_setup(options, placement).replace(
            n_gpu_layers=placement.n_gpu_layers,
            # Without a GPU an engine that has the machine for itself counts its cores.
            n_threads=placement.n_threads if placement.devices or self._share else options.n_threads,
            devices=tuple(device.id for device in placement.devices),
            split_mode=placement.split_mode,
            main_gpu=placement.main_gpu,
            tensor_split=placement.tensor_split,
            cpu_tensors=placement.cpu_tensors,
            draft_device=placement.draft_device,
            mmproj_device=placement.mmproj_device,
            gpu_optional=constraints.n_gpu_layers < 0,
        )

    def _found(self) -> tuple[Device, ...]:
        return self._find_devices(self._gpu.devices, self._gpu.rpc_servers)

    def _devices(self, found: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return this engine's part of the GPUs, corrected by what earlier plans were off."""
        assert self._model is not None, "its header was read"
        if self._share is not None:
            found = self._share.devices(found, are_divisible=self._gpus_are_divisible)
        return tuple(
            replace(device, correction_bytes=self._calibration.extra_bytes(self._model.digest, device.id))
            for device in found
        )

    @property
    def _gpus_are_divisible(self) -> bool:
        return self._constraints.main_gpu < 0 and not self._constraints.tensor_split

    def _host(self, host: Host) -> Host:
        return host if self._share is None else self._share.host(host)

    def _used(self, device: Device, pid: int, memory: Sequence[BufferUse]) -> int | None:
        """Return what the engine uses of a GPU: by the driver, else by the decrease in free memory, else by llama.cpp.

        Free memory also changes with other programs; llama.cpp's figures lack what the driver allocates for itself.
        """
        if device.index >= 0:
            own = self._used_bytes(device.index, pid)
            if own is not None:
                return own
            found = self._find_devices((), ())
            shares = self._share is not None and not self._share.has_own_gpus(
                len(found), are_divisible=self._gpus_are_divisible
            )
            now = next((each for each in found if each.id == device.id), None)
            # Other replicas change the free memory of a GPU that they share.
            return None if now is None or shares else max(0, device.free_bytes - now.free_bytes)
        names = {device.id, *device.aliases}
        buffers = [use for use in memory if use.name in names]
        return (
            CONTEXT_BYTES + sum(use.weight_bytes + use.kv_bytes + use.compute_bytes for use in buffers)
            if buffers
            else None
        )


def _unplannable(options: EngineOptions, reason: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_MODEL_FILE,
        f"{options.model_path} cannot be planned for: {reason}.",
        hint="Download the file again, or set engine.n_gpu_layers, engine.slots and engine.n_ctx.",
        field="model.path",
    )


def _without(taken: Sequence[PlacementPlan], devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the GPUs with the memory of these plans added to what is free."""
    freed = Counter[str]()
    for placement in taken:
        freed.update(
            {
                device.id: demand.bytes
                for device, demand in zip(placement.devices, placement.demand.devices, strict=True)
            }
        )
    return tuple(
        replace(device, free_bytes=min(device.total_bytes, device.free_bytes + freed[device.id])) for device in devices
    )


def _freed(host: Host, taken: Sequence[PlacementPlan]) -> Host:
    if host.available_bytes is None:
        return host
    return replace(host, available_bytes=host.available_bytes + sum(placement.demand.host_bytes for placement in taken))


def _worth(placement: PlacementPlan) -> tuple[int, int, int, bool]:
    # These must not decrease because other models are loaded; longer contexts are optional.
    return placement.n_gpu_layers, -len(placement.cpu_tensors), placement.setup.slots, bool(placement.mmproj_device)


def _with_setup(options: EngineOptions, placement: PlacementPlan) -> EngineOptions:
    flash_attention = options.flash_attention if placement.setup.flash_attention else "off"
    setup = asdict(placement.setup) | {"flash_attention": flash_attention}
    if options.kind != "chat":  # how many tokens are computed at once; only a single text may exceed it
        setup |= {"n_batch": options.n_batch, "n_ubatch": options.n_ubatch}
    return options.replace(**setup)


def _report(placement: PlacementPlan) -> None:
    _log.info(
        "planned",
        gpu_layers=placement.n_gpu_layers,
        gpus=[device.name for device in placement.devices],
        slots=placement.setup.slots,
        n_ctx=placement.setup.n_ctx,
        vram_mib=[demand.bytes // MIB for demand in placement.demand.devices],
        host_mib=placement.demand.host_bytes // MIB,
    )
    for reason in placement.reasons:
        _log.debug("plan_reason", name=reason.name, value=reason.value, why=reason.why, explicit=reason.explicit)
    if not placement.fits:
        _log.warning("plan_does_not_fit", reason=" ".join(placement.advice))


def plan_report(
    placement: PlacementPlan, *, model: ModelShape, host: Host, constraints: PlacementConstraints
) -> EnginePlan:
    """Return a plan in the protocol's terms. Texts are truncated, since some come from files and drivers."""
    from inferencecenter.protocol.values import (  # noqa: PLC0415 - the first engine is planned before their import
        EnginePlan,
        PlannedDevice,
        PlannedHost,
        PlanReason,
    )

    setup, demand = placement.setup, placement.demand
    parts = zip(placement.devices, demand.devices, placement.layer_counts, strict=True)
    return EnginePlan(
        fits=placement.fits,
        layers=model.n_layers + 1,
        n_gpu_layers=placement.n_gpu_layers,
        split_mode=placement.split_mode,
        slots=setup.slots,
        n_ctx=setup.n_ctx,
        n_batch=setup.n_batch,
        n_ubatch=setup.n_ubatch,
        kv_type_k=setup.kv_type_k,
        kv_type_v=setup.kv_type_v,
        flash_attention=setup.flash_attention,
        n_threads=placement.n_threads,
        devices=tuple(
            PlannedDevice(
                id=_cut(device.id),
                name=_cut(device.name),
                total_bytes=device.total_bytes,
                free_bytes=device.free_bytes,
                margin_bytes=margin_bytes(device, constraints),
                layers=layers,
                weight_bytes=own.weight_bytes,
                kv_bytes=own.kv_bytes,
                compute_bytes=own.compute_bytes,
                context_bytes=own.context_bytes,
            )
            for device, own, layers in parts
        )[:_MOST_DEVICES],
        host=PlannedHost(
            available_bytes=host.available_bytes,
            weight_bytes=demand.host_weight_bytes,
            kv_bytes=demand.host_kv_bytes,
            compute_bytes=demand.host_compute_bytes,
            expert_layers=placement.experts_in_host,
        ),
        reasons=tuple(
            PlanReason(name=_cut(each.name), value=_cut(each.value), why=_cut(each.why), explicit=each.explicit)
            for each in placement.reasons[:_MOST_REASONS]
        ),
        advice=tuple(map(_cut, placement.advice[:_MOST_ADVICE])),
    )


def with_measured_usage(plan: EnginePlan, used_bytes: Mapping[str, int]) -> EnginePlan:
    """Return the plan with the measured usage of GPUs, by their ids."""
    devices = (each.model_copy(update={"used_bytes": used_bytes.get(each.id)}) for each in plan.devices)
    return plan.model_copy(update={"devices": tuple(devices)})


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}\N{HORIZONTAL ELLIPSIS}"


class RpcPlanner(Planner):
    """Plans an engine that also uses devices of nodes, at each launch: then it is known which there are."""

    _on_nodes: tuple[Device, ...] = ()

    def first(self, options: EngineOptions) -> EngineOptions:
        return options

    def again(self, options: EngineOptions) -> EngineOptions:
        return options

    def fits_beside(self, others: Sequence[Planner], options: EngineOptions) -> bool:
        """See ``Planner``; before the first launch the devices of the nodes are unknown, and nothing is evicted."""
        return not self._on_nodes or super().fits_beside(others, options)

    def at_launch(self, options: EngineOptions, servers: Mapping[str, str]) -> EngineOptions:
        """Return the options of an engine that reaches the RPC servers of nodes at these addresses. Blocks.

        Raises:
            InferenceCenterError: ``invalid_config`` for a configured GPU that does not exist.
        """
        self._on_nodes = node_devices(servers)
        options = super().again(options)
        # To the engine a device is what llama.cpp calls it, which is another name at each launch.
        names = {device.id: device.aliases[0] for device in self._on_nodes}
        return options.replace(
            devices=tuple(names.get(device, device) for device in options.devices),
            draft_device=names.get(options.draft_device, options.draft_device),
            mmproj_device=names.get(options.mmproj_device, options.mmproj_device),
        )

    @property
    def fits_host(self) -> bool:
        """Whether this machine has the memory for what the last plan leaves to it."""
        host = report.host if (report := self.report) else None
        if host is None or host.available_bytes is None:
            return True
        return host.weight_bytes + host.kv_bytes + host.compute_bytes <= host.available_bytes

    def _found(self) -> tuple[Device, ...]:
        return select_devices((*self._find_devices((), self._gpu.rpc_servers), *self._on_nodes), self._gpu.devices)


class RemotePlanner(Planner):
    """Plans nothing here, for an engine on another machine: its host plans there."""

    def first(self, options: EngineOptions) -> EngineOptions:
        return options

    def again(self, options: EngineOptions) -> EngineOptions:
        return options

    def fits_beside(self, others: Sequence[Planner], options: EngineOptions) -> bool:
        del others, options
        return True
