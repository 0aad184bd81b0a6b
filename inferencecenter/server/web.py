"""The web page over HTTP: its front page where the daemon answers, its files below ``web/``.

The files are read once: what is not in the table is not served, whatever a path says.
"""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from starlette.requests import Request


ROOT: Final = Path(__file__).parents[1] / "web"
FRONT_PAGE: Final = "index.html"
PREFIX: Final = "web/"
"""What the front page puts before the path of each file that it names."""
_MAIN_MODULE: Final = "js/main.js"
_IMPORT: Final = re.compile(rb"""\b(?:import|export)\b[\w\s{},*$]*\bfrom\s*["'](\.[^"'\n]+)["']""")

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
"""What is served, by suffix; files that only tools read have others. Of those without one, only the licences are."""
_PLAIN_FILES: Final = ("LICENSES",)
_WORTH_COMPRESSING: Final = 0.9
"""The share of its size that a compressed file may have at most."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A file as it goes over the wire, with the digest that it is known by."""

    body: bytes
    etag: str
    encoding: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A file of the page; ``compressed`` is ``None`` where that saves little."""

    media_type: str
    plain: Variant
    compressed: Variant | None

    def variant(self, accept_encoding: str) -> Variant:
        """Return what a client gets that accepts these encodings, as in the header of that name."""
        return self.compressed if self.compressed is not None and _accepts_gzip(accept_encoding) else self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFiles:
    """All files of the page: ``assets`` by their paths, which the front page names below ``version``.

    A version is a digest of all of them, so what is under it never changes.
    """

    version: str
    front_page: WebFile
    assets: Mapping[str, WebFile]


@cache
def read_web_files(root: Path = ROOT) -> WebFiles:
    """Read the files below ``root``, with the version in the addresses that the front page names.

    The page also names the modules that its first one imports, those of these, and so on, so that a browser asks for
    all of them at once rather than for each when it has read who imports it.
    """
    contents = dict(_served(root))
    digest = hashlib.sha256()
    for path, content in contents.items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    version = digest.hexdigest()[:16]
    front_page = contents.pop(FRONT_PAGE)
    links = "".join(f'  <link rel="modulepreload" href="{PREFIX}{path}" />\n  ' for path in _imported(contents))
    front_page = front_page.replace(b"</head>", f"{links}</head>".encode())
    front_page = front_page.replace(f'"{PREFIX}'.encode(), f'"{PREFIX}{version}/'.encode())
    return WebFiles(
        version=version,
        front_page=_file(FRONT_PAGE, front_page),
        assets={path: _file(path, content) for path, content in contents.items()},
    )


def _served(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        known = path.suffix in _MEDIA_TYPES and (path.suffix or path.name in _PLAIN_FILES)
        if known and path.is_file():
            yield path.relative_to(root).as_posix(), path.read_bytes()


def _imported(contents: Mapping[str, bytes]) -> list[str]:
    """Return what the first module needs, the nearest first."""
    found = [_MAIN_MODULE]
    for path in found:
        for target in _IMPORT.findall(contents.get(path, b"")):
            imported = posixpath.normpath(posixpath.join(posixpath.dirname(path), target.decode()))
            if imported in contents and imported not in found:
                found.append(imported)
    return found[1:]


def _file(path: str, content: bytes) -> WebFile:
    digest = hashlib.sha256(content).hexdigest()[:16]
    packed = gzip.compress(content, mtime=0)
    worth_it = len(packed) < _WORTH_COMPRESSING * len(content)
    return WebFile(
        media_type=_MEDIA_TYPES[Path(path).suffix],
        plain=Variant(content, f'"{digest}"'),
        compressed=Variant(packed, f'"{digest}-gzip"', "gzip") if worth_it else None,
    )


def _accepts_gzip(accept_encoding: str) -> bool:
    for each in accept_encoding.lower().split(","):
        coding, _, weight = each.replace(" ", "").partition(";q=")
        if coding in ("gzip", "*"):
            return weight.rstrip("0.") != "" or not weight
    return False


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
