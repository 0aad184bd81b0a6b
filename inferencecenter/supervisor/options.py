"""What an engine is told at its start, as the settings have it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.split import USUAL_N_BATCH, USUAL_N_UBATCH, USUAL_SLOTS
from inferencecenter.ipc.messages import Adapter, EngineOptions
from inferencecenter.supervisor.backoff import RestartPolicy

if TYPE_CHECKING:
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.settings import EngineSettings, KvSettings
    from inferencecenter.supervisor.kv_places import KvPlaces

_MAX_WORKER_THREADS: Final = 8


def engine_options(spec: ModelSpec, places: KvPlaces, kv: KvSettings) -> EngineOptions:
    """Return what an engine is told: what is set, and what is usual where that is left open and no plan can be made."""
    engine = spec.engine
    return EngineOptions(
        backend=engine.backend,
        parent_pid=os.getpid(),
        model_path=str(spec.path),
        model_name=spec.name,
        lora=tuple(Adapter(str(each.path), each.scale) for each in spec.lora),
        slots=engine.slots or USUAL_SLOTS,
        n_ctx=engine.n_ctx,
        n_gpu_layers=engine.n_gpu_layers,
        n_threads=engine.n_threads,
        n_threads_batch=engine.n_threads_batch,
        n_batch=engine.n_batch or max(USUAL_N_BATCH, engine.n_ubatch),
        n_ubatch=engine.n_ubatch or min(USUAL_N_UBATCH, engine.n_batch or USUAL_N_UBATCH),
        kv_type_k="f16" if engine.kv_type_k == "auto" else engine.kv_type_k,
        kv_type_v="f16" if engine.kv_type_v == "auto" else engine.kv_type_v,
        flash_attention=engine.flash_attention,
        use_mmap=engine.use_mmap,
        use_mlock=engine.use_mlock,
        prefill_grid_tokens=engine.prefill_grid_tokens,
        target_step_ms=engine.target_step_ms,
        worker_threads=engine.worker_threads or min(len(os.sched_getaffinity(0)), _MAX_WORKER_THREADS),
        echo_delay_ms=engine.echo_delay_ms,
        quantum_tokens=engine.quantum_tokens,
        ageing_s=engine.ageing_s,
        speculative=engine.speculative,
        draft_tokens=engine.draft_tokens,
        queue_timeout_s=engine.queue_timeout_s or 0.0,
        kv_ram_dir=str(places.ram_dir),
        kv_ram_bytes=places.ram_bytes,
        kv_disk_dir=str(places.disk_dir),
        kv_disk_bytes=places.disk_bytes,
        kv_client_share=kv.client_share,
    )


def restart_policy(engine: EngineSettings) -> RestartPolicy:
    """Return when and how often an engine that was lost is started again."""
    return RestartPolicy(
        min_s=engine.restart_backoff_min_s,
        max_s=engine.restart_backoff_max_s,
        max_restarts=engine.max_restarts,
        window_s=engine.restart_window_s,
    )
