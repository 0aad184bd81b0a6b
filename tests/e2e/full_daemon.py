"""A daemon on a machine whose memory a test fills: ``python -m tests.e2e.full_daemon serve``.

How much of it is in use is what a file says, in percent; nothing else limits it.
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
    """Read the file that plays the kernel."""
    percent = int(Path(os.environ[USED_VARIABLE]).read_text())
    return MemoryLimit(_TOTAL_BYTES * percent // 100, _TOTAL_BYTES)


def play_kernel() -> None:
    """Have the guard look at the played memory, and all the time."""
    vars(memory_pressure).update(machine_memory=machine_memory, cgroup_memory=lambda: None)
    vars(memory_pressure).update(BUSY_EVERY_S=0.02, IDLE_EVERY_S=0.02)


if __name__ == "__main__":
    play_kernel()
    main()
