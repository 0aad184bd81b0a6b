"""Composition root: builds the parts of the daemon from the settings, runs them, and shuts them down.

Beside ``one_shot`` the only module that names the concrete classes. Errors in the configuration (state directory, port,
client file, parameters, model file) are found here, before or while the first engine starts, and end the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import importlib.util
import os
import resource
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import uvloop

from inferencecenter import __version__
from inferencecenter.api.app import DeferredRoutes, create_app
from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.auth.bootstrap import ensure_admin
from inferencecenter.auth.clients_file import load_clients
from inferencecenter.auth.quotas import AccessQuotas
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.nvml import Gpu
from inferencecenter.hardware.vram_calibration import PLAN_FILE, VramCalibration
from inferencecenter.mcp.gateway import McpGateway
from inferencecenter.models.library import ModelLibrary
from inferencecenter.models.registry import LOCAL_NODE, configured_files, read_registry
from inferencecenter.protocol.base import Event, Request, build_messages
from inferencecenter.protocol.values import Value
from inferencecenter.reload import ConfigReloader
from inferencecenter.server.context import ServerContext, no_sessions, no_usage, no_usage_page
from inferencecenter.server.control import ControlSocket, record_open_files
from inferencecenter.server.listener import BACKLOG, CLOSING_S, Listener, address, bind, bind_ollama, inherited_sockets
from inferencecenter.server.load_history import HISTORY_FILE, LoadHistory, recording
from inferencecenter.server.tls import Certificate
from inferencecenter.server.unix_socket import unix_accounts, unix_socket
from inferencecenter.sessions.context import parse_config_params
from inferencecenter.sessions.images.library import ImageLibrary
from inferencecenter.sessions.images.store import IMAGES_NAME, ImageFile
from inferencecenter.sessions.journal import RETRY_LATER_MS, check_writable
from inferencecenter.sessions.manager import SessionManager
from inferencecenter.sessions.observability import TurnObservers
from inferencecenter.sessions.prompt.template_process import TemplateProcessPool
from inferencecenter.sessions.store.archive import Archive
from inferencecenter.sessions.store.rows import utc_day
from inferencecenter.sessions.store.schema import DATABASE_NAME
from inferencecenter.sessions.store.store import SessionStore
from inferencecenter.supervisor.engine_options import (
    engine_lock_path,
    engine_options,
    kv_cache_paths,
    remove_ram_cache,
    remove_stale_caches,
)
from inferencecenter.supervisor.memory_pressure import MemoryPressureMonitor, reader
from inferencecenter.supervisor.model_manager import ManagedModel, ModelManager
from inferencecenter.supervisor.planning import Planner, RemotePlanner, ReplicaShare, RpcPlanner
from inferencecenter.supervisor.poison_turns import CrashLimit, PoisonTurnStore
from inferencecenter.supervisor.process import EXIT_GRACE_S, STOP_DEADLINE_S, SUSPEND_DEADLINE_S, LocalLauncher
from inferencecenter.supervisor.replica_placement import ReplicaRates
from inferencecenter.supervisor.replica_set import Replica, ReplicaSet, loaded_siblings
from inferencecenter.supervisor.rpc_nodes import RpcNodes
from inferencecenter.supervisor.step_metrics import StepMeter
from inferencecenter.supervisor.supervisor import Supervisor
from inferencecenter.supervisor.thermal import ThermalThrottler
from inferencecenter.systemd_notifier import Notifier, SystemdNotifier
from inferencecenter.telemetry.loop_monitor import LoopMonitor
from inferencecenter.telemetry.metrics import DaemonMetrics
from inferencecenter.telemetry.traces import open_traces

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence

    from inferencecenter.auth.authentication import ExternalAuthProvider
    from inferencecenter.cluster.engine_cluster import EngineCluster
    from inferencecenter.config.sections import McpServerSettings
    from inferencecenter.config.settings import Settings
    from inferencecenter.first_engine import FirstEngine
    from inferencecenter.ipc.messages import StepOutput
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.mcp.gateway import McpClient
    from inferencecenter.models.registry import ModelSpec, Registry
    from inferencecenter.protocol.params import Params
    from inferencecenter.server.context import SessionReader, UsagePageReader, UsageReader
    from inferencecenter.sessions.observability import Totals
    from inferencecenter.sessions.store.archive import SessionLine, UsageLine, UsagePage
    from inferencecenter.sessions.store.recorder import PurgeKind
    from inferencecenter.supervisor.model_manager import ModelEngine
    from inferencecenter.supervisor.poison_turns import Suspicion
    from inferencecenter.supervisor.process import EngineLauncher
    from inferencecenter.supervisor.remote import RemoteLauncher
    from inferencecenter.supervisor.rpc_nodes import RpcServers
    from inferencecenter.telemetry.metrics import McpMetrics
    from inferencecenter.telemetry.otlp import Traces

_MCP_CLIENT: Final = "inferencecenter.mcp.connection"
"""Its import takes 0.4 s and 23 MiB, which daemons without MCP servers do not need."""
_SUSPECTS_FILE: Final = "suspects.json"
_COMPLETE_AFTER_S: Final = 0.1
STOP_S: Final = CLOSING_S + SUSPEND_DEADLINE_S + STOP_DEADLINE_S + EXIT_GRACE_S + 5.0
"""How long stopping takes at most after the turns' time is over, including what the store needs at the end."""

