"""HTTP pages for operators: about, liveness, readiness and metrics."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Final, get_args

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

import inferencecenter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.nvml import SLOWDOWN_NAMES
from inferencecenter.hardware.process_usage import read_usage
from inferencecenter.ipc.port import EngineState
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server import event_factory
from inferencecenter.server.handshake import check_query, read_credential, refusal_body, refusal_headers
from inferencecenter.server.listener import OLLAMA_KEY
from inferencecenter.supervisor.nodes import DrainState, NodeState, machine_resources
from inferencecenter.telemetry.instruments import label_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client import Gauge
    from prometheus_client.registry import Collector
    from starlette.requests import Request

    from inferencecenter.hardware.nvml import GpuReading, Gpus
    from inferencecenter.hardware.process_usage import ProcessUsage
    from inferencecenter.ipc.link import NodeResources
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.handshake import PeerInfo
    from inferencecenter.supervisor.nodes import NodeStatus
    from inferencecenter.telemetry.engine_metrics import EngineMetrics
    from inferencecenter.telemetry.metrics import DaemonMetrics, MachineMetrics
    from inferencecenter.telemetry.node_metrics import NodeMetrics


PROXY_NOT_TRUSTED: Final = "not_trusted"
"""Hint of ``/readyz`` about a proxy on this machine that is not in ``server.trusted_proxies``."""


class StatusPages:
    """Handlers of plain HTTP requests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._scrape = MetricsPage(context)

    async def about(self, request: Request) -> Response:
        """Describe the daemon to a caller without a WebSocket; to clients of Ollama in the words that they look for."""
        if request.scope.get("state", {}).get(OLLAMA_KEY):
            return PlainTextResponse("Ollama is running")
        return JSONResponse(
            {
                "server": "inferencecenter",
                "version": inferencecenter.__version__,
                "protocol": PROTOCOL_VERSION,
                "subprotocol": SUBPROTOCOL,
                "message": "Connect with a WebSocket to this address.",
            }
        )

    async def healthz(self, _request: Request) -> Response:
        """Liveness: always 200."""
        return JSONResponse({"status": "ok"})

    async def health(self, _request: Request) -> Response:
        """Readiness in the form of llama-server: 200 if the default model is loaded or will be by a turn."""
        engine = self._context.models.status
        if engine.serves and not self._context.hub.draining:
            return JSONResponse({"status": "ok"})
        message = "Loading model" if engine.state is EngineState.STARTING else "The engine is not running"
        error = {"code": 503, "message": message, "type": "unavailable_error"}
        return JSONResponse({"error": error}, status_code=503)

    async def readyz(self, request: Request) -> Response:
        """Readiness: 200 if a turn could run now, which may wake an engine, else 503.

        Without the session database no turn of a stored session starts, and events of such a session are held back;
        without the account database no login is accepted. Callers on this machine are warned of an untrusted proxy.
        """
        engine = self._context.models.status
        storable = self._context.sessions.fault is None and self._context.accounts.is_in_place
        ready = engine.serves and storable and not self._context.hub.draining
        detail = event_factory.describe_engine(engine)
        return JSONResponse(
            {
                "state": "draining" if self._context.hub.draining else engine.state.value,
                "load_fraction": engine.load_fraction,
                "detail": detail if storable else f"{detail}; the files in the state directory cannot be used",
                "storage": "ok" if storable else "unavailable",
                **({"proxy": PROXY_NOT_TRUSTED} if self._reports_proxy(request) else {}),
            },
            status_code=200 if ready else 503,
        )

    async def metrics(self, request: Request) -> Response:
        """Return the metrics to permitted callers."""
        try:
            self._admit(request)
        except InferenceCenterError as error:
            return Response(refusal_body(error), status_code=error.spec.http_status, headers=refusal_headers(error))
        body, media_type = await self._scrape.page(request.headers.get("accept", ""))
        return Response(body, media_type=media_type)

    def _caller(self, request: Request) -> PeerInfo:
        return self._context.proxies.peer_info(request.client.host if request.client else "", request.headers)

    def _reports_proxy(self, request: Request) -> bool:
        return self._caller(request).on_this_machine and self._context.proxies.sees_untrusted

    def _admit(self, request: Request) -> None:
        context = self._context
        access = context.settings.metrics_access
        check_query(request.scope["query_string"])
        caller = self._caller(request)
        if access in ("loopback", "either") and caller.on_this_machine:
            return
        if access == "loopback":
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                "metrics are for programs on this machine",
                hint="server.metrics_access may allow tokens too.",
            )
        credential = read_credential(request.headers)
        if credential is None:
            raise InferenceCenterError(
                ErrorCode.NOT_AUTHENTICATED, hint=f"Send a token with the scope {Scope.OPERATOR} as a bearer token."
            )
        account = context.authenticator.authenticate(credential, address=caller.address)
        if Scope.OPERATOR not in account.scopes:
            raise InferenceCenterError(ErrorCode.FORBIDDEN, f"metrics need the scope {Scope.OPERATOR}")


