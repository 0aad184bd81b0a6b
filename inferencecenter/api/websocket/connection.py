"""A WebSocket connection of the daemon's own protocol: its login, frames in and events out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog

from inferencecenter.api.websocket import commands
from inferencecenter.auth.audit import audit_entry
from inferencecenter.auth.rate_limits import RefusalBackoffs
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.codec import FrameError, read_frame
from inferencecenter.protocol.values import ClientLimits
from inferencecenter.server import event_factory
from inferencecenter.server.connection import LARGE_FRAME_CHARS, SocketConnection
from inferencecenter.server.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from inferencecenter.auth.account import Account
    from inferencecenter.auth.audit import AuditEvent
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.codec import Frame
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.outbox import Wire

_log = structlog.get_logger(__name__)


class Connection(SocketConnection[Outbox]):
    """A socket of the daemon's own protocol; authenticated with the upgrade or by a frame.

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
        super().__init__(
            context, wire, outbox=Outbox, backoffs=RefusalBackoffs(), address=address, traceparent=traceparent
        )
        self.v1 = False
        self._turns: dict[str, str] = {}
        self._rest: Callable[[], Awaitable[None]] | None = None
        if v1:
            self.enable_v1()

    def enable_v1(self) -> None:
        """Send this socket all ops and fields from now on."""
        self.v1 = True
        self._outbox.enable_v1()

    def accepted(self) -> None:
        """Send the first event: who is authenticated, or that authentication is due."""
        if self.authenticated:
            self.send(self.auth_success())
        else:
            self.send(self.hello())
            self._arm(self.context.settings.auth_timeout_s, "authentication timeout")

    def _left(self) -> None:
        self.context.hub.remove(self)

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
        client = self.client
        line = audit_entry(
            event, client_id=client.client_id, token_id=client.token_id or None, address=self.address, detail=detail
        )
        self.context.authenticator.audit(line)

    def authenticate(self, account: Account) -> None:
        """Authenticate the socket as ``account``.

        Raises:
            InferenceCenterError: ``rate_limited`` when the client has too many sockets.
        """
        self.context.hub.join(account.client_id, self)
        self._sign_in(account)
        self.context.quotas.admit(account)
        _log.info("client_connected", client=account.client_id, address=self.address, v1=self.v1)

    def auth_success(self) -> events.AuthSuccess:
        """Return the client's own settings."""
        client = self.client
        limits = self.context.limits_of(client.client_id, client.token_id)
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

    def defer(self, rest: Callable[[], Awaitable[None]]) -> None:
        """Run the rest of a command before the next frame is read: it waits for a disk or another service."""
        self._rest = rest

    async def _process(self, text: str) -> None:
        await commands.run(self, await self._read(text))
        await self._run_deferred()

    async def _read(self, text: str) -> Frame:
        """Parse a frame, a large one in a thread.

        Raises:
            InferenceCenterError: See ``read_frame``; ``message_too_large`` also for more than a login takes before
                authentication.
        """
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

    def _fail_frame(self, error: InferenceCenterError) -> None:
        self.fail(error, request_id=error.request_id if isinstance(error, FrameError) else None)

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

    def _announce_drain(self, deadline_s: float) -> None:
        self.send(events.GoingAway(deadline_ms=int(deadline_s * 1000), resume=self.context.sessions.durable))

    @property
    def _busy(self) -> bool:
        return bool(self._turns)

    def _release(self) -> None:
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
