"""The nodes of a measured daemon, as the measuring process finds them: directories, each with one host."""

from __future__ import annotations

from pathlib import Path
from typing import Final

NODES_VARIABLE: Final = "BENCHMARK_NODES"
"""Environment variable with the directory of the nodes."""
PID_FILE: Final = "host.pid"


def node_name(index: int) -> str:
    """Return the name of a node."""
    return f"box{index + 1}"


def node_processes(directory: Path) -> tuple[int, ...]:
    """Return the process ids of a node's host and its engine.

    Raises:
        OSError: There is no host.
    """
    host = int((directory / PID_FILE).read_text())
    children = Path(f"/proc/{host}/task/{host}/children").read_text().split()
    return (host, *(int(child) for child in children))
