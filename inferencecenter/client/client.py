"""One authenticated client, shared by any number of sessions at once, over as many sockets as it takes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Unpack

from inferencecenter.client.errors import failure, made
from inferencecenter.client.multiplexer import RequestMultiplexer, expect
from inferencecenter.client.options import ClientOptions, RetryOptions, waits
from inferencecenter.client.reconnect import BackoffPolicy
from inferencecenter.client.session import ClientSession
from inferencecenter.client.transport import Address, Timing, open_transport, socket_url
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION
from inferencecenter.protocol.events import (
    AuthSuccess,
    Hello,
    Metrics,
    Models,
    ModelUnloaded,
    SessionCreated,
    SessionResumed,
    Sessions,
    Swap,
    UsageReport,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from inferencecenter.client.options import SessionOptions
    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.values import ModelSummary, SessionSummary

_PAGE_SESSIONS: Final = 1000


_WIND_UP_S: Final = 1.0
"""How long a client that leaves waits for the end of turns that were left before."""


class Client:
    """A client of one daemon, open inside ``async with``, or from ``open`` to ``close``.

    When its socket is lost it opens another, and every session goes on there.

    Args:
        url: Where the daemon is: ``ws://`` or ``wss://``, or the ``http://`` that a browser is given.
        token: What to show.
        options: See ``ClientOptions``.

    Raises:
        RequestError: There is neither a token nor a client id with its key, or both.
    """

    def __init__(self, url: str, token: str | None = None, **options: Unpack[ClientOptions]) -> None:
        if unknown := options.keys() - ClientOptions.__annotations__:
            raise TypeError(f"a client has no option {min(unknown)}")
        credential = made(
            requests.Auth,
            token=token,
            client_id=options.get("client_id"),
            api_key=options.get("api_key"),
            protocol=PROTOCOL_VERSION,
        )
        self._address = Address(
            url=socket_url(url),
            credential=credential,
            tls=options.get("tls"),
            open_timeout_s=options.get("open_timeout_s", 10.0),
            keepalive_s=options.get("keepalive_s", 20.0),
        )
        self._options = options
        self._tasks = TaskGroup("client")
        self._opened: RequestMultiplexer | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._address.url} {self._opened and self._opened.line}>"

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open a socket and authenticate.

        Raises:
            InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, ``forbidden`` or ``rate_limited``.
        """
        options = self._options
        policy = BackoffPolicy(give_up_after_s=options.get("give_up_after_s", 300.0))
        link = await open_transport(self._address)
        exchange = RequestMultiplexer(
            self._address,
            policy=policy if options.get("reconnect", True) else None,
            on_notice=options.get("on_notice"),
            timing=options.get("timing", Timing()),
            retries=options.get("retries", 0),
        )
        exchange.begin(link)
        self._tasks.spawn(exchange.run(link), name="connection")
        self._opened = exchange

    async def close(self) -> None:
        """Close the socket. Sessions stay, and turns go on, but for those that were left."""
        if self._opened is not None:
            await self._opened.drained(timeout_s=_WIND_UP_S)
            await self._tasks.cancel()
            await self._opened.line.close()

    @property
    def _exchange(self) -> RequestMultiplexer:
        if self._opened is None:
            raise failure(ErrorCode.DAEMON_UNREACHABLE, "the client is not open", hint="Use it inside `async with`.")
        return self._opened

    @property
    def hello(self) -> Hello:
        """What the daemon said when the socket opened last, or when it was asked again."""
        return self._exchange.hello

    @property
    def account(self) -> AuthSuccess:
        """Who the daemon says this is."""
        return self._exchange.account

    @property
    def connected(self) -> bool:
        """Whether the daemon hears this client now, and every session is open."""
        return self._exchange.line.connected

    @property
    def ended(self) -> InferenceCenterError | None:
        """Why the connection is over for good; ``None`` while it is not."""
        return self._exchange.line.ended

    @contextlib.asynccontextmanager
    async def session(self, **options: Unpack[SessionOptions]) -> AsyncIterator[ClientSession]:
        """Have a session that is closed when it is left; ``create_session`` opens one that stays.

        Args:
            options: See ``SessionOptions``.

        Raises:
            InferenceCenterError: See ``create_session``.
        """
        session = await self.create_session(**options)
        try:
            yield session
        except BaseException:
            await session.leave(failed=True)
            raise
        await session.leave(failed=False)

    async def create_session(self, **options: Unpack[SessionOptions]) -> ClientSession:
        """Open a session; if its model has to be loaded first, wait for that.

        Args:
            options: See ``SessionOptions``.

        Raises:
            InferenceCenterError: What the daemon refused, ``model_loading`` when that took too long, or
                ``daemon_unreachable``.
        """
        fields = {name: value for name, value in options.items() if name not in RetryOptions.__annotations__}
        create = made(requests.CreateSession, **fields)
        patience = self._exchange.patience(**waits(options))
        created = await patience.run(lambda: self._exchange.request(create))
        return ClientSession.opened(self._exchange, expect(created, SessionCreated))

    async def resume(self, session_id: str) -> tuple[ClientSession, SessionResumed]:
        """Take up a session, also from another connection, which loses it.

        Returns:
            The session, whose ``follow`` yields the turn that runs, and all that was said before.

        Raises:
            InferenceCenterError: ``session_not_found``, or ``daemon_unreachable``.
        """
        await self._exchange.line.until_connected()
        session = self._exchange.sessions.get(session_id) or ClientSession(self._exchange, session_id, epoch=None)
        self._exchange.attach(session)
        session.attach()
        try:
            answer = await self._exchange.request_unchecked(
                requests.ResumeSession(op="resume_session", session_id=session_id)
            )
        except InferenceCenterError:
            self._exchange.detach(session)
            raise
        return session, expect(answer, SessionResumed)

    async def sessions(self) -> tuple[SessionSummary, ...]:
        """Return all sessions of this client, oldest first, whichever connection has them.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        found: list[SessionSummary] = []
        after: str | None = None
        while True:
            request = requests.ListSessions(op="list_sessions", limit=_PAGE_SESSIONS, after=after)
            page = expect(await self.request(request), Sessions)
            found += page.sessions
            if (after := page.next) is None:
                return tuple(found)

    async def usage(self, *, days: int = 30, client_id: str | None = None) -> UsageReport:
        """Return what was used by day, and what the token may still use.

        Args:
            days: So many, today included; they begin at midnight UTC.
            client_id: Whose; another's needs the operator scope.

        Raises:
            InferenceCenterError: ``forbidden`` or ``daemon_unreachable``.
        """
        return expect(await self.request(made(requests.Usage, days=days, client_id=client_id)), UsageReport)

    async def metrics(self, interval_s: float = 1.0) -> AsyncIterator[Metrics]:
        """Yield readings of the GPU, the engine and the work, again and again; while the connection is lost, wait.

        Args:
            interval_s: Seconds between them.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        while True:
            yield expect(await self.request(requests.Metrics(op="metrics")), Metrics)
            await self._exchange.timing.sleep(interval_s)

    async def models(self) -> tuple[ModelSummary, ...]:
        """Return the models that this client may use, by name.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        return expect(await self.request(requests.ListModels(op="list_models")), Models).models

    async def load_model(self, name: str, *, on_progress: Callable[[Swap], None] | None = None) -> None:
        """Have a model loaded and be the one of all sessions that name none; return when it is.

        Args:
            name: As ``models`` tells.
            on_progress: Called with how far it is.

        Raises:
            InferenceCenterError: ``forbidden``, ``model_not_found``, ``model_loading`` while another is being loaded,
                ``engine_unavailable`` with the reason when it cannot be loaded, which changes nothing, or
                ``daemon_unreachable``.
        """

        def is_interim(event: Event) -> bool:
            if not isinstance(event, Swap) or event.phase in ("done", "failed"):
                return False
            if on_progress is not None:
                on_progress(event)
            return True

        load = requests.LoadModel(op="load_model", name=name)
        ended = expect(await self._exchange.request(load, is_interim=is_interim), Swap)
        if ended.phase == "failed":
            raise failure(ErrorCode.ENGINE_UNAVAILABLE, f"{name} cannot be loaded: {ended.detail}")

    async def unload_model(self, name: str) -> None:
        """Have a model's memory freed when its turns have ended; the next turn that wants it loads it again.

        Raises:
            InferenceCenterError: ``forbidden``, ``model_not_found`` or ``daemon_unreachable``.
        """
        expect(await self.request(requests.UnloadModel(op="unload_model", name=name)), ModelUnloaded)

    async def refresh_hello(self) -> Hello:
        """Ask again who answers and whether it is ready.

        Raises:
            InferenceCenterError: ``daemon_unreachable``.
        """
        answer = await self.request(requests.Hello(op="hello", protocol=PROTOCOL_VERSION))
        self._exchange.hello = expect(answer, Hello)
        return self._exchange.hello

    async def request(self, request: Request) -> Event:
        """Send a request and return its direct reply; while the connection is lost, wait.

        What only reads, or ends a session, is sent again when its answer is lost with the socket. Of anything else
        nobody knows then whether it was done: ``daemon_unreachable`` says so.

        Raises:
            InferenceCenterError: What the daemon refused, or ``daemon_unreachable``.
        """
        return await self._exchange.request(request)
