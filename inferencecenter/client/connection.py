"""One authenticated client, shared by any number of sessions at once, over as many sockets as it takes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.client.exchange import Exchange, Notice, expect
from inferencecenter.client.lifeline import Timing
from inferencecenter.client.link import Address, open_link
from inferencecenter.client.loading import LOAD_TIMEOUT_S
from inferencecenter.client.reconnecting import BackoffPolicy
from inferencecenter.client.session import ClientSession
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION
from inferencecenter.protocol.events import (
    AuthSuccess,
    Hello,
    Models,
    ModelUnloaded,
    SessionCreated,
    SessionResumed,
    Sessions,
    Swap,
)
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from inferencecenter.protocol.base import Event, Request
    from inferencecenter.protocol.values import (
        Metadata,
        Mode,
        ModelSummary,
        OnDisconnect,
        OnFull,
        Priority,
        SessionSummary,
    )

_PAGE_SESSIONS: Final = 1000


class Client:
    """A connected client; ``connect`` makes one.

    When its socket is lost it opens another, and every session goes on there.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

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

    async def create_session(  # noqa: PLR0913 - all by name, each a field of the frame
        self,
        *,
        system: str | None = None,
        mode: Mode = "chat",
        model: str | None = None,
        params: dict[str, Any] | None = None,
        priority: Priority | None = None,
        on_full: OnFull | None = None,
        on_disconnect: OnDisconnect | None = None,
        store: bool = True,
        ttl_s: float | None = None,
        metadata: Metadata | None = None,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        on_loading: Callable[[str], None] | None = None,
    ) -> ClientSession:
        """Open a session; if its model has to be loaded first, wait for that.

        Args:
            system: System prompt.
            mode: Whether the model's template is applied.
            model: Name of its model; without it the session goes with the daemon's choice.
            params: Session level of parameters.
            priority: Class of its turns; the account's when not given.
            on_full: What happens when its context is full; without it the mode decides.
            on_disconnect: What happens when the socket is lost; without it the session goes on and is resumed.
            store: Whether it may be written to disk.
            ttl_s: Idle seconds before it expires.
            metadata: Strings of the caller's own.
            load_timeout_s: Seconds that the model may take to be loaded.
            on_loading: Called about once a second until then, with what the daemon says.

        Raises:
            InferenceCenterError: What the daemon refused, ``model_loading`` when that took too long, or
                ``daemon_unreachable``.
        """
        create = requests.CreateSession(
            op="create_session",
            system=system,
            mode=mode,
            model=model,
            params=params,
            priority=priority,
            on_full=on_full,
            on_disconnect=on_disconnect,
            store=store,
            ttl_s=ttl_s,
            metadata=metadata,
        )
        created = await self._exchange.request_when_loaded(create, timeout_s=load_timeout_s, on_loading=on_loading)
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
        session.take_up()
        try:
            answer = await self._exchange.ask(requests.ResumeSession(op="resume_session", session_id=session_id))
        except InferenceCenterError:
            self._exchange.detach(session)
            raise
        return session, expect(answer, SessionResumed)

    async def list_sessions(self) -> tuple[SessionSummary, ...]:
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
            raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, f"{name} cannot be loaded: {ended.detail}")

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


@contextlib.asynccontextmanager
async def connect(  # noqa: PLR0913 - all by name
    url: str,
    *,
    token: str | None = None,
    client_id: str | None = None,
    api_key: str | None = None,
    # Timeouts
    open_timeout_s: float = 10.0,
    keepalive_s: float = 20.0,
    # When the socket is lost
    reconnect: bool = True,
    give_up_after_s: float | None = 300.0,
    on_notice: Callable[[Notice], None] | None = None,
    timing: Timing | None = None,
) -> AsyncIterator[Client]:
    """Open a socket and authenticate with a token, or with a client id and its API key.

    Args:
        url: The daemon's WebSocket.
        token: A token.
        client_id: The account's name, with ``api_key``.
        api_key: The account's key.
        open_timeout_s: Seconds that opening, and then authenticating, may take.
        keepalive_s: Seconds between pings; a daemon that leaves one unanswered for as long is lost.
        reconnect: Open another socket when this one is lost, and go on there with every session. Without it a lost
            socket is the end.
        give_up_after_s: Seconds without a connection after which that is the end; ``None`` for never.
        on_notice: Called with each change of the connection, and with what the daemon tells everybody.
        timing: Time and chance, for tests.

    Raises:
        InferenceCenterError: ``daemon_unreachable``, ``not_authenticated``, ``forbidden`` or ``rate_limited``.
    """
    credential = requests.Auth(op="auth", token=token, client_id=client_id, api_key=api_key, protocol=PROTOCOL_VERSION)
    address = Address(url=url, credential=credential, open_timeout_s=open_timeout_s, keepalive_s=keepalive_s)
    policy = BackoffPolicy(give_up_after_s=give_up_after_s) if reconnect else None
    link = await open_link(address)
    exchange = Exchange(address, policy=policy, on_notice=on_notice, timing=timing or Timing())
    exchange.begin(link)
    tasks = TaskGroup("client")
    tasks.spawn(exchange.run(link), name="connection")
    try:
        yield Client(exchange)
    finally:
        await tasks.cancel()
