"""Images at addresses: files that a client names and the daemon fetches, from hosts that the operator allows.

A host is allowed by its name, so its entry in the name system decides what is
connected to. Redirections are not followed, since they could lead to any host, and neither
cookies nor the environment's proxies and passwords are used.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

import httpx2

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input

if TYPE_CHECKING:
    from collections.abc import Collection

_CONNECT_S: Final = 5.0
_READ_S: Final = 10.0
_TOTAL_S: Final = 30.0
_MOST_AT_ONCE: Final = 8
_MOST_OF_CLIENT: Final = 4
_HTTPS_PORT: Final = 443


class ImageFetcher:
    """Fetches files over HTTPS. On the event loop.

    Args:
        hosts: Allowed hosts, as ``example.org`` or ``example.org:8443``.
        max_bytes: Size of the largest file.
        transport: Sends requests; one that verifies certificates by default.
    """

    def __init__(
        self, hosts: Collection[str], *, max_bytes: int, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._transport = transport
        self._timeout = httpx2.Timeout(_READ_S, connect=_CONNECT_S, pool=_TOTAL_S)
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)
        self._of_client: Counter[str] = Counter()

    async def fetch(self, client_id: str, url: str, *, path: str) -> bytes:
        """Return the file at an address, which is the field ``path`` of a client's request.

        Raises:
            InferenceCenterError: ``invalid_request`` for a host that is not allowed, or if there is no file of allowed
                size; ``rate_limited`` if too many of the client's are being fetched.
        """
        with foreign_input(lambda _: self._forbidden(path)):
            address = httpx2.URL(url)
        if _host_of(address) not in self._hosts:
            raise self._forbidden(path)
        if self._of_client[client_id] >= _MOST_OF_CLIENT:
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED, f"{_MOST_OF_CLIENT} images of this client are being fetched", field=path
            )
        self._of_client[client_id] += 1
        try:
            async with asyncio.timeout(_TOTAL_S), self._slots:
                return await self._read(address, path)
        except TimeoutError:
            raise _unfetched(path, f"it takes longer than {_TOTAL_S:.0f} s") from None
        finally:
            self._of_client[client_id] -= 1
            if not self._of_client[client_id]:
                del self._of_client[client_id]

    def _forbidden(self, path: str) -> InferenceCenterError:
        allowed = ", ".join(sorted(self._hosts))
        return InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "an image is not at an address of an allowed host",
            field=path,
            hint=f"Images are fetched with https from {allowed}; send others in Base64.",
        )

    async def _read(self, url: httpx2.URL, path: str) -> bytes:
        if self._transport is None:
            limits = httpx2.Limits(max_connections=_MOST_AT_ONCE, max_keepalive_connections=0)
            self._transport = httpx2.AsyncHTTPTransport(trust_env=False, limits=limits)
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "inferencecenter"}
        with foreign_input(lambda reason: _unfetched(path, reason)):
            request = httpx2.Request("GET", url, headers=headers, extensions={"timeout": self._timeout.as_dict()})
            response = await self._transport.handle_async_request(request)
            try:
                if response.status_code != httpx2.codes.OK:
                    raise _unfetched(path, f"the host answers {response.status_code}")
                file = bytearray()
                async for chunk in response.aiter_raw():
                    file += chunk
                    if len(file) > self._max_bytes:
                        raise _unfetched(path, f"it has more than {self._max_bytes} bytes")
            finally:
                await response.aclose()
        return bytes(file)


def _host_of(url: httpx2.URL) -> str | None:
    """Return host and port of an address; ``None`` for one that is not HTTPS or has credentials."""
    if url.scheme != "https" or url.userinfo:
        return None
    return url.host if url.port in (None, _HTTPS_PORT) else f"{url.host}:{url.port}"


def _unfetched(path: str, reason: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, f"an image cannot be fetched: {reason}", field=path)
