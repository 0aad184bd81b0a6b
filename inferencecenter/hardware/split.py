"""Divides a model between GPUs and the host: ``plan(model, devices, host, constraints)``. Pure.

llama.cpp puts the output matrix and the *last* layers on GPUs: ``n_gpu_layers`` of ``n`` is the output and ``n - 1``
layers. A layer's KV is where its weights are. If a model does not fit, the plan reduces in this order: slots, the
precision of KV (if allowed), the batch size, experts on GPUs, layers on GPUs, the GPU altogether. The number of layers
is the largest that all earlier reductions allow; then each reduction is undone as far as it fits.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.hardware.explain import advice, reasons
from inferencecenter.hardware.footprint import (
    RuntimeConfig,
    compute_bytes,
    host_compute_bytes,
    kv_bytes,
    offload_compute_bytes,
)
from inferencecenter.hardware.placement import (
    MIB,
    NO_DEMAND,
    Demand,
    DeviceDemand,
    Placement,
    PlacementPlan,
    decode_threads,
    usable_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.placement import Device, Host, PlacementConstraints


_Unit = TypeVar("_Unit")

CONTEXT_BYTES: Final = 300 * MIB
"""The driver's overhead in a process that computes: its context, kernels and the matrix library's workspace."""

# Further embeddings on a GPU whose batches overlap with others': its own inputs, and those it is sent.
_FIRST_TRANSFERS, _OTHER_TRANSFERS = 4, 8
_HALVINGS: Final = 30  # small models take less than a thousandth of a large GPU


def place(  # noqa: PLR0913 - what is placed, and where
    model: ModelShape,
    setup: RuntimeConfig,
    devices: tuple[Device, ...],
    division: tuple[int, int],
    constraints: PlacementConstraints,
    *,
    draft_on_gpu: bool = False,
    projector_on_gpu: bool = False,
) -> Placement:
    """Place the layers of ``division`` on the devices, in proportion to their room.

    The division is ``n_gpu_layers`` in llama.cpp's counting, and the number of layers on GPUs whose experts stay on the
    host. A draft model and a projector are each as a whole on the first device, or in the host's memory.
    """
    n_gpu_layers, experts_in_host = division
    start = first_on_gpu(model, n_gpu_layers)
    units = list(_units(model, setup, start, experts_in_host)) if n_gpu_layers else []
    buffers = [_buffer_bytes(model, setup, number, len(devices), division) for number in range(len(devices))]
    available = [
        usable_bytes(device, constraints) - buffer - CONTEXT_BYTES
        for device, buffer in zip(devices, buffers, strict=True)
    ]
    drafting, host_drafting = _draft_demand(model.draft, setup, on_gpu=draft_on_gpu)
    if draft_on_gpu:
        available[0] -= drafting.bytes
    projecting, host_projecting = _projector_demand(model, on_gpu=projector_on_gpu)
    if projector_on_gpu:
        available[0] -= projecting.bytes
    sizes = [weights + kv for weights, kv in units]
    counts = None
    if constraints.tensor_split and len(devices) == len(constraints.tensor_split):
        counts = by_proportion(constraints.tensor_split, len(sizes))
    elif devices:
        counts = _evenly_filled(sizes, available)
    fits = counts is not None and _holds(sizes, counts, available)
    if counts is None:
        counts = by_proportion([max(1, room) for room in available], len(sizes)) if devices else ()
    return Placement(
        setup=setup,
        devices=devices,
        counts=counts,
        n_gpu_layers=n_gpu_layers,
        experts_in_host=experts_in_host,
        cpu_tensors=_cpu_tensors(model, start, experts_in_host),
        demand=Demand(
            devices=tuple(
                DeviceDemand(
                    weight_bytes=sum(weights for weights, _ in own) + sum(each.weight_bytes for each in added),
                    kv_bytes=sum(kv for _, kv in own) + sum(each.kv_bytes for each in added),
                    compute_bytes=buffer + sum(each.compute_bytes for each in added),
                    context_bytes=CONTEXT_BYTES,
                )
                for own, buffer, added in zip(
                    _cut(units, counts), buffers, chain([(drafting, projecting)], repeat(())), strict=False
                )
            ),
            host_weight_bytes=_host_weight_bytes(model, start, experts_in_host, output=n_gpu_layers == 0)
            + host_drafting.weight_bytes
            + host_projecting.weight_bytes,
            host_kv_bytes=sum(kv_bytes(layer, setup) for layer in model.layers[:start]) + host_drafting.kv_bytes,
            host_compute_bytes=host_compute_bytes(
                model, setup, n_devices=len(devices), overlaps=len(devices) > 1 and not (start or experts_in_host)
            )
            + host_drafting.compute_bytes
            + host_projecting.compute_bytes,
        ),
        fits=fits or not devices,
        draft_on_gpu=draft_on_gpu,
        projector_on_gpu=projector_on_gpu,
    )


def _draft_demand(draft: ModelShape | None, setup: RuntimeConfig, *, on_gpu: bool) -> tuple[DeviceDemand, DeviceDemand]:
    """Return the draft model's memory on a GPU and on the host."""
    if draft is None:
        return NO_DEMAND, NO_DEMAND
    whole = DeviceDemand(
        weight_bytes=draft.bytes,
        kv_bytes=sum(kv_bytes(layer, setup) for layer in draft.layers),
        compute_bytes=compute_bytes(draft, setup),
        context_bytes=0,
    )
    if not on_gpu:
        return NO_DEMAND, whole
    layers_bytes = sum(layer.bytes for layer in draft.layers)
    exchanged = host_compute_bytes(draft, setup, n_devices=1)
    return (
        replace(whole, weight_bytes=layers_bytes + draft.output_bytes),
        replace(NO_DEMAND, weight_bytes=draft.embedding_bytes, compute_bytes=exchanged),
    )


