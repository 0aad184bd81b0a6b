"""The first process of a machine: starts hosts as Ray does on a node, when it is asked over the network.

``python -m tests.cluster.node_agent`` listens on ``PORT``; each connection brings a ``RayRequest`` as a line of JSON,
and gets an empty line when the host was started.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec

from inferencecenter.cluster.ray_cluster import RayRequest
from inferencecenter.ipc.engine_child import die_with_parent

PORT = 6400


def main() -> None:
    """Serve requests; hosts end with this process."""
    die_with_parent()
    hosts: dict[str, subprocess.Popen[bytes]] = {}
    with socket.create_server(("0.0.0.0", PORT)) as server:
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as stream:
                request = msgspec.json.decode(stream.readline(), type=RayRequest)
                if (last := hosts.get(request.engine)) is not None:
                    last.kill()
                    last.wait()
                host = subprocess.Popen([sys.executable, "-m", request.module], stdin=subprocess.PIPE)
                assert host.stdin is not None
                host.stdin.write(request.ticket.encode() + b"\n")
                host.stdin.flush()
                hosts[request.engine] = host
                stream.write(b"\n")


if __name__ == "__main__":
    main()
