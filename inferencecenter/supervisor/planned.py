"""A plan in the words of the protocol: what operators see of a model that runs, and scripts of one that might. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.plan import margin_bytes
from inferencecenter.protocol.values import EnginePlan, PlannedDevice, PlannedHost, PlanReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.hardware.model_shape import ModelShape
    from inferencecenter.hardware.plan import Host, Plan, Wishes

_MOST_CHARS: Final = 512
_MOST_DEVICES: Final = 64
_MOST_REASONS: Final = 32
_MOST_ADVICE: Final = 128


def described(made: Plan, *, model: ModelShape, host: Host, wishes: Wishes) -> EnginePlan:
    """Return a plan with what it was made from. Texts, of which some come from files and drivers, have an end."""
    setup, demand = made.setup, made.demand
    parts = zip(made.devices, demand.devices, made.layer_counts, strict=True)
    return EnginePlan(
        fits=made.fits,
        layers=model.n_layers + 1,
        n_gpu_layers=made.n_gpu_layers,
        split_mode=made.split_mode,
        slots=setup.slots,
        n_ctx=setup.n_ctx,
        n_batch=setup.n_batch,
        n_ubatch=setup.n_ubatch,
        kv_type_k=setup.kv_type_k,
        kv_type_v=setup.kv_type_v,
        flash_attention=setup.flash_attention,
        n_threads=made.n_threads,
        devices=tuple(
            PlannedDevice(
                id=_cut(device.id),
                name=_cut(device.name),
                total_bytes=device.total_bytes,
                free_bytes=device.free_bytes,
                margin_bytes=margin_bytes(device, wishes),
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
            expert_layers=made.experts_in_host,
        ),
        reasons=tuple(
            PlanReason(name=_cut(each.name), value=_cut(each.value), why=_cut(each.why), explicit=each.explicit)
            for each in made.reasons[:_MOST_REASONS]
        ),
        advice=tuple(map(_cut, made.advice[:_MOST_ADVICE])),
    )


def measured(plan: EnginePlan, used_bytes: Mapping[str, int]) -> EnginePlan:
    """Return the plan with what it took in fact of GPUs, by their ids."""
    devices = (each.model_copy(update={"used_bytes": used_bytes.get(each.id)}) for each in plan.devices)
    return plan.model_copy(update={"devices": tuple(devices)})


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 1]}\N{HORIZONTAL ELLIPSIS}"
