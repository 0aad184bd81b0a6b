"""What the parts of the server share, put together once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from inferencecenter.errors import InferenceCenterError
from inferencecenter.hardware.pressure import Pressure
from inferencecenter.server import replies
from inferencecenter.server.authentication import Authenticator
from inferencecenter.server.feed import MetricsFeed, Sources
from inferencecenter.server.hub import Hub
from inferencecenter.server.origins import Proxies

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.hardware.nvml import Gpu
    from inferencecenter.ipc.port import EnginePort, EngineStatus
    from inferencecenter.server.accounts import Accounts
    from inferencecenter.sessions.registry import Sessions
    from inferencecenter.settings import ServerSettings
    from inferencecenter.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The daemon as the server's parts see it; ``clock`` is Unix seconds, ``monotonic`` seconds that only rise.

    ``pressure`` tells how short memory was at the last look.
    """

    settings: ServerSettings
    engine: EnginePort
    sessions: Sessions
    gpu: Gpu
    metrics: Metrics
    pressure: Callable[[], Pressure]
    authenticator: Authenticator
    proxies: Proxies
    hub: Hub
    feed: MetricsFeed
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    started_s: float

    @classmethod
    def create(  # noqa: PLR0913 - every part of the daemon by its name
        cls,
        settings: ServerSettings,
        *,
        engine: EnginePort,
        sessions: Sessions,
        accounts: Accounts,
        gpu: Gpu,
        metrics: Metrics,
        pressure: Callable[[], Pressure] = Pressure,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Context:
        """Build the server's own parts around those that it is given; call it on the event loop."""
        context = cls(
            settings=settings,
            engine=engine,
            sessions=sessions,
            gpu=gpu,
            metrics=metrics,
            pressure=pressure,
            authenticator=Authenticator(
                accounts,
                attempts_per_minute=settings.login_attempts_per_minute,
                clock=monotonic,
                metrics=metrics,
            ),
            proxies=Proxies(settings.trusted_proxies),
            hub=Hub(
                max_connections=settings.max_connections,
                max_per_client=settings.max_connections_per_client,
                metrics=metrics,
            ),
            feed=MetricsFeed(Sources(gpu=gpu, engine=engine, sessions=sessions, clock=clock)),
            clock=clock,
            monotonic=monotonic,
            started_s=monotonic(),
        )
        engine.subscribe(context.engine_changed)
        return context

    def uptime_s(self) -> float:
        """Return how long the daemon has been up."""
        return self.monotonic() - self.started_s

    def engine_changed(self, engine: EngineStatus) -> None:
        """Tell every client of the engine's new state."""
        event = replies.engine_changed(engine)
        if event is not None:
            self.hub.broadcast(event)

    def tokens_changed(self) -> None:
        """Close the sockets whose token was revoked."""
        try:
            living = self.authenticator.living_tokens()
        except InferenceCenterError as error:
            _log.error("tokens_unreadable", error=error.message, hint=error.hint)
            return
        self.hub.close_revoked(living)

    async def drain(self) -> None:
        """Tell clients that the daemon stops and let their turns finish, for as long as the settings allow."""
        await self.hub.drain(self.settings.shutdown_timeout_s)

    async def close(self) -> None:
        """End what runs beside the connections."""
        await self.feed.close()
        await self.authenticator.close()
