"""Divides a model between GPUs and the host: ``plan(model, devices, host, wishes)``. Pure.

llama.cpp puts the output matrix and the *last* layers on GPUs: ``n_gpu_layers`` of ``n`` is the output and ``n - 1``
layers. A layer's KV is where its weights are. What does not fit is given up in this order: slots, the precision of the
KV (if that is allowed), the size of a batch, experts (which go to the host), layers, and then the GPU. As many layers
go to the GPU as can by giving up all before; of what was given up, everything that fits beside them is taken back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.footprint import SetUp
from inferencecenter.hardware.placing import place
from inferencecenter.hardware.plan import Plan
from inferencecenter.hardware.wording import advice, reasons

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.plan import Device, Host, Place, Wishes

USUAL_SLOTS: Final = 8
USUAL_N_CTX: Final = 4096
USUAL_N_BATCH: Final = 2048
USUAL_N_UBATCH: Final = 512
_LEAST_N_CTX: Final = 256
_BATCHES: Final = ((USUAL_N_BATCH, USUAL_N_UBATCH), (1024, 256), (512, 128))
"""Tokens in a decode call, and computed at once; llama.cpp's own first."""
_MOST_N_CTX_FOR_MANY: Final = 32_768
_QUANTIZED: Final = ("q8_0", "q4_0")
_FLOATS: Final = frozenset({"f32", "f16", "bf16"})
_FEW_THREADS: Final = 4


def plan(model: ModelShape, devices: Sequence[Device], host: Host, wishes: Wishes) -> Plan:
    """Return the plan; where even the least does not fit, one that says so."""
    usable = tuple(devices) if wishes.main_gpu < 0 else tuple(devices[wishes.main_gpu : wishes.main_gpu + 1])
    search = _Search(model, usable, host, wishes)
    found = search.best()
    chosen = found or search.last_resort()
    n_threads = threads(model, chosen, host, wishes)
    return Plan(
        setup=chosen.setup,
        n_gpu_layers=chosen.n_gpu_layers,
        devices=chosen.devices,
        split_mode="layer" if len(chosen.devices) > 1 else "none",
        main_gpu=0 if chosen.devices else -1,
        layer_counts=chosen.counts,
        tensor_split=tuple(map(float, chosen.counts)) if len(chosen.devices) > 1 else (),
        experts_in_host=chosen.experts_in_host,
        cpu_tensors=chosen.cpu_tensors,
        n_threads=n_threads,
        fits=found is not None,
        demand=chosen.demand,
        reasons=reasons(model, chosen, n_threads=n_threads, devices=usable, wishes=wishes),
        advice=advice(model, chosen, fits=found is not None, host=host, wishes=wishes),
    )


def threads(model: ModelShape, chosen: Place, host: Host, wishes: Wishes) -> int:
    """Return the threads that compute: few where the processor only looks up embeddings."""
    if wishes.n_threads:
        return wishes.n_threads
    everything = chosen.n_gpu_layers > model.n_layers and not chosen.cpu_tensors
    return min(_FEW_THREADS, host.cores) if everything else host.cores


def attends_in_flashes(wishes: Wishes, *, n_gpu_layers: int, kv_types: tuple[str, str]) -> bool:
    """Tell whether flash attention is used: as it is set, else where a GPU computes or KV is quantized.

    On a processor llama.cpp has it go row by row through what is read after a long history, and through every token
    that is generated; short questions then take three times as long (docs/decisions/0008-speed-levers.md).
    """
    if wishes.flash_attention != "auto":
        return wishes.flash_attention == "on"
    return n_gpu_layers > 0 or not set(kv_types) <= _FLOATS


