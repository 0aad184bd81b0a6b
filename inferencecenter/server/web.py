"""The web page over HTTP: its front page where the daemon answers, its files below ``web/``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from inferencecenter.server.web_files import WebFile, WebFiles

_POLICY: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "font-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # Whatever becomes part of the page as HTML has been through the sanitizer.
    "require-trusted-types-for 'script'",
    "trusted-types dompurify",
)
_UNUSED: Final = ("camera", "display-capture", "geolocation", "microphone", "payment", "usb")
FILE_HEADERS: Final = {
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""What every answer of the page carries."""
HEADERS: Final = FILE_HEADERS | {
    "content-security-policy": "; ".join(_POLICY),
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": ", ".join(f"{feature}=()" for feature in _UNUSED),
}
"""What those carry too that a browser may show as a document: all but scripts and styles, which are half a hundred."""
_PARTS: Final = ("text/javascript", "text/css")
_FOREVER: Final = "public, max-age=31536000, immutable"
_LOOK_AGAIN: Final = "no-cache"


class WebPage:
    """Answers with the page and its files.

    Args:
        files: All there are.
        base_path: What stands before every address.
        otherwise: Answers at the front page's address to who does not ask for HTML.
    """

    def __init__(self, files: WebFiles, *, base_path: str, otherwise: Callable[[Request], Awaitable[Response]]) -> None:
        self._files = files
        self._base_path = base_path
        self._otherwise = otherwise

    def routes(self) -> list[BaseRoute]:
        """Return the routes; they stand before others for the same addresses."""
        routes: list[BaseRoute] = [
            Route(self._base_path + "/", self.front_page),
            Route(self._base_path + "/web/{path:path}", self.file),
        ]
        if self._base_path:
            routes.append(Route(self._base_path, self.way_in))
        return routes

    async def front_page(self, request: Request) -> Response:
        """Show the page to a browser."""
        if _wants_html(request):
            return _answer(request, self._files.front_page, caching=_LOOK_AGAIN)
        response = await self._otherwise(request)
        response.headers["vary"] = "accept"
        return response

    async def way_in(self, request: Request) -> Response:
        """Send a browser to where the page's relative addresses lead to its files."""
        if _wants_html(request):
            return RedirectResponse(self._base_path + "/", headers={"vary": "accept"})
        return await self.front_page(request)

    async def file(self, request: Request) -> Response:
        """Send a file of the page, by its path with or without the version before it."""
        path: str = request.path_params["path"]
        bare = path.removeprefix(f"{self._files.version}/")
        found = self._files.assets.get(bare)
        if found is None:
            return _not_found()
        return _answer(request, found, caching=_LOOK_AGAIN if bare == path else _FOREVER)


def _answer(request: Request, file: WebFile, *, caching: str) -> Response:
    variant = file.variant(request.headers.get("accept-encoding", ""))
    safe = FILE_HEADERS if file.media_type.startswith(_PARTS) else HEADERS
    headers = safe | {"cache-control": caching, "etag": variant.etag, "vary": "accept, accept-encoding"}
    if has_etag(variant.etag, request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if variant.encoding is not None:
        headers["content-encoding"] = variant.encoding
    return Response(variant.body, headers=headers | {"content-type": file.media_type})


def _not_found() -> Response:
    error = {"message": "the web page has no such file", "type": "invalid_request_error", "param": None, "code": None}
    return Response(
        orjson.dumps({"error": error}),
        status_code=404,
        headers=HEADERS | {"cache-control": "no-store", "content-type": "application/json"},
    )


def _wants_html(request: Request) -> bool:
    accept = request.headers.get("accept", "")
    return any(kind.partition(";")[0].strip().lower() == "text/html" for kind in accept.split(","))


def has_etag(etag: str, if_none_match: str) -> bool:
    """Tell whether a request's ``If-None-Match`` names ``etag``."""
    known = [each.strip().removeprefix("W/") for each in if_none_match.split(",")]
    return etag in known or known == ["*"]
