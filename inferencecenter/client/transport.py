"""The WebSocket transport: opens and authenticates sockets, and reconnects whenever one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import websockets
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from websockets.asyncio.client import connect as open_socket
from websockets.typing import Subprotocol

from inferencecenter.client.errors import as_exception, failure, unreachable
from inferencecenter.client.reconnect import (
    BackoffPolicy,
    Connected,
    Ended,
    ReconnectBackoff,
    Reconnecting,
    closing_error,
    is_final,
)
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL
from inferencecenter.protocol.events import AnyEvent, AuthFailed, AuthSuccess, Error, Hello

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from ssl import SSLContext

    from websockets.asyncio.client import ClientConnection

    from inferencecenter.client.reconnect import ConnectionState
    from inferencecenter.protocol.base import Event, Request


_EVENTS: Final[TypeAdapter[AnyEvent]] = TypeAdapter(
    Annotated[AnyEvent, Field(discriminator="op")], config=ConfigDict(defer_build=True)
)
_MAX_FRAME_BYTES: Final = 2**26
_CLOSE_TIMEOUT_S: Final = 2.0
_LAST_WORD_S: Final = 1.0
_HTTP_ERRORS: Final = {401: ErrorCode.NOT_AUTHENTICATED, 403: ErrorCode.FORBIDDEN, 429: ErrorCode.RATE_LIMITED}


class UnknownEvent(BaseModel):
    """A numbered event of a later protocol version, of which only the sequence number is understood."""

    model_config = ConfigDict(defer_build=True)

    session_id: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the daemon and how to connect to it.

    Attributes:
        url: WebSocket URL.
        credential: Token, or client id with API key.
        tls: TLS context; ``None`` uses the system's certificate authorities.
        open_timeout_s: Timeout in seconds of the handshake, and again of the authentication.
        keepalive_s: Seconds between pings, and the timeout of each.
    """

    url: str
    credential: requests.Auth
    tls: SSLContext | None
    open_timeout_s: float
    keepalive_s: float


class Transport:
    """An open, authenticated socket.

    Attributes:
        hello: The daemon's ``hello``.
        account: The authenticated account.
    """

    def __init__(self, socket: ClientConnection, hello: Hello, account: AuthSuccess) -> None:
        self._socket = socket
        self.hello = hello
        self.account = account

    async def send(self, request: Request) -> None:
        """Send a request; on a closed socket it is dropped, and ``events`` reports the reason.

        Raises:
            InferenceCenterError: ``message_too_large``.
        """
        text = request.model_dump_json(exclude_none=True)
        limit = self.hello.limits.max_frame_bytes
        # The daemon would close the socket, and with it all turns of this client.
        if len(text) > limit or (len(text) * 4 > limit and len(text.encode()) > limit):
            raise failure(
                ErrorCode.MESSAGE_TOO_LARGE, f"{request.op} is larger than the {limit} bytes that the daemon accepts"
            )
        with contextlib.suppress(websockets.ConnectionClosed):
            await self._socket.send(text)

    async def events(self) -> AsyncIterator[Event | UnknownEvent]:
        """Yield the daemon's events until the socket closes."""
        with contextlib.suppress(websockets.ConnectionClosed):
            async for text in self._socket:
                if (event := parse(text)) is not None:
                    yield event

    def closing_error(self) -> tuple[InferenceCenterError, bool]:
        """Return why the socket closed, and whether that is final."""
        return closing_error(self._socket.close_code, self._socket.close_reason)

    async def close(self) -> None:
        """Close with a closing handshake, bounded by a short timeout."""
        await self._socket.close()


async def open_transport(address: Address) -> Transport:
    """Open a socket and authenticate.

    Raises:
        InferenceCenterError: ``not_authenticated``, ``forbidden``, or a temporary error such as ``daemon_unreachable``
            and ``rate_limited``.
    """
    try:
        socket = await open_socket(
            address.url,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            open_timeout=address.open_timeout_s,
            ping_interval=address.keepalive_s,
            ping_timeout=address.keepalive_s,
            close_timeout=_CLOSE_TIMEOUT_S,
            max_size=_MAX_FRAME_BYTES,
            ssl=(address.tls or True) if address.url.lower().startswith("wss:") else None,
        )
    except (OSError, websockets.WebSocketException) as error:
        raise _refused(address.url, error) from error
    try:
        async with asyncio.timeout(address.open_timeout_s):
            return await _enter(socket, address)
    except TimeoutError as error:
        socket.transport.abort()
        raise unreachable(address.url, "the socket opens but receives nothing") from error
    except websockets.ConnectionClosed as error:
        raise closing_error(socket.close_code, socket.close_reason)[0] from error
    except BaseException:
        socket.transport.abort()
        raise


