"""The process that talks to Ray: ``python -m inferencecenter.cluster.ray_driver ADDRESS``.

Ray ends a process that has connected to a cluster when it loses the cluster, and takes 80 MiB of it. So the front does
that in a child, with a request and a reply a line of JSON (``RayRequest``, ``RayReply``), each request in a thread.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec
import ray

from inferencecenter.cluster.ray_cluster import NAMESPACE, NodeFacts, RayNode, RayReply, RayRequest, node_resource

_START_TIMEOUT_S: Final = 60.0
_GONE_TIMEOUT_S: Final = 10.0
_REACH_TIMEOUT_S: Final = 5.0
_CLOCK_READINGS: Final = 3
_MOST_EXAMINED: Final = 64

_UNWANTED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for workers which have reserved neither cores nor GPUs."""


class HostActor:
    """The Ray actor beside a host: starts it on its machine, and ends with it, as it does with the actor."""

    def start(self, module: str, ticket: bytes) -> int:
        """Start the host, a module, with a ticket as JSON; return its process id."""
        environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        host = subprocess.Popen(  # noqa: S603 - this Python, and a module of this package
            [sys.executable, "-m", module], stdin=subprocess.PIPE, env=environment
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


class ExaminingActor:
    """The Ray actor that reports facts about its machine. Its code comes from the driver, whose version may differ."""

    def facts(self, files: bytes, listeners: tuple[tuple[str, int], ...]) -> dict[str, Any]:
        """Return the fields of ``NodeFacts`` but the clock; ``files`` are a list of ``ModelFile`` as JSON."""
        import inferencecenter  # noqa: PLC0415 - that of the actor's machine

        found: dict[str, Any] = {"version": inferencecenter.__version__, "llama_cpp": ""}
        with suppress(PackageNotFoundError):
            found["llama_cpp"] = version("llama-cpp-python")
        try:
            from inferencecenter.cluster.node import compare_files  # noqa: PLC0415 - as above
        except ImportError:
            found["files"] = ()
        else:
            found["files"] = compare_files(files)
        found["unreachable"] = tuple(map(_why_unreachable, listeners))
        return found

    def now(self) -> float:
        """Return the time of its clock."""
        return time.time()


def _why_unreachable(listener: tuple[str, int]) -> str:
    """Return why a listener cannot be reached; empty if it can."""
    try:
        socket.create_connection(listener, timeout=_REACH_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _examine(request: RayRequest) -> tuple[NodeFacts, ...]:
    """Ask all nodes at once, then their clocks one after the other."""
    names = sorted({node.name for node in _nodes() if node.alive})[:_MOST_EXAMINED]
    files = msgspec.json.encode(request.files)
    actors: dict[str, Any] = {
        name: ray.remote(ExaminingActor).options(num_cpus=0, resources={node_resource(name): 0.001}).remote()
        for name in names
    }
    asked = {name: actor.facts.remote(files, request.listeners) for name, actor in actors.items()}
    until_s = time.monotonic() + _START_TIMEOUT_S
    found = []
    for name, actor in actors.items():
        try:
            facts = ray.get(asked[name], timeout=max(0.1, until_s - time.monotonic()))
            offset_s, error_s = _compare_clock(actor)
            found.append(NodeFacts(name=name, clock_offset_s=offset_s, clock_error_s=error_s, **facts))
        except Exception as error:  # noqa: BLE001 - a border: Ray raises many kinds
            found.append(NodeFacts(name=name, error=_last_line(error)))
        ray.kill(actor)
    return tuple(found)


def _compare_clock(actor: Any) -> tuple[float, float]:
    """Return how far the clock of an actor's machine is ahead, and half the round trip, by which that may be wrong."""
    measured = []
    for _ in range(_CLOCK_READINGS):
        before_s = time.time()
        there_s = ray.get(actor.now.remote(), timeout=_REACH_TIMEOUT_S)
        after_s = time.time()
        error_s = abs(after_s - before_s) / 2
        measured.append((error_s, there_s - before_s - error_s))
    error_s, offset_s = min(measured)
    return offset_s, error_s


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)


def _nodes() -> tuple[RayNode, ...]:
    prefix = node_resource("")
    own_id = ray.get_runtime_context().get_node_id()
    return tuple(
        RayNode(
            name=resource.removeprefix(prefix),
            address=node["NodeManagerAddress"],
            alive=node["Alive"],
            own=node["NodeID"] == own_id,
        )
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
    ray.get(actor.start.remote(request.module, request.ticket.encode()), timeout=_START_TIMEOUT_S)


def _serve(request: RayRequest, writing: threading.Lock) -> None:
    try:
        if request.op == "start":
            _start(request)
        facts = _examine(request) if request.op == "examine" else ()
        reply = RayReply(number=request.number, nodes=_nodes(), facts=facts)
    except Exception as error:  # noqa: BLE001 - a border: Ray raises many kinds
        reply = RayReply(number=request.number, error=_last_line(error))
    with writing:
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


def main() -> int:
    """Connect to the cluster, and serve requests until the end of standard input."""
    ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    writing = threading.Lock()
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=RayRequest)
        threading.Thread(target=_serve, args=(request, writing), daemon=True).start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
