"""The daemon under a service manager: real processes, real sockets, the echo backend."""

from __future__ import annotations

import http.client
import json
import os
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
from tests.service.harness import Manager, Started, started

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAT_S = 0.05


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A service manager that hears what it is told."""
    listening = Manager(tmp_path / "notify")
    yield listening
    listening.close()


def is_ready(words: dict[str, str]) -> bool:
    """Whether a datagram says that the daemon is ready."""
    return words.get("READY") == "1"


def readiness(port: int) -> int:
    """Return the status of ``/readyz``."""
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    asking.request("GET", "/readyz")
    status = asking.getresponse().status
    asking.close()
    return status


def test_ready_is_said_when_turns_can_run(tmp_path: Path, manager: Manager) -> None:
    """Before it the start is extended, with a status; at its moment the daemon answers that it is ready."""
    (listening,) = bind("127.0.0.1", 0)
    with listening, started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path)) as daemon:
        first = manager.hear()
        assert first == {"EXTEND_TIMEOUT_USEC": "60000000"}
        manager.hear_until(is_ready)
        assert readiness(listening.getsockname()[1]) == 200
        statuses = [words["STATUS"] for words in manager.heard if "STATUS" in words]
        assert statuses[0].startswith("loading the model, ")
        assert daemon.stop() == 0
        stopping = manager.hear_until(lambda words: words.get("STOPPING") == "1")
        # 7 s for the turns, and what the engine and the store may take.
        assert 7_000_000 < int(stopping["EXTEND_TIMEOUT_USEC"]) < 60_000_000
        assert not any("WATCHDOG" in words for words in manager.heard)


def test_the_watchdog_is_fed_while_the_front_runs(tmp_path: Path, manager: Manager) -> None:
    """A front that does not run says nothing, and goes on when it does."""
    with started(tmp_path, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC=str(int(2 * BEAT_S * 1_000_000))) as daemon:
        manager.hear_until(is_ready)
        for _ in range(3):
            assert manager.hear_until(lambda words: "WATCHDOG" in words) == {"WATCHDOG": "1"}
        os.kill(daemon.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
        manager.drop_what_waits()
        assert manager.hear(10 * BEAT_S) is None
        os.kill(daemon.process.pid, signal.SIGCONT)
        assert manager.hear_until(lambda words: "WATCHDOG" in words) == {"WATCHDOG": "1"}
        assert daemon.stop() == 0


def test_a_killed_engine_does_not_end_the_feeding(tmp_path: Path, manager: Manager) -> None:
    """The supervisor starts another; the daemon was ready and stays so."""
    with started(tmp_path, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC=str(int(2 * BEAT_S * 1_000_000))) as daemon:
        manager.hear_until(is_ready)
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        daemon.wait_for_log("engine_ready", times=2)
        manager.drop_what_waits()
        assert manager.hear_until(lambda words: "WATCHDOG" in words) == {"WATCHDOG": "1"}
        assert sum(is_ready(words) for words in manager.heard) == 1
        assert daemon.stop() == 0


def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path: Path, manager: Manager) -> None:
    """Readiness is never said, and the exit status is that of the failure."""
    with started(
        tmp_path,
        NOTIFY_SOCKET=str(manager.path),
        INFERENCECENTER_ENGINE__BACKEND="llama",
        INFERENCECENTER_MODEL__PATH=str(tmp_path / "none.gguf"),
    ) as daemon:
        assert daemon.process.wait(timeout=60) == 66
        manager.drop_what_waits()
        assert not any(is_ready(words) for words in manager.heard)


def test_the_engine_is_what_the_kernel_takes_when_memory_runs_out(tmp_path: Path, manager: Manager) -> None:
    """It volunteers; the front stays as it was started."""
    with started(tmp_path, NOTIFY_SOCKET=str(manager.path)) as daemon:
        manager.hear_until(is_ready)
        scores = [
            int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (daemon.engine_pid(), daemon.process.pid)
        ]
        assert scores == [500, int(Path("/proc/self/oom_score_adj").read_text())]


def test_connections_wait_while_the_daemon_starts_again(tmp_path: Path, manager: Manager) -> None:
    """A client that connects to the inherited socket between two daemons is served by the second."""
    (listening,) = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    with listening:
        with started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path)) as first:
            manager.hear_until(is_ready)
            assert readiness(port) == 200
            assert first.stop() == 0
        with socket.create_connection(("127.0.0.1", port), timeout=60) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            with started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path)) as second:
                assert early.recv(4096).startswith(b"HTTP/1.1 200")
                assert f"http://127.0.0.1:{port}/" in second.log.read_text()
                assert second.stop() == 0


def test_requests_are_logged_neither_before_nor_after_a_reload(tmp_path: Path, manager: Manager) -> None:
    """Their addresses may hold what a log should not."""
    (listening,) = bind("127.0.0.1", 0)
    with listening, started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path)) as daemon:
        manager.hear_until(is_ready)
        for reloads in (0, 1):
            if reloads:
                daemon.process.send_signal(signal.SIGHUP)
                daemon.wait_for_log("reloaded")
            asking = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=30)
            asking.request("GET", "/healthz?note=private")
            assert asking.getresponse().status == 200
            asking.close()
        assert daemon.stop() == 0
        assert "private" not in daemon.log.read_text()
        assert "uvicorn" not in daemon.log.read_text()


def test_lock_files_that_were_left_lock_nothing(tmp_path: Path, manager: Manager) -> None:
    """They stay when a daemon has stopped; whatever is in them, the next daemon and its engine start."""
    with started(tmp_path, NOTIFY_SOCKET=str(manager.path)) as first:
        manager.hear_until(is_ready)
        assert first.stop() == 0
    left = sorted(path.name for path in (tmp_path / "state").glob("*.lock"))
    assert [name.partition("-")[0] for name in left] == ["daemon.lock", "engine"]
    for name in left:
        (tmp_path / "state" / name).write_text(str(os.getpid()))  # of a process that lives
    with started(tmp_path, NOTIFY_SOCKET=str(manager.path)) as second:
        manager.hear_until(is_ready)
        assert second.stop() == 0


def test_a_socket_that_does_not_listen_ends_the_start(tmp_path: Path) -> None:
    """The message names the descriptor, and the exit status is one that systemd does not try again."""
    with socket.socket() as connection, started(tmp_path, sockets=(connection,)) as daemon:
        assert daemon.process.wait(timeout=60) == 78
        assert "inherited descriptor 3 does not listen" in daemon.log.read_text()


class Reloadable:
    """A daemon with a certificate, a file of clients and a configuration that may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.client = ssl.create_default_context()
        self.authority.configure_trust(self.client)
        (self.port_holder,) = bind("127.0.0.1", 0)
        self.port = self.port_holder.getsockname()[1]
        self.issue()
        self.clients("kitchen-key")
        self.configure()

    @property
    def environment(self) -> dict[str, str]:
        """What the daemon is started with."""
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

    def reload(self, daemon: Started, manager: Manager) -> None:
        """Send SIGHUP and wait until the daemon has done with it."""
        manager.drop_what_waits()
        daemon.process.send_signal(signal.SIGHUP)
        reloading = manager.hear_until(lambda words: "RELOADING" in words)
        assert int(reloading["MONOTONIC_USEC"]) > 0
        manager.hear_until(is_ready)

    def serial(self) -> str:
        """The number of the certificate that a client sees now."""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as plain,
            self.client.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            certificate = secure.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"])

    def login(self, key: str) -> str:
        """Try the client's key, and return the answer's op."""
        with connect(f"wss://127.0.0.1:{self.port}/", ssl=self.client, open_timeout=60) as websocket:
            json.loads(websocket.recv())
            websocket.send(json.dumps({"op": "auth", "client_id": "kitchen", "api_key": key}))
            op: str = json.loads(websocket.recv())["op"]
            return op


