"""A daemon whose machine memory a test controls: ``python -m tests.e2e.full_daemon serve``.

A file says what percentage of memory is in use; no other limit applies.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from inferencecenter.cli import main
from inferencecenter.hardware.memory import MemoryLimit
from inferencecenter.supervisor import memory_pressure

USED_VARIABLE: Final = "TEST_MEMORY_FILE"
_TOTAL_BYTES: Final = 2**30


def machine_memory() -> MemoryLimit:
    """Read the simulated memory use from the file."""
    percent = int(Path(os.environ[USED_VARIABLE]).read_text())
    return MemoryLimit(_TOTAL_BYTES * percent // 100, _TOTAL_BYTES)


def simulate_memory() -> None:
    """Make the memory monitor read the simulated memory continuously."""
    vars(memory_pressure).update(machine_memory=machine_memory, cgroup_memory=lambda: None)
    vars(memory_pressure).update(BUSY_EVERY_S=0.02, IDLE_EVERY_S=0.02)


if __name__ == "__main__":
    simulate_memory()
    main()
