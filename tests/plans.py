"""Placement plans as `status` reports them."""

from __future__ import annotations

from inferencecenter.protocol.values import EnginePlan, PlannedDevice, PlannedHost, PlanReason


def engine_plan(
    devices: tuple[PlannedDevice, ...] = (), *, weight_bytes: int = 1, reasons: tuple[PlanReason, ...] = ()
) -> EnginePlan:
    """Return a plan with these GPUs and this many bytes of weights in main memory."""
    return EnginePlan(
        fits=True,
        layers=29,
        n_gpu_layers=sum(each.layers for each in devices),
        split_mode="none",
        slots=8,
        n_ctx=4096,
        n_batch=2048,
        n_ubatch=512,
        kv_type_k="f16",
        kv_type_v="f16",
        flash_attention=True,
        n_threads=4,
        devices=devices,
        host=PlannedHost(weight_bytes=weight_bytes, kv_bytes=1, compute_bytes=1, expert_layers=0),
        reasons=reasons,
        advice=(),
    )