def _projector_demand(model: ModelShape, *, on_gpu: bool) -> tuple[DeviceDemand, DeviceDemand]:
    """Return the projector's memory on a GPU and on the host."""
    if model.projector is None:
        return NO_DEMAND, NO_DEMAND
    whole = replace(NO_DEMAND, weight_bytes=model.projector.weight_bytes, compute_bytes=model.projector.compute_bytes)
    return (whole, NO_DEMAND) if on_gpu else (NO_DEMAND, whole)


def first_on_gpu(model: ModelShape, n_gpu_layers: int) -> int:
    """Return the index of the first layer on a GPU: GPUs hold the last layers, and the output counts as one."""
    return min(model.n_layers, max(0, model.n_layers + 1 - n_gpu_layers))


def by_proportion(shares: Sequence[float], n_units: int) -> tuple[int, ...]:
    """Divide units as llama.cpp does: unit ``i`` goes to the first device whose cumulative share ends after it."""
    total = sum(shares)
    ends = [end / total for end in accumulate(shares)]
    owners = [min(bisect_right(ends, unit / n_units), len(shares) - 1) for unit in range(n_units)]
    return tuple(owners.count(device) for device in range(len(shares)))


def _units(model: ModelShape, setup: RuntimeConfig, start: int, experts_in_host: int) -> Iterator[tuple[int, int]]:
    """Yield weights and KV of each layer on a GPU, and finally of the output."""
    for number, layer in enumerate(model.layers[start:]):
        yield layer.dense_bytes if number < experts_in_host else layer.bytes, kv_bytes(layer, setup)
    yield model.output_bytes, 0


def _buffer_bytes(
    model: ModelShape, setup: RuntimeConfig, number: int, n_devices: int, division: tuple[int, int]
) -> int:
    """Return the compute buffer of one of several devices."""
    n_gpu_layers, experts_in_host = division
    start = first_on_gpu(model, n_gpu_layers)
    if start or experts_in_host:
        if number:
            return compute_bytes(model, setup)
        in_host = [*model.layers[:start], *model.layers[start : start + experts_in_host]]
        return offload_compute_bytes(
            model,
            setup,
            largest_bytes=max(layer.largest_bytes for layer in in_host),
            kv_layer_bytes=max((kv_bytes(layer, setup) for layer in model.layers[:start]), default=0),
        )
    if n_devices == 1:
        return compute_bytes(model, setup)
    return compute_bytes(model, setup, transfers=_OTHER_TRANSFERS if number else _FIRST_TRANSFERS)


def _host_weight_bytes(model: ModelShape, start: int, experts_in_host: int, *, output: bool) -> int:
    layers = sum(layer.bytes for layer in model.layers[:start])
    experts = sum(layer.expert_bytes for layer in model.layers[start : start + experts_in_host])
    # A tied output that is on no GPU is the embeddings themselves.
    own_output = model.output_bytes - (model.embedding_bytes if model.tied else 0)
    return model.embedding_bytes + layers + experts + (own_output if output else 0)


def _evenly_filled(sizes: Sequence[int], available: Sequence[int]) -> tuple[int, ...] | None:
    """Return how many consecutive units each device gets when all are filled to about the same fraction."""
    counts = _filled(sizes, available)
    if counts is None or len(available) == 1:
        return counts
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        filled = _filled(sizes, [int(room * middle) for room in available])
        if filled is None:
            low = middle
        else:
            counts, high = filled, middle
    return counts