class _Search:
    """Goes through what could be given up, in order, and stops at the first that fits."""

    def __init__(self, model: ModelShape, devices: tuple[Device, ...], host: Host, wishes: Wishes) -> None:
        self._model = model
        self._host = host
        self._wishes = wishes
        by_size = sorted(devices, key=lambda device: -device.free_bytes)
        # As few GPUs as hold it: what is on one needs no transfers.
        self._teams = [
            tuple(device for device in devices if device in by_size[:count]) for count in range(1, len(devices) + 1)
        ]
        if (wishes.split_mode == "layer" or wishes.tensor_split) and self._teams:
            self._teams = self._teams[-1:]
        elif wishes.split_mode == "none":
            self._teams = self._teams[:1]

    def best(self) -> Place | None:
        """Return what fits with the most layers on GPUs and then the least given up; ``None`` if nothing does."""
        usual = self._wishes.n_ctx or min(USUAL_N_CTX, self._model.n_ctx_train)
        n_ctx = usual
        while True:
            for n_gpu_layers in self._layer_counts():
                for in_host in self._experts_in_host(n_gpu_layers):
                    found = self._first_fit((n_gpu_layers, in_host), n_ctx, usual=usual)
                    if found is not None:
                        return found
            if self._wishes.n_ctx or n_ctx <= _LEAST_N_CTX:
                return None
            n_ctx = max(_LEAST_N_CTX, n_ctx // 2)

    def last_resort(self) -> Place:
        """Return what takes least, to say what is missing."""
        usual = self._wishes.n_ctx or min(USUAL_N_CTX, self._model.n_ctx_train)
        least = self._wishes.n_ctx or min(_LEAST_N_CTX, usual)
        *_, n_gpu_layers = self._layer_counts()
        *_, in_host = self._experts_in_host(n_gpu_layers)
        setup = self._least(least, n_gpu_layers=n_gpu_layers)
        team = self._teams[-1] if n_gpu_layers and self._teams else ()
        return place(self._model, setup, team, (n_gpu_layers, in_host), self._wishes)

    def _first_fit(self, division: tuple[int, int], n_ctx: int, *, usual: int) -> Place | None:
        # What takes least, of everything and on each GPU. Where it does not fit, none does.
        if self._fit(self._least(n_ctx, n_gpu_layers=division[0]), division) is None:
            return None
        for setup in self._setups(n_ctx, n_gpu_layers=division[0]):
            found = self._fit(setup, division)
            if found is not None:
                return self._grown(found) if setup.n_ctx == usual else found
        return None

    def _fit(self, setup: SetUp, division: tuple[int, int]) -> Place | None:
        """Return the place on the first team that holds it."""
        for team in self._teams if division[0] else [()]:
            found = place(self._model, setup, team, division, self._wishes)
            if found.fits and self._host_holds(found):
                return found
        return None

    def _grown(self, found: Place) -> Place:
        """Return the place with longer contexts, where GPUs hold everything and have memory left.

        The host's memory is not taken for that, nor another GPU.
        """
        wishes, setup = self._wishes, found.setup
        everything = found.n_gpu_layers > self._model.n_layers and not found.experts_in_host
        if not everything or wishes.n_ctx or setup.slots < (wishes.slots or USUAL_SLOTS):
            return found
        for longer in self._longer(setup.n_ctx, min(self._model.n_ctx_train, _MOST_N_CTX_FOR_MANY)):
            division = (found.n_gpu_layers, found.experts_in_host)
            more = place(self._model, replace(setup, n_ctx=longer), found.devices, division, wishes)
            if more.fits and self._host_holds(more):
                return more
        return found

    def _host_holds(self, found: Place) -> bool:
        available = self._host.available_bytes
        return available is None or found.demand.host_bytes <= available

    def _layer_counts(self) -> Sequence[int]:
        everything = self._model.n_layers + 1
        asked = self._wishes.n_gpu_layers
        if asked >= 0:
            return [min(asked, everything) if self._teams else 0]
        limit = self._wishes.most_gpu_layers
        most = everything if limit is None else min(limit, everything)
        return range(most, -1, -1) if self._teams else [0]

    def _experts_in_host(self, n_gpu_layers: int) -> Sequence[int]:
        """Return of how many layers, the first on a GPU, the experts stay with the host."""
        on_gpu = max(0, n_gpu_layers - 1)
        if not self._model.has_experts or not on_gpu or self._wishes.expert_offload == "never":
            return [0]
        if self._wishes.expert_offload == "all":
            return [on_gpu]
        return range(on_gpu + 1) if n_gpu_layers > self._model.n_layers else [on_gpu]

    def _setups(self, n_ctx: int, *, n_gpu_layers: int) -> Iterator[SetUp]:
        """Yield set-ups, those that give up least first; ``_least`` is the last of them."""
        for batch in self._batches():
            for kv_types in self._kv_types():
                for slots in self._slots(n_ctx):
                    yield self._setup(batch, kv_types, slots, n_gpu_layers=n_gpu_layers)

    def _least(self, n_ctx: int, *, n_gpu_layers: int) -> SetUp:
        slots = (self._wishes.slots or 1, n_ctx)
        return self._setup(self._batches()[-1], self._kv_types()[-1], slots, n_gpu_layers=n_gpu_layers)

    def _setup(
        self, batch: tuple[int, int], kv_types: tuple[str, str], slots: tuple[int, int], *, n_gpu_layers: int
    ) -> SetUp:
        return SetUp(
            slots=slots[0],
            n_ctx=slots[1],
            n_batch=max(batch[0], slots[0]),
            n_ubatch=batch[1],
            kv_type_k=kv_types[0],
            kv_type_v=kv_types[1],
            flash_attention=attends_in_flashes(self._wishes, n_gpu_layers=n_gpu_layers, kv_types=kv_types),
        )

    def _slots(self, n_ctx: int) -> Iterator[tuple[int, int]]:
        """Yield slots and the tokens of each: as many slots as can be, or before that contexts as long as can be."""
        counts = [self._wishes.slots] if self._wishes.slots else range(USUAL_SLOTS, 0, -1)
        lengths = [n_ctx]
        if self._wishes.prefer == "long" and not self._wishes.n_ctx:
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
        k, v = self._wishes.kv_type_k, self._wishes.kv_type_v
        auto = ["f16", *(_QUANTIZED if self._wishes.quantized_kv else ())]
        pairs = [(each if k == "auto" else k, each if v == "auto" else v) for each in auto]
        if self._wishes.flash_attention == "off" and v == "auto":
            pairs = [(kind, "f16") for kind, _ in pairs]
        return list(dict.fromkeys(pairs))

    def _batches(self) -> list[tuple[int, int]]:
        wishes = self._wishes
        pairs = [(wishes.n_batch or n_batch, wishes.n_ubatch or n_ubatch) for n_batch, n_ubatch in _BATCHES]
        valid = [(max(n_batch, n_ubatch) if not wishes.n_batch else n_batch, n_ubatch) for n_batch, n_ubatch in pairs]
        return list(dict.fromkeys((n_batch, min(n_ubatch, n_batch)) for n_batch, n_ubatch in valid))
