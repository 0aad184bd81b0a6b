"""The process that talks to Ray: ``python -m inferencecenter.cluster.ray_driver ADDRESS``.

Ray ends a process that has connected to a cluster when it loses the cluster, and takes 80 MiB of it. So the front does
that in a child, with a request and a reply a line of JSON (``RayRequest``, ``RayReply``), one after the other.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any, Final

import msgspec
import ray

from inferencecenter.cluster.ray_cluster import NAMESPACE, NodeState, RayReply, RayRequest, node_resource

_START_TIMEOUT_S: Final = 60.0
_GONE_TIMEOUT_S: Final = 10.0


_UNWANTED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for workers which have reserved neither cores nor GPUs."""


class HostActor:
    """The Ray actor beside a host: starts it on its machine, and ends with it, as it does with the actor."""

    def start(self, ticket: bytes) -> int:
        """Start the host with a ticket as JSON; return its process id."""
        environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        host = subprocess.Popen(
            [sys.executable, "-m", "inferencecenter.cluster.engine_host"], stdin=subprocess.PIPE, env=environment
        )
        assert host.stdin is not None, "it was started with a pipe"
        host.stdin.write(ticket + b"\n")
        host.stdin.flush()
        threading.Thread(target=self._end_with, args=(host,), daemon=True).start()
        return host.pid

    @staticmethod
    def _end_with(host: subprocess.Popen[bytes]) -> None:
        host.wait()
        os._exit(0)


def _nodes() -> tuple[NodeState, ...]:
    prefix = node_resource("")
    return tuple(
        NodeState(name=resource.removeprefix(prefix), address=node["NodeManagerAddress"], alive=node["Alive"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        for resource in node["Resources"]
        if resource.startswith(prefix)
    )


def _end(name: str) -> None:
    """Kill an actor, and wait until its name is free."""
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    except ValueError:  # there is none
        return
    until_s = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < until_s:
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.05)


def _start(request: RayRequest) -> None:
    alive = [node.name for node in _nodes() if node.alive]
    if request.node not in alive:
        raise LookupError(f"no node {request.node} is in the cluster (there are: {', '.join(alive) or 'none'})")
    _end(request.engine)
    actor: Any = (
        ray.remote(HostActor)
        .options(
            name=request.engine,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=0,
            resources={node_resource(request.node): 0.001},
        )
        .remote()
    )
    ray.get(actor.start.remote(request.ticket.encode()), timeout=_START_TIMEOUT_S)


def main() -> int:
    """Connect to the cluster, and serve requests until the end of standard input."""
    ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=RayRequest)
        try:
            if request.op == "start":
                _start(request)
            reply = RayReply(nodes=_nodes())
        except Exception as error:  # noqa: BLE001 - a border: Ray raises many kinds
            reply = RayReply(error=str(error).strip().splitlines()[-1] if str(error).strip() else repr(error))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
