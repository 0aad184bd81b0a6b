"""Serves the requests of ``cluster/ray_driver.py`` without Ray: ``python -m tests.cluster.agent_driver``.

The nodes are a JSON object of names and addresses in the environment; hosts are started by the ``node_agent`` there.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from inferencecenter.cluster.ray_cluster import RayNode, RayReply, RayRequest
from tests.cluster.node_agent import PORT

MODULE = "tests.cluster.agent_driver"
NODES_VARIABLE = "TEST_NODES"
_TIMEOUT_S = 2.0


def main() -> int:
    """Serve requests until the end of standard input."""
    addresses = msgspec.json.decode(os.environ[NODES_VARIABLE], type=dict[str, str])
    nodes = tuple(RayNode(name=name, address=address, alive=True) for name, address in addresses.items())
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=RayRequest)
        reply = RayReply(number=request.number, nodes=nodes)
        if request.op == "start":
            try:
                with socket.create_connection((addresses[request.node], PORT), timeout=_TIMEOUT_S) as agent:
                    agent.sendall(line)
                    if not agent.recv(1):
                        reply = RayReply(number=request.number, error="the agent started nothing")
            except OSError as error:
                reply = RayReply(number=request.number, error=str(error))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