def _filled(sizes: Sequence[int], available: Sequence[int]) -> tuple[int, ...] | None:
    """Return how many consecutive units each device gets when they are filled one after the other."""
    counts, next_unit = [], 0
    for room in available:
        left, count = room, 0
        while next_unit < len(sizes) and sizes[next_unit] <= left:
            left -= sizes[next_unit]
            next_unit += 1
            count += 1
        counts.append(count)
    return tuple(counts) if next_unit == len(sizes) else None


def _holds(sizes: Sequence[int], counts: Sequence[int], available: Sequence[int]) -> bool:
    return all(sum(own) <= room for own, room in zip(_cut(sizes, counts), available, strict=True))


def _cut(units: Sequence[_Unit], counts: Sequence[int]) -> Iterator[Sequence[_Unit]]:
    start = 0
    for count in counts:
        yield units[start : start + count]
        start += count


def _cpu_tensors(model: ModelShape, start: int, experts_in_host: int) -> tuple[str, ...]:
    if not experts_in_host:
        return ()
    layers = "|".join(str(layer) for layer in range(start, min(model.n_layers, start + experts_in_host)))
    return (rf"^blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps",)


USUAL_SLOTS: Final = 8
USUAL_N_CTX: Final = 4096
USUAL_N_BATCH: Final = 2048
USUAL_N_UBATCH: Final = 512
_LEAST_N_CTX: Final = 256
_BATCHES: Final = ((USUAL_N_BATCH, USUAL_N_UBATCH), (1024, 256), (512, 128))
"""Tokens per decode call, and per computation; llama.cpp's defaults first."""
_MOST_N_CTX_FOR_MANY: Final = 32_768
_QUANTIZED: Final = ("q8_0", "q4_0")
_FLOATS: Final = frozenset({"f32", "f16", "bf16"})
_FEW_THREADS: Final = 4


def plan(model: ModelShape, devices: Sequence[Device], host: Host, constraints: PlacementConstraints) -> PlacementPlan:
    """Return the plan; if even the minimum does not fit, ``fits`` is false."""
    usable = (
        tuple(devices) if constraints.main_gpu < 0 else tuple(devices[constraints.main_gpu : constraints.main_gpu + 1])
    )
    search = _Search(model, usable, host, constraints)
    fitting = search.best(projector_on_gpu=True) if model.projector is not None else None
    fitting = fitting or search.best()
    chosen = fitting or search.last_resort()
    n_threads = threads(model, chosen, host, constraints)
    return PlacementPlan(
        setup=chosen.setup,
        n_gpu_layers=chosen.n_gpu_layers,
        devices=chosen.devices,
        split_mode="layer" if len(chosen.devices) > 1 else "none",
        main_gpu=0 if chosen.devices else -1,
        layer_counts=chosen.counts,
        tensor_split=tuple(map(float, chosen.counts)) if len(chosen.devices) > 1 else (),
        experts_in_host=chosen.experts_in_host,
        cpu_tensors=chosen.cpu_tensors,
        draft_device=chosen.devices[0].id if chosen.draft_on_gpu else "",
        mmproj_device=chosen.devices[0].id if chosen.projector_on_gpu else "",
        n_threads=n_threads,
        fits=fitting is not None,
        demand=chosen.demand,
        reasons=reasons(model, chosen, n_threads=n_threads, devices=usable, constraints=constraints),
        advice=advice(model, chosen, fits=fitting is not None, host=host, constraints=constraints),
    )


def threads(model: ModelShape, chosen: Placement, host: Host, constraints: PlacementConstraints) -> int:
    """Return the number of compute threads: few if the processor only looks up embeddings, or has little to read."""
    if constraints.n_threads:
        return constraints.n_threads
    if chosen.n_gpu_layers > model.n_layers and not chosen.cpu_tensors:
        return min(_FEW_THREADS, host.cores)
    return host.cores if constraints.embeds else decode_threads(model.bytes, host.cores)


def uses_flash_attention(constraints: PlacementConstraints, *, n_gpu_layers: int, kv_types: tuple[str, str]) -> bool:
    """Return whether flash attention is used: as configured, else if a GPU computes or KV is quantized.

    On a processor llama.cpp runs it row by row for a prefill after a long history and for every generated token; short
    prompts then take three times as long (docs/decisions/0008-speed-levers.md).
    """
    if constraints.flash_attention != "auto":
        return constraints.flash_attention == "on"
    return n_gpu_layers > 0 or not set(kv_types) <= _FLOATS


