"""The WebSocket transport: opens and authenticates sockets.

Imported with the first socket, because the socket library takes as long to import as the rest of the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.request
from base64 import b64encode
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import websockets
from pydantic import BaseModel, ConfigDict, ValidationError
from websockets.asyncio.client import connect, unix_connect
from websockets.typing import Subprotocol

from inferencecenter.client.errors import as_exception, failure, unreachable
from inferencecenter.client.options import unix_path
from inferencecenter.client.retry import closing_error
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import requests
from inferencecenter.protocol.base import PROTOCOL_VERSION, SUBPROTOCOL, SessionEvent
from inferencecenter.protocol.events import AnyEvent, AuthFailed, AuthSuccess, Error, Hello
from inferencecenter.protocol.values import MessageImage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from websockets.asyncio.client import ClientConnection

    from inferencecenter.client.options import Address
    from inferencecenter.protocol.base import Event, Request


_EVENTS: Final[Mapping[str, type[Event]]] = MappingProxyType(
    {kind.model_fields["op"].default: kind for kind in get_args(AnyEvent)}
)
_UNIX_SOCKET_URL: Final = "ws://localhost/ws"
_MAX_FRAME_BYTES: Final = 2**26
_CLOSE_TIMEOUT_S: Final = 2.0
_UPLOAD_S: Final = 120.0
_CLOSE_FRAME_TIMEOUT_S: Final = 1.0
_HTTP_ERRORS: Final = {401: ErrorCode.NOT_AUTHENTICATED, 403: ErrorCode.FORBIDDEN, 429: ErrorCode.RATE_LIMITED}


class _EventHead(BaseModel):
    """The fields that route a frame of any protocol version."""

    model_config = ConfigDict(defer_build=True)

    op: str
    session_id: str | None = None
    seq: int | None = None


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

    async def events(self) -> AsyncIterator[Event]:
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
    path = unix_path(address.url)
    opening = connect if path is None else partial(unix_connect, path)
    try:
        connection = await opening(
            address.url if path is None else _UNIX_SOCKET_URL,
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
            return await _enter(connection, address)
    except TimeoutError as error:
        connection.transport.abort()
        raise unreachable(address.url, "the socket opens but receives no data") from error
    except websockets.ConnectionClosed as error:
        raise closing_error(connection.close_code, connection.close_reason)[0] from error
    except BaseException:
        connection.transport.abort()
        raise


def upload_image(address: Address, file: str | Path | bytes) -> MessageImage:
    """Upload an image over HTTP; blocks.

    Raises:
        InferenceCenterError: See ``Client.add_image``.
    """
    data = file if isinstance(file, bytes) else Path(file).read_bytes()
    path = unix_path(address.url)
    base = (address.url if path is None else _UNIX_SOCKET_URL).removesuffix("/ws").rstrip("/")
    authorization = {"Authorization": f"Bearer {token}"} if (token := address.credential.token) is not None else {}
    request = urllib.request.Request(  # noqa: S310 - of the address that the client was made for
        f"http{base.removeprefix('ws')}/images",
        data=json.dumps({"data": b64encode(data).decode()}).encode(),
        headers={**authorization, "Content-Type": "application/json"},
    )
    try:
        with _http_open(request, address, path) as answer:
            return MessageImage.model_validate_json(answer.read())
    except urllib.error.HTTPError as refusal:
        error = json.loads(refusal.read() or b"{}").get("error", {})
        code = error.get("code")
        raise failure(
            ErrorCode(code) if code in set(ErrorCode) else ErrorCode.INTERNAL,
            error.get("message", str(refusal)),
            field=error.get("param"),
        ) from None
    except OSError as error:
        raise unreachable(address.url, str(error)) from error


def _http_open(request: urllib.request.Request, address: Address, path: str | None) -> http.client.HTTPResponse:
    if path is None:
        opened = urllib.request.urlopen(request, timeout=_UPLOAD_S, context=address.tls)  # noqa: S310 - as above
    else:
        opened = urllib.request.build_opener(_UnixHandler(path)).open(request, timeout=_UPLOAD_S)
    return cast("http.client.HTTPResponse", opened)


class _UnixHandler(urllib.request.HTTPHandler):
    """Sends HTTP requests to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request and return the response."""
        return self.do_open(cast("Any", partial(_UnixHttpConnection, self._path)), req)


class _UnixHttpConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def parse(text: str | bytes) -> Event | None:
    """Parse a frame; one of a later protocol version, if it is numbered, becomes a plain ``SessionEvent``."""
    # The op is read first: a union would build the validators of all events with the first frame.
    try:
        head = _EventHead.model_validate_json(text)
    except ValidationError:
        return None
    with contextlib.suppress(ValidationError):
        if (kind := _EVENTS.get(head.op)) is not None:
            return kind.model_validate_json(text)
    if head.session_id is None or head.seq is None:
        return None
    return SessionEvent.model_construct(op=head.op, session_id=head.session_id, seq=head.seq)


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
            raise await _authentication_failure(socket, answer)
        if isinstance(answer, Error):
            raise as_exception(answer)


async def _authentication_failure(socket: ClientConnection, answer: AuthFailed) -> InferenceCenterError:
    """Return why authentication failed: an invalid credential, or a valid one that is refused by a close code."""
    message = f"the daemon refuses the credential: {answer.reason}"
    if answer.retry_after_ms is None:
        with contextlib.suppress(TimeoutError, websockets.ConnectionClosed):
            await socket.send(requests.Hello(op="hello", protocol=PROTOCOL_VERSION).model_dump_json(exclude_none=True))
            async with asyncio.timeout(_CLOSE_FRAME_TIMEOUT_S):
                await socket.recv()
    code = ErrorCode.NOT_AUTHENTICATED
    if answer.retry_after_ms is not None or socket.close_code is not None:
        code = ErrorCode.RATE_LIMITED
    return failure(code, message, retry_after_ms=answer.retry_after_ms)


def _refused(url: str, error: Exception) -> InferenceCenterError:
    if not isinstance(error, websockets.InvalidStatus):
        return unreachable(url, str(error) or type(error).__name__)
    response = error.response
    retry_after = response.headers.get("Retry-After", "")
    retry_after_ms = int(retry_after) * 1000 if retry_after.isdecimal() else None
    code = _HTTP_ERRORS.get(response.status_code)
    if code is not None:
        message = f"{url} refuses with HTTP status {response.status_code}"
        return failure(code, message, retry_after_ms=retry_after_ms)
    return unreachable(url, str(error), retry_after_ms=retry_after_ms)