_log = structlog.get_logger(__name__)


def install_signal_handlers(*, stop: Callable[[], None], reload: Callable[[], object]) -> None:
    """Stop at the first SIGINT or SIGTERM, and restore the second one's default effect; reload at SIGHUP.

    With a terminal, SIGHUP means that the terminal is gone, and stops the daemon; where it is ignored, as under nohup,
    it stays ignored. Call it on the event loop.
    """
    loop = asyncio.get_running_loop()
    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        if _has_terminal():
            ends.append(signal.SIGHUP)
        else:
            loop.add_signal_handler(signal.SIGHUP, reload)

    def end(received: signal.Signals) -> None:
        _log.info("stopping", signal=received.name)
        for each in ends:
            loop.remove_signal_handler(each)
        stop()

    for each in ends:
        loop.add_signal_handler(each, end, each)


def _has_terminal() -> bool:
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def used_today(settings: Settings) -> dict[tuple[str, str], int]:
    """Return the tokens used since midnight UTC that count towards limits, by client and token; empty if unreadable."""
    path, today = settings.state_dir / DATABASE_NAME, utc_day(time.time())
    try:
        with Archive.open(path) as archive:
            lines = archive.usage_by_token(since=today)
    except InferenceCenterError as error:
        _log.warning("usage_unreadable", error=error.message, hint=error.hint)
        return {}
    return {(line.client_id, line.token_id or ""): line.counted_tokens for line in lines if line.day == today}


def usage_reader(settings: Settings) -> UsageReader:
    """Return a function that reads usage since a day; without a session store none is kept."""
    if not settings.sessions.store:
        return no_usage

    def read(client_id: str, since: str) -> Sequence[UsageLine]:
        with _read_store(settings, "usage") as archive:
            return archive.usage(client_id, since=since)

    return read


def usage_page_reader(settings: Settings) -> UsagePageReader:
    """Return a function that reads a page of the usage of all accounts; without a session store none is kept."""
    if not settings.sessions.store:
        return no_usage_page

    def read(since: str, after: str | None, limit: int) -> UsagePage:
        with _read_store(settings, "usage") as archive:
            return archive.usage_page(since, after=after, limit=limit)

    return read


def session_reader(settings: Settings) -> SessionReader:
    """Return a function that reads the archived sessions of a client, or of all; without a store there are none."""
    if not settings.sessions.store:
        return no_sessions

    def read(client_id: str | None, after: str | None, limit: int) -> Sequence[SessionLine]:
        with _read_store(settings, "sessions") as archive:
            return archive.sessions(client_id, archived=True, after=after, limit=limit)

    return read


@contextlib.contextmanager
def _read_store(settings: Settings, what: str) -> Iterator[Archive]:
    """Open the session store for reading; clients get neither its path nor SQLite's message.

    Raises:
        InferenceCenterError: ``storage_unavailable``.
    """
    try:
        with Archive.open(settings.state_dir / DATABASE_NAME) as archive:
            yield archive
    except InferenceCenterError as error:
        if error.code is not ErrorCode.STORAGE_UNAVAILABLE:
            raise
        _log.warning(f"{what}_unreadable", error=error.message, hint=error.hint)
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            f"{what} cannot be read at the moment",
            hint="Try again when the operator has fixed it.",
            retry_after_ms=RETRY_LATER_MS,
        ) from None


