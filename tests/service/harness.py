"""A daemon started as systemd starts it, and its notifications."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_TIMEOUT_S: Final = 60.0
_ROOT: Final = Path(__file__).parents[2]


class ServiceManager:
    """The end of the notification socket that systemd holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.heard: list[dict[str, str]] = []

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def receive(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, str] | None:
        """Return the variables of the next datagram, ``None`` when there is none in time."""
        self._socket.settimeout(timeout_s)
        try:
            datagram = self._socket.recv(8192).decode()
        except (TimeoutError, BlockingIOError):
            return None
        words = dict(line.split("=", maxsplit=1) for line in datagram.split("\n"))
        self.heard.append(words)
        return words

    def receive_until(self, wanted: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """Receive up to and including the first datagram that matches."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            words = self.receive(left_s)
            if words is not None and wanted(words):
                return words
        raise AssertionError(f"not told in time; heard {self.heard}")

    def discard_pending(self) -> None:
        """Discard received datagrams."""
        while self.receive(0) is not None:
            pass


@dataclass
class StartedDaemon:
    """A daemon and its log."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    log: Path

    def stop(self) -> int:
        """Send SIGTERM and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def wait_for_log(self, event: str, *, times: int = 1) -> None:
        """Block until the daemon has logged an event so many times."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.log.read_text().count(f'"event":"{event}"') < times:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def engine_pid(self) -> int:
        """The pid of the engine."""
        children = os.fspath(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with open(children) as listed:  # noqa: PTH123 - a file of the kernel's
            pids = listed.read().split()
        (pid,) = (each for each in pids if b"engine\0--fd\0" in Path(f"/proc/{each}/cmdline").read_bytes())
        return int(pid)


@contextlib.contextmanager
def start_service(
    folder: Path, *, sockets: tuple[socket.socket, ...] = (), how: str = "run", **environment: str
) -> Iterator[StartedDaemon]:
    """Start a daemon with the echo backend, and kill it at the end if it still runs.

    It is a fork of a process that has imported it; with ``how="exec"`` it is executed, which takes seconds of CPU time.
    """
    fds = [each.fileno() for each in sockets]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
    settings = {
        "INFERENCECENTER_STATE_DIR": str(folder / "state"),
        "INFERENCECENTER_SERVER__PORT": "0",
        "INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "7",
        "INFERENCECENTER_ENGINE__BACKEND": "echo",
        "INFERENCECENTER_KV__RAM_DIR": str(folder / "ram"),
        "INFERENCECENTER_LOG__FORMAT": "json",
    }
    if sockets:
        settings["LISTEN_FDS"] = str(len(sockets))
    log = folder / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.activated", how, *map(str, fds)],
            env=inherited | settings | environment,
            stdout=output,
            stderr=output,
            pass_fds=fds,
            cwd=_ROOT,
            start_new_session=how == "exec",  # without a terminal
        )
    try:
        yield StartedDaemon(process, folder / "state", log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
