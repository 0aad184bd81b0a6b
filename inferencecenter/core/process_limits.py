"""What a process may take that runs a stranger's program, set from within: processor time, memory, no core dumps."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(n_bytes: int) -> None:
    """Let the process map so much more than it has now, and leave no core dump when it dies of that."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + n_bytes,) * 2)


def limit_cpu(seconds: float) -> None:
    """Have the kernel end the process when it works for so much longer, rounded up: its parent may be gone by then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def mapped_bytes() -> int:
    """Return how much the process has mapped."""
    return _statm_bytes(0)


def resident_bytes() -> int:
    """Return how much of it is in memory."""
    return _statm_bytes(1)


def _statm_bytes(column: int) -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[column]) * resource.getpagesize()