def external_auth(settings: Settings) -> ExternalAuthProvider | None:
    """Return the external auth provider, if one is configured; call it on the event loop.

    Raises:
        InferenceCenterError: ``invalid_config`` for a file that cannot be used.
    """
    if settings.external_auth.url is None:
        return None
    # The HTTP client takes a tenth of a second to import, and most daemons do not need it.
    from inferencecenter.auth.external import ExternalAuth  # noqa: PLC0415

    return ExternalAuth(settings.external_auth, defaults=settings.auth, clock=time.monotonic)


def engine_cluster(settings: Settings) -> EngineCluster | None:
    """Return the cluster, if one is configured.

    Raises:
        InferenceCenterError: ``invalid_config`` if its packages are not installed or its files cannot be used.
    """
    if settings.cluster.address is None:
        return None
    missing = [name for name in ("ray", "cryptography") if importlib.util.find_spec(name) is None]
    if missing:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"engines on other machines need the package {missing[0]}",
            field="cluster.address",
            hint="pip install 'inferencecenter[cluster]'",
        )
    from inferencecenter.cluster.engine_cluster import EngineCluster  # noqa: PLC0415 - needs them

    return EngineCluster(settings.cluster, settings.state_dir)


def _check_mcp_client(settings: Settings) -> None:
    """Refuse MCP servers if their client is not installed.

    Raises:
        InferenceCenterError: ``invalid_config``.
    """
    if settings.mcp and importlib.util.find_spec("mcp") is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "MCP servers need the package mcp",
            field=f"mcp.{next(iter(settings.mcp))}",
            hint="pip install 'inferencecenter[mcp]'",
        )


def mcp_gateway(settings: Settings, metrics: McpMetrics) -> McpGateway:
    """Return the gateway to the declared MCP servers.

    Raises:
        InferenceCenterError: ``invalid_config`` if there are any and their client is not installed.
    """
    _check_mcp_client(settings)
    if settings.mcp:
        importlib.import_module(_MCP_CLIENT)  # before the first turn, which it would delay
    return McpGateway(settings.mcp, connect=_connect_mcp, metrics=metrics)


def _connect_mcp(server: McpServerSettings, tasks: TaskGroup, tools_changed: Callable[[], None]) -> McpClient:
    from inferencecenter.mcp.connection import McpConnection  # noqa: PLC0415 - see _MCP_CLIENT

    return McpConnection(server, tasks=tasks, tools_changed=tools_changed)


