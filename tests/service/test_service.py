"""The daemon under a service manager: real processes and sockets, the echo backend."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from inferencecenter.server.listener import bind
from tests.service.harness import ServiceManager, StartedDaemon, start_service

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAT_S = 0.05


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    """A service manager that receives notifications."""
    listening = ServiceManager(tmp_path / "notify")
    yield listening
    listening.close()


def is_ready(words: dict[str, str]) -> bool:
    """Whether a datagram announces readiness."""
    return words.get("READY") == "1"


def readiness(port: int) -> int:
    """Return the status of ``/readyz``."""
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    asking.request("GET", "/readyz")
    status = asking.getresponse().status
    asking.close()
    return status


@pytest.mark.slow
def test_ready_is_notified_when_turns_can_run(tmp_path: Path, manager: ServiceManager) -> None:
    """Before that the start is extended."""
    (listening,) = bind("127.0.0.1", 0)
    with (
        listening,
        start_service(tmp_path, sockets=(listening,), how="exec", NOTIFY_SOCKET=str(manager.path)) as daemon,
    ):
        first = manager.receive()
        assert first == {"EXTEND_TIMEOUT_USEC": "60000000"}
        manager.receive_until(is_ready)
        assert readiness(listening.getsockname()[1]) == 200
        # A task sends the status, which a fast start overtakes.
        if not any("STATUS" in words for words in manager.heard):
            manager.receive_until(lambda words: "STATUS" in words)
        status = next(words["STATUS"] for words in manager.heard if "STATUS" in words)
        assert re.match("(loading the model, |engine ready: )", status)
        assert daemon.stop() == 0
        stopping = manager.receive_until(lambda words: words.get("STOPPING") == "1")
        # 7 s for the turns, and what the engine and the store may take.
        assert 7_000_000 < int(stopping["EXTEND_TIMEOUT_USEC"]) < 60_000_000
        assert not any("WATCHDOG" in words for words in manager.heard)


def test_watchdog_stops_while_the_daemon_hangs(tmp_path: Path, manager: ServiceManager) -> None:
    """A stopped daemon sends nothing, and resumes afterwards."""
    with start_service(
        tmp_path, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC=str(int(2 * BEAT_S * 1_000_000))
    ) as daemon:
        manager.receive_until(is_ready)
        for _ in range(3):
            assert manager.receive_until(lambda words: "WATCHDOG" in words) == {"WATCHDOG": "1"}
        os.kill(daemon.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
        manager.discard_pending()
        assert manager.receive(10 * BEAT_S) is None
        os.kill(daemon.process.pid, signal.SIGCONT)
        assert manager.receive_until(lambda words: "WATCHDOG" in words) == {"WATCHDOG": "1"}
        assert daemon.stop() == 0


@pytest.mark.slow
def test_watchdog_continues_over_an_engine_kill(tmp_path: Path, manager: ServiceManager) -> None:
    """The daemon stays ready."""
    with start_service(
        tmp_path, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC=str(int(2 * BEAT_S * 1_000_000))
    ) as daemon:
        manager.receive_until(is_ready)
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        daemon.wait_for_log("engine_ready", times=2)
        manager.discard_pending()
        assert manager.receive_until(lambda words: "WATCHDOG" in words) == {"WATCHDOG": "1"}
        assert sum(is_ready(words) for words in manager.heard) == 1
        assert daemon.stop() == 0


def test_unloadable_model_fails_the_start(tmp_path: Path, manager: ServiceManager) -> None:
    """Readiness is never notified, and the exit code is that of the failure."""
    with start_service(
        tmp_path,
        NOTIFY_SOCKET=str(manager.path),
        INFERENCECENTER_ENGINE__BACKEND="llama",
        INFERENCECENTER_MODEL__PATH=str(tmp_path / "none.gguf"),
    ) as daemon:
        assert daemon.process.wait(timeout=60) == 66
        manager.discard_pending()
        assert not any(is_ready(words) for words in manager.heard)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StartedDaemon, int]]:
    """A daemon that is ready, and its port, for tests that leave it so."""
    folder = tmp_path_factory.mktemp("service")
    (listening,) = bind("127.0.0.1", 0)
    notified = ServiceManager(folder / "notify")
    with (
        contextlib.closing(notified),
        listening,
        start_service(folder, sockets=(listening,), NOTIFY_SOCKET=str(notified.path)) as daemon,
    ):
        notified.receive_until(is_ready)
        yield daemon, listening.getsockname()[1]
        assert daemon.stop() == 0


def test_engine_is_preferred_by_the_oom_killer(service: tuple[StartedDaemon, int]) -> None:
    """The daemon's score is unchanged."""
    daemon, _ = service
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (daemon.engine_pid(), daemon.process.pid)]
    assert scores == [500, int(Path("/proc/self/oom_score_adj").read_text())]


