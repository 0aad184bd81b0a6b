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
    from pathlib import Path

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

    def remove_ram(self) -> None:
        """Delete what is in memory: without the daemon nobody asks for it, and it takes memory from others."""
        shutil.rmtree(self.ram_dir, ignore_errors=True)


def kv_places(settings: KvSettings, state_dir: Path) -> KvPlaces:
    """Return the places for a daemon with this ``state_dir``, which no other has at the same time.

    The bytes in memory are clipped to what is free there, with a line in the log: a tmpfs may be smaller than thought,
    in a container as a rule 64 MiB, and a page that does not fit it ends the process that writes it.
    """
    own = hashlib.sha256(bytes(state_dir)).hexdigest()[:_NAME_CHARS]
    ram_dir = settings.ram_dir / own
    disk_dir = (settings.disk_dir or state_dir / "kv") / own
    if not settings.parking:
        return KvPlaces(ram_dir, 0, disk_dir, 0)
    return KvPlaces(ram_dir, _clipped(ram_dir, settings.ram_mib * _MIB), disk_dir, settings.disk_mib * _MIB)


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
