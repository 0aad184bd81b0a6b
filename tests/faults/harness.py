"""A daemon that is killed and restarted on one state directory, with fault points in all of its processes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.harness import Daemon, start_daemon
from tests.faults.fault_injection import DIRECTORY_VARIABLE, FaultInjector

if TYPE_CHECKING:
    from collections.abc import Iterator

ECHO = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "1",
    "INFERENCECENTER_ENGINE__N_CTX": "4096",
}
FAST_RESTARTS = {
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.01",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.05",
    "INFERENCECENTER_ENGINE__MAX_RESTARTS": "1000",
    "INFERENCECENTER_AUTH__DEFAULT_MAX_SESSIONS": "100000",
}
FEW_SLOTS = {
    "INFERENCECENTER_ENGINE__SLOTS": "2",
    "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "8",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",
    "INFERENCECENTER_ENGINE__N_BATCH": "64",
    "INFERENCECENTER_ENGINE__N_UBATCH": "64",
    "INFERENCECENTER_ENGINE__TARGET_STEP_MS": "4",
}
"""Few slots, short quanta and short steps: prompts are prefilled in chunks, and KV is moved all the time."""
SHORT_SHUTDOWN = {
    "INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "0.2",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "20",
}
"""A daemon that stops before its turns end, even where a slow disk delays their first tokens."""
LINE = "{} told me a long story about the sea, the wind and the old harbour where it all began. "


@dataclass
class DaemonHarness:
    """A state directory and its daemons; ``daemon`` is the latest one."""

    state_dir: Path
    model: Path
    settings: dict[str, str]
    faults: FaultInjector
    daemon: Daemon = field(init=False)

    @classmethod
    def at(cls, root: Path, model: Path, **settings: str) -> DaemonHarness:
        """Return a harness below ``root``; no daemon is started."""
        faults = FaultInjector(root / "traps")
        settings = {**FAST_RESTARTS, **settings, DIRECTORY_VARIABLE: str(faults.directory)}
        return cls(root / "state", model, settings, faults)

    def start(self, *, ready: bool = True, storage: str = "ok", **settings: str) -> Daemon:
        """Start a daemon, and wait until its engine is ready and its storage is in the expected state."""
        self.daemon = start_daemon(
            self.state_dir, self.model, program="tests.faults.daemon", **(self.settings | settings)
        )
        if ready:
            self.daemon.wait_ready(storage=storage)
        return self.daemon

    def ensure(self) -> Daemon:
        """Clear the faults, and start a daemon where none runs."""
        self.faults.clear()
        if not hasattr(self, "daemon") or self.daemon.process.poll() is not None:
            self.start()
        return self.daemon

    def kill(self) -> None:
        """Kill the daemon."""
        self.daemon.process.kill()
        self.daemon.process.wait()

    def wait_killed(self) -> None:
        """Wait until the daemon has been killed."""
        assert self.daemon.process.wait(timeout=60) == -signal.SIGKILL, self.daemon.log.read_text()[-4000:]

    def close(self) -> None:
        """Stop a running daemon."""
        if hasattr(self, "daemon") and self.daemon.process.poll() is None:
            self.faults.clear()
            self.daemon.stop()


@contextlib.contextmanager
def daemon_harness(root: Path, model: Path, **settings: str) -> Iterator[DaemonHarness]:
    """Yield a harness whose daemon is stopped at the end."""
    found = DaemonHarness.at(root, model, **settings)
    try:
        yield found
    finally:
        found.close()
    if hasattr(found, "daemon"):
        found.daemon.warn_of_blocked_loop()


def log_lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the log lines of all daemons of a state directory."""
    whole = daemon.log.read_text().rpartition("\n")[0]  # the last line may be incomplete
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def logged(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    """Return the log lines of one event."""
    return [line for line in log_lines(daemon) if line["event"] == event]


def data_bytes(pid: int) -> int:
    """Return the size of a process's private data."""
    used = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert used is not None
    return int(used[1]) * 1024


def open_files(pid: int) -> int:
    """Return the number of a process's open descriptors."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
