"""One socket to the daemon, from the handshake to its close."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import websockets
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from websockets.asyncio.client import connect as open_socket
from websockets.typing import Subprotocol

from inferencecenter.client.failures import as_exception, failure, unreachable
from inferencecenter.client.reconnecting import closing_error
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL
from inferencecenter.protocol.events import AnyEvent, AuthFailed, AuthSuccess, Error, Hello

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from ssl import SSLContext

    from websockets.asyncio.client import ClientConnection

    from inferencecenter.protocol.base import Event, Request

_EVENTS: Final[TypeAdapter[AnyEvent]] = TypeAdapter(
    Annotated[AnyEvent, Field(discriminator="op")], config=ConfigDict(defer_build=True)
)
_MAX_FRAME_BYTES: Final = 2**26
_CLOSE_TIMEOUT_S: Final = 2.0
_LAST_WORD_S: Final = 1.0
_HTTP_ERRORS: Final = {401: ErrorCode.NOT_AUTHENTICATED, 403: ErrorCode.FORBIDDEN, 429: ErrorCode.RATE_LIMITED}


class Unknown(BaseModel):
    """A numbered event of a later version: only its number is understood."""

    model_config = ConfigDict(defer_build=True)

    session_id: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the daemon is and how to get in.

    Attributes:
        url: Its WebSocket.
        credential: What to show.
        tls: Verifies the daemon's certificate; ``None`` leaves that to the system's authorities.
        open_timeout_s: Seconds for the handshake, and as many for the authentication.
        keepalive_s: Seconds between pings, and seconds that each has to be answered.
    """

    url: str
    credential: requests.Auth
    tls: SSLContext | None
    open_timeout_s: float
    keepalive_s: float


class Link:
    """An open, authenticated socket.

    Attributes:
        hello: What the daemon said when the socket opened.
        account: Who the daemon says this is.
    """

    def __init__(self, socket: ClientConnection, hello: Hello, account: AuthSuccess) -> None:
        self._socket = socket
        self.hello = hello
        self.account = account

    async def send(self, request: Request) -> None:
        """Send a request; on a socket that has closed it is lost, and ``events`` says why.

        Raises:
            InferenceCenterError: ``message_too_large``.
        """
        text = request.model_dump_json(exclude_none=True)
        limit = self.hello.limits.max_frame_bytes
        # The daemon would close the socket, and with it everybody's turns.
        if len(text) > limit or (len(text) * 4 > limit and len(text.encode()) > limit):
            raise failure(
                ErrorCode.MESSAGE_TOO_LARGE, f"{request.op} is larger than the {limit} bytes that the daemon takes"
            )
        with contextlib.suppress(websockets.ConnectionClosed):
            await self._socket.send(text)

    async def events(self) -> AsyncIterator[Event | Unknown]:
        """Yield what the daemon says until the socket closes."""
        with contextlib.suppress(websockets.ConnectionClosed):
            async for text in self._socket:
                if (event := parse(text)) is not None:
                    yield event

    def closing_error(self) -> tuple[InferenceCenterError, bool]:
        """Return why the socket closed, and whether that is final."""
        return closing_error(self._socket.close_code, self._socket.close_reason)

    async def close(self) -> None:
        """Say good-bye, and wait a little for the answer."""
        await self._socket.close()


async def open_link(address: Address) -> Link:
    """Open a socket and authenticate.

    Raises:
        InferenceCenterError: ``not_authenticated``, ``forbidden``, or anything else that may be otherwise at the next
            attempt, as ``daemon_unreachable`` and ``rate_limited``.
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
        raise unreachable(address.url, "it opens a socket and then says nothing") from error
    except websockets.ConnectionClosed as error:
        raise closing_error(socket.close_code, socket.close_reason)[0] from error
    except BaseException:
        socket.transport.abort()
        raise


def socket_url(url: str) -> str:
    """Return an address as a WebSocket's: ``http`` and ``https`` are said of the same daemon."""
    scheme, separator, rest = url.partition("://")
    return {"http": "ws", "https": "wss"}.get(scheme.lower(), scheme) + separator + rest


def parse(text: str | bytes) -> Event | Unknown | None:
    """Return an event; of an op or a shape that this version does not know, at most its number."""
    with contextlib.suppress(ValidationError):
        return _EVENTS.validate_json(text)
    with contextlib.suppress(ValidationError):
        return Unknown.model_validate_json(text)
    return None


async def _enter(socket: ClientConnection, address: Address) -> Link:
    greeting = parse(await socket.recv())
    if not isinstance(greeting, Hello):
        raise unreachable(address.url, "what answers there is no InferenceCenter")
    await socket.send(address.credential.model_copy(update={"id": "auth"}).model_dump_json(exclude_none=True))
    while True:
        answer = parse(await socket.recv())
        if isinstance(answer, AuthSuccess):
            return Link(socket, greeting, answer)
        if isinstance(answer, AuthFailed):
            raise await _not_let_in(socket, answer)
        if isinstance(answer, Error):
            raise as_exception(answer)


async def _not_let_in(socket: ClientConnection, answer: AuthFailed) -> InferenceCenterError:
    """Return why: a wrong credential, or the right one at a bad time, after which the daemon closes."""
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
