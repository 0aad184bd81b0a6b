"""Explains a placement: the reason for each number, and alternatives. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.footprint import kv_bytes, kv_bytes_per_token
from inferencecenter.hardware.placement import WEIGHT_BYTES_PER_THREAD, Reason, margin_bytes, usable_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.placement import Device, Host, Placement, PlacementConstraints

_SET: Final = "set"


def reasons(
    model: ModelShape,
    chosen: Placement,
    *,
    n_threads: int,
    devices: Sequence[Device],
    constraints: PlacementConstraints,
) -> tuple[Reason, ...]:
    """Return each number of a plan with its reason."""
    experts = (Reason("expert_offload", _experts(chosen), _why_experts(model, chosen)),) if model.has_experts else ()
    adapters = (Reason("lora", mib(model.adapter_bytes), _why_lora(chosen), explicit=True),) * bool(model.adapter_bytes)
    return (
        Reason(
            "n_gpu_layers",
            f"{chosen.n_gpu_layers} of {model.n_layers + 1}",
            _why_layers(model, chosen, devices, constraints),
            explicit=constraints.n_gpu_layers >= 0,
        ),
        Reason("devices", _devices(chosen), _why_devices(chosen, devices), explicit=_devices_are_set(constraints)),
        *experts,
        *adapters,
        *((Reason("draft", model.draft.name, _why_draft(model.draft, chosen), explicit=True),) if model.draft else ()),
        *_projector_reasons(model, chosen),
        *(_embedding_reasons(model, chosen) if constraints.embeds else _turn_reasons(model, chosen, constraints)),
        Reason(
            "n_threads",
            str(n_threads),
            _why_threads(n_threads, model, chosen, constraints),
            explicit=bool(constraints.n_threads),
        ),
    )


def _turn_reasons(model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> tuple[Reason, ...]:
    """Return the numbers of a context for turns."""
    setup = chosen.setup
    return (
        Reason("slots", str(setup.slots), _why_slots(model, chosen, constraints), explicit=bool(constraints.slots)),
        Reason("n_ctx", str(setup.n_ctx), _why_n_ctx(model, chosen, constraints), explicit=bool(constraints.n_ctx)),
        Reason(
            "kv_type_k, kv_type_v",
            f"{setup.kv_type_k}, {setup.kv_type_v}",
            _why_kv(model, chosen, constraints),
            explicit=_kv_is_set(constraints),
        ),
        Reason(
            "flash_attention",
            "on" if setup.flash_attention else "off",
            _why_flash_attention(chosen, constraints),
            explicit=constraints.flash_attention != "auto",
        ),
        Reason(
            "n_batch, n_ubatch",
            f"{setup.n_batch}, {setup.n_ubatch}",
            _SET if constraints.n_ubatch or constraints.n_batch else _why_batch(chosen),
            explicit=bool(constraints.n_ubatch or constraints.n_batch),
        ),
    )


def _embedding_reasons(model: ModelShape, chosen: Placement) -> tuple[Reason, ...]:
    """Return the numbers of a context for embeddings."""
    setup = chosen.setup
    return (
        Reason("slots", str(setup.slots), "texts leave no KV"),
        Reason(
            "n_ctx",
            str(setup.n_ctx),
            f"the longest text, which is computed at once; the model was trained for {model.n_ctx_train}",
        ),
        Reason(
            "flash_attention",
            "on" if setup.flash_attention else "off",
            "all rows of a batch are computed together" if setup.flash_attention else _SET,
        ),
        Reason("n_batch, n_ubatch", f"{setup.n_batch}, {setup.n_ubatch}", "a batch of texts, or the longest one"),
    )


def advice(
    model: ModelShape, chosen: Placement, *, fits: bool, host: Host, constraints: PlacementConstraints
) -> tuple[str, ...]:
    """Return alternatives, and warnings."""
    return tuple(
        [
            *_shortages(chosen, fits=fits, host=host, constraints=constraints),
            *_about_model(model),
            *_about_slots(model, chosen, constraints),
            *_about_precision(model, chosen, constraints),
        ]
    )


def _shortages(chosen: Placement, *, fits: bool, host: Host, constraints: PlacementConstraints) -> Iterator[str]:
    if fits:
        return
    for device, demand in zip(chosen.devices, chosen.demand.devices, strict=True):
        have = usable_bytes(device, constraints)
        if demand.bytes > have:
            yield (
                f"Does not fit on {device.name}: has {mib(have)} after a margin of "
                f"{mib(margin_bytes(device, constraints))}, needs {mib(demand.bytes)}."
            )
    need, available = chosen.demand.host_bytes, host.available_bytes
    if available is not None and need > available:
        yield f"Does not fit in memory: has {mib(available)}, needs {mib(need)}."


def _about_model(model: ModelShape) -> Iterator[str]:
    if not model.known:
        yield (
            f"The architecture {model.architecture!r} is unknown: "
            "full attention is assumed in all layers, which may overestimate the KV."
        )


def _about_slots(model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> Iterator[str]:
    """Yield the contexts that the slots' memory would allow with fewer or more slots."""
    setup, total = chosen.setup, chosen.setup.slots * chosen.setup.n_ctx
    if constraints.slots or constraints.n_ctx or setup.slots == 1 or setup.n_ctx >= model.n_ctx_train:
        return
    longest = min(model.n_ctx_train, total)
    if constraints.prefer == "many":
        yield (
            f"For a single user with a long context: 1 slot of {longest} tokens takes the same memory; "
            'gpu.prefer = "long" selects it.'
        )