class MetricsPage:
    """Renders the metrics."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their media type, in OpenMetrics format if ``accept`` includes it."""
        context, metrics = self._context, self._context.metrics
        gpus = await context.gpus.get()
        engines = context.models.statuses
        metrics.sessions.set(context.sessions.totals().total_sessions)
        metrics.archived_sessions.set(context.sessions.archive.n_sessions)
        metrics.session_loads.value = context.sessions.archive.n_loaded
        metrics.storage_failing.set(context.sessions.fault is not None)
        metrics.records_set_aside.value = context.sessions.n_skipped
        show_task_failures(metrics)
        show_engines(metrics.engines, engines)
        show_processes(metrics.machine, engines)
        show_gpus(metrics.machine, gpus)
        show_nodes(metrics.nodes, engines, context.models.nodes, gpus)
        encode, media_type = _encoder(accept)
        # On the event loop, where all of it is counted: a thread would only contend for the interpreter.
        return encode(metrics.registry), media_type


def show_task_failures(metrics: DaemonMetrics) -> None:
    """Update the metrics of failed background tasks."""
    for owner, failures in TaskGroup.failures.items():
        metrics.task_failures.labels(label_text(owner)).value = failures


def show_engines(metrics: EngineMetrics, engines: Mapping[str, EngineStatus]) -> None:
    """Update the metrics of engines, by model name."""
    metrics.clear()
    for name, status in engines.items():
        label, model = label_text(name), status.model
        metrics.ready.labels(label).set(status.serves)
        for state in EngineState:
            metrics.state.labels(label, state.value).set(status.state is state)
        metrics.restarts.labels(label).value = status.restarts
        metrics.running_turns.labels(label).set(status.running)
        metrics.waiting_turns.labels(label).set(status.waiting)
        metrics.parked_sessions.labels(label).set(status.parked_sessions)
        metrics.parked_bytes.labels(label, "ram").set(status.parked_ram_bytes)
        metrics.parked_bytes.labels(label, "disk").set(status.parked_bytes - status.parked_ram_bytes)
        if model is not None:
            metrics.slots.labels(label).set(model.slots)
            metrics.gpu_layers.labels(label).set(model.n_gpu_layers)
            kind = (model.architecture, model.backend, model.library)
            metrics.info.labels(label, *map(label_text, kind)).set(1)
        for index, replica in enumerate(status.replicas):
            _show_replica(metrics, label, str(index), replica)


def _show_replica(metrics: EngineMetrics, model: str, index: str, status: EngineStatus) -> None:
    for state in EngineState:
        metrics.replica_state.labels(model, index, state.value).set(status.state is state)
    metrics.replica_running_turns.labels(model, index).set(status.running)
    metrics.replica_waiting_turns.labels(model, index).set(status.waiting)
    metrics.replica_restarts.labels(model, index).value = status.restarts


def show_nodes(
    metrics: NodeMetrics, engines: Mapping[str, EngineStatus], nodes: Sequence[NodeStatus], gpus: Gpus
) -> None:
    """Update the metrics of machines: of the engines' own, of the cluster's, if there is one, and of the GPUs here."""
    metrics.clear()
    for model, status in engines.items():
        by_node: defaultdict[str, list[EngineStatus]] = defaultdict(list)
        for each in status.replicas or (status,):
            by_node[each.node or LOCAL_NODE].append(each)
        for node, statuses in by_node.items():
            _show_node_engines(metrics, label_text(node), label_text(model), statuses)
    _show_resources(metrics, LOCAL_NODE, machine_resources(gpus))
    for machine in nodes:
        _show_node(metrics, machine)


def _show_node_engines(metrics: NodeMetrics, node: str, model: str, statuses: Sequence[EngineStatus]) -> None:
    metrics.engines_ready.labels(node, model).set(sum(each.serves for each in statuses))
    metrics.running_turns.labels(node, model).set(sum(each.running for each in statuses))
    metrics.waiting_turns.labels(node, model).set(sum(each.waiting for each in statuses))
    metrics.parked_sessions.labels(node, model).set(sum(each.parked_sessions for each in statuses))
    in_ram = sum(each.parked_ram_bytes for each in statuses)
    metrics.parked_bytes.labels(node, model, "ram").set(in_ram)
    metrics.parked_bytes.labels(node, model, "disk").set(sum(each.parked_bytes for each in statuses) - in_ram)
    metrics.engine_restarts.labels(node, model).value = sum(each.restarts for each in statuses)


