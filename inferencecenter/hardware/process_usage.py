"""CPU time and memory of a process, as the kernel accounts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inferencecenter.core.errors import foreign_input

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Fields 14 and 15 of /proc/PID/stat (proc(5)), counted from the state, which follows the name in parentheses.
_UTIME: Final = 11
_STIME: Final = 12


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU seconds of all threads since the start of the process, and its current memory."""

    cpu_s: float
    rss_bytes: int


def read_usage(pid: int) -> ProcessUsage:
    """Return the usage of a process.

    Raises:
        OSError: There is no such process, or the kernel's figures cannot be parsed.
    """
    with foreign_input(OSError, own=OSError):
        return _read(_PROC / str(pid))


def _read(process: Path) -> ProcessUsage:
    # The name may contain spaces and parentheses; the text after its last parenthesis does not.
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    resident_pages = int((process / "statm").read_text().split()[1])
    return ProcessUsage(
        cpu_s=(int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S, rss_bytes=resident_pages * _PAGE_BYTES
    )