def test_sighup_takes_new_certificates_and_clients(tmp_path: Path, manager: Manager) -> None:
    """Those who came with a key that is none any more are closed; the rest of the connections go on."""
    setup = Reloadable(tmp_path)
    with (
        setup.port_holder as listening,
        started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path), **setup.environment) as daemon,
    ):
        manager.hear_until(is_ready)
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


@pytest.mark.parametrize("broken", ["config.toml", "clients.toml", "tls.key"])
def test_what_is_broken_at_sighup_stays_as_it_was(tmp_path: Path, manager: Manager, broken: str) -> None:
    """The daemon goes on with what it has, says what is wrong, and takes the rest."""
    setup = Reloadable(tmp_path)
    with (
        setup.port_holder as listening,
        started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path), **setup.environment) as daemon,
    ):
        manager.hear_until(is_ready)
        before = setup.serial()
        setup.issue()
        (tmp_path / broken).write_text("broken = [")
        setup.reload(daemon, manager)
        assert (setup.serial() == before) == (broken == "tls.key")
        assert setup.login("kitchen-key") == "auth_success"
        refused = [line for line in map(json.loads, json_lines(daemon.log)) if line["event"] == "not_reloaded"]
        what = {"config.toml": "settings", "clients.toml": "clients", "tls.key": "certificate"}[broken]
        assert [line["what"] for line in refused] == [what]
        assert broken in refused[0]["error"]
        assert daemon.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["config.toml", "clients.toml", "tls.key"])
def test_the_command_reports_what_was_not_reloaded(tmp_path: Path, manager: Manager, broken: str) -> None:
    """It waits, names the reason and fails; the daemon goes on as it was, and the mended file is taken."""
    setup = Reloadable(tmp_path)
    setup.configure(f'state_dir = "{tmp_path}/state"')
    sound = (tmp_path / broken).read_text()
    with (
        setup.port_holder as listening,
        started(tmp_path, sockets=(listening,), NOTIFY_SOCKET=str(manager.path), **setup.environment) as daemon,
    ):
        manager.hear_until(is_ready)
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


def command(setup: Reloadable, *arguments: str) -> subprocess.CompletedProcess[str]:
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
    """Return the lines of a log that were logged, without what was announced."""
    return [line for line in log.read_text().splitlines() if line.startswith("{")]


def test_sighup_of_an_ignoring_parent_stays_ignored(tmp_path: Path, manager: Manager) -> None:
    """Under nohup nothing is read again."""
    ignoring = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with started(tmp_path, NOTIFY_SOCKET=str(manager.path)) as daemon:
            manager.hear_until(is_ready)
            daemon.process.send_signal(signal.SIGHUP)
            assert daemon.stop() == 0
            assert '"reloaded"' not in daemon.log.read_text()
    finally:
        signal.signal(signal.SIGHUP, ignoring)