class McpReloader:
    """Applies other MCP servers; the client is imported in a thread if no server was declared before.

    Args:
        gateway: The servers.
        tasks: Runs the import.
    """

    def __init__(self, gateway: McpGateway, tasks: TaskGroup) -> None:
        self._gateway = gateway
        self._tasks = tasks
        self._latest: Settings | None = None

    def apply(self, settings: Settings) -> None:
        """Replace the servers, possibly after this returned.

        Raises:
            InferenceCenterError: ``invalid_config`` if the client is not installed.
        """
        _check_mcp_client(settings)
        self._latest = settings
        if not settings.mcp or _MCP_CLIENT in sys.modules:
            self._gateway.replace_servers(settings.mcp)
        else:
            self._tasks.spawn(self._import_and_apply(settings), name="mcp")

    async def _import_and_apply(self, settings: Settings) -> None:
        await asyncio.to_thread(importlib.import_module, _MCP_CLIENT)
        if settings is self._latest:  # not replaced by a later reload
            self._gateway.replace_servers(settings.mcp)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is announced once the daemon listens; ``admin_token`` only on the first run."""

    address: str
    admin_token: str | None
    model: str
    unix_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is opened before the event loop runs.

    Without ``store`` sessions end with the daemon; without ``traces`` no turn is traced. ``ollama`` are the sockets for
    its clients, which have no TLS. ``unix_accounts`` are the accounts of users of the Unix socket, by user id.
    """

    accounts: Accounts
    store: SessionStore | None
    images: ImageLibrary
    config_params: Params
    registry: Registry
    first_engine: FirstEngine | None
    sockets: list[socket.socket]
    unix_accounts: Mapping[int, str]
    ollama: list[socket.socket]
    certificate: Certificate | None
    traces: Traces | None
    cluster: EngineCluster | None
    reload_settings: Callable[[], Settings]
    templates: TemplateProcessPool = field(default_factory=TemplateProcessPool)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of the port, if it has one."""
        return self.certificate.context if self.certificate else None


def serve(
    settings: Settings,
    *,
    announce: Callable[[Announcement], None],
    reload_settings: Callable[[], Settings],
    first_engine: FirstEngine | None = None,
) -> int:
    """Run the daemon until SIGINT or SIGTERM and return the exit code; its state directory is locked.

    The first signal lets running turns finish for ``server.shutdown_timeout_s``; the next daemon continues those that
    have not. A second one ends it at once. With ``engine.exit_when_failed`` the daemon also ends, with code 1, when the
    engine is given up. At SIGHUP, or on request of the command line, settings are reloaded by ``reload_settings``.
    ``first_engine`` is the one that was launched ahead, if any.

    Raises:
        InferenceCenterError: The daemon cannot run: ``invalid_config``, ``invalid_model_file``, ``address_in_use`` or
            ``storage_unavailable``.
    """
    # A watchdog ends a stuck daemon by SIGABRT; the log then has the stack.
    faulthandler.enable()
    _allow_many_sockets()
    with ExitStack() as held:
        server = settings.server
        inherited = inherited_sockets(os.environ, pid=os.getpid())
        unix = [each for each in inherited if each.family == socket.AF_UNIX]
        sockets = [each for each in inherited if each not in unix] or bind(server.host, server.port)
        for listening in (*sockets, *unix):
            held.callback(listening.close)
        if server.unix_socket is not None and str(server.unix_socket) not in [each.getsockname() for each in unix]:
            mode = int(server.unix_socket_mode, 8)
            unix.append(held.enter_context(unix_socket(server.unix_socket, mode=mode, backlog=BACKLOG)))
        ollama = bind_ollama() if server.ollama else []
        for listening in ollama:
            held.callback(listening.close)
        certificate = Certificate(server.certfile, server.keyfile) if server.certfile and server.keyfile else None
        config_params = parse_config_params(settings)
        registry = read_registry(settings) if first_engine is None else first_engine.registry
        registry.log_remarks()
        if (traces := open_traces(settings.telemetry)) is not None:
            held.callback(traces.close)
        accounts = Accounts.open(
            settings.state_dir / ACCOUNTS_NAME,
            clock=time.time,
            static=load_clients(settings.auth),
            audit_days=settings.auth.audit_days,
        )
        held.callback(accounts.close)
        accounts.audit(AuditEvent.DAEMON_STARTED, detail=__version__)
        held.callback(accounts.audit, AuditEvent.DAEMON_STOPPED)
        store = _open_store(settings)
        images = _open_images(settings)
        held.callback(images.close)
        record_open_files(settings.state_dir, (accounts.identity, store.identity if store is not None else None))
        prepared = _Prepared(
            accounts=accounts,
            store=store,
            images=images,
            config_params=config_params,
            registry=registry,
            first_engine=first_engine,
            sockets=[*sockets, *ollama, *unix],
            unix_accounts=unix_accounts(settings.auth.unix_users) if unix else {},
            ollama=ollama,
            certificate=certificate,
            traces=traces,
            cluster=engine_cluster(settings),
            reload_settings=reload_settings,
        )
        announcement = Announcement(
            address=address(sockets, server),
            unix_paths=tuple(each.getsockname() for each in unix),
            admin_token=ensure_admin(accounts, settings.state_dir),
            model=registry.default,
        )
        with contextlib.suppress(KeyboardInterrupt):
            return uvloop.run(_run(settings, prepared, on_listening=lambda: announce(announcement)))
    return 0


def _open_store(settings: Settings) -> SessionStore | None:
    if not settings.sessions.store:
        return None
    return SessionStore.open(settings.state_dir / DATABASE_NAME, search=settings.sessions.search)


def _open_images(settings: Settings) -> ImageLibrary:
    file = None
    if settings.sessions.store:
        file = ImageFile(settings.state_dir / IMAGES_NAME, sessions=settings.state_dir / DATABASE_NAME)
    fetcher = None
    if settings.server.image_hosts:
        from inferencecenter.sessions.images.fetcher import ImageFetcher  # noqa: PLC0415 - its client takes 0.1 s

        fetcher = ImageFetcher(settings.server.image_hosts, max_bytes=settings.server.max_body_bytes)
    max_bytes = settings.sessions.images_mib * 1024 * 1024
    return ImageLibrary(file, max_bytes=max_bytes, clock=time.time, fetcher=fetcher)


async def _run(settings: Settings, prepared: _Prepared, *, on_listening: Callable[[], None]) -> int:
    """Build the parts, serve, and shut them down; return the exit code.

    Sockets are closed first, then the engine, which leaves its turns as they are, and last the store that persists
    them.

    Raises:
        InferenceCenterError: The model cannot be loaded, or something cannot be created in the state directory.
    """
    accounts, store, metrics, history = prepared.accounts, prepared.store, DaemonMetrics(), LoadHistory(clock=time.time)

    def live_sessions() -> tuple[str, ...]:
        return sessions.kv_owners()

    models = make_models(
        settings,
        prepared.registry,
        metrics=metrics,
        live_sessions=live_sessions,
        pixels=prepared.images.pixels,
        cluster=prepared.cluster,
        first_engine=prepared.first_engine,
    )
    supervisor, gpu = models.engine(models.default), Gpu()
    memory = MemoryPressureMonitor(
        engines=lambda: models.supervisors, measure=reader(settings.memory, settings.gpu), metrics=metrics
    )
    quotas = AccessQuotas(accounts, defaults=settings.limits, clock=time.time, monotonic=time.monotonic)
    sessions = SessionManager(
        engines=models,
        renderers=prepared.templates,
        config_params=prepared.config_params,
        settings=settings.sessions,
        stateless_ttl_s=settings.server.stateless_ttl_s,
        journal=store,
        archive=store.reader if store is not None else None,
        observer=TurnObservers(metrics, history),
        tracer=prepared.traces,
        images=prepared.images,
        admit=memory.admit,
        quota_of=quotas.of,
    )
    reporter = _reporter(settings, models, gpu, totals=sessions.totals)
    context = ServerContext.create(
        settings.server,
        models=models,
        library=ModelLibrary(
            directory=settings.models_dir,
            configured=lambda: configured_files(settings) | configured_files(prepared.reload_settings()),
            environment=os.environ,
        ),
        sessions=sessions,
        accounts=accounts,
        account_defaults=settings.auth,
        quotas=quotas,
        gpu=gpu,
        metrics=metrics,
        pressure=lambda: memory.pressure,
        stop=lambda: listener.stop(),  # noqa: PLW0108 - it is made further down
        read_usage=usage_reader(settings),
        read_usage_page=usage_page_reader(settings),
        read_sessions=session_reader(settings),
        purge=lambda kind, name: _purge(kind, name, sessions, store),
        external=external_auth(settings),
        unix_accounts=prepared.unix_accounts,
        mcp=mcp_gateway(settings, metrics.mcp),
        history=history,
    )
    background = TaskGroup("background")
    guard = ThermalThrottler(
        settings.gpu, engines=models, limit=models.limit, notify=context.hub.broadcast, metrics=metrics
    )
    reload = ConfigReloader(
        started_with=settings,
        read=prepared.reload_settings,
        accounts=accounts,
        certificate=prepared.certificate,
        close_clients=context.hub.close_clients,
        limits_changed=context.limits_changed,
        announced=reporter.reloading,
        apply_models=models.apply,
        apply_mcp=McpReloader(context.mcp, background).apply,
    )

    def is_unrecoverable() -> bool:
        return supervisor.load_failure is not None or _ends_with(models, settings)

    def stop_when_unrecoverable(_: EngineStatus) -> None:
        # A swapped-in model that cannot be loaded does not end the daemon: the client that requested it gets the error.
        if is_unrecoverable():
            listener.stop()

    app = create_app(context, apis := DeferredRoutes(context))
    listener = Listener(
        app,
        settings.server,
        drain=partial(reporter.drain_and_stop, lambda: context.drain(at_once=is_unrecoverable())),
        tls=prepared.tls,
        ollama=prepared.ollama,
        refused=metrics.connection_refused,
        refusal=context.upgrade_limiter.refusal,
        delay_s=context.connection_delay_s,
        connected=lambda: monitor.wake(),  # noqa: PLW0108 - it is made from the listener
    )
    monitor = LoopMonitor(metrics.loop_lag_s, is_idle=lambda: listener.n_connections == 0)

    models.subscribe(stop_when_unrecoverable)
    async with aclosing(prepared.templates), AsyncExitStack() as running:
        if store is not None:
            running.push_async_callback(store.close)
            store.watch(context.storage_changed)
            _restore(settings, store, accounts=accounts, quotas=quotas, sessions=sessions)
            running.push_async_callback(sessions.archive.close)
        running.push_async_callback(background.join)
        control = ControlSocket(
            settings.state_dir,
            tokens_changed=context.tokens_changed,
            purge=lambda kind, name: background.spawn(_purge_requested(kind, name, sessions, store), name=kind),
            reload=reload.run,
        )
        control.open()
        running.callback(control.close)
        running.push_async_callback(context.close)
        install_signal_handlers(stop=listener.stop, reload=reload.run)
        running.callback(remove_ram_cache, settings.kv, settings.state_dir)
        reporter.begin()
        running.push_async_callback(reporter.close)
        await running.enter_async_context(recording(history, settings.state_dir / HISTORY_FILE, context.sampler))
        guard.begin()
        running.push_async_callback(guard.close)
        if settings.memory.guard:
            models.subscribe_models(lambda _name, status: memory.engine_changed(status))
        running.push_async_callback(memory.close)
        prepared.templates.start_spare()
        await running.enter_async_context(
            _running(models, prepared.cluster, after_crash=store is not None and not store.was_clean)
        )
        await running.enter_async_context(monitor)
        on_listening()
        await _listen(listener, prepared.sockets, import_apis=partial(apis.load, app))
    if supervisor.load_failure is not None:
        raise supervisor.load_failure
    _log.info("stopped")
    return int(_ends_with(models, settings))


async def _listen(
    listener: Listener, sockets: list[socket.socket], *, import_apis: Callable[[], Awaitable[None]]
) -> None:
    """Serve, with the objects that live as long as the daemon excluded from garbage collection.

    A full collection traverses every object that is not frozen: modules, message models and sessions. In an idle daemon
    that takes 40 to 70 ms, during which no stream gets a token, and closed connections trigger it every few seconds.
    """
    tasks = TaskGroup("listen")
    tasks.spawn(_complete_start(import_apis), name="complete-start")
    try:
        await listener.serve(sockets)
    finally:
        await tasks.cancel()


async def _complete_start(import_apis: Callable[[], Awaitable[None]]) -> None:
    """Import the HTTP APIs, build the message models and freeze all objects, not before the engine has its options.

    A small model is loaded within a tenth of a second, so a turn may run meanwhile: the import is in a thread, models
    are built one by one, and nothing is collected beforehand, which would take 50 ms for the 1,300 objects of garbage
    that imports leave.
    """
    await asyncio.sleep(_COMPLETE_AFTER_S)
    await import_apis()
    for _ in build_messages(Request, Event, Value):
        await asyncio.sleep(0)
    gc.freeze()
    gc.enable()  # the command line disabled it for the imports


async def _purge(kind: PurgeKind, name: str, sessions: SessionManager, store: SessionStore | None) -> bool:
    """Close a session, or all of a client, and delete what is stored of them; other work goes on meanwhile.

    The data is deleted when this returns.

    Returns:
        Whether there was a live or an archived one.

    Raises:
        InferenceCenterError: ``storage_unavailable`` if the data cannot be deleted.
    """
    owner = name if kind == "client" else sessions.owner_of(name)
    if store is not None:
        check_writable(store.of_client(owner or ""))
    n_sessions, archived = 0, None
    while n_closed := sessions.purge(kind, name):
        n_sessions += n_closed
        await asyncio.sleep(0)
    if store is not None:
        archived = await sessions.archive.purged(kind, name)
        if kind == "client":
            await sessions.images.forget_client(name)
        n_sessions += sessions.purge(kind, name)  # one that was loaded meanwhile
        owner = archived or owner or ""
        store.purge(kind, name, client_id=owner)
        await sessions.archive.committed(owner)
    _log.info("purged", kind=kind, name=name, sessions=n_sessions)
    return n_sessions > 0 or archived is not None


async def _purge_requested(kind: PurgeKind, name: str, sessions: SessionManager, store: SessionStore | None) -> None:
    try:
        await _purge(kind, name, sessions, store)
    except InferenceCenterError as error:
        _log.error("not_purged", kind=kind, name=name, error=error.message)


def _restore(
    settings: Settings, store: SessionStore, *, accounts: Accounts, quotas: AccessQuotas, sessions: SessionManager
) -> None:
    """Restore what earlier daemons stored."""
    quotas.restore_usage(used_today(settings))
    sessions.presets.restore(store.presets)
    sessions.restore(store.load(), clean=store.was_clean, limits=accounts.session_limits())


def _ends_with(models: ModelManager, settings: Settings) -> bool:
    """Return whether the daemon ends because the default model's engine was given up."""
    return settings.engine.exit_when_failed and models.engine(models.default).given_up