def _show_node(metrics: NodeMetrics, node: NodeStatus) -> None:
    label = label_text(node.name)
    for state in get_args(NodeState):
        metrics.state.labels(label, state).set(node.state == state)
    for drain in get_args(DrainState):
        metrics.drain.labels(label, drain).set(node.drain == drain)
    metrics.sessions.labels(label).set(node.sessions)
    if node.name == LOCAL_NODE:
        return
    for server in node.rpc_servers:
        metrics.rpc_servers_used.labels(label, label_text(server.model)).set(server.state == "ready")
    if node.beat_age_s is not None:
        metrics.heartbeat_age_s.labels(label).set(node.beat_age_s)
    metrics.link_sent_bytes.labels(label).value = node.traffic.sent_bytes
    metrics.link_received_bytes.labels(label).value = node.traffic.received_bytes
    metrics.link_reconnects.labels(label).value = node.traffic.reconnects
    if node.resources is not None:
        _show_resources(metrics, label, node.resources)


def _show_resources(metrics: NodeMetrics, node: str, resources: NodeResources) -> None:
    if resources.ram_used_bytes is not None and resources.ram_total_bytes is not None:
        metrics.memory_used_bytes.labels(node).set(resources.ram_used_bytes)
        metrics.memory_total_bytes.labels(node).set(resources.ram_total_bytes)
    for number, gpu in enumerate(resources.gpus):
        labels = (node, str(number))
        metrics.gpu_memory_used_bytes.labels(*labels).set(gpu.used_bytes)
        metrics.gpu_memory_total_bytes.labels(*labels).set(gpu.total_bytes)
        if gpu.utilization_percent is not None:
            metrics.gpu_utilization_percent.labels(*labels).set(gpu.utilization_percent)
        if gpu.temperature_c is not None:
            metrics.gpu_temperature_c.labels(*labels).set(gpu.temperature_c)


def show_processes(metrics: MachineMetrics, engines: Mapping[str, EngineStatus]) -> None:
    """Update the metrics of this process and the engine processes."""
    metrics.clear_processes()
    _show_process(metrics, [os.getpid()], "front", "")
    for name, status in engines.items():
        pids = [each.pid for each in status.replicas or (status,) if each.pid is not None]
        if pids:
            _show_process(metrics, pids, "engine", label_text(name))


def show_gpus(metrics: MachineMetrics, gpus: Gpus) -> None:
    metrics.clear_gpus()
    for position, reading in enumerate(gpus.readings):
        gpu = str(position if reading.index is None else reading.index)
        described = (reading.name or "", reading.uuid or "", gpus.driver_version or "")
        metrics.gpu_info.labels(gpu, *map(label_text, described)).set(1)
        for gauge, value in _figures(metrics, reading):
            if value is not None:
                gauge.labels(gpu).set(value)
        for reason in SLOWDOWN_NAMES if reading.slowdowns is not None else ():
            metrics.gpu_slowdown.labels(gpu, reason).set(reason in (reading.slowdowns or ()))


def _figures(metrics: MachineMetrics, reading: GpuReading) -> tuple[tuple[Gauge, float | None], ...]:
    return (
        (metrics.gpu_temperature_c, reading.temperature_c),
        (metrics.gpu_power_watts, reading.power_watts),
        (metrics.gpu_power_limit_watts, reading.power_limit_watts),
        (metrics.gpu_fan_percent, reading.fan_percent),
        (metrics.gpu_utilization_percent, reading.utilization_percent),
        (metrics.gpu_memory_used_bytes, reading.vram_used_bytes),
        (metrics.gpu_memory_total_bytes, reading.vram_total_bytes),
        (metrics.gpu_sm_clock_mhz, reading.sm_clock_mhz),
    )


def _show_process(metrics: MachineMetrics, pids: Iterable[int], process: str, model: str) -> None:
    """Show what the front, or the engines of a model, use together."""
    usages: list[ProcessUsage] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has just ended
            usages.append(read_usage(pid))
    if usages:
        metrics.process_cpu_s.labels(process, model).value = sum(each.cpu_s for each in usages)
        metrics.process_rss_bytes.labels(process, model).set(sum(each.rss_bytes for each in usages))


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a number
        return generate_latest, CONTENT_TYPE_PLAIN_0_0_4
