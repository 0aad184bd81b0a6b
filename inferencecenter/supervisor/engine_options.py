"""Builds an engine's options and the paths of its KV cache from the settings."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.hardware.placement import MIB
from inferencecenter.hardware.split import USUAL_N_BATCH, USUAL_N_UBATCH, USUAL_SLOTS
from inferencecenter.ipc.engine_options import EngineOptions, KvCachePaths
from inferencecenter.models.registry import LOCAL_NODE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from inferencecenter.config.settings import KvSettings
    from inferencecenter.models.registry import ModelSpec

_NAME_CHARS: Final = 12

_log = structlog.get_logger(__name__)
_MAX_WORKER_THREADS: Final = 8


def kv_cache_paths(
    settings: KvSettings, state_dir: Path, spec: ModelSpec, *, replica: int = 0, node: str = LOCAL_NODE
) -> KvCachePaths:
    """Return the KV cache paths of a model's replica, which only the daemon with this ``state_dir`` uses.

    The replicas on a machine divide the model's budgets equally; the first has the paths of a model without replicas.
    The host of one on another machine has directories of its own, and clips the size in memory there.
    """
    name = replica_key(spec, replica)
    n_there = max(1, spec.nodes.count(node))  # a machine that has joined is not named
    ram_bytes = settings.ram_mib * MIB // n_there if settings.parking else 0
    ram_dir = _own(settings.ram_dir, state_dir) / name
    disk_dir = _own(settings.disk_dir or state_dir / "kv", state_dir) / name
    return KvCachePaths(
        ram_dir=ram_dir,
        ram_bytes=clipped_to_free(ram_dir, ram_bytes) if node == LOCAL_NODE else ram_bytes,
        disk_dir=disk_dir,
        disk_bytes=settings.disk_mib * MIB // n_there if settings.parking else 0,
        client_share=settings.client_share,
    )


def cache_key(spec: ModelSpec) -> str:
    """Return a file name that two models share exactly if their parked KV is interchangeable."""
    engine = spec.engine
    kind = (spec.name, spec.path, spec.lora, engine.kv_type_k, engine.kv_type_v, engine.flash_attention)
    return hashlib.sha256(repr(kind).encode()).hexdigest()[:_NAME_CHARS]


def replica_key(spec: ModelSpec, replica: int) -> str:
    """Return the name of a replica's directories and lock; that of the first is the model's."""
    return cache_key(spec) if replica == 0 else f"{cache_key(spec)}-{replica}"


def engine_lock_path(state_dir: Path, spec: ModelSpec, *, replica: int = 0) -> Path:
    """Return the file that an engine of a model's replica locks as long as it lives."""
    return state_dir / f"engine-{replica_key(spec, replica)}.lock"


def remove_stale_caches(settings: KvSettings, state_dir: Path, specs: Iterable[ModelSpec]) -> None:
    """Delete the caches of models and replicas that no longer exist or whose KV would differ now."""
    known = {replica_key(spec, replica) for spec in specs for replica in range(spec.replicas)}
    for directory in (settings.ram_dir, settings.disk_dir or state_dir / "kv"):
        with contextlib.suppress(OSError):
            for path in _own(directory, state_dir).iterdir():
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)


def remove_ram_cache(settings: KvSettings, state_dir: Path) -> None:
    """Delete the cache in memory: it is of no use without the daemon."""
    shutil.rmtree(_own(settings.ram_dir, state_dir), ignore_errors=True)


def _own(directory: Path, state_dir: Path) -> Path:
    return directory / hashlib.sha256(bytes(state_dir)).hexdigest()[:_NAME_CHARS]


def clipped_to_free(ram_dir: Path, wanted_bytes: int) -> int:
    """Return a size in memory that the file system of a directory has free, with a log line if it is smaller.

    A tmpfs may be small (64 MiB in most containers), and a page that does not fit kills the process that writes it.
    """
    if not wanted_bytes:
        return 0
    try:
        existing = next(place for place in (ram_dir, *ram_dir.parents) if place.exists())
        system = os.statvfs(existing)
    except OSError as error:
        _log.warning("kv_ram_unavailable", path=str(ram_dir), reason=error.strerror)
        return 0
    free_bytes = system.f_bavail * system.f_frsize + _size_bytes(ram_dir)
    if wanted_bytes <= free_bytes:
        return wanted_bytes
    _log.warning("kv_ram_clipped", path=str(ram_dir), wanted_mib=wanted_bytes // MIB, free_mib=free_bytes // MIB)
    return free_bytes


def _size_bytes(directory: Path) -> int:
    # Files left by an earlier daemon count as free: the first engine deletes them.
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    return 0


def engine_options(spec: ModelSpec, kv: KvCachePaths) -> EngineOptions:
    """Return an engine's options from the settings, with defaults for what is unset in case no plan can be made."""
    engine = spec.engine
    resolved = {
        "slots": engine.slots or USUAL_SLOTS,
        "n_batch": engine.n_batch or max(USUAL_N_BATCH, engine.n_ubatch),
        "n_ubatch": engine.n_ubatch or min(USUAL_N_UBATCH, engine.n_batch or USUAL_N_UBATCH),
        "kv_type_k": "f16" if engine.kv_type_k == "auto" else engine.kv_type_k,
        "kv_type_v": "f16" if engine.kv_type_v == "auto" else engine.kv_type_v,
        "worker_threads": engine.worker_threads or min(len(os.sched_getaffinity(0)), _MAX_WORKER_THREADS),
    }
    return EngineOptions(
        **(dict(engine) | resolved),
        kind=spec.kind,
        model_path=str(spec.path),
        model_name=spec.name,
        lora=spec.lora,
        draft_path="" if spec.draft is None else str(spec.draft),
        mmproj_path="" if spec.mmproj is None else str(spec.mmproj),
        kv=kv,
    )