def test_requests_are_never_logged(service: tuple[StartedDaemon, int]) -> None:
    """Their addresses may hold secrets, also after a reload."""
    daemon, port = service
    for reloads in (1, 2):
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        asking.request("GET", "/healthz?note=private")
        assert asking.getresponse().status == 200
        asking.close()
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for_log("reloaded", times=reloads)
    assert "private" not in daemon.log.read_text()
    assert "uvicorn" not in daemon.log.read_text()


def test_inherited_socket_queues_connections_between_daemons(tmp_path: Path, manager: ServiceManager) -> None:
    """The second daemon serves them."""
    (listening,) = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    with listening:
        with start_service(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path)) as first:
            manager.receive_until(is_ready)
            assert readiness(port) == 200
            assert first.stop() == 0
        with socket.create_connection(("127.0.0.1", port), timeout=60) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            with start_service(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path)) as second:
                assert early.recv(4096).startswith(b"HTTP/1.1 200")
                assert f"http://127.0.0.1:{port}/" in second.log.read_text()
                assert second.stop() == 0


def test_stale_lock_files_are_harmless(tmp_path: Path, manager: ServiceManager) -> None:
    """The next daemon and its engine start whatever the lock files contain."""
    with start_service(tmp_path, NOTIFY_SOCKET=str(manager.path)) as first:
        manager.receive_until(is_ready)
        assert first.stop() == 0
    left = sorted(path.name for path in (tmp_path / "state").glob("*.lock"))
    assert [name.partition("-")[0] for name in left] == ["daemon.lock", "engine"]
    for name in left:
        (tmp_path / "state" / name).write_text(str(os.getpid()))  # of a running process
    with start_service(tmp_path, NOTIFY_SOCKET=str(manager.path)) as second:
        manager.receive_until(is_ready)
        assert second.stop() == 0


def test_inherited_socket_must_listen(tmp_path: Path) -> None:
    """The message names the descriptor, and systemd does not retry the exit code."""
    with socket.socket() as connection, start_service(tmp_path, sockets=(connection,)) as daemon:
        assert daemon.process.wait(timeout=60) == 78
        assert "inherited descriptor 3 does not listen" in daemon.log.read_text()


class ReloadableDaemon:
    """A daemon with a certificate, a clients file and a configuration that change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.client = ssl.create_default_context()
        self.authority.configure_trust(self.client)
        (self.port_holder,) = bind("127.0.0.1", 0)
        self.port = self.port_holder.getsockname()[1]
        self.repair()

    def repair(self) -> None:
        """Write every file anew as it was at first."""
        self.issue()
        self.clients("kitchen-key")
        self.configure()

    @property
    def environment(self) -> dict[str, str]:
        """The daemon's environment."""
        return {"INFERENCECENTER_CONFIG": str(self.folder / "config.toml")}

    def issue(self) -> None:
        """Write a new certificate."""
        issued = self.authority.issue_cert("127.0.0.1")
        (self.folder / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
        (self.folder / "tls.key").write_bytes(issued.private_key_pem.bytes())

    def clients(self, key: str) -> None:
        """Write a file with one client that has this key."""
        (self.folder / "clients.toml").write_text(f'[[client]]\nclient_id = "kitchen"\napi_key = "{key}"\n')

    def configure(self, more: str = "") -> None:
        """Write the configuration."""
        (self.folder / "config.toml").write_text(
            f'auth.clients_file = "{self.folder}/clients.toml"\n'
            f'server.certfile = "{self.folder}/tls.crt"\nserver.keyfile = "{self.folder}/tls.key"\n{more}\n'
        )

    def reload(self, daemon: StartedDaemon, manager: ServiceManager) -> None:
        """Send SIGHUP and wait until the reload is done."""
        manager.discard_pending()
        daemon.process.send_signal(signal.SIGHUP)
        reloading = manager.receive_until(lambda words: "RELOADING" in words)
        assert int(reloading["MONOTONIC_USEC"]) > 0
        manager.receive_until(is_ready)

    def serial(self) -> str:
        """The serial number of the certificate in use."""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as plain,
            self.client.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            certificate = secure.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"])

    def login(self, key: str) -> str:
        """Try the client's key, and return the reply's op."""
        with connect(f"wss://127.0.0.1:{self.port}/", ssl=self.client, open_timeout=60) as websocket:
            json.loads(websocket.recv())
            websocket.send(json.dumps({"op": "auth", "client_id": "kitchen", "api_key": key}))
            op: str = json.loads(websocket.recv())["op"]
            return op


def test_sighup_reloads_certificates_and_clients(tmp_path: Path, manager: ServiceManager) -> None:
    """Connections of removed keys are closed; the others continue."""
    setup = ReloadableDaemon(tmp_path)
    with (
        setup.port_holder as listening,
        start_service(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path), **setup.environment) as daemon,
    ):
        manager.receive_until(is_ready)
        assert f"https://127.0.0.1:{setup.port}/" in daemon.log.read_text()
        before = setup.serial()
        token = (daemon.state_dir / "admin.token").read_text().strip()
        address = f"wss://127.0.0.1:{setup.port}/"
        with (
            connect(address, ssl=setup.client, open_timeout=60) as kitchen,
            connect(address, ssl=setup.client, open_timeout=60) as admin,
        ):
            for websocket, credential in (
                (kitchen, {"client_id": "kitchen", "api_key": "kitchen-key"}),
                (admin, {"token": token}),
            ):
                websocket.recv()
                websocket.send(json.dumps({"op": "auth", **credential}))
                assert json.loads(websocket.recv())["op"] == "auth_success"
            setup.issue()
            setup.clients("another-key")
            setup.configure("server.max_connections = 9\nlog.level = 'warning'")
            setup.reload(daemon, manager)
            assert setup.serial() != before
            with pytest.raises(ConnectionClosed) as caught:
                kitchen.recv(timeout=30)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 4401
            admin.send(json.dumps({"op": "create_session"}))
            assert json.loads(admin.recv(timeout=30))["op"] == "session_created"
        assert (setup.login("kitchen-key"), setup.login("another-key")) == ("auth_failed", "auth_success")
        assert '"settings":["server.max_connections"]' in daemon.log.read_text()
        assert daemon.stop() == 0


