"""A real daemon in its own process, and a client that speaks only the wire protocol."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from tests.ports import free_port
from tests.prefork import fork_program

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

START_TIMEOUT_S = 240.0
REPLY_TIMEOUT_S = 60.0
LOOP_BOUND_MS = 250
"""CPU time that one step of the daemon's event loop may take."""

Message = dict[str, Any]

ENDLESS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Parameters of a turn that runs until it is aborted, or for thousands of tokens."""


class MetricsPage:
    """The samples of a metrics page."""

    def __init__(self, page: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of ``inferencecenter_`` and ``name`` that have these labels.

        Raises:
            AssertionError: No sample has them.
        """
        found = [
            sample.value
            for sample in self._samples
            if sample.name == f"inferencecenter_{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, f"there is no {name} with {labels}"
        return sum(found)


@dataclass
class Daemon:
    """A running daemon, its address and its files."""

    process: subprocess.Popen[bytes]
    port: int
    state_dir: Path
    log: Path

    @property
    def url(self) -> str:
        """The WebSocket address."""
        return f"ws://127.0.0.1:{self.port}/"

    @property
    def admin_token(self) -> str:
        """The administrator's token, which the first start wrote."""
        return (self.state_dir / "admin.token").read_text().strip()

    def get(self, path: str) -> tuple[int, str]:
        """Fetch ``path`` over HTTP and return status and body; ``/metrics`` with its token."""
        headers = {"Authorization": f"Bearer {self.admin_token}"} if path == "/metrics" else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> MetricsPage:
        """Return the current metrics."""
        return MetricsPage(self.get("/metrics")[1])

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric; see ``MetricsPage.value``."""
        return self.metrics().value(name, **labels)

    def ready(self, *, storage: str = "ok") -> bool:
        """Whether the daemon answers, its engine is ready, and its storage is in the expected state."""
        try:
            status, body = self.get("/readyz")
        except OSError:
            return False
        answer = json.loads(body)
        serves = status == 200 or (answer["state"], answer["storage"]) == ("ready", "unavailable")
        return serves and answer["storage"] == storage

    def engine_pid(self) -> int:
        """The pid of the daemon's engine child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engines = [int(pid) for pid in children if b"engine\0--fd\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) == 1, f"expected one engine child, found {engines}"
        return engines[0]

    def wait_ready(self, *, storage: str = "ok") -> None:
        """Block until the engine is ready and the daemon's storage as expected.

        Raises:
            AssertionError: The daemon ended or is not ready in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready(storage=storage):
            assert self.process.poll() is None, f"the daemon ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log.read_text()}"
            time.sleep(0.05)

    def warn_of_blocked_loop(self, *, since_bytes: int = 0) -> None:
        """Warn of each step of the event loop that took longer than ``LOOP_BOUND_MS`` of CPU time.

        The log is read from ``since_bytes`` on. A warning and no failure: how long a step takes depends on the machine.
        """
        log = self.log.read_bytes()[since_bytes:].decode()
        for line in (json.loads(line) for line in log.splitlines() if '"loop_blocked"' in line):
            if line["cpu_ms"] >= LOOP_BOUND_MS:
                warnings.warn(f"the event loop was blocked: {line}", stacklevel=2)

    def stop(self) -> int:
        """Stop the daemon with SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # the log then ends with a traceback of each thread
            self.process.wait()
            raise AssertionError(f"the daemon does not stop:\n{self.log.read_text()[-6000:]}") from None


def start_daemon(state_dir: Path, model: Path | None, *, program: str = "inferencecenter", **settings: str) -> Daemon:
    """Start a daemon by the module of its command line on a free port, without waiting until it is ready.

    Without ``model`` the settings name the model. The log is a file beside the state directory, and a later daemon
    appends to it.
    """
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
    environment |= {
        "INFERENCECENTER_STATE_DIR": str(state_dir),
        "INFERENCECENTER_SERVER__PORT": str(port),
        **({} if model is None else {"INFERENCECENTER_MODEL__PATH": str(model)}),
        "INFERENCECENTER_LOG__FORMAT": "json",
        "INFERENCECENTER_KV__RAM_DIR": str(state_dir.parent / "ram"),  # a killed daemon leaves files there
        "INFERENCECENTER_ENGINE__N_THREADS": "1",  # enough for the demo model, and robust on a busy machine
        "INFERENCECENTER_ENGINE__N_THREADS_BATCH": "1",
        "INFERENCECENTER_ENGINE__N_CTX": "8192",  # an endless turn lasts for seconds on the demo model
        **settings,
    }
    state_dir.mkdir(parents=True, exist_ok=True)
    log = state_dir.parent / f"{state_dir.name}.log"
    with log.open("ab") as output:
        process = fork_program(program, "serve", env=environment, output=output.fileno())
    return Daemon(process=process, port=port, state_dir=state_dir, log=log)


@contextlib.contextmanager
def run_daemon(state_dir: Path, model: Path | None, **settings: str) -> Iterator[Daemon]:
    """Start a daemon on a free port, wait until it is ready, and stop it at the end."""
    daemon = start_daemon(state_dir, model, **settings)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.stop()
    daemon.warn_of_blocked_loop()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Suspend a process with SIGSTOP inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def command_line(daemon: Daemon, *arguments: str) -> Any:
    """Run ``inferencecenter`` on the daemon's state directory and return what it writes as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "inferencecenter", *arguments, "--json"],
        env={"INFERENCECENTER_STATE_DIR": str(daemon.state_dir), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    return json.loads(done.stdout)


@dataclass
class SocketClient:
    """A connected socket and the frames it has received; each listener is called with every frame."""

    socket: ClientConnection
    seen: list[Message] = field(default_factory=list)
    listeners: list[Callable[[Message], object]] = field(default_factory=list)

    async def send(self, **message: Any) -> None:
        """Send one frame."""
        await self.socket.send(json.dumps(message))

    async def receive(self) -> Message:
        """The next frame."""
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            message: Message = json.loads(await self.socket.recv())
        self.seen.append(message)
        for listener in self.listeners:
            listener(message)
        return message

    async def until(self, wanted: Callable[[Message], bool]) -> Message:
        """Read frames up to and including the first that is ``wanted``."""
        while True:
            message = await self.receive()
            if wanted(message):
                return message

    async def ask(self, **message: Any) -> Message:
        """Send a frame with an id and return the frame that echoes it."""
        request_id = f"r{len(self.seen)}-{message['op']}"
        await self.send(id=request_id, **message)
        return await self.until(lambda reply: reply.get("id") == request_id)

    async def create(self, **options: Any) -> str:
        """Create a session and return its id."""
        created = await self.ask(op="create_session", **options)
        assert created["op"] == "session_created", created
        session_id: str = created["session_id"]
        return session_id

    async def turn(self, session_id: str, prompt: str, **params: Any) -> tuple[str, Message]:
        """Run one turn to its end: the text, and the ``end`` frame."""
        await self.send(op="infer", session_id=session_id, prompt=prompt, params=params)
        text, end = "", None
        while end is None:
            message = await self.receive()
            if message.get("session_id") != session_id:
                continue
            assert message["op"] != "error", message
            text += message["content"] if message["op"] == "token" else ""
            end = message if message["op"] == "end" else None
        return text, end


async def _upgrade(url: str) -> ClientConnection:
    """Connect, and retry after 429: unauthenticated sockets of one address share a rate limit."""
    while True:
        try:
            return await connect(url, max_size=2**22)
        except InvalidStatus as refusal:
            if refusal.response.status_code != http.HTTPStatus.TOO_MANY_REQUESTS:
                raise
            await asyncio.sleep(int(refusal.response.headers["Retry-After"]))


@contextlib.asynccontextmanager
async def connect_client(daemon: Daemon, token: str = "") -> AsyncIterator[SocketClient]:
    """A v1 socket, authenticated with a token, by default the administrator's."""
    async with await _upgrade(daemon.url) as websocket:
        client = SocketClient(websocket)
        reply = await client.ask(op="auth", token=token or daemon.admin_token, protocol=1)
        assert reply["op"] == "auth_success", reply
        yield client


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    """Mount a tmpfs; skip the test where mounting is not permitted."""
    path.mkdir(exist_ok=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
