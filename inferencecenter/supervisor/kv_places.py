"""Where the engines of this daemon keep KV that is in no slot, and how much of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.settings import KvSettings

_MIB: Final = 2**20
_NAME_CHARS: Final = 12

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KvPlaces:
    """A directory in memory and one on disk, each this daemon's own; one without bytes is not used."""

    ram_dir: Path
    ram_bytes: int
    disk_dir: Path
    disk_bytes: int


def kv_places(settings: KvSettings, state_dir: Path, spec: ModelSpec) -> KvPlaces:
    """Return the places of a model, for a daemon with this ``state_dir``, which no other has at the same time.

    The bytes in memory are clipped to what is free there, with a line in the log: a tmpfs may be smaller than thought,
    in a container as a rule 64 MiB, and a page that does not fit it ends the process that writes it.
    """
    name = place_name(spec)
    ram_dir = _own(settings.ram_dir, state_dir) / name
    disk_dir = _own(settings.disk_dir or state_dir / "kv", state_dir) / name
    if not settings.parking:
        return KvPlaces(ram_dir, 0, disk_dir, 0)
    return KvPlaces(ram_dir, _clipped(ram_dir, settings.ram_mib * _MIB), disk_dir, settings.disk_mib * _MIB)


def place_name(spec: ModelSpec) -> str:
    """Return a name for files, the same for what parks KV that is alike and for nothing else."""
    engine = spec.engine
    kind = (spec.name, spec.path, spec.lora, engine.kv_type_k, engine.kv_type_v, engine.flash_attention)
    return hashlib.sha256(repr(kind).encode()).hexdigest()[:_NAME_CHARS]


def clean_places(settings: KvSettings, state_dir: Path, specs: Iterable[ModelSpec]) -> None:
    """Delete what was kept of models that there are no more, or that are run otherwise now."""
    known = {place_name(spec) for spec in specs}
    for directory in (settings.ram_dir, settings.disk_dir or state_dir / "kv"):
        with contextlib.suppress(OSError):
            for path in _own(directory, state_dir).iterdir():
                if path.name not in known:
                    shutil.rmtree(path, ignore_errors=True)


def remove_ram(settings: KvSettings, state_dir: Path) -> None:
    """Delete what is in memory: without the daemon nobody asks for it, and it takes memory from others."""
    shutil.rmtree(_own(settings.ram_dir, state_dir), ignore_errors=True)


def _own(directory: Path, state_dir: Path) -> Path:
    return directory / hashlib.sha256(bytes(state_dir)).hexdigest()[:_NAME_CHARS]


def _clipped(ram_dir: Path, wanted_bytes: int) -> int:
    """Return ``wanted_bytes``, or what the directory's file system can take if that is less."""
    try:
        existing = next(place for place in (ram_dir, *ram_dir.parents) if place.exists())
        system = os.statvfs(existing)
    except OSError as error:
        _log.warning("kv_ram_unavailable", path=str(ram_dir), reason=error.strerror)
        return 0
    free_bytes = system.f_bavail * system.f_frsize + _size_bytes(ram_dir)
    if wanted_bytes <= free_bytes:
        return wanted_bytes
    _log.warning("kv_ram_clipped", path=str(ram_dir), wanted_mib=wanted_bytes // _MIB, free_mib=free_bytes // _MIB)
    return free_bytes


def _size_bytes(directory: Path) -> int:
    """What is left there of an earlier daemon takes room that the first engine makes free."""
    with contextlib.suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    return 0