class _Search:
    """Enumerates reductions in order and stops at the first configuration that fits."""

    def __init__(
        self, model: ModelShape, devices: tuple[Device, ...], host: Host, constraints: PlacementConstraints
    ) -> None:
        self._model = model
        self._host = host
        self._constraints = constraints
        self._projector_on_gpu = False
        by_size = sorted(devices, key=lambda device: (device.remote, -device.free_bytes))
        # As few GPUs as possible: a single one needs no transfers. Those of this machine first.
        self._teams = [
            tuple(device for device in devices if device in by_size[:count]) for count in range(1, len(devices) + 1)
        ]
        if (constraints.split_mode == "layer" or constraints.tensor_split) and self._teams:
            self._teams = self._teams[-1:]
        elif constraints.split_mode == "none":
            self._teams = self._teams[:1]

    def best(self, *, projector_on_gpu: bool = False) -> Placement | None:
        """Return the placement with the most layers on GPUs, then the fewest reductions; ``None`` if none fits.

        With ``projector_on_gpu`` the projector is on the first GPU if any layer is on one, and takes room of layers.
        """
        self._projector_on_gpu = projector_on_gpu
        usual = self._constraints.n_ctx or min(USUAL_N_CTX, self._model.n_ctx_train)
        n_ctx = usual
        while True:
            for n_gpu_layers in self._layer_counts():
                for in_host in self._experts_in_host(n_gpu_layers):
                    placement = self._first_fit((n_gpu_layers, in_host), n_ctx, usual=usual)
                    if placement is not None:
                        return placement
            if self._constraints.n_ctx or n_ctx <= _LEAST_N_CTX:
                return None
            n_ctx = max(_LEAST_N_CTX, n_ctx // 2)

    def last_resort(self) -> Placement:
        """Return the smallest placement, to report what is missing."""
        usual = self._constraints.n_ctx or min(USUAL_N_CTX, self._model.n_ctx_train)
        least = self._constraints.n_ctx or min(_LEAST_N_CTX, usual)
        *_, n_gpu_layers = self._layer_counts()
        *_, in_host = self._experts_in_host(n_gpu_layers)
        setup = self._least(least, n_gpu_layers=n_gpu_layers)
        team = self._teams[-1] if n_gpu_layers and self._teams else ()
        return place(self._model, setup, team, (n_gpu_layers, in_host), self._constraints)

    def _first_fit(self, division: tuple[int, int], n_ctx: int, *, usual: int) -> Placement | None:
        # The minimum of everything and on each GPU. If it does not fit, none does.
        if self._fit(self._least(n_ctx, n_gpu_layers=division[0]), division) is None:
            return None
        for setup in self._setups(n_ctx, n_gpu_layers=division[0]):
            placement = self._fit(setup, division)
            if placement is not None:
                placement = self._with_draft_on_gpu(placement)
                return self._grown(placement) if setup.n_ctx == usual else placement
        return None

    def _with_draft_on_gpu(self, placement: Placement) -> Placement:
        """Return the placement with the draft model on the first GPU, if it has room."""
        if self._model.draft is None or not placement.devices:
            return placement
        division = (placement.n_gpu_layers, placement.experts_in_host)
        moved = place(
            self._model,
            placement.setup,
            placement.devices,
            division,
            self._constraints,
            draft_on_gpu=True,
            projector_on_gpu=placement.projector_on_gpu,
        )
        return moved if moved.fits and self._host_holds(moved) else placement

    def _fit(self, setup: RuntimeConfig, division: tuple[int, int]) -> Placement | None:
        """Return the placement on the first set of GPUs that holds it."""
        for team in self._teams if division[0] else [()]:
            seeing = self._projector_on_gpu and bool(team)
            placement = place(self._model, setup, team, division, self._constraints, projector_on_gpu=seeing)
            if placement.fits and self._host_holds(placement):
                return placement
        return None

    def _grown(self, placement: Placement) -> Placement:
        """Return the placement with longer contexts, if the GPUs hold everything and have memory left.

        Neither the host's memory nor another GPU is used for that.
        """
        constraints, setup = self._constraints, placement.setup
        everything = placement.n_gpu_layers > self._model.n_layers and not placement.experts_in_host
        if not everything or constraints.n_ctx or setup.slots < (constraints.slots or USUAL_SLOTS):
            return placement
        for longer in self._longer(setup.n_ctx, min(self._model.n_ctx_train, _MOST_N_CTX_FOR_MANY)):
            division = (placement.n_gpu_layers, placement.experts_in_host)
            more = place(
                self._model,
                replace(setup, n_ctx=longer),
                placement.devices,
                division,
                constraints,
                draft_on_gpu=placement.draft_on_gpu,
                projector_on_gpu=placement.projector_on_gpu,
            )
            if more.fits and self._host_holds(more):
                return more
        return placement

    def _host_holds(self, placement: Placement) -> bool:
        available = self._host.available_bytes
        return available is None or placement.demand.host_bytes <= available

    def _layer_counts(self) -> Sequence[int]:
        everything = self._model.n_layers + 1
        requested = self._constraints.n_gpu_layers
        if requested >= 0:
            return [min(requested, everything) if self._teams else 0]
        limit = self._constraints.most_gpu_layers
        most = everything if limit is None else min(limit, everything)
        return range(most, -1, -1) if self._teams else [0]

    def _experts_in_host(self, n_gpu_layers: int) -> Sequence[int]:
        """Return for how many layers, from the first on a GPU, the experts may stay on the host."""
        on_gpu = max(0, n_gpu_layers - 1)
        if not self._model.has_experts or not on_gpu or self._constraints.expert_offload == "never":
            return [0]
        if self._constraints.expert_offload == "all":
            return [on_gpu]
        return range(on_gpu + 1) if n_gpu_layers > self._model.n_layers else [on_gpu]

    def _setups(self, n_ctx: int, *, n_gpu_layers: int) -> Iterator[RuntimeConfig]:
        """Yield configurations in the order of reductions; ``_least`` is the last."""
        for batch in self._batches():
            for kv_types in self._kv_types():
                for slots in self._slots(n_ctx):
                    yield self._setup(batch, kv_types, slots, n_gpu_layers=n_gpu_layers)

    def _least(self, n_ctx: int, *, n_gpu_layers: int) -> RuntimeConfig:
        slots = (self._constraints.slots or 1, n_ctx)
        return self._setup(self._batches()[-1], self._kv_types()[-1], slots, n_gpu_layers=n_gpu_layers)

    def _setup(
        self, batch: tuple[int, int], kv_types: tuple[str, str], slots: tuple[int, int], *, n_gpu_layers: int
    ) -> RuntimeConfig:
        return RuntimeConfig(
            slots=slots[0],
            n_ctx=slots[1],
            n_batch=max(batch[0], slots[0]),
            n_ubatch=batch[1],
            kv_type_k=kv_types[0],
            kv_type_v=kv_types[1],
            flash_attention=uses_flash_attention(self._constraints, n_gpu_layers=n_gpu_layers, kv_types=kv_types),
        )

    def _slots(self, n_ctx: int) -> Iterator[tuple[int, int]]:
        """Yield slots and their context: as many slots as possible or, if preferred, contexts as long as possible."""
        counts = [self._constraints.slots] if self._constraints.slots else range(USUAL_SLOTS, 0, -1)
        lengths = [n_ctx]
        if self._constraints.prefer == "long" and not self._constraints.n_ctx:
            lengths = [*self._longer(n_ctx, self._model.n_ctx_train), n_ctx]
        for length in lengths:
            yield from ((count, length) for count in counts)

    def _longer(self, n_ctx: int, limit: int) -> list[int]:
        lengths = []
        while n_ctx < limit:
            n_ctx = min(2 * n_ctx, limit)
            lengths.append(n_ctx)
        return lengths[::-1]

    def _kv_types(self) -> list[tuple[str, str]]:
        k, v = self._constraints.kv_type_k, self._constraints.kv_type_v
        auto = ["f16", *(_QUANTIZED if self._constraints.quantized_kv else ())]
        pairs = [(each if k == "auto" else k, each if v == "auto" else v) for each in auto]
        if self._constraints.flash_attention == "off" and v == "auto":
            pairs = [(kind, "f16") for kind, _ in pairs]
        return list(dict.fromkeys(pairs))

    def _batches(self) -> list[tuple[int, int]]:
        constraints = self._constraints
        pairs = [(constraints.n_batch or n_batch, constraints.n_ubatch or n_ubatch) for n_batch, n_ubatch in _BATCHES]
        valid = [
            (max(n_batch, n_ubatch) if not constraints.n_batch else n_batch, n_ubatch) for n_batch, n_ubatch in pairs
        ]
        return list(dict.fromkeys((n_batch, min(n_ubatch, n_batch)) for n_batch, n_ubatch in valid))
