"""Launches the default model's engine before the daemon is imported: it loads the model meanwhile.

Both take about as long, on different cores. Only what an engine's options depend on is imported before: the settings,
the registry, the memory of the machine. The engine's messages wait in its socket until the daemon reads them, so to the
daemon it is an engine that is launched as any other and loads its model sooner. It starts another one if that is to
have other options.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferencecenter.hardware.vram_calibration import PLAN_FILE, VramCalibration
from inferencecenter.ipc import engine_child
from inferencecenter.models.registry import read_registry
from inferencecenter.supervisor.engine_options import engine_lock_path, engine_options, kv_cache_paths
from inferencecenter.supervisor.planning import Planner
from inferencecenter.supervisor.process import LocalLauncher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.config.settings import Settings
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.models.registry import ModelSpec, Registry


@dataclass(frozen=True, slots=True)
class FirstEngine:
    """An engine that was launched ahead, and what it was planned by."""

    registry: Registry
    spec: ModelSpec
    calibration: VramCalibration
    planner: Planner
    options: EngineOptions
    launcher: LocalLauncher


@contextmanager
def launched_ahead(settings: Settings) -> Iterator[FirstEngine | None]:
    """Launch the engine of the default model, and end it in the end if it was not used; the state directory is locked.

    Yields:
        ``None`` without a prespawned interpreter, for a model with replicas or on another machine, and where the engine
        cannot be started, which the daemon finds again.

    Raises:
        InferenceCenterError: ``invalid_config``; see ``read_registry`` and ``Planner.first``.
    """
    first = _launch(settings) if engine_child.is_prespawned() else None
    try:
        yield first
    finally:
        if first is not None:
            first.launcher.discard_ahead()


def _launch(settings: Settings) -> FirstEngine | None:
    registry = read_registry(settings)
    spec = registry.get(registry.default)
    if spec.is_on_nodes or spec.rpc_nodes:
        return None
    calibration = VramCalibration(settings.state_dir / PLAN_FILE)
    planner = Planner(engine=spec.engine, gpu=settings.gpu, calibration=calibration)
    options = planner.first(engine_options(spec, kv_cache_paths(settings.kv, settings.state_dir, spec)))
    launcher = LocalLauncher(engine_lock_path(settings.state_dir, spec))
    try:
        launcher.launch_ahead(options)
    except OSError:
        return None
    return FirstEngine(registry, spec, calibration, planner, options, launcher)
