"""Memory in use and available: of the machine, the control group (cgroup), or a process; and the machine's cores.

Values that cannot be read are absent.

Memory in use is what the kernel cannot reclaim without swapping. A mapped model file does not count: its pages are a
cache of the file.

- Of the machine: ``MemTotal - MemAvailable``.
- Of a control group (version 2): ``memory.current - active_file - inactive_file - slab_reclaimable``. Files of a tmpfs
  and locked pages are not in the two lists of file pages.
- Of a control group of version 1: ``memory.usage_in_bytes - total_active_file - total_inactive_file``. Kernel memory
  is accounted separately there.
- Of a process: ``RssAnon + RssShmem``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferencecenter.hardware.placement import Host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
_KIB: Final = 1024
_WHOLE: Final = re.compile(r"[0-9]{1,19}")
_UNLIMITED_BYTES: Final = 2**60
"""A version 1 limit from here on means unlimited: the kernel then reports the largest number of whole pages."""


@dataclass(frozen=True, slots=True)
class _Controller:
    """The files of a cgroup's memory controller, and the fields of ``memory.stat`` that are reclaimable."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_VERSION_1: Final = _Controller(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable=("total_active_file", "total_inactive_file"),
)
_VERSION_2: Final = _Controller(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    reclaimable=("active_file", "inactive_file", "slab_reclaimable"),
)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A usage and its limit."""

    used_bytes: int
    total_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """A process's memory without file pages: private, and shared including files of a tmpfs."""

    own_bytes: int = 0
    shared_bytes: int = 0


def machine_memory(proc: Path = PROC) -> MemoryLimit | None:
    fields = _fields(proc / "meminfo")
    total, available = fields.get("MemTotal:", 0) * _KIB, fields.get("MemAvailable:")
    return MemoryLimit(total - available * _KIB, total) if total and available is not None else None


def cgroup_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryLimit | None:
    """Return the usage and limit of this process's cgroup; of several limited ones, the fullest.

    The limit is ``memory.max``, or ``memory.high`` if that is less: above it the kernel throttles the group. In
    version 1 it is ``memory.limit_in_bytes``.
    """
    return max(_shares(proc, cgroups), key=lambda share: share.used_bytes / share.total_bytes, default=None)


def available_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the memory that is available without swapping, or ``None`` if unknown.

    It is the minimum of the free memory of the machine, this process's cgroup and its ancestors.
    """
    shares = list(_shares(proc, cgroups))
    if (machine := machine_memory(proc)) is not None:
        shares.append(machine)
    return min((share.left_bytes for share in shares), default=None)


def resident_memory(pid: int, proc: Path = PROC) -> ResidentMemory:
    """Return the resident memory of a process; zero if it has ended."""
    fields = _fields(proc / str(pid) / "status")
    return ResidentMemory(fields.get("RssAnon:", 0) * _KIB, fields.get("RssShmem:", 0) * _KIB)


def _shares(proc: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    """Yield the usage of each limit that applies to this process."""
    groups = _groups(proc, cgroups)
    yield from (share for group, controller in groups if (share := _share(group, controller)) is not None)


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Controller]]:
    """Yield this process's cgroup and its visible ancestors.

    In a container of version 1 the group's path is the host's, of which only the container's own group is mounted: the
    outermost ancestor.
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, found, path = rest.partition(":/")
        if not found:
            continue
        if line.startswith("0::"):
            root, controller = cgroups, _VERSION_2
        elif "memory" in controllers.split(","):
            root, controller = cgroups / controllers, _VERSION_1
        else:
            continue
        group = Path(path)
        yield from ((root / each, controller) for each in (group, *group.parents) if ".." not in each.parts)


def _share(group: Path, controller: _Controller) -> MemoryLimit | None:
    found = (_number(group / name) for name in controller.limits)
    limits = [limit for limit in found if limit and limit < _UNLIMITED_BYTES]
    used = _number(group / controller.usage)
    if not limits or used is None:
        return None
    stat = _fields(group / "memory.stat")
    return MemoryLimit(max(0, used - sum(stat.get(name, 0) for name in controller.reclaimable)), min(limits))


def _number(path: Path) -> int | None:
    """Return the number in a file; ``None`` for ``max`` too."""
    lines = _lines(path)
    return _integer(lines[0].strip()) if lines else None


def _fields(path: Path) -> Mapping[str, int]:
    """Return the lines of a file that begin with a name and a number."""
    columns = (line.split() for line in _lines(path))
    numbers = ((each[0], _integer(each[1])) for each in columns if len(each) > 1)
    return {name: number for name, number in numbers if number is not None}


def _lines(path: Path) -> list[str]:
    """Return the lines of a kernel file; none if it cannot be read as text."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def _integer(text: str) -> int | None:
    return int(text) if _WHOLE.fullmatch(text) else None


# The host: memory and cores.

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
