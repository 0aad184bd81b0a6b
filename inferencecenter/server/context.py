"""Components shared by the parts of the server, created in one place."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import structlog

from inferencecenter.auth.audit import audit_entry
from inferencecenter.auth.authentication import Authenticator
from inferencecenter.auth.rate_limits import OperationRateLimiter, Pacer, RefusalBackoffs, rate_limit_key
from inferencecenter.config.sections import AuthSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_worker import FairWorker
from inferencecenter.hardware.nvml import read_gpus
from inferencecenter.hardware.pressure import Pressure
from inferencecenter.ipc.port import ModelsPort
from inferencecenter.mcp.gateway import McpGateway
from inferencecenter.models.library import ModelDownloads
from inferencecenter.protocol import events
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server import event_factory
from inferencecenter.server.connection_limits import UpgradeLimiter
from inferencecenter.server.handshake import TrustedProxies
from inferencecenter.server.hub import ConnectionHub
from inferencecenter.server.load_history import LoadHistory
from inferencecenter.server.metrics_stream import GpuCache, MetricsFeed, MetricsSampler
from inferencecenter.server.stream_recording import StreamRecordings
from inferencecenter.sessions.store.archive import UsagePage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from inferencecenter.auth.accounts import Accounts
    from inferencecenter.auth.audit import AuditEvent
    from inferencecenter.auth.authentication import ExternalAuthProvider
    from inferencecenter.auth.quotas import AccessQuotas
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.config.settings import ServerSettings
    from inferencecenter.hardware.nvml import Gpu, Gpus
    from inferencecenter.ipc.messages import ModelInfo
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.models.library import ModelLibrary
    from inferencecenter.models.registry import ModelSpec
    from inferencecenter.protocol.values import EnginePlan, ModelSummary
    from inferencecenter.sessions.context import Principal
    from inferencecenter.sessions.journal import StorageFault
    from inferencecenter.sessions.manager import SessionManager
    from inferencecenter.sessions.store.archive import SessionLine, UsageLine
    from inferencecenter.sessions.store.recorder import PurgeKind
    from inferencecenter.supervisor.nodes import NodeStatus
    from inferencecenter.telemetry.metrics import DaemonMetrics

UsageReader: TypeAlias = "Callable[[str, str], Sequence[UsageLine]]"
"""Reads the usage of a client from a day on, such as 2026-11-22; blocks for disk I/O."""


def no_usage(_client_id: str, _since: str) -> Sequence[UsageLine]:
    """Return no usage, which is not recorded if sessions are not stored."""
    return ()


UsagePageReader: TypeAlias = "Callable[[str, str | None, int], UsagePage]"
"""Reads the usage, from a day on, of the accounts after one, at most so many; blocks for disk I/O."""


def no_usage_page(_since: str, _after: str | None, _limit: int) -> UsagePage:
    """Return no usage, as ``no_usage`` does."""
    return UsagePage((), n_more=0)


SessionReader: TypeAlias = "Callable[[str | None, str | None, int], Sequence[SessionLine]]"
"""Reads archived sessions of a client, or of all, after a session and at most so many; blocks for disk I/O."""


def no_sessions(_client_id: str | None, _after: str | None, _limit: int) -> Sequence[SessionLine]:
    """Return no sessions: none are archived if they are not stored."""
    return ()


_OPERATION_INTERVAL_S: Final = 0.02
_OPERATION_BURST: Final = 8
"""A page that loads sends about as many operations."""
_CONNECTION_INTERVAL_S: Final = 0.01
_CONNECTION_BURST: Final = 4

_log = structlog.get_logger(__name__)


class ServedModels(ModelsPort, Protocol):
    """The server's interface to the models: also their state, and operators' actions."""

    def spec_of(self, name: str) -> ModelSpec:
        """Return a model's configuration; ``model_not_found`` for an unknown one."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def plan(self) -> EnginePlan | None:
        """Placement of the model between GPUs and host at the last engine start; ``None`` without one."""

    @property
    def statuses(self) -> Mapping[str, EngineStatus]:
        """Status of the engines of all models used so far, by model name."""

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """The machines that run engines; none if the daemon is in no cluster."""

    def drain_node(self, name: str) -> None:
        """Begin to move the sessions of a machine to other ones."""

    def undrain_node(self, name: str) -> None:
        """Use a machine again that was drained."""

    def rescan(self) -> None:
        """Add models that were placed in ``models_dir``."""

    def forget_removed(self) -> None:
        """Forget models whose files were deleted from ``models_dir``; their running turns end first."""

    def describe(self) -> tuple[ModelSummary, ...]: ...

    def swap(self, name: str, on_progress: Callable[[events.Swap], None]) -> None:
        """Load a model and make it the default; ``on_progress`` receives the progress."""

    def unload(self, name: str) -> None:
        """Free a model's memory once its turns have ended."""

    def subscribe_models(self, listener: Callable[[str, EngineStatus], None]) -> None:
        """Call ``listener`` with the model's name and status when the state of an engine changes."""

    def subscribe_swaps(self, listener: Callable[[ModelInfo], None]) -> None:
        """Call ``listener`` with the new default model."""


