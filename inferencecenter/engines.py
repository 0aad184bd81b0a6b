"""Puts together what plans, starts and lends engines, one for each model, as the settings have it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.vram_calibration import VramCalibration
from inferencecenter.supervisor.crash_limit import CrashLimit
from inferencecenter.supervisor.engine_options import (
    cache_key,
    engine_options,
    kv_cache_paths,
    remove_stale_caches,
    restart_policy,
)
from inferencecenter.supervisor.model_manager import ManagedModel, ModelManager
from inferencecenter.supervisor.planning import Planner
from inferencecenter.supervisor.poison_turn_store import PoisonTurnStore
from inferencecenter.supervisor.step_metrics import StepMeter
from inferencecenter.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from inferencecenter.config.settings import Settings
    from inferencecenter.models.registry import ModelSpec, Registry
    from inferencecenter.telemetry.engine_metrics import EngineMetrics

_PLAN_FILE: Final = "plan.json"
_SUSPECTS_FILE: Final = "suspects.json"


def make_models(
    settings: Settings,
    registry: Registry,
    *,
    metrics: EngineMetrics,
    live_sessions: Callable[[], Collection[str]] | None = None,
) -> ModelManager:
    """Return the models, of which none is loaded yet, and delete what was parked for those that there are no more.

    Args:
        settings: Where things are kept, and what is set about GPUs.
        registry: The models by name.
        metrics: Where their steps are counted.
        live_sessions: Names the sessions whose KV a new engine is to keep; without it all is kept.
    """
    remove_stale_caches(settings.kv, settings.state_dir, registry.models.values())
    suspicion_file = PoisonTurnStore(settings.state_dir / _SUSPECTS_FILE)
    crash_limit = CrashLimit(
        max_deaths=settings.engine.max_client_crashes,
        window_s=settings.engine.client_crash_window_s,
        monotonic=time.monotonic,
    )
    corrections = VramCalibration(settings.state_dir / _PLAN_FILE)

    first: Supervisor | None = None

    def ends_daemon(supervisor: Supervisor) -> bool:
        if supervisor.given_up:
            return settings.engine.exit_when_failed and supervisor is models.engine(models.default)
        return supervisor.load_failure is not None and supervisor is first

    def make(spec: ModelSpec, admit: Callable[[ManagedModel], Awaitable[bool]]) -> ManagedModel:
        return _model(
            spec,
            admit,
            # What is wrong with the GPUs that are set is to end the daemon, and others are planned when they load.
            plan_now=first is None,
            settings=settings,
            corrections=corrections,
            metrics=metrics,
            live_sessions=live_sessions,
            ends_daemon=ends_daemon,
            crash_limit=crash_limit,
            suspicion_file=suspicion_file,
        )

    models = ModelManager(
        registry,
        make=make,
        max_resident=settings.engine.max_resident,
        min_residency_s=settings.engine.min_residency_s,
    )
    first = models.engine(registry.default)
    return models


def _model(  # noqa: PLR0913 - what it is put together from, by name
    spec: ModelSpec,
    admit: Callable[[ManagedModel], Awaitable[bool]],
    *,
    plan_now: bool,
    settings: Settings,
    corrections: VramCalibration,
    metrics: EngineMetrics,
    live_sessions: Callable[[], Collection[str]] | None,
    ends_daemon: Callable[[Supervisor], bool],
    crash_limit: CrashLimit,
    suspicion_file: PoisonTurnStore,
) -> ManagedModel:
    engine = spec.engine
    planner = Planner(engine=engine, gpu=settings.gpu, calibration=corrections)
    options = engine_options(spec, kv_cache_paths(settings.kv, settings.state_dir, spec), settings.kv)
    if plan_now:
        options = planner.first(options)
    meter = StepMeter(metrics, model=spec.name)

    async def may_load() -> bool:
        return await admit(model)

    supervisor = Supervisor(
        options,
        policy=restart_policy(engine),
        max_queue=engine.max_queue,
        queue_warning=engine.queue_warning,
        load_timeout_s=engine.load_timeout_s,
        hang_timeout_s=engine.hang_timeout_s,
        sleep_after_s=engine.sleep_after_s if engine.sleep_after_s > 0 else None,
        live_sessions=live_sessions,
        plan_again=planner.again,
        ends_with_it=lambda: ends_daemon(supervisor),
        admit=may_load,
        on_step=meter.step,
        crash_limit=crash_limit,
        suspicion_file=suspicion_file,
        lock_path=settings.state_dir / f"engine-{cache_key(spec)}.lock",
    )
    supervisor.subscribe(planner.on_status)
    supervisor.subscribe(meter.engine_changed)
    model = ManagedModel(spec, planner, supervisor)
    return model
