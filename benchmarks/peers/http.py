"""Clients of HTTP servers: persistent connections, typed responses, and server-sent events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
import msgspec

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from benchmarks.target import TargetSpec

T = TypeVar("T")

# The last event of a turn repeats its prompt in one line.
_READ_BUFFER_BYTES: Final = 2**20
_LAST_REQUEST: Final = {"connection": "close"}


class _Detail(msgspec.Struct):
    """The inside of an error."""

    message: str = ""


class Failure(msgspec.Struct):
    """An error in OpenAI's format."""

    error: _Detail


class Http:
    """Requests to one server.

    All methods raise ``daemon_unreachable`` when it cannot be reached, ``not_authenticated`` when it refuses the token,
    ``engine_unavailable`` with its message when it refuses the request otherwise, and ``internal`` for an answer of an
    unexpected form.
    """

    def __init__(self, spec: TargetSpec) -> None:
        self._url = spec.url
        self._session = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {spec.token}"} if spec.token else None,
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(keepalive_timeout=3600),
            read_bufsize=_READ_BUFFER_BYTES,
        )

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._session.close()

    async def get(self, path: str, kind: type[T]) -> T:
        """Fetch a page."""
        try:
            async with self._session.get(self._url + path) as response:
                return msgspec.json.decode(await _checked(response), type=kind)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise _mapped(error, self._url + path) from error

    async def post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """Send JSON and return the whole answer."""
        try:
            async with self._session.post(self._url + path, json=body) as response:
                return msgspec.json.decode(await _checked(response), type=kind)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise _mapped(error, self._url + path) from error

    async def stream(
        self, path: str, body: dict[str, Any], decoder: msgspec.json.Decoder[T], *, keep_connection: bool = True
    ) -> AsyncGenerator[tuple[float, T], None]:
        """Send JSON and yield the events of the answer, each with the monotonic second in which its bytes came.

        Closing the iterator early closes the connection, which aborts the generation on these servers.

        Args:
            path: Where to send it.
            body: What to send.
            decoder: Reads an event.
            keep_connection: Whether the connection may be used again after a whole answer.
        """
        headers = None if keep_connection else _LAST_REQUEST
        try:
            async with self._session.post(self._url + path, json=body, headers=headers) as response:
                if response.status != 200:
                    await _checked(response)
                rest = b""
                async for data in response.content.iter_any():
                    now = time.monotonic()
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        payload = line[5:].strip() if line.startswith(b"data:") else b""
                        if payload and payload != b"[DONE]":
                            yield now, decoder.decode(payload)
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise _mapped(error, self._url + path) from error


async def _checked(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a successful answer."""
    body = await response.read()
    if response.status < 400:
        return body
    try:
        words = msgspec.json.decode(body, type=Failure).error.message
    except msgspec.DecodeError:
        words = response.reason or "no reason given"
    code = ErrorCode.NOT_AUTHENTICATED if response.status == 401 else ErrorCode.ENGINE_UNAVAILABLE
    raise InferenceCenterError(code, f"{response.url} answers {response.status}: {words}")


def _mapped(error: Exception, url: str) -> InferenceCenterError:
    if isinstance(error, msgspec.DecodeError):
        return InferenceCenterError(ErrorCode.INTERNAL, f"{url} answers in another shape: {error}")
    return InferenceCenterError(ErrorCode.DAEMON_UNREACHABLE, f"{url}: {str(error) or type(error).__name__}")