def socket_url(url: str) -> str:
    """Return the WebSocket URL for an ``http``, ``https``, ``ws`` or ``wss`` address of the daemon."""
    scheme, separator, rest = url.partition("://")
    return {"http": "ws", "https": "wss"}.get(scheme.lower(), scheme) + separator + rest


def parse(text: str | bytes) -> Event | UnknownEvent | None:
    """Parse a frame; an unknown op or shape yields at most its sequence number."""
    with contextlib.suppress(ValidationError):
        return _EVENTS.validate_json(text)
    with contextlib.suppress(ValidationError):
        return UnknownEvent.model_validate_json(text)
    return None


async def _enter(socket: ClientConnection, address: Address) -> Transport:
    greeting = parse(await socket.recv())
    if not isinstance(greeting, Hello):
        raise unreachable(address.url, "the server there is not InferenceCenter")
    await socket.send(address.credential.model_copy(update={"id": "auth"}).model_dump_json(exclude_none=True))
    while True:
        answer = parse(await socket.recv())
        if isinstance(answer, AuthSuccess):
            return Transport(socket, greeting, answer)
        if isinstance(answer, AuthFailed):
            raise await _not_let_in(socket, answer)
        if isinstance(answer, Error):
            raise as_exception(answer)


async def _not_let_in(socket: ClientConnection, answer: AuthFailed) -> InferenceCenterError:
    """Return why: an invalid credential, or a valid one at a bad time, after which the daemon closes the socket."""
    words = f"the daemon refuses the credential: {answer.reason}"
    if answer.retry_after_ms is None:
        with contextlib.suppress(TimeoutError, websockets.ConnectionClosed):
            await socket.send(requests.Hello(op="hello", protocol=PROTOCOL_VERSION).model_dump_json(exclude_none=True))
            async with asyncio.timeout(_LAST_WORD_S):
                await socket.recv()
    code = ErrorCode.NOT_AUTHENTICATED
    if answer.retry_after_ms is not None or socket.close_code is not None:
        code = ErrorCode.RATE_LIMITED
    return failure(code, words, retry_after_ms=answer.retry_after_ms)


def _refused(url: str, error: Exception) -> InferenceCenterError:
    if not isinstance(error, websockets.InvalidStatus):
        return unreachable(url, str(error) or type(error).__name__)
    response = error.response
    retry_after = response.headers.get("Retry-After", "")
    retry_after_ms = int(retry_after) * 1000 if retry_after.isdecimal() else None
    code = _HTTP_ERRORS.get(response.status_code)
    if code is not None:
        words = f"{url} refuses with HTTP status {response.status_code}"
        return failure(code, words, retry_after_ms=retry_after_ms)
    return unreachable(url, str(error), retry_after_ms=retry_after_ms)


@dataclass(frozen=True, slots=True)
class Timing:
    """Clock and randomness. ``monotonic`` and ``sleep`` are in seconds, ``random`` returns numbers from 0 to 1."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random


class TransportListener(Protocol):
    """Receives the events and state changes of a ``ReconnectingTransport``."""

    def take(self, event: Event | UnknownEvent) -> None:
        """Handle an event."""

    def cut(self) -> None:
        """Handle the loss of the socket and of everything in flight in both directions."""

    async def restore(self, link: Transport) -> None:
        """Restore the state of the previous socket on a new one.

        Raises:
            InferenceCenterError: The daemon cannot do that yet; the attempt counts as failed.
        """

    def told(self, state: ConnectionState) -> None:
        """Handle a change of the connection's state."""