def _about_precision(model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> Iterator[str]:
    gave_up = chosen.n_gpu_layers <= model.n_layers or (not constraints.slots and chosen.setup.slots < 8)
    if chosen.devices and gave_up and not constraints.quantized_kv and not _kv_is_set(constraints):
        yield "gpu.quantized_kv = true would halve the memory of KV (q8_0), at a small loss of precision."


def _why_layers(
    model: ModelShape, chosen: Placement, devices: Sequence[Device], constraints: PlacementConstraints
) -> str:
    if constraints.n_gpu_layers >= 0:
        return _SET
    if not devices:
        return "llama.cpp can use no GPU"
    if not chosen.n_gpu_layers:
        return "no GPU has room for the output matrix and the buffers: the model runs on the CPU"
    if constraints.most_gpu_layers is not None and chosen.n_gpu_layers == constraints.most_gpu_layers:
        return "more failed to load last time"
    if chosen.n_gpu_layers > model.n_layers:
        return "all layers and the output matrix fit"
    start = model.n_layers + 1 - chosen.n_gpu_layers
    next_layer = model.layers[start - 1]
    room = sum(
        usable_bytes(device, constraints) - demand.bytes
        for device, demand in zip(chosen.devices, chosen.demand.devices, strict=True)
    )
    return (
        f"the output matrix and layers {start} to {model.n_layers - 1}; the next layer needs "
        f"{mib(next_layer.bytes + kv_bytes(next_layer, chosen.setup))}, and {mib(room)} are free"
    )


def _devices_are_set(constraints: PlacementConstraints) -> bool:
    return bool(constraints.tensor_split) or constraints.main_gpu >= 0 or constraints.split_mode != "auto"


def _kv_is_set(constraints: PlacementConstraints) -> bool:
    return constraints.kv_type_k != "auto" or constraints.kv_type_v != "auto"


def _devices(chosen: Placement) -> str:
    if not chosen.devices:
        return "none"
    if len(chosen.devices) == 1:
        return chosen.devices[0].name
    return ", ".join(f"{device.name}: {count}" for device, count in zip(chosen.devices, chosen.counts, strict=True))


def _why_devices(chosen: Placement, devices: Sequence[Device]) -> str:
    if not chosen.devices:
        return "no GPU memory is used"
    if len(devices) == 1:
        return "the only GPU"
    if len(chosen.devices) == 1:
        return "the model fits on one GPU, which avoids transfers between GPUs"
    return "layers per GPU, including the output matrix as one; all GPUs are filled to about the same share"


def _experts(chosen: Placement) -> str:
    return f"{chosen.experts_in_host} layers" if chosen.experts_in_host else "none"


def _why_experts(model: ModelShape, chosen: Placement) -> str:
    if not chosen.n_gpu_layers:
        return "no layer is on a GPU"
    if not chosen.experts_in_host:
        return "the experts of all offloaded layers fit on the GPUs"
    return (
        f"experts stay in host memory, where a token uses {model.n_experts_used} of {model.n_experts}; "
        "attention and KV of these layers are on the GPU"
    )


def _why_lora(chosen: Placement) -> str:
    where = "on GPUs for offloaded layers" if chosen.n_gpu_layers else "in host memory"
    return f"{_SET}; adapters count as weights of their layers, {where}"


def _projector_reasons(model: ModelShape, chosen: Placement) -> tuple[Reason, ...]:
    if (projector := model.projector) is None:
        return ()
    if chosen.projector_on_gpu:
        where = f"on {chosen.devices[0].name}"
    else:
        where = "in host memory" + (", as no GPU has room for them" if chosen.devices else "")
    why = f"{_SET}; {mib(projector.weight_bytes)} of weights, and {mib(projector.compute_bytes)} for an image, {where}"
    return (Reason("mmproj", projector.name, why, explicit=True),)


def _why_draft(draft: ModelShape, chosen: Placement) -> str:
    own = sum(kv_bytes(layer, chosen.setup) for layer in draft.layers)
    cost = f"{_SET}; {mib(draft.bytes)} of weights and {mib(own)} of KV"
    if chosen.draft_on_gpu:
        return f"{cost} on {chosen.devices[0].name}"
    return f"{cost} in host memory" + (", as no GPU has room for them" if chosen.devices else "")


def _why_slots(model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> str:
    setup = chosen.setup
    each = sum(kv_bytes(layer, setup) for layer in model.layers) // setup.slots
    cost = f"{mib(each)} of KV per slot"
    if constraints.slots:
        return f"{_SET}; {cost}"
    if setup.slots == 8:
        return f"default; {cost}"
    return f"the memory left by the layers; {cost}. Further sessions share the slots; their KV is parked"


def _why_n_ctx(model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> str:
    n_ctx = chosen.setup.n_ctx
    if constraints.n_ctx:
        return _SET
    if n_ctx == model.n_ctx_train:
        return "the context length of the model's training"
    trained = f"the model was trained for {model.n_ctx_train}"
    if constraints.prefer == "long":
        return f"the longest that fits; {trained}"
    if n_ctx > 4096:
        return f"the longest that fits on the GPU in all slots; {trained}"
    return f"default; {trained}" if n_ctx == 4096 else f"more does not fit in memory; {trained}"


def _why_kv(model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> str:
    setup = chosen.setup
    per_token = kv_bytes_per_token(model, type_k=setup.kv_type_k, type_v=setup.kv_type_v)
    cost = f"{per_token / 1024:.0f} KiB per token"
    if _kv_is_set(constraints):
        return f"{_SET}; {cost}"
    return f"full precision; {cost}" if setup.kv_type_k == "f16" else f"quantized to make the model fit; {cost}"


def _why_flash_attention(chosen: Placement, constraints: PlacementConstraints) -> str:
    if constraints.flash_attention != "auto":
        return _SET
    if chosen.n_gpu_layers:
        return "used where the GPU has kernels for the model"
    if chosen.setup.flash_attention:
        return "required by quantized KV"
    return "short prompts and decode are faster without it on a CPU"


def _why_batch(chosen: Placement) -> str:
    buffers = [demand.compute_bytes for demand in chosen.demand.devices] or [chosen.demand.host_compute_bytes]
    cost = f"compute buffers of {' and '.join(map(mib, buffers))}"
    return (
        f"llama.cpp's default; {cost}" if chosen.setup.n_ubatch == 512 else f"reduced to leave room for layers; {cost}"
    )


def _why_threads(n_threads: int, model: ModelShape, chosen: Placement, constraints: PlacementConstraints) -> str:
    if constraints.n_threads:
        return _SET
    if chosen.n_gpu_layers > model.n_layers and not chosen.experts_in_host:
        return "the CPU only looks up embeddings"
    if not constraints.embeds and model.bytes < (n_threads + 1) * WEIGHT_BYTES_PER_THREAD:
        return f"one for each {mib(WEIGHT_BYTES_PER_THREAD)} of weights, at least one"
    return f"one for each of {n_threads} cores"


def mib(n_bytes: int) -> str:
    """Format bytes as ``2,310 MiB``."""
    return f"{n_bytes / 2**20:,.0f} MiB"
