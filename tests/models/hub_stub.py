"""A stub of huggingface.co on the loopback that can be made to fail."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StubFile:
    """A file of a repository.

    Attributes:
        claimed: What the hub says instead of the content's SHA-256.
        is_large: Whether it is kept as a large file, and not by git itself.
    """

    content: bytes
    claimed: str | None = None
    is_large: bool = True

    @property
    def sibling(self) -> dict[str, Any]:
        """The file's entry in the repository listing."""
        blob = hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()
        about: dict[str, Any] = {"size": len(self.content), "blobId": blob}
        if self.is_large:
            sha256 = self.claimed or hashlib.sha256(self.content).hexdigest()
            about["lfs"] = {"size": len(self.content), "sha256": sha256, "pointerSize": 134}
        return about


def _going() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class StubHub:
    """What the hub has, how it misbehaves, and what it was asked.

    Attributes:
        repos: Files by repository and path.
        cuts: After how many bytes the next bodies break off, each once.
        statuses: What the next requests for files are answered with instead, each once.
        ignores_range: Whether a file always comes from its first byte on.
        storage: Where requests for files are redirected to, if anywhere.
        gated: Repositories that require accepted conditions.
        token: Without which repositories are unknown.
        listing: What is answered instead of what a repository has.
        range_said: What is said instead of which part of a file comes.
        pause: While it is cleared, bodies stop in their middle.
        heard: Method, path, range and credential of each request.
    """

    repos: dict[str, dict[str, StubFile]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    ignores_range: bool = False
    storage: str | None = None
    gated: frozenset[str] = frozenset()
    token: str | None = None
    listing: bytes | None = None
    range_said: str | None = None
    heard: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    pause: threading.Event = field(default_factory=_going)
    url: str = ""

    def ranges(self) -> list[str | None]:
        """The ranges that were asked for."""
        return [span for _, path, span, _ in self.heard if "/resolve/" in path or path.startswith("/blob/")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub

    def do_GET(self) -> None:
        """Answer as a hub, or as the storage behind it."""
        path = self.path.split("?")[0]
        self.hub.heard.append(("GET", path, self.headers.get("Range"), self.headers.get("Authorization")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._listing("/".join(parts[2:4]))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]), parts[3])
        elif parts[0] == "blob":
            self._body(self.hub.repos["/".join(parts[1:3])]["/".join(parts[3:])].content)
        else:
            self._json(404, {"error": "nothing here"})

    def _listing(self, repo: str) -> None:
        if repo in self.hub.gated:
            self._json(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif repo not in self.hub.repos or not self._may():
            self._json(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif self.hub.listing is not None:
            self._write(200, self.hub.listing)
        else:
            siblings = [{"rfilename": path} | file.sibling for path, file in self.hub.repos[repo].items()]
            self._json(200, {"id": repo, "sha": COMMIT, "siblings": siblings})

    def _file(self, repo: str, path: str, revision: str) -> None:
        file = self.hub.repos.get(repo, {}).get(path)
        if self.hub.statuses:
            self._json(self.hub.statuses.pop(0), {"error": "not now"})
        elif file is None or revision != COMMIT or not self._may():
            self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        elif self.hub.storage is not None:
            self._json(302, {}, {"Location": f"{self.hub.storage}/blob/{repo}/{path}?signature=secret"})
        else:
            self._body(file.content)

    def _may(self) -> bool:
        return self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _body(self, content: bytes) -> None:
        span = self.headers.get("Range")
        if span is None or self.hub.ignores_range:
            self.send_response(200)
        else:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", self.hub.range_said or f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.hub.cuts:
            self.wfile.write(content[: self.hub.cuts.pop(0)])
            self.close_connection = True
        else:
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.hub.pause.wait(60)
            self.wfile.write(content[half:])

    def _json(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._write(status, json.dumps(body).encode(), headers)

    def _write(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving(hub: StubHub) -> Iterator[StubHub]:
    """Serve a hub until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
