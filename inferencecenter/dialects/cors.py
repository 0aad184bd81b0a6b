"""Cross-origin requests: pages of origins that may connect may also read the answers.

Credentials are tokens in ``Authorization``, which a page has to know and to send itself; cookies there are none. So an
answer names the origin that asked, never all of them, and never allows credentials.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers

from inferencecenter.server.origins import origin_allowed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Send
    from starlette.types import Scope as AsgiScope

    from inferencecenter.server.context import Context

_PREFLIGHT_S: Final = 600
_READABLE: Final = "retry-after, retry-after-ms, x-should-retry"
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_MOST_HEADERS: Final = 64


class CrossOrigin:
    """An ASGI application around that of one address.

    Args:
        app: What answers.
        context: The rest of the daemon.
        methods: What the address takes.
    """

    def __init__(self, app: ASGIApp, context: Context, *, methods: Iterable[str]) -> None:
        self._app = app
        self._context = context
        self._methods = ", ".join(sorted(methods))

    async def __call__(self, asgi: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or have a request answered for the page that it is from."""
        headers = Headers(scope=asgi)
        origin = headers.get("origin")
        if origin is None or not self._allows(origin, asgi, headers):
            await self._app(asgi, receive, send)
        elif asgi["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(send, origin, headers.get("access-control-request-headers", ""))
        else:
            await self._app(asgi, receive, _readable_for(origin, send))

    def _allows(self, origin: str, asgi: AsgiScope, headers: Headers) -> bool:
        caller = self._context.proxies.caller(asgi["client"][0] if asgi["client"] else "", headers)
        return origin_allowed(origin, caller.host, self._context.settings.allowed_origins)

    async def _preflight(self, send: Send, origin: str, asked: str) -> None:
        names = [name.strip() for name in asked.split(",")[:_MOST_HEADERS]]
        headers = {
            **_origin_headers(origin),
            "access-control-allow-methods": self._methods,
            "access-control-allow-headers": ", ".join(name for name in names if _HEADER_NAME.fullmatch(name)),
            "access-control-max-age": str(_PREFLIGHT_S),
        }
        await send({"type": "http.response.start", "status": 204, "headers": _encoded(headers)})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _readable_for(origin: str, send: Send) -> Send:
    """Return a ``send`` that lets pages of an origin read the answer."""
    added = _encoded({**_origin_headers(origin), "access-control-expose-headers": _READABLE})

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


def _origin_headers(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
