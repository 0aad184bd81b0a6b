"""The machine around the GPUs: memory and cores."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from inferencecenter.hardware.plan import Host

_MEMINFO: Final = Path("/proc/meminfo")
_CPUS: Final = Path("/sys/devices/system/cpu")


def read_host() -> Host:
    """Look at this machine."""
    return Host(available_bytes=available_memory_bytes(), cores=physical_cores())


def available_memory_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Return the memory that can be had without swapping, or None where the kernel does not say."""
    try:
        text = meminfo.read_text()
    except (OSError, ValueError):
        return None
    found = re.search(r"^MemAvailable:\s+([0-9]{1,19}) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def physical_cores(cpus: Path = _CPUS) -> int:
    """Return how many cores this process may run on, counting hyper-threads of one core once."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list", cpu) for cpu in allowed}
    return len(cores)


def _siblings(listing: Path, cpu: int) -> str:
    try:
        return listing.read_text().strip()
    except (OSError, ValueError):
        return str(cpu)
