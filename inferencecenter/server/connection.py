"""The core of a WebSocket connection: its client, its frames in order, its pace and its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.codec import is_slow
from inferencecenter.server.hub import EXPIRED, Deadline
from inferencecenter.server.states import CONNECTION, ConnectionEvent, ConnectionState
from inferencecenter.server.websocket import CLOSE_FRAME_TIMEOUT_S, LINGER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Send

    from inferencecenter.auth.account import Account
    from inferencecenter.auth.rate_limits import RefusalBackoffs
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.outbox import SocketOutbox, Wire
    from inferencecenter.sessions.context import AccountLimits

MAX_FRAMES_BEFORE_LOGIN: Final = 32
"""Frames that an unauthenticated socket may send, each of which gets a reply; a login takes one or two."""
LARGE_FRAME_CHARS: Final = 64 * 1024
"""Size of a frame from which on it is refused before authentication."""

OutboxT = TypeVar("OutboxT", bound="SocketOutbox[Any]")
_Result = TypeVar("_Result")

_log = structlog.get_logger(__name__)


class SocketConnection(ABC, Generic[OutboxT]):
    """An accepted socket; runs on the event loop, and only ``receive`` waits.

    ``_move`` is the only writer of its state.

    Args:
        context: The rest of the daemon.
        wire: The transport.
        outbox: Makes the outbox.
        backoffs: Where refusals of its client are counted, for this socket alone or for several.
        address: Remote address.
        traceparent: Span of the client's trace for turns that name none.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        context: ServerContext,
        wire: Wire,
        *,
        outbox: Callable[..., OutboxT],
        backoffs: RefusalBackoffs,
        address: str,
        traceparent: str | None = None,
    ) -> None:
        self.context = context
        self.address = address
        self.traceparent = traceparent
        self._wire = wire
        self._state = ConnectionState.CONNECTED
        self._client: Account | None = None
        self._deadline: Deadline | None = None
        self._n_frames_before_login = 0
        self._backoffs = backoffs
        self._refused = False
        self._delay_s = 0.0
        self._pause: asyncio.Future[None] | None = None
        self._outbox = outbox(
            wire, limit_bytes=context.settings.outbox_bytes, overflowed=self._too_slow, metrics=context.metrics
        )
        wire.on_writable, wire.on_lost = self._outbox.flush, self.lost

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state} {self.address} {self.client_id or None}>"

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def closed(self) -> bool:
        """Whether the socket is closed for reading and writing."""
        return self._state is ConnectionState.CLOSED

    @property
    def authenticated(self) -> bool:
        return self._state in (ConnectionState.AUTHENTICATED, ConnectionState.DRAINING)

    @property
    def client(self) -> Account:
        assert self._client is not None
        return self._client

    @property
    def client_id(self) -> str:
        """Id of the authenticated client, empty before authentication."""
        return self._client.client_id if self._client is not None else ""

    def set_account_limits(self, limits: AccountLimits) -> None:
        """Set the limits of the sessions of its client; only once authenticated."""
        self._client = replace(self.client, **limits._asdict())

    async def run(self, receive: Receive, send: Send, *, subprotocol: str | None) -> None:
        """Accept the upgrade, and process frames until the socket is closed."""
        try:
            await send({"type": "websocket.accept", "subprotocol": subprotocol})
            self.accepted()
            while (message := await receive())["type"] == "websocket.receive":
                await self.receive(message.get("text"))
                # Between frames of a client that sends many at once, other clients run.
                await asyncio.sleep(0)
        finally:
            self.lost()
            self._left()

    async def receive(self, text: str | None) -> None:
        """Process a frame; ``None`` stands for a binary one.

        An error in one frame is sent to the client, and the socket stays open.
        """
        if self.closed:
            return
        self.context.metrics.frames_in.value += 1
        if not self.authenticated:
            self._n_frames_before_login += 1
            if self._n_frames_before_login > MAX_FRAMES_BEFORE_LOGIN:
                self.close(CloseCode.TOO_MANY, "too many frames before authentication")
                return
        self._refused, self._delay_s = False, 0.0
        try:
            if text is None:
                raise InferenceCenterError(
                    ErrorCode.INVALID_REQUEST, "the frame is binary", hint="Send JSON in text frames."
                )
            await self._process(text)
        except InferenceCenterError as error:
            self._fail_frame(error)
        except Exception:  # noqa: BLE001 - boundary: a defect in one frame must not close the socket
            _log.exception("frame_failed")
            self._fail_frame(InferenceCenterError(ErrorCode.INTERNAL))
        await self._slow_down()

    async def aside(self, text: str, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on a frame, in a thread if that takes long."""
        if not is_slow(text):
            return work()
        return await self.context.worker.run(self.client_id, work)

    def drain(self, deadline_s: float) -> None:
        """Start nothing new, and close once nothing is running for its client."""
        if self._state is ConnectionState.CONNECTED:
            self.close(CloseCode.RESTART, "the daemon stops")
        elif self._state is ConnectionState.AUTHENTICATED:
            self._move(ConnectionEvent.DRAIN)
            self._announce_drain(deadline_s)
            self._leave_if_drained()

    def close(self, code: CloseCode, reason: str) -> None:
        """Close after all queued frames; the socket is closed for reading and writing."""
        linger_s = LINGER_S if self.authenticated else CLOSE_FRAME_TIMEOUT_S
        self._end((code, reason, linger_s), write_rest=True)

    def evict(self) -> None:
        """Close at once to make room for newer sockets, without waiting for the peer."""
        self._end((CloseCode.TOO_MANY, "replaced by newer sockets before authentication", 0.0))

    def lost(self) -> None:
        """Clean up after the socket was closed by either side."""
        self._end(None)

    @abstractmethod
    def accepted(self) -> None:
        """Begin: the upgrade was accepted."""

    @abstractmethod
    def _left(self) -> None:
        """Leave the hub: the socket is closed and read no more."""

    @abstractmethod
    async def _process(self, text: str) -> None:
        """Process a text frame; errors are sent to the client."""

    @abstractmethod
    def _fail_frame(self, error: InferenceCenterError) -> None:
        """Send an error about the frame that is processed."""

    @abstractmethod
    def _announce_drain(self, deadline_s: float) -> None:
        """Notify the client that the daemon stops."""

    @property
    @abstractmethod
    def _busy(self) -> bool:
        """Whether turns of this socket are running."""

    @abstractmethod
    def _release(self) -> None:
        """Release the resources of the authenticated socket, which is closed."""

    def _sign_in(self, account: Account) -> None:
        """Become authenticated, until the token expires."""
        self._move(ConnectionEvent.AUTHENTICATE)
        self._client = account
        self._disarm()
        if account.expires_at is not None:
            self._arm(account.expires_at - self.context.clock(), EXPIRED)

    def _arm(self, delay_s: float, reason: str) -> None:
        """Close with 4401 after ``delay_s``."""
        self._deadline = Deadline(delay_s, lambda: self.close(CloseCode.NOT_AUTHENTICATED, reason))

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _move(self, event: ConnectionEvent) -> None:
        self._state = CONNECTION.next(self._state, event)

    async def _slow_down(self) -> None:
        """Delay the next frame of a client that sends many operations or refused frames; see ``RefusalBackoff``."""
        if not self._refused:
            self._backoffs.accepted(self.client_id)
        elif self.authenticated:
            self._delay_s = max(self._delay_s, self._backoffs.refused(self.client_id))
        if self._delay_s and not self.closed:
            await self._wait(self._delay_s)

    async def _wait(self, delay_s: float) -> None:
        """Wait, at most until the socket is closed."""
        loop = asyncio.get_running_loop()
        self._pause = loop.create_future()
        timer = loop.call_later(delay_s, self._end_pause)
        await self._pause
        timer.cancel()

    def _end_pause(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def _leave_if_drained(self) -> None:
        if self._state is ConnectionState.DRAINING and not self._busy:
            # Not at once: a session may be in the middle of publishing the end of a turn.
            asyncio.get_running_loop().call_soon(self.close, CloseCode.RESTART, "the daemon stops")

    def _too_slow(self) -> None:
        _log.warning("slow_reader", client=self.client_id or None, address=self.address)
        # Not at once: a session may be in the middle of publishing.
        asyncio.get_running_loop().call_soon(
            self._end, (CloseCode.TOO_SLOW, "too slow a reader", CLOSE_FRAME_TIMEOUT_S)
        )

    def _end(self, farewell: tuple[CloseCode, str, float] | None, *, write_rest: bool = False) -> None:
        """Close once: with a code, a reason and the peer's time to answer in seconds, or silently with ``None``."""
        if self.closed:
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
            self._release()
