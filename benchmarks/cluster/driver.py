"""Starts hosts as children of its own: ``python -m benchmarks.cluster.driver ADDRESS``.

It serves the requests of ``cluster/ray_driver.py``; nodes are directories. Hosts end with this process, which ends with
the daemon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.cluster.nodes import NODES_VARIABLE, PID_FILE
from inferencecenter.cluster.node import DIRECTORY_VARIABLE
from inferencecenter.cluster.ray_cluster import RayNode, RayReply, RayRequest

MODULE: Final = "benchmarks.cluster.driver"
HOST: Final = "inferencecenter.cluster.engine_host"


def start_host(ticket: bytes, directory: Path, *, module: str = HOST) -> subprocess.Popen[bytes]:
    """Start a host with a ticket as JSON, on a node with this directory."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    host = subprocess.Popen(  # noqa: S603 - its own interpreter and module
        [sys.executable, "-m", module], stdin=subprocess.PIPE, env={**os.environ, DIRECTORY_VARIABLE: str(directory)}
    )
    assert host.stdin is not None, "it was started with a pipe"
    host.stdin.write(ticket + b"\n")
    host.stdin.flush()
    (directory / PID_FILE).write_text(str(host.pid))
    return host


def main() -> int:
    """Serve requests until the end of standard input."""
    nodes = Path(os.environ[NODES_VARIABLE])
    hosts: dict[str, subprocess.Popen[bytes]] = {}
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=RayRequest)
        if request.op == "start":
            if (last := hosts.get(request.engine)) is not None:
                last.kill()
                last.wait()
            hosts[request.engine] = start_host(request.ticket.encode(), nodes / request.node)
        found = tuple(RayNode(name=each.name, address="127.0.0.1", alive=True) for each in nodes.iterdir())
        reply = RayReply(number=request.number, nodes=found)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
