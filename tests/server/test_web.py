"""The web page over HTTP."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inferencecenter.server import web
from inferencecenter.server.web import (
    FILE_HEADERS,
    HEADERS,
    ROOT,
    SERVICE_WORKER_HEADERS,
    WORKER_HEADERS,
    WebFiles,
    read_web_files,
)
from tests.server.harness import Running, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

BROWSER = "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\n"
ZIPPED = "Accept-Encoding: gzip, deflate, br\r\n"
SAFE = set(HEADERS)


def fields(head: str) -> dict[str, str]:
    """Return the headers of a response."""
    return dict(line.split(": ", maxsplit=1) for line in head.split("\r\n")[1:] if line)


async def test_browser_gets_the_page(server: Running) -> None:
    """Only its own files may be loaded, and each is immutable."""
    status, head, body = await server.http("/", BROWSER)
    found = fields(head)
    assert (status, found["content-type"]) == (200, "text/html; charset=utf-8")
    assert found["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in found["content-security-policy"]
    assert (found["cache-control"], set(found) >= SAFE) == ("no-cache", True)
    named = re.findall(r'(?:src|href)="([^"]+)"', body.decode())
    assert len(named) >= 4
    for path in named:
        status, head, _ = await server.http("/" + path)
        assert (status, fields(head)["cache-control"]) == (200, "public, max-age=31536000, immutable"), path


def test_page_has_no_inline_script_or_style() -> None:
    """Its policy would refuse them."""
    page = (ROOT / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:|https?://", page) == []


@pytest.mark.parametrize("accept", ["", "Accept: */*\r\n", "Accept: application/json\r\n"])
async def test_programs_get_the_description(server: Running, accept: str) -> None:
    """Only clients that accept HTML get the page; caches keep both apart."""
    status, head, body = await server.http("/", accept)
    assert (status, json.loads(body)["server"], fields(head)["vary"]) == (200, "inferencecenter", "accept")


@pytest.mark.parametrize("path", ["/ws", "/api/inference", "/api/inference/"])
async def test_other_socket_paths_have_no_page(server: Running, path: str) -> None:
    """The page's relative URLs would break there."""
    assert json.loads((await server.http(path, BROWSER))[2])["server"] == "inferencecenter"


async def test_socket_shares_the_page_path(server: Running) -> None:
    """The page's URL is the socket's too."""
    async with server.connect() as socket:
        assert (await receive(socket))["op"] == "hello"