def _reporter(settings: Settings, models: ModelManager, gpu: Gpu, *, totals: Callable[[], Totals]) -> SystemdNotifier:
    return SystemdNotifier(
        Notifier.from_environment(os.environ, pid=os.getpid()),
        engine=models,
        totals=totals,
        read_gpu=gpu.read,
        settled=lambda: models.engine(models.default).given_up and not settings.engine.exit_when_failed,
        stop_s=settings.server.shutdown_timeout_s + STOP_S,
    )


def _allow_many_sockets() -> None:
    """Raise the soft limit of open files to the hard one: each connection takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_models(  # noqa: PLR0913 - keyword-only but for what it works on
    settings: Settings,
    registry: Registry,
    *,
    metrics: DaemonMetrics,
    live_sessions: Callable[[], Collection[str]],
    pixels: Callable[[str], Awaitable[bytes | None]] | None = None,
    cluster: EngineCluster | None = None,
    first_engine: FirstEngine | None = None,
) -> ModelManager:
    """Return the models, none of them loaded yet, and delete the parked KV of models that no longer exist.

    Args:
        settings: The daemon's settings.
        registry: The models by name.
        metrics: Where steps are recorded.
        live_sessions: Returns the sessions whose KV a new engine keeps.
        pixels: Returns the pixels of an image by its digest.
        cluster: Engines on other machines.
        first_engine: The engine that was launched ahead.
    """
    remove_stale_caches(settings.kv, settings.state_dir, registry.models.values())
    suspicion_file = PoisonTurnStore(settings.state_dir / _SUSPECTS_FILE)
    crash_limit = CrashLimit(
        max_deaths=settings.engine.max_client_crashes,
        window_s=settings.engine.client_crash_window_s,
        monotonic=time.monotonic,
    )
    calibration = VramCalibration(settings.state_dir / PLAN_FILE) if first_engine is None else first_engine.calibration

    first: ModelEngine | None = None

    def ends_daemon(engine: ModelEngine) -> bool:
        if engine.given_up:
            return settings.engine.exit_when_failed and engine is models.engine(models.default)
        return engine.load_failure is not None and engine is first

    def make_replica(  # noqa: PLR0913 - keyword-only; most have defaults
        spec: ModelSpec,
        index: int,
        *,
        node: str,
        share: ReplicaShare | None = None,
        suspicions: dict[str, Suspicion] | None = None,
        rates: ReplicaRates | None = None,
        admit: Callable[[Supervisor], Awaitable[bool]],
        ends_with_it: Callable[[Supervisor], bool],
    ) -> Replica:
        parts = _on_machine(settings, spec, index, node, cluster=cluster, calibration=calibration, share=share)
        launcher, planner = parts.launcher, parts.planner
        options = engine_options(spec, kv_cache_paths(settings.kv, settings.state_dir, spec, replica=index, node=node))
        if first is None and first_engine is not None:
            launcher, planner, options = first_engine.launcher, first_engine.planner, first_engine.options
        elif first is None:
            # A wrong GPU setting is to end the daemon, so the first model is planned now; others when they are loaded.
            options = planner.first(options)
        meter = StepMeter(metrics.engines, metrics.nodes, model=spec.name, node=node)
        supervisor = Supervisor(
            options,
            live_sessions=live_sessions,
            plan_again=planner.again,
            ends_with_it=lambda: ends_with_it(supervisor),
            admit=lambda: admit(supervisor),
            on_step=meter.step if rates is None else partial(_measure_step, meter, rates),
            pixels=pixels,
            crash_limit=crash_limit,
            suspicion_file=suspicion_file,
            suspicions=suspicions,
            launcher=launcher,
            node=node,
        )
        supervisor.subscribe(planner.on_status)
        supervisor.subscribe(meter.engine_changed)
        rpc = None if parts.rpc_servers is None else RpcNodes(supervisor, parts.rpc_servers)
        return Replica(supervisor, planner, spec, rates or ReplicaRates(), host=parts.host, rpc=rpc)

    def make(spec: ModelSpec, admit: Callable[[ModelEngine], Awaitable[bool]]) -> ManagedModel:
        if not spec.is_on_nodes:
            only = make_replica(spec, 0, node=LOCAL_NODE, admit=admit, ends_with_it=ends_daemon)
            return ManagedModel(spec, only.planner, only.supervisor, only.rpc)

        async def admit_replica(supervisor: Supervisor) -> bool:
            return await admit(replica_set) and supervisor.wanted

        suspicions: dict[str, Suspicion] = {}

        def make_one(spec: ModelSpec, index: int, node: str) -> Replica:
            return make_replica(
                spec,
                index,
                node=node,
                share=_local_share(spec, index, lambda: loaded_siblings(replica_set.replicas, index)),
                suspicions=suspicions,
                rates=ReplicaRates(),
                admit=admit_replica,
                ends_with_it=lambda _: ends_daemon(replica_set),
            )

        replica_set = ReplicaSet(
            spec,
            make=make_one,
            is_drained=_drained_nodes(cluster),
            placed=metrics.engines.placement_counter(spec.name),
        )
        return ManagedModel(spec, replica_set.replicas[0].planner, replica_set)

    models = ModelManager(
        registry,
        make=make,
        max_resident=settings.engine.max_resident,
        min_residency_s=settings.engine.min_residency_s,
        nodes=None if cluster is None else cluster.nodes,
    )
    first = models.engine(registry.default)
    return models


@dataclass(frozen=True, slots=True)
class ReplicaParts:
    """What starts and what plans the engines of a replica, and what connects it to other machines, if it uses any."""

    launcher: EngineLauncher
    planner: Planner
    host: RemoteLauncher | None = None
    rpc_servers: RpcServers | None = None


def _on_machine(  # noqa: PLR0913 - keyword-only but for what it works on
    settings: Settings,
    spec: ModelSpec,
    index: int,
    node: str,
    *,
    cluster: EngineCluster | None,
    calibration: VramCalibration,
    share: ReplicaShare | None,
) -> ReplicaParts:
    local = LocalLauncher(engine_lock_path(settings.state_dir, spec, replica=index))
    if node == LOCAL_NODE and not spec.rpc_nodes:
        return ReplicaParts(local, Planner(engine=spec.engine, gpu=settings.gpu, calibration=calibration, share=share))
    assert cluster is not None, "the registry refuses nodes without a cluster"
    if spec.rpc_nodes:
        planner = RpcPlanner(engine=spec.engine, gpu=settings.gpu, calibration=calibration)
        launcher = cluster.rpc_launcher(spec, planner, local)
        return ReplicaParts(launcher, planner, rpc_servers=launcher)
    remote = cluster.launcher(spec, index, node)
    planner_there = RemotePlanner(engine=spec.engine, gpu=settings.gpu, calibration=calibration)
    return ReplicaParts(remote, planner_there, host=remote)


@contextlib.asynccontextmanager
async def _running(models: ModelManager, cluster: EngineCluster | None, *, after_crash: bool) -> AsyncIterator[None]:
    """Run the engines; ``after_crash`` of an earlier daemon."""
    async with cluster or contextlib.nullcontext():
        models.start(after_crash=after_crash)
        try:
            yield
        finally:
            await models.stop()


def _drained_nodes(cluster: EngineCluster | None) -> Callable[[str], bool]:
    return (lambda _: False) if cluster is None else cluster.nodes.is_drained


def _local_share(spec: ModelSpec, index: int, siblings: Callable[[], Sequence[Planner]]) -> ReplicaShare | None:
    """Return a replica's part of this machine; ``None`` if it is the only one here."""
    local = [each for each, node in enumerate(spec.nodes) if node == LOCAL_NODE]
    if len(local) < 2 or index not in local:
        return None
    return ReplicaShare(local.index(index), len(local), siblings=siblings)


def _measure_step(meter: StepMeter, rates: ReplicaRates, step: StepOutput) -> None:
    meter.step(step)
    rates.step(step)
