"""The web page over HTTP: its front page at the daemon's URL, its files below ``web/``.

Only the files read for the first request are served, so no path leads outside.
"""

from __future__ import annotations

import asyncio
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
_OFFLINE_PAGE: Final = "offline.html"
"""Shown at the front page's URL by its service worker."""
PREFIX: Final = "web/"
"""Prefix of the file paths in the front page."""
_MAIN_MODULE: Final = "js/main.js"
_TEXTS: Final = "js/texts"
"""Folder of the page's texts: one module for each language, named by its tag, and beside it a folder of its parts."""
_IMPORT: Final = re.compile(rb"""\b(?:import|export)\b[\w\s{},*$]*\bfrom\s*["'](\.[^"'\n]+)["']""")

_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
    ".bcmap": "application/octet-stream",
    "": "text/plain; charset=utf-8",
}
"""Media types of served files by suffix. Files for tools have other suffixes; without one, only licenses are served."""
_PLAIN_FILES: Final = ("LICENSES",)
_WORTH_COMPRESSING: Final = 0.9
"""Maximum ratio of a compressed file's size to the original."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A file in one encoding, with its digest (ETag)."""

    body: bytes
    etag: str
    encoding: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A file of the page; ``compressed`` is ``None`` if compression saves little."""

    media_type: str
    headers: Mapping[str, str]
    plain: Variant
    compressed: Variant | None

    def variant(self, accept_encoding: str) -> Variant:
        """Return the variant for the value of an ``Accept-Encoding`` header."""
        return self.compressed if self.compressed is not None and _accepts_gzip(accept_encoding) else self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFiles:
    """All files of the page: ``assets`` by their paths, which the front page references below ``version``.

    A version is a digest of all files, so the content of a versioned path never changes.
    """

    version: str
    front_page: WebFile
    assets: Mapping[str, WebFile]


@cache
def read_web_files(root: Path = ROOT) -> WebFiles:
    """Read the files below ``root`` and put the version into the paths in the front page.

    The page also lists its languages, and the modules that its first one imports, directly or indirectly, so that a
    browser requests all of them at once rather than level by level.
    """
    contents = dict(_served(root))
    digest = hashlib.sha256()
    for path, content in contents.items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    version = digest.hexdigest()[:16]
    links = "".join(f'  <link rel="modulepreload" href="{PREFIX}{path}" />\n  ' for path in _imported(contents))
    contents[FRONT_PAGE] = contents[FRONT_PAGE].replace(b"</head>", f"{links}</head>".encode())
    for path in contents.keys() & {FRONT_PAGE, _OFFLINE_PAGE}:
        contents[path] = contents[path].replace(f'"{PREFIX}'.encode(), f'"{PREFIX}{version}/'.encode())
    front_page = contents.pop(FRONT_PAGE)
    tags = " ".join(Path(path).stem for path in contents if posixpath.dirname(path) == _TEXTS)
    front_page = front_page.replace(b"<html ", f'<html data-languages="{tags}" '.encode())
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
    """Return the transitive imports of the first module, the nearest first."""
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
    media_type = _MEDIA_TYPES[Path(path).suffix]
    is_part = media_type.startswith(_PARTS)
    special = next((headers for suffix, headers in _HEADERS.items() if path.endswith(suffix)), None)
    return WebFile(
        media_type=media_type,
        headers=special or (FILE_HEADERS if is_part else HEADERS),
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
    "manifest-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # HTML that is inserted into the page has passed the sanitizer.
    "require-trusted-types-for 'script'",
    "trusted-types dompurify offline-worker pdf-worker",
)
_UNUSED: Final = ("camera", "display-capture", "geolocation", "payment", "usb")
FILE_HEADERS: Final = {
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of every response of the page."""
HEADERS: Final = FILE_HEADERS | {
    "content-security-policy": "; ".join(_POLICY),
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": ", ".join([*(f"{feature}=()" for feature in _UNUSED), "microphone=(self)"]),
}
"""Further headers of files that a browser may show as a document: all but scripts and styles."""
WORKER_HEADERS: Final = FILE_HEADERS | {"content-security-policy": "default-src 'none'"}
"""Headers of a script that runs as a worker, whose policy is its own: it reads foreign files, and may load nothing."""
SERVICE_WORKER_HEADERS: Final = FILE_HEADERS | {
    "content-security-policy": "default-src 'none'; connect-src 'self'",
    "service-worker-allowed": "/",
}
"""Headers of the service worker, whose scope is the page and not the folder of its file."""
_HEADERS: Final = {".worker.js": WORKER_HEADERS, ".sw.js": SERVICE_WORKER_HEADERS}
_PARTS: Final = ("text/javascript", "text/css")
_FOREVER: Final = "public, max-age=31536000, immutable"
_LOOK_AGAIN: Final = "no-cache"


class WebPage:
    """Serves the page and its files. The first request reads them, in a thread: it takes a quarter of a second.

    Args:
        base_path: Prefix of every path.
        otherwise: Handles requests for the front page's path that do not accept HTML.
    """

    def __init__(self, *, base_path: str, otherwise: Callable[[Request], Awaitable[Response]]) -> None:
        self._files: WebFiles | None = None
        self._reading = asyncio.Lock()
        self._base_path = base_path
        self._otherwise = otherwise

    def routes(self) -> list[BaseRoute]:
        """Return the routes; they take precedence over others for the same paths."""
        routes: list[BaseRoute] = [
            Route(self._base_path + "/", self.front_page),
            Route(self._base_path + "/web/{path:path}", self.file),
        ]
        if self._base_path:
            routes.append(Route(self._base_path, self.redirect_to_page))
        return routes

    async def front_page(self, request: Request) -> Response:
        """Return the front page to a browser."""
        if _wants_html(request):
            files = await self._read()
            return _answer(request, files.front_page, caching=_LOOK_AGAIN)
        response = await self._otherwise(request)
        response.headers["vary"] = "accept"
        return response

    async def redirect_to_page(self, request: Request) -> Response:
        """Redirect a browser to where the page's relative URLs resolve to its files."""
        if _wants_html(request):
            return RedirectResponse(self._base_path + "/", headers={"vary": "accept"})
        return await self.front_page(request)

    async def file(self, request: Request) -> Response:
        """Return a file of the page, by its path with or without the version."""
        path: str = request.path_params["path"]
        files = await self._read()
        bare = path.removeprefix(f"{files.version}/")
        found = files.assets.get(bare)
        if found is None:
            return _not_found()
        return _answer(request, found, caching=_LOOK_AGAIN if bare == path else _FOREVER)

    async def _read(self) -> WebFiles:
        async with self._reading:
            if self._files is None:
                self._files = await asyncio.to_thread(read_web_files)
        return self._files


def _answer(request: Request, file: WebFile, *, caching: str) -> Response:
    variant = file.variant(request.headers.get("accept-encoding", ""))
    headers = {**file.headers, "cache-control": caching, "etag": variant.etag, "vary": "accept, accept-encoding"}
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
    """Return whether a request's ``If-None-Match`` contains ``etag``."""
    known = [each.strip().removeprefix("W/") for each in if_none_match.split(",")]
    return etag in known or known == ["*"]