def test_sighup_keeps_the_old_value_of_a_broken_file(tmp_path: Path, manager: ServiceManager) -> None:
    """The error is logged, and the rest is reloaded, whichever file is broken."""
    setup = ReloadableDaemon(tmp_path)
    with (
        setup.port_holder as listening,
        start_service(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path), **setup.environment) as daemon,
    ):
        manager.receive_until(is_ready)
        kinds = {"config.toml": "settings", "clients.toml": "clients", "tls.key": "certificate"}
        for number, (broken, what) in enumerate(kinds.items()):
            before = setup.serial()
            setup.repair()
            (tmp_path / broken).write_text("broken = [")
            setup.reload(daemon, manager)
            assert (setup.serial() == before) == (broken == "tls.key")
            assert setup.login("kitchen-key") == "auth_success"
            refused = [line for line in map(json.loads, json_lines(daemon.log)) if line["event"] == "not_reloaded"]
            assert [line["what"] for line in refused[number:]] == [what]
            assert broken in refused[number]["error"]
        assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["config.toml", "clients.toml", "tls.key"])
def test_reload_command_reports_failures(tmp_path: Path, manager: ServiceManager, broken: str) -> None:
    """It names the reason and fails; the repaired file is accepted."""
    setup = ReloadableDaemon(tmp_path)
    setup.configure(f'state_dir = "{tmp_path}/state"')
    sound = (tmp_path / broken).read_text()
    with (
        setup.port_holder as listening,
        start_service(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path), **setup.environment) as daemon,
    ):
        manager.receive_until(is_ready)
        (tmp_path / broken).write_text("broken = [")
        refused = command(setup, "reload")
        assert refused.returncode == 78
        assert broken in refused.stderr
        assert setup.login("kitchen-key") == "auth_success"
        assert '"event":"reloaded"' not in daemon.log.read_text()
        (tmp_path / broken).write_text(sound)
        if broken != "tls.key":
            setup.issue()
        before = setup.serial()
        taken = command(setup, "reload")
        assert (taken.returncode, taken.stdout, taken.stderr) == (0, "Reloaded.\n", "")
        assert (setup.serial() == before) == (broken == "tls.key")
        assert daemon.stop() == 0
        assert command(setup, "reload").returncode == 69


def command(setup: ReloadableDaemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the daemon's configuration."""
    return subprocess.run(
        [sys.executable, "-m", "inferencecenter", *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
        | setup.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def json_lines(log: Path) -> list[str]:
    """Return the logged lines, without the printed announcement."""
    return [line for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_ignored_sighup_stays_ignored(tmp_path: Path, manager: ServiceManager) -> None:
    """Under nohup no reload happens."""
    ignoring = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with start_service(tmp_path, how="exec", NOTIFY_SOCKET=str(manager.path)) as daemon:
            manager.receive_until(is_ready)
            daemon.process.send_signal(signal.SIGHUP)
            assert daemon.stop() == 0
            assert '"reloaded"' not in daemon.log.read_text()
    finally:
        signal.signal(signal.SIGHUP, ignoring)