async def _purge_live(sessions: SessionManager, kind: PurgeKind, name: str) -> bool:
    """End a session, or all of a client, of a daemon that stores none."""
    n_sessions = 0
    while n_closed := sessions.purge(kind, name):
        n_sessions += n_closed
        await asyncio.sleep(0)
    return n_sessions > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """The daemon as seen by the server; ``clock`` is Unix seconds, ``monotonic`` monotonic seconds.

    ``pressure`` returns the memory pressure last measured; ``last_engine_events`` holds the last event sent to clients
    for each model's engine. ``account_defaults`` apply to new accounts. ``refusal_backoffs`` are those of HTTP
    requests. ``read_usage`` reads a client's usage, ``read_usage_page`` that of several; ``purge`` ends and deletes a
    session, or all of a client, and returns whether there was one. ``worker`` runs CPU-bound work, ``disk_worker``
    blocking disk I/O, and ``stop`` ends the daemon as SIGTERM does. ``stream_recordings`` has the streams that outlive
    their connection, ``mcp`` the declared MCP servers.
    """

    settings: ServerSettings
    models: ServedModels
    library: ModelLibrary
    downloads: ModelDownloads
    sessions: SessionManager
    accounts: Accounts
    account_defaults: AuthSettings
    gpu: Gpu
    gpus: GpuCache
    metrics: DaemonMetrics
    pressure: Callable[[], Pressure]
    quotas: AccessQuotas
    operations: OperationRateLimiter
    refusal_backoffs: RefusalBackoffs
    operation_pacer: Pacer
    connection_pacer: Pacer
    read_usage: UsageReader
    read_usage_page: UsagePageReader
    read_sessions: SessionReader
    purge: Callable[[PurgeKind, str], Awaitable[bool]]
    stop: Callable[[], None]
    authenticator: Authenticator
    proxies: TrustedProxies
    upgrade_limiter: UpgradeLimiter
    hub: ConnectionHub
    sampler: MetricsSampler
    feed: MetricsFeed
    history: LoadHistory
    worker: FairWorker
    disk_worker: FairWorker
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    started_s: float
    last_engine_events: dict[str, events.EngineChanged]
    stream_recordings: StreamRecordings
    mcp: McpGateway

    @classmethod
    def create(  # noqa: PLR0913 - every part of the daemon by its name
        cls,
        settings: ServerSettings,
        *,
        models: ServedModels,
        library: ModelLibrary,
        sessions: SessionManager,
        accounts: Accounts,
        quotas: AccessQuotas,
        gpu: Gpu,
        metrics: DaemonMetrics,
        stop: Callable[[], None],
        account_defaults: AuthSettings | None = None,
        read_usage: UsageReader = no_usage,
        read_usage_page: UsagePageReader = no_usage_page,
        read_sessions: SessionReader = no_sessions,
        purge: Callable[[PurgeKind, str], Awaitable[bool]] | None = None,
        external: ExternalAuthProvider | None = None,
        unix_accounts: Mapping[int, str] = MappingProxyType({}),
        mcp: McpGateway | None = None,
        history: LoadHistory | None = None,
        pressure: Callable[[], Pressure] = Pressure,
        gpus: Callable[[], Gpus] = read_gpus,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> ServerContext:
        """Create the server's own components from the given ones; to be called on the event loop."""
        proxies = TrustedProxies(settings.trusted_proxies)
        upgrade_limiter = UpgradeLimiter(
            proxies, per_s=settings.unauthenticated_per_s, clock=monotonic, metrics=metrics
        )
        sampler = MetricsSampler(gpu=gpu, engine=models, sessions=sessions, clock=clock)
        context = cls(
            settings=settings,
            models=models,
            library=library,
            downloads=ModelDownloads(library),
            sessions=sessions,
            accounts=accounts,
            account_defaults=account_defaults or AuthSettings(),
            gpu=gpu,
            gpus=GpuCache(gpus),
            metrics=metrics,
            pressure=pressure,
            quotas=quotas,
            operations=OperationRateLimiter(settings.operations_per_minute, monotonic=monotonic),
            refusal_backoffs=RefusalBackoffs(),
            operation_pacer=Pacer(interval_s=_OPERATION_INTERVAL_S, burst=_OPERATION_BURST, monotonic=monotonic),
            connection_pacer=Pacer(interval_s=_CONNECTION_INTERVAL_S, burst=_CONNECTION_BURST, monotonic=monotonic),
            read_usage=read_usage,
            read_usage_page=read_usage_page,
            read_sessions=read_sessions,
            purge=purge or partial(_purge_live, sessions),
            stop=stop,
            authenticator=Authenticator(
                accounts,
                limits_of=quotas.effective,
                external=external,
                unix_accounts=unix_accounts,
                attempts_per_minute=settings.login_attempts_per_minute,
                clock=monotonic,
                metrics=metrics,
            ),
            proxies=proxies,
            upgrade_limiter=upgrade_limiter,
            hub=ConnectionHub(settings, on_authenticated=upgrade_limiter.give_back, metrics=metrics),
            sampler=sampler,
            feed=MetricsFeed(sampler),
            history=history or LoadHistory(clock=clock),
            worker=FairWorker("front"),
            disk_worker=FairWorker("disk"),
            clock=clock,
            monotonic=monotonic,
            started_s=monotonic(),
            last_engine_events={},
            stream_recordings=StreamRecordings(),
            mcp=mcp or McpGateway({}, metrics=metrics.mcp),
        )
        quotas.watch(context.hub.tokens_in_use)
        models.subscribe_models(sessions.engine_changed)
        models.subscribe_models(context.engine_changed)
        models.subscribe_swaps(context.model_changed)
        sessions.subscribe(context.hub.notify_client)
        return context

    def audit(self, client: Principal, address: str, event: AuditEvent, detail: str = "") -> None:
        """Record an action of a client in the audit log, later and in a batch."""
        token_id = client.token_id or None
        entry = audit_entry(event, client_id=client.client_id, token_id=token_id, address=address, detail=detail)
        self.authenticator.audit(entry)

    async def remove_model(self, name: str, *, client_id: str) -> str:
        """Delete the files of a model, whose running turns end first; return its name.

        Raises:
            InferenceCenterError: ``model_not_found``; ``invalid_request`` for the default model, one that settings
                name, or one outside the directory; ``storage_unavailable``.
        """
        spec = self.models.spec_of(name)
        if spec.name == self.models.default:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{spec.name} is the default model",
                field="name",
                hint="Make another the default first.",
            )
        await self.disk_worker.run(client_id, partial(self.library.remove, spec.name, spec.path))
        self.models.forget_removed()
        return spec.name

    def uptime_s(self) -> float:
        """Seconds since the daemon was started."""
        return self.monotonic() - self.started_s

    def operation_delay_s(self, client_id: str) -> float:
        """Return how long a client that was charged for an operation waits; 0 while only its own turns run."""
        return self.operation_pacer.delay_s(client_id) if self.sessions.runs_turns(besides=client_id) else 0.0

    async def load_session(self, client: Principal, session_id: str, *, closing: bool = False) -> None:
        """Load the session that a request names if it is archived, which counts as an operation of its size.

        Raises:
            InferenceCenterError: ``rate_limited``; see also ``SessionArchive.load``.
        """
        if await self.sessions.archive.load(client, session_id, closing=closing) and not closing:
            n_chars = self.sessions.session_chars(client, session_id)
            self.operations.charge(client.client_id, n_chars=n_chars)

    def connection_delay_s(self, address: str) -> float:
        """Return how long a new connection waits; 0 while no turns run, and for trusted proxies."""
        if not self.sessions.runs_turns() or self.proxies.trusts(address):
            return 0.0
        return self.connection_pacer.delay_s(rate_limit_key(address))

    def engine_changed(self, name: str, engine: EngineStatus) -> None:
        """Broadcast the new state of a model's engine to all clients."""
        event = event_factory.engine_changed(engine, model=None if name == self.models.default else name)
        if event is None or event == self.last_engine_events.get(name):
            return
        is_relevant = name in self.last_engine_events or event.model is None or event.state != "asleep"
        self.last_engine_events[name] = event
        if is_relevant:  # not a model that is asleep because it was never used
            self.hub.broadcast(event)

    def storage_changed(self, fault: StorageFault | None) -> None:
        """Broadcast that sessions cannot be stored, with the reason, or that they can be stored again."""
        self.hub.broadcast(event_factory.storage_changed(fault))

    def model_changed(self, model: ModelInfo) -> None:
        """Broadcast the new default model to all clients."""
        self.hub.broadcast(events.ModelChanged(model=model.name, n_ctx=model.n_ctx))

    def tokens_changed(self) -> None:
        """Close the sockets of revoked tokens, and apply changed limits of tokens and accounts."""
        try:
            living = self.accounts.valid_tokens()
            limits = self.accounts.session_limits()
            self.quotas.reload()
            self.hub.close_changed_users(self.authenticator.current_unix_account)
        except InferenceCenterError as error:
            _log.error("tokens_unreadable", error=error.message, hint=error.hint)
            return
        self.hub.close_revoked(living)
        self.hub.close_disallowed(self.limits_of)
        self.hub.set_account_limits(limits)
        self.sessions.set_account_limits(limits)

    def limits_changed(self, defaults: AccessLimits) -> None:
        """Apply limits changed in the settings or ``clients.toml``.

        On an error the previous limits stay in force.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        self.quotas.reload(defaults)
        self.sessions.set_account_limits(self.accounts.session_limits())
        self.hub.close_disallowed(self.limits_of)

    def models_for(self, client: Principal) -> tuple[ModelSummary, ...]:
        """Return the models that a client may use; for an operator, all models."""
        if Scope.OPERATOR in client.scopes:
            self.models.rescan()
            return self.models.describe()
        limits = self.limits_of(client.client_id, client.token_id)
        return tuple(model for model in self.models.describe() if limits.allows_model(model.name))

    def limits_of(self, client_id: str, token_id: str) -> AccessLimits:
        """Return the current limits of a client's token; an API key has the empty token id."""
        return self.quotas.of(client_id, token_id).limits

    async def drain(self, *, at_once: bool = False) -> None:
        """Announce the shutdown to clients and let their turns finish, within the time that the settings allow.

        With ``at_once`` turns are left unfinished, to be resumed after the next start.
        """
        await self.hub.drain(0.0 if at_once else self.settings.shutdown_timeout_s)

    async def close(self) -> None:
        """Stop the background work."""
        await self.mcp.close()
        await self.feed.close()
        await self.gpus.close()
        await self.authenticator.close()
        self.worker.close()
        self.disk_worker.close()