async def test_files_are_compressed_on_request(server: Running) -> None:
    """Each encoding has its own ETag."""
    plain = await server.http("/web/vendor/preact.js")
    packed = await server.http("/web/vendor/preact.js", ZIPPED)
    declined = await server.http("/web/vendor/preact.js", "Accept-Encoding: gzip;q=0, br\r\n")
    expected = (ROOT / "vendor/preact.js").read_bytes()
    assert plain[2] == declined[2] == gzip.decompress(packed[2]) == expected
    assert (fields(packed[1])["content-encoding"], "content-encoding" in plain[1]) == ("gzip", False)
    assert fields(plain[1])["etag"] == fields(declined[1])["etag"] != fields(packed[1])["etag"]
    assert fields(plain[1])["content-type"] == "text/javascript; charset=utf-8"
    assert "accept-encoding" in fields(plain[1])["vary"]


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("/", HEADERS),
        ("/web/icon.svg", HEADERS),
        ("/web/vendor/htm.js", FILE_HEADERS),
        ("/web/vendor/uplot.css", FILE_HEADERS),
        ("/web/vendor/pdfjs/pdf.worker.js", WORKER_HEADERS),
        ("/web/offline.sw.js", SERVICE_WORKER_HEADERS),
        ("/web/icons/icon-192.png", HEADERS),
    ],
)
async def test_etag_gives_304(server: Running, path: str, safe: dict[str, str]) -> None:
    """The tag may be weak or in a list; another tag gets the file. Scripts need no policy."""
    tag = fields((await server.http(path, BROWSER))[1])["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        status, head, body = await server.http(path, BROWSER + f"If-None-Match: {known}\r\n")
        assert (status, body, fields(head)["etag"], set(fields(head)) & set(HEADERS)) == (
            (304, b"", tag, set(safe) & set(HEADERS))
        )
    assert (await server.http(path, BROWSER + 'If-None-Match: "other"\r\n'))[0] == 200


async def test_head_request_has_no_body(server: Running) -> None:
    """It has the length."""
    size = (ROOT / "vendor/htm.js").stat().st_size
    status, head, body = await server.http("/web/vendor/htm.js", method="HEAD")
    assert (status, body, fields(head)["content-length"]) == (200, b"", str(size))


@pytest.mark.parametrize(
    "path",
    [
        "/web/",
        "/web/js",
        "/web/js/",
        "/web/../settings.py",
        "/web/js/../../settings.py",
        "/web/%2e%2e/settings.py",
        "/web/..%2fsettings.py",
        "/web/..%5csettings.py",
        "/web/%2fetc/passwd",
        "/web//etc/passwd",
        "/web/js/main.js%00.css",
        "/web/js/main.js/",
        "/web/JS/MAIN.JS",
        "/web/index.html",
        "/web/0123456789abcdef/js/main.js",
        "/web/vendor/versions.json",
        "/web/vendor/preact.d.ts",
        "/web/%ff%fe",
        "/web/.git/config",
    ],
)
async def test_unlisted_paths_are_404(server: Running, path: str) -> None:
    """Paths are keys of a table and never reach the file system."""
    status, head, body = await server.http(path)
    assert (status, "error" in json.loads(body), set(fields(head)) >= SAFE) == (404, True, True)


async def test_only_get_and_head_are_allowed(server: Running) -> None:
    """Other methods get 405."""
    assert (await server.http("/web/vendor/htm.js", method="DELETE"))[0] == 405


async def test_files_are_read_once_and_not_by_the_start(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and compressing them would delay the first turn."""
    reads: list[WebFiles] = []

    def read() -> WebFiles:
        reads.append(read_web_files())
        return reads[-1]

    monkeypatch.setattr(web, "read_web_files", read)
    async with serve() as server:
        assert reads == []
        assert (await server.http("/", BROWSER))[0] == 200
        assert (await server.http("/web/js/main.js"))[0] == 200
        assert len(reads) == 1


async def test_page_can_be_disabled(serve: Serve) -> None:
    """Browsers then get the description, and there are no files."""
    async with serve(web=False) as server:
        assert json.loads((await server.http("/", BROWSER))[2])["server"] == "inferencecenter"
        assert (await server.http("/web/vendor/htm.js"))[0] == 404


async def test_page_below_a_base_path(serve: Serve) -> None:
    """Browsers are redirected to the path with a slash."""
    async with serve(base_path="/inference") as server:
        status, head, _ = await server.http("/inference", BROWSER)
        assert (status, fields(head)["location"]) == (307, "/inference/")
        status, _, body = await server.http("/inference/", BROWSER)
        script, *_ = re.findall(r'<script[^>]* src="([^"]+)"', body.decode())
        assert (status, (await server.http(f"/inference/{script}"))[0]) == (200, 200)
        assert json.loads((await server.http("/inference"))[2])["server"] == "inferencecenter"
        assert (await server.http("/web/vendor/htm.js"))[0] == 404


def test_version_covers_every_served_file(tmp_path: Path) -> None:
    """It changes with any of them, and with no other file."""
    (tmp_path / "js").mkdir()
    (tmp_path / "index.html").write_text('<script src="web/js/a.js">')
    (tmp_path / "js/a.js").write_text("1")
    (tmp_path / "js/a.d.ts").write_text("declare")
    read = read_web_files.__wrapped__
    first = read(tmp_path)
    assert list(first.assets) == ["js/a.js"]
    assert f'"web/{first.version}/js/a.js"' in first.front_page.plain.body.decode()
    (tmp_path / "js/a.d.ts").write_text("other")
    assert read(tmp_path).version == first.version
    (tmp_path / "js/a.js").write_text("2")
    assert read(tmp_path).version != first.version


def test_page_preloads_static_imports(tmp_path: Path) -> None:
    """Each statically imported module is preloaded once, and dynamically imported ones are not."""
    modules = {
        "index.html": "<head></head>",
        "js/main.js": 'import { a,\n  b } from "./views/a.js";\nimport("./later.js");',
        "js/views/a.js": 'export * from"../../vendor/b.js";import{c}from"../main.js"; import x from "../none.js";',
        "js/later.js": "",
        "vendor/b.js": "",
    }
    for path, text in modules.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    files = read_web_files.__wrapped__(tmp_path)
    named = re.findall(r'rel="modulepreload" href="web/(\w+)/([^"]+)"', files.front_page.plain.body.decode())
    assert named == [(files.version, "js/views/a.js"), (files.version, "vendor/b.js")]


def test_served_files_are_packaged() -> None:
    """The package data's patterns cover them."""
    with (ROOT.parents[1] / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["inferencecenter"]
    packed = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.parent.glob(pattern)}
    assert read_web_files().assets.keys() <= packed
    assert not any(name.endswith((".ts", ".json")) for name in packed)


def test_vendored_files_match_their_digests() -> None:
    """Each has a license, and none is unlisted."""
    folder = ROOT / "vendor"
    packages = json.loads((folder / "versions.json").read_text(encoding="utf-8"))["packages"]
    noted = {each["file"]: each["sha256"] for package in packages for each in package["files"]}
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {name: hashlib.sha256(files.pop(name).read_bytes()).hexdigest() for name in noted} == noted
    assert set(files) == {"LICENSES", "versions.json"}
    licenses = files["LICENSES"].read_text(encoding="utf-8")
    for package in packages:
        assert f"{package['name']} {package['version']} ({package['license']})" in licenses


def test_imports_are_served() -> None:
    """Every static import is relative and leads to a file: there is no import map."""
    assets = read_web_files().assets
    statement = re.compile(r"""\b(?:import|export)\b[\w\s{},*$]*\bfrom\s*["']([^"'\n]+)["']""")
    wrong = []
    for path in (each for each in assets if each.endswith(".js")):
        for target in statement.findall(assets[path].plain.body.decode()):
            resolved = (ROOT / path).parent.joinpath(target).resolve()
            if not target.startswith(".") or resolved.relative_to(ROOT.resolve()).as_posix() not in assets:
                wrong.append((path, target))
    assert wrong == []
