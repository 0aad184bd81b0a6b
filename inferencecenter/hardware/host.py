"""The host: memory and cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from inferencecenter.hardware.memory import available_memory_bytes
from inferencecenter.hardware.placement import Host

_CPUS: Final = Path("/sys/devices/system/cpu")


def read_host() -> Host:
    """Read this machine's memory and cores."""
    return Host(available_bytes=available_memory_bytes(), cores=physical_cores())


def physical_cores(cpus: Path = _CPUS) -> int:
    """Return the number of physical cores that this process may run on."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", cpu) for cpu in allowed}
    return len(cores)


def _siblings(listing: Path, cpu: int) -> str:
    try:
        return listing.read_text().strip()
    except (OSError, ValueError):
        return str(cpu)
