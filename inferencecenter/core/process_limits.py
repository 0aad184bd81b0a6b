"""Limits that a process sets on itself before it runs untrusted programs: CPU time, memory, no core dumps."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(n_bytes: int) -> None:
    """Limit further memory mappings of the process, and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + n_bytes,) * 2)


def limit_cpu(seconds: float) -> None:
    """Have the kernel kill the process after so much more CPU time, rounded up; that works without its parent."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def mapped_bytes() -> int:
    """Return the size of the process's mappings."""
    return _statm_bytes(0)


def resident_bytes() -> int:
    return _statm_bytes(1)


def _statm_bytes(column: int) -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[column]) * resource.getpagesize()
