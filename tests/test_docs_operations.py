"""The operations page works: nginx in front of a daemon, reading the log, the format of ``clients.toml``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from websockets.sync.client import connect
from websockets.typing import Origin

from inferencecenter.auth.clients_file import ClientEntry
from tests.documentation import read_page
from tests.ports import free_port
from tests.service.harness import ServiceManager, StartedDaemon, start_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = read_page("docs/operations.md")
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin:/sbin:/bin")
GUARD_S = 60
HELD_BACK_BYTES = 4096
CALLER = "127.0.0.2"
"""The address that clients of the proxy have: another than the proxy's own."""
LONG_PROMPT = "word " * 100
"""Its answer, which repeats it, takes minutes at the pace that the daemon is given."""

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt install nginx-light)")
needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")


def block(language: str, mark: str) -> str:
    """Return the page's one block in a language that contains a mark."""
    (found,) = (each.text for each in PAGE.blocks if each.language == language and mark in each.text)
    return found


def test_every_client_key_is_documented() -> None:
    """The table has exactly the keys of the file, in the order of the example."""
    section = PAGE.source.partition("clients.toml\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(rows) == sorted(ClientEntry.model_fields)


@needs_jq
def test_log_commands_work(tmp_path: Path) -> None:
    """Lines that are no JSON or no log record are skipped."""
    (command,) = re.findall(r"`journalctl -u inferencecenter -o cat \| (jq [^`]+)`", PAGE.source)
    log = tmp_path / "log"
    log.write_text(
        'Address  http://127.0.0.1:3000/\n{"event":"engine_ready"}\n17\n\n  File "x.py"\n{"event":"stopped"}\n'
    )
    with log.open() as lines:
        done = subprocess.run(["sh", "-c", f"{command} | jq -r .event"], stdin=lines, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["engine_ready", "stopped"]
    assert done.stderr == b""


@dataclass(frozen=True)
class Proxied:
    """A daemon behind nginx with the page's configuration."""

    daemon: StartedDaemon
    own_port: int
    port: int
    tls: ssl.SSLContext

    @property
    def token(self) -> str:
        """The administrator's token."""
        return (self.daemon.state_dir / "admin.token").read_text().strip()

    def connect(self, path: str) -> Any:
        """Open a WebSocket through the proxy."""
        return connect(
            f"wss://127.0.0.1:{self.port}{path}", ssl=self.tls, source_address=(CALLER, 0), open_timeout=GUARD_S
        )

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
        """Send a request through the proxy; the connection ends with the block."""
        asking = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=GUARD_S, context=self.tls, source_address=(CALLER, 0)
        )
        with contextlib.closing(asking):
            asking.request(method, path, body if body is None else json.dumps(body), headers)
            with asking.getresponse() as answer:
                yield answer


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    """The page's nginx and daemon settings with test ports and certificates."""
    folder = tmp_path_factory.mktemp("proxied")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    (folder / "chain.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
    own_port, port = free_port(), free_port()
    (folder / "config.toml").write_text(block("toml", "trusted_proxies"))
    shown = block("nginx", "proxy_pass")
    for there, here in (
        ("127.0.0.1:3000", f"127.0.0.1:{own_port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/models.example.org/fullchain.pem", f"{folder}/chain.pem"),
        ("/etc/ssl/models.example.org/privkey.pem", f"{folder}/key.pem"),
    ):
        assert there in shown
        shown = shown.replace(there, here)
    manager = ServiceManager(folder / "notify")
    with (
        contextlib.closing(manager),
        start_service(
            folder,
            INFERENCECENTER_CONFIG=str(folder / "config.toml"),
            INFERENCECENTER_SERVER__PORT=str(own_port),
            INFERENCECENTER_ENGINE__ECHO_DELAY_MS="1000",
            INFERENCECENTER_ENGINE__N_CTX="65536",
            NOTIFY_SOCKET=str(manager.path),
        ) as daemon,
        nginx(folder, shown, port),
    ):
        manager.receive_until(lambda words: words.get("READY") == "1")
        yield Proxied(daemon, own_port, port, tls)


@contextlib.contextmanager
def nginx(folder: Path, servers: str, port: int) -> Iterator[None]:
    """Run nginx with the page's configuration in a minimal one, with all files in one folder."""
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    whole = (
        f"{'user root root;' if os.geteuid() == 0 else ''} daemon off; worker_processes 1; pid {folder}/nginx.pid;"
        f"error_log stderr; events {{}} http {{ access_log off; client_body_temp_path {folder}/body; {places}\n"
        f"{servers}\n}}\n"
    )
    (folder / "nginx.conf").write_text(whole)
    log = folder / "nginx.log"
    with log.open("wb") as output:
        assert NGINX is not None
        command = [NGINX, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: process.poll() is not None or reachable(port))
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(timeout=GUARD_S)


def reachable(port: int) -> bool:
    """Return whether something listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait for a state of other processes.

    Raises:
        AssertionError: It is not reached within a minute.
    """
    deadline = time.monotonic() + GUARD_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_nginx
@pytest.mark.slow
def test_websocket_streams_through_the_proxy(proxied: Proxied) -> None:
    """Text arrives while the answer is generated, and client frames pass meanwhile."""
    with proxied.connect("/inference/ws") as websocket:
        assert json.loads(websocket.recv(timeout=GUARD_S))["op"] == "hello"

        def ask(**request: Any) -> dict[str, Any]:
            websocket.send(json.dumps({"id": "x", **request}))
            while True:
                answer: dict[str, Any] = json.loads(websocket.recv(timeout=GUARD_S))
                if answer.get("id") == "x":
                    return answer

        assert ask(op="auth", token=proxied.token, protocol=1)["op"] == "auth_success"
        session_id = ask(op="create_session")["session_id"]
        websocket.send(json.dumps({"op": "infer", "session_id": session_id, "prompt": LONG_PROMPT}))
        frame: dict[str, Any] = {}
        while frame.get("op") != "token":
            frame = json.loads(websocket.recv(timeout=GUARD_S))
            assert frame["op"] != "error", frame
        websocket.send(json.dumps({"op": "abort", "session_id": session_id}))
        while frame["op"] != "end":
            frame = json.loads(websocket.recv(timeout=GUARD_S))
        assert frame["finish_reason"] == "aborted"


@needs_nginx
@pytest.mark.slow
def test_http_stream_is_not_buffered(proxied: Proxied) -> None:
    """Its first piece arrives while most of the answer is outstanding."""
    body = {"model": "echo", "stream": True, "messages": [{"role": "user", "content": LONG_PROMPT}]}
    with proxied.request(
        "POST", "/inference/v1/chat/completions", body, Authorization=f"Bearer {proxied.token}"
    ) as answer:
        assert answer.status == 200
        seen = b""
        while b'"content"' not in seen:
            piece = answer.read1(65536)
            assert piece, seen
            seen += piece
        # A buffering proxy holds text until a page of memory is full, which takes about twenty tokens.
        assert len(seen) < HELD_BACK_BYTES


@needs_nginx
@pytest.mark.slow
def test_largest_body_passes_the_proxy(proxied: Proxied) -> None:
    """The proxy refuses no body that the daemon accepts."""
    body = {"model": "echo", "messages": "x" * (8 * 2**20 - 100)}
    with proxied.request(
        "POST", "/inference/v1/chat/completions", body, Authorization=f"Bearer {proxied.token}"
    ) as answer:
        assert (answer.status, json.load(answer)["error"]["param"]) == (400, "messages")


@needs_nginx
@pytest.mark.slow
def test_base_path_applies_to_pages(proxied: Proxied) -> None:
    """Health is served through the proxy and directly below the base path only; metrics only directly."""
    statuses = {}
    for path in ("/inference/healthz", "/inference/readyz", "/inference/metrics", "/healthz", "/metrics", "/"):
        with proxied.request("GET", path) as answer:
            statuses[path] = answer.status
    assert statuses == {
        "/inference/healthz": 200,
        "/inference/readyz": 200,
        "/inference/metrics": 404,
        "/healthz": 404,
        "/metrics": 404,
        "/": 404,
    }
    direct = http.client.HTTPConnection("127.0.0.1", proxied.own_port, timeout=GUARD_S)
    with contextlib.closing(direct):
        direct.request("GET", "/inference/metrics", headers={"Authorization": f"Bearer {proxied.token}"})
        assert direct.getresponse().status == 200


@needs_nginx
@pytest.mark.slow
def test_web_page_is_served_below_the_base_path(proxied: Proxied) -> None:
    """The page, its script and its WebSocket work over TLS, with the proxy's address as the origin."""
    with proxied.request("GET", "/inference/", Accept="text/html") as answer:
        page = answer.read().decode()
    (script, *_) = re.findall(r'src="([^"]+\.js)"', page)
    with proxied.request("GET", f"/inference/{script.removeprefix('/inference/')}") as answer:
        assert answer.status == 200
    origin = Origin(f"https://127.0.0.1:{proxied.port}")
    with connect(
        f"wss://127.0.0.1:{proxied.port}/inference/ws", ssl=proxied.tls, origin=origin, open_timeout=GUARD_S
    ) as websocket:
        assert json.loads(websocket.recv(timeout=GUARD_S))["op"] == "hello"


@needs_nginx
@pytest.mark.slow
def test_daemon_sees_the_client_address(proxied: Proxied) -> None:
    """The address of a refused login is the client's, whatever headers the client sends."""
    with proxied.request(
        "GET", "/inference/v1/models", **{"Authorization": "Bearer wrong", "X-Forwarded-For": "198.51.100.7"}
    ) as answer:
        assert answer.status == 401
    lines = [json.loads(line) for line in proxied.daemon.log.read_text().splitlines() if line.startswith("{")]
    assert [line["address"] for line in lines if line["event"] == "login_failed"] == [CALLER]