class ReconnectingTransport:
    """Keeps one socket open; ``run`` is the only writer of its state.

    Args:
        address: Address and credential of the daemon.
        policy: Backoff of reconnects; ``None`` disables reconnecting.
        timing: Clock and randomness.
        user: Receives events and state changes.
    """

    def __init__(
        self, address: Address, *, policy: BackoffPolicy | None, timing: Timing, user: TransportListener
    ) -> None:
        self._address = address
        self._policy = policy
        self._timing = timing
        self._user = user
        self._tasks = TaskGroup("lifeline")
        self._link: Transport | None = None
        self._failure: InferenceCenterError | None = None
        self._settled = asyncio.Event()
        self.ended: InferenceCenterError | None = None
        self.n_sockets = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} sockets={self.n_sockets} connected={self.connected} ended={self.ended!r}>"

    @property
    def connected(self) -> bool:
        """Whether the socket is open and everything is restored."""
        return self._settled.is_set() and self.ended is None

    async def until_connected(self) -> None:
        """Wait until the socket is open and everything is restored.

        Raises:
            InferenceCenterError: The connection has ended for good.
        """
        await self._settled.wait()
        if self.ended is not None:
            raise self.ended

    async def send(self, request: Request) -> None:
        """Send a request; without a socket it is dropped.

        Raises:
            InferenceCenterError: ``message_too_large``.
        """
        if self._link is not None:
            await self._link.send(request)

    async def fail(self, error: InferenceCenterError) -> None:
        """Close the socket, which is open but unusable, so that ``run`` reconnects."""
        if self._link is not None:
            self._failure = error
            await self._link.close()

    async def run(self, link: Transport) -> None:
        """Read from one socket after the other until the connection ends for good.

        Args:
            link: The first socket.
        """
        backoff = new_backoff(self._policy, self._timing)
        restoring: asyncio.Task[None] | None = None
        try:
            while True:
                opened_at = self._timing.monotonic()
                error, final = await self._serve(link, restoring)
                if final or self._policy is None:
                    self._end(error)
                    return
                self._user.cut()
                now = self._timing.monotonic()
                backoff.lost(now=now, up_s=now - opened_at)
                link = await self._reopen(backoff, error)
                self._link = link
                self.n_sockets += 1
                restoring = self._tasks.spawn(self._restore(link), name="restore")
        except _OverError as over:
            self._end(over.error)
        finally:
            await self.close()

    def begin(self, link: Transport) -> None:
        """Start with the first socket, on which there is nothing to restore."""
        self._link = link
        self.n_sockets = 1
        self._settled.set()

    async def _serve(self, link: Transport, restoring: asyncio.Task[None] | None) -> tuple[InferenceCenterError, bool]:
        """Dispatch events until the socket closes; return why it did, and whether that is final."""
        async for event in link.events():
            self._user.take(event)
        if restoring is not None:
            restoring.cancel()
        failed, self._failure, self._link = self._failure, None, None
        self._settled.clear()
        return link.closing_error() if failed is None else (failed, False)

    async def _restore(self, link: Transport) -> None:
        try:
            await self._user.restore(link)
        except InferenceCenterError as error:
            await self.fail(error)
        else:
            self._settled.set()
            self._user.told(Connected())

    async def _reopen(self, backoff: ReconnectBackoff, error: InferenceCenterError) -> Transport:
        """Return a new socket.

        Raises:
            _OverError: The connection has ended for good.
        """
        while True:
            wait_s = backoff.next_wait_s(now=self._timing.monotonic(), retry_after_s=(error.retry_after_ms or 0) / 1000)
            if wait_s is None:
                raise _OverError(_given_up(error))
            self._user.told(Reconnecting(attempt=backoff.attempt, in_s=wait_s, error=error))
            await self._timing.sleep(wait_s)
            try:
                return await open_transport(self._address)
            except InferenceCenterError as refusal:
                if is_final(refusal):
                    raise _OverError(refusal) from refusal
                error = refusal

    def _end(self, error: InferenceCenterError) -> None:
        self.ended = error
        self._settled.set()
        self._user.told(Ended(error))

    async def close(self) -> None:
        """End the connection, wake everything that waits, and close the socket, even if ``run`` never started."""
        if self.ended is None:
            self._end(failure(ErrorCode.DAEMON_UNREACHABLE, "the client was closed"))
        await self._tasks.cancel()
        if self._link is not None:
            await self._link.close()


class _OverError(Exception):
    """Reconnecting has stopped for good."""

    def __init__(self, error: InferenceCenterError) -> None:
        super().__init__(str(error))
        self.error = error


def new_backoff(policy: BackoffPolicy | None, timing: Timing) -> ReconnectBackoff:
    """Return a new backoff that starts now."""
    return ReconnectBackoff(policy or BackoffPolicy(), random=timing.random, now=timing.monotonic())


def _given_up(error: InferenceCenterError) -> InferenceCenterError:
    return failure(
        ErrorCode.DAEMON_UNREACHABLE,
        f"the connection was lost and not restored in time: {error.message}",
        hint=error.hint,
    )
