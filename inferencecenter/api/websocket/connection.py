"""One WebSocket connection: its state, its account, frames in and events out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from inferencecenter.api.websocket import commands
from inferencecenter.auth.account import client_of
from inferencecenter.auth.audit import audit_entry
from inferencecenter.auth.rate_limits import RefusalBackoff
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.codec import FrameError, read_frame
from inferencecenter.protocol.values import ClientLimits
from inferencecenter.server import event_factory
from inferencecenter.server.hub import EXPIRED, Deadline
from inferencecenter.server.outbox import Outbox
from inferencecenter.server.states import CONNECTION, ConnectionEvent, ConnectionState
from inferencecenter.server.websocket import LAST_WORD_S, LINGER_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from inferencecenter.auth.account import Account
    from inferencecenter.auth.audit import AuditEvent
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.codec import Frame
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.outbox import Wire
    from inferencecenter.sessions.client import Principal

MAX_FRAMES_BEFORE_LOGIN: Final = 32
"""Frames that an unauthenticated socket may send, each of which gets a reply; a login takes one or two."""
LARGE_FRAME_CHARS: Final = 64 * 1024
"""From this size on a frame takes too long to parse on the event loop; it is also the maximum of a login."""

_Result = TypeVar("_Result")

_log = structlog.get_logger(__name__)


class Connection:
    """An accepted socket; runs on the event loop, and only ``receive`` waits.

    ``_move`` is the only writer of its state.

    Args:
        context: The rest of the daemon.
        wire: The transport.
        address: Address that failed logins are counted for.
        v1: Whether the socket chose the subprotocol.
        traceparent: Span of the client's trace for turns that name none.
    """

    def __init__(
        self, context: ServerContext, wire: Wire, *, address: str, v1: bool, traceparent: str | None = None
    ) -> None:
        self.context = context
        self.address = address
        self.traceparent = traceparent
        self.v1 = False
        self._wire = wire
        self._state = ConnectionState.CONNECTED
        self._account: Account | None = None
        self._client: Principal | None = None
        self._turns: dict[str, str] = {}
        self._timer: Deadline | None = None
        self._rest: Callable[[], Awaitable[None]] | None = None
        self._n_frames_before_login = 0
        self._pace = RefusalBackoff()
        self._refused = False
        self._pause: asyncio.Future[None] | None = None
        self._outbox = Outbox(
            wire,
            limit_bytes=context.settings.outbox_bytes,
            overflowed=self._too_slow,
            metrics=context.metrics,
        )
        wire.on_writable, wire.on_lost = self._outbox.flush, self.lost
        if v1:
            self.enable_v1()

    def __repr__(self) -> str:
        client_id = self._account.client_id if self._account else None
        return f"<Connection {self._state} {self.address} {client_id}>"

    @property
    def state(self) -> ConnectionState:
        """State of the connection."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether the socket is closed for reading and writing."""
        return self._state is ConnectionState.CLOSED

    @property
    def authenticated(self) -> bool:
        """Whether the socket is authenticated."""
        return self.state in (ConnectionState.AUTHENTICATED, ConnectionState.DRAINING)

    @property
    def client(self) -> Principal:
        """The authenticated client."""
        assert self._client is not None
        return self._client

    @property
    def client_id(self) -> str:
        """Id of the authenticated client, empty before authentication."""
        return self._client.client_id if self._client is not None else ""

    @property
    def token_id(self) -> str | None:
        """Id of the token that authenticated the socket."""
        return self._account.token_id if self._account else None

    @property
    def limits(self) -> AccessLimits:
        """Limits of the client's token; only once authenticated."""
        return self.context.quotas.of(self.client.client_id, self.client.token_id).limits

    def enable_v1(self) -> None:
        """Send this socket all ops and fields from now on."""
        self.v1 = True
        self._outbox.enable_v1()

    def send_hello(self) -> None:
        """Send the first event: who is authenticated, or that authentication is due."""
        if self.authenticated:
            self.send(self.auth_success())
        else:
            self.send(self.hello())
            self._arm(self.context.settings.auth_timeout_s, "authentication timeout")

    def hello(self) -> events.Hello:
        """Return the ``hello`` event."""
        context = self.context
        return event_factory.hello(
            context.models.status,
            context.settings,
            uptime_s=context.uptime_s(),
            storable=context.sessions.fault is None,
        )

    def audit(self, event: AuditEvent, detail: str = "") -> None:
        """Record an action of its client in the audit log."""
        line = audit_entry(
            event, client_id=self.client.client_id, token_id=self.token_id, address=self.address, detail=detail
        )
        self.context.authenticator.audit(line)

    def set_max_sessions(self, max_sessions: int) -> None:
        """Set the maximum number of sessions of its client; only once authenticated."""
        self._client = replace(self.client, max_sessions=max_sessions)

    def authenticate(self, account: Account) -> None:
        """Authenticate the socket as ``account``.

        Raises:
            InferenceCenterError: ``rate_limited`` when the client has too many sockets.
        """
        self.context.hub.join(account.client_id, self)
        self._move(ConnectionEvent.AUTHENTICATE)
        self._account = account
        self._client = client_of(account)
        self.context.quotas.admit(account)
        self._disarm()
        if account.expires_at is not None:
            self._arm(account.expires_at - self.context.clock(), EXPIRED)
        _log.info("client_connected", client=account.client_id, address=self.address, v1=self.v1)

    def auth_success(self) -> events.AuthSuccess:
        """Return the client's own settings."""
        client, limits = self.client, self.limits
        return events.AuthSuccess(
            client_id=client.client_id,
            max_sessions=client.max_sessions,
            scopes=tuple(sorted(client.scopes)),
            priority=client.priority,
            limits=ClientLimits(
                max_sessions=client.max_sessions,
                max_connections=self.context.settings.max_connections_per_client,
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                tokens_per_day=limits.tokens_per_day,
                concurrent_turns=limits.concurrent_turns,
                max_tokens=limits.max_tokens,
                models=limits.models,
            ),
        )

    async def receive(self, text: str | None) -> None:
        """Process a frame; ``None`` stands for a binary one.

        An error in one frame is sent to the client, and the socket stays open.
        """
        if self.closed:
            return
        self.context.metrics.frames_in.inc()
        if not self.authenticated:
            self._n_frames_before_login += 1
            if self._n_frames_before_login > MAX_FRAMES_BEFORE_LOGIN:
                self.close(CloseCode.TOO_MANY, "too many frames before authentication")
                return
        self._refused = False
        try:
            await commands.run(self, await self._read(text))
            await self._run_deferred()
        except InferenceCenterError as error:
            self.fail(error, request_id=error.request_id if isinstance(error, FrameError) else None)
        except Exception:  # noqa: BLE001 - boundary: a defect in one frame must not close the socket
            _log.exception("frame_failed")
            self.fail(InferenceCenterError(ErrorCode.INTERNAL))
        await self._back_off()

    async def aside(self, n_chars: int, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on a frame of this many characters; a large one in a thread."""
        if n_chars < LARGE_FRAME_CHARS:
            return work()
        return await self.context.worker.run(self.client.client_id, work)

    def defer(self, rest: Callable[[], Awaitable[None]]) -> None:
        """Run the rest of a command before the next frame is read: it waits for a disk or another service."""
        self._rest = rest

    async def _read(self, text: str | None) -> Frame:
        """Parse a frame, a large one in a thread.

        Raises:
            InferenceCenterError: See ``read_frame``; ``message_too_large`` also for more than a login takes before
                authentication.
        """
        if text is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, "the frame is binary", hint="Send JSON in text frames."
            )
        if len(text) >= LARGE_FRAME_CHARS and not self.authenticated:
            raise InferenceCenterError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"the frame has {len(text)} characters, which is too long before authentication",
                hint="Authenticate first.",
            )
        try:
            return await self.aside(len(text), partial(read_frame, text))
        except InferenceCenterError:
            if self.authenticated:
                self.context.operations.count(self.client_id, n_frame_chars=len(text))
            raise

    async def _back_off(self) -> None:
        """Delay the next frame after many refused ones; see ``RefusalBackoff``."""
        if not self._refused:
            self._pace.accepted()
        elif self.authenticated and (delay_s := self._pace.refused()):
            loop = asyncio.get_running_loop()
            self._pause = loop.create_future()
            timer = loop.call_later(delay_s, self._end_pause)
            await self._pause
            timer.cancel()

    def _end_pause(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def _run_deferred(self) -> None:
        """Run the rest of the last command, if there is one."""
        while (rest := self._rest) is not None:
            self._rest = None
            await rest()

    def send(self, event: Event) -> None:
        """Send an event without blocking; a closed connection sends nothing."""
        self._outbox.send(event)
        if type(event) is not events.Token:
            self._watch_turns(event)

    def replay(self, missed: Sequence[Event]) -> None:
        """Send events requested in bulk, at the speed of the peer; see ``Outbox``."""
        self._outbox.replay(missed)
        for event in missed:
            self._watch_turns(event)

    @property
    def replay_pending(self) -> bool:
        """Whether events requested in bulk are still queued."""
        return self._outbox.replay_pending

    async def wait_replayed(self) -> None:
        """Wait until none is queued, or the connection is closed."""
        await self._outbox.wait_replayed()

    def fail(
        self,
        error: InferenceCenterError,
        *,
        request_id: str | None = None,
        op: str = "",
        session_id: str | None = None,
    ) -> None:
        """Send an error about a frame of the client; ``op`` and ``session_id`` are those of the frame."""
        self._refused = True
        self.context.metrics.errors.labels(error.code.value).inc()
        if self.v1:
            self.send(event_factory.error_event(error, request_id=request_id, session_id=session_id))
            return
        for event in event_factory.legacy_errors(error, request_id=request_id, op=op, session_id=session_id):
            self.send(event)

    def drain(self, deadline_s: float) -> None:
        """Announce the shutdown to the client, and close once nothing is running for it."""
        if self.state is ConnectionState.CONNECTED:
            self.close(CloseCode.RESTART, "the daemon stops")
        elif self.state is ConnectionState.AUTHENTICATED:
            self.send(events.GoingAway(deadline_ms=int(deadline_s * 1000), resume=self.context.sessions.durable))
            self._move(ConnectionEvent.DRAIN)
            self._leave_if_drained()

    def close(self, code: CloseCode, reason: str) -> None:
        """Close after all queued frames; the socket is closed for reading and writing."""
        linger_s = LINGER_S if self.authenticated else LAST_WORD_S
        self._end((code, reason, linger_s), write_rest=True)

    def evict(self) -> None:
        """Close at once to make room for newer sockets, without waiting for the peer."""
        self._end((CloseCode.TOO_MANY, "replaced by newer sockets before authentication", 0.0))

    def lost(self) -> None:
        """Clean up after the socket was closed by either side."""
        self._end(None)

    def _move(self, event: ConnectionEvent) -> None:
        self._state = CONNECTION.next(self._state, event)

    def _too_slow(self) -> None:
        _log.warning("slow_reader", client=self._account and self._account.client_id, address=self.address)
        # Not at once: a session may be in the middle of publishing.
        asyncio.get_running_loop().call_soon(self._end_slow)

    def _end_slow(self) -> None:
        self._end((CloseCode.TOO_SLOW, "too slow a reader", LAST_WORD_S))

    def _end(self, farewell: tuple[CloseCode, str, float] | None, *, write_rest: bool = False) -> None:
        """Close once: with a code, a reason and the peer's time to answer in seconds, or silently with ``None``."""
        if self.state is ConnectionState.CLOSED:
            return
        was_authenticated = self.authenticated
        self._move(ConnectionEvent.CLOSE)
        self._end_pause()
        self._disarm()
        self._outbox.close(write_rest=write_rest)
        self._wire.on_writable = self._wire.on_lost = None
        if farewell is not None:
            code, reason, linger_s = farewell
            self._wire.finish(code, reason, linger_s=linger_s)
        if was_authenticated:
            self.context.feed.unsubscribe(self)
            self.context.hub.leave(self.client.client_id, self)
            self.context.sessions.detach(self)
            _log.info("client_disconnected", client=self.client.client_id, address=self.address)

    def _watch_turns(self, event: Event) -> None:
        """Follow the sessions attached to this socket, which stays open at shutdown until their turns end."""
        match event:
            case events.Queued():
                self._turns[event.session_id] = event.turn_id
                return
            case events.SessionResumed(turn_id=str(turn_id)):
                self._turns[event.session_id] = turn_id
                return
            case events.End() | events.Error(turn_id=str()):
                if self._turns.get(event.session_id or "") == event.turn_id:
                    del self._turns[event.session_id or ""]
            case events.SessionResumed() | events.SessionDetached():
                self._turns.pop(event.session_id, None)
            case _:
                return
        self._leave_if_drained()

    def _leave_if_drained(self) -> None:
        if self.state is ConnectionState.DRAINING and not self._turns:
            # Not at once: a session may be in the middle of publishing the end of a turn.
            asyncio.get_running_loop().call_soon(self.close, CloseCode.RESTART, "the daemon stops")

    def _arm(self, delay_s: float, reason: str) -> None:
        """Close with 4401 after ``delay_s``."""
        self._timer = Deadline(delay_s, lambda: self.close(CloseCode.NOT_AUTHENTICATED, reason))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
