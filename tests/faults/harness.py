"""A daemon that is killed and started again on one state directory, with traps in all of its processes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.harness import Daemon, start_daemon
from tests.faults.traps import DIRECTORY_VARIABLE, Traps

if TYPE_CHECKING:
    from collections.abc import Iterator

ECHO = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "1",
    "INFERENCECENTER_ENGINE__N_CTX": "4096",
}
HASTY = {
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.01",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.05",
    "INFERENCECENTER_ENGINE__MAX_RESTARTS": "1000",
    "INFERENCECENTER_AUTH__DEFAULT_MAX_SESSIONS": "100000",
}
CROWDED = {
    "INFERENCECENTER_ENGINE__SLOTS": "2",
    "INFERENCECENTER_ENGINE__QUANTUM_TOKENS": "8",
    "INFERENCECENTER_ENGINE__PREFILL_GRID_TOKENS": "16",
    "INFERENCECENTER_ENGINE__N_BATCH": "64",
    "INFERENCECENTER_ENGINE__N_UBATCH": "64",
    "INFERENCECENTER_ENGINE__TARGET_STEP_MS": "4",
}
"""Few slots, short turns in them and short steps, so that prompts are read in pieces, and KV is moved all the time."""
IN_NO_HURRY = {
    "INFERENCECENTER_SERVER__SHUTDOWN_TIMEOUT_S": "0.2",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "20",
}
"""A daemon that stops before its turns are over, also where a slow disk holds back their first words."""
LINE = "{} told me a long story about the sea, the wind and the old harbour where it all began. "


@dataclass
class Site:
    """Where a daemon runs, and runs again; ``daemon`` is the one that was started last."""

    state_dir: Path
    model: Path
    settings: dict[str, str]
    traps: Traps
    daemon: Daemon = field(init=False)

    @classmethod
    def at(cls, root: Path, model: Path, **settings: str) -> Site:
        """Return a site below ``root``; nothing runs yet."""
        traps = Traps(root / "traps")
        settings = {**HASTY, **settings, DIRECTORY_VARIABLE: str(traps.directory)}
        return cls(root / "state", model, settings, traps)

    def start(self, *, ready: bool = True, storage: str = "ok", **settings: str) -> Daemon:
        """Start a daemon, and wait until its engine is ready and its storage as expected."""
        self.daemon = start_daemon(
            self.state_dir, self.model, program="tests.faults.daemon", **(self.settings | settings)
        )
        if ready:
            self.daemon.wait_ready(storage=storage)
        return self.daemon

    def ensure(self) -> Daemon:
        """Have a daemon run: the one from before, or another if that is gone."""
        self.traps.clear()
        if not hasattr(self, "daemon") or self.daemon.process.poll() is not None:
            self.start()
        return self.daemon

    def kill(self) -> None:
        """End the daemon without a word."""
        self.daemon.process.kill()
        self.daemon.process.wait()

    def dead(self) -> None:
        """Wait for the daemon to have been killed."""
        assert self.daemon.process.wait(timeout=60) == -signal.SIGKILL, self.daemon.log.read_text()[-4000:]

    def close(self) -> None:
        """End whatever runs."""
        if hasattr(self, "daemon") and self.daemon.process.poll() is None:
            self.traps.clear()
            self.daemon.stop()


@contextlib.contextmanager
def site(root: Path, model: Path, **settings: str) -> Iterator[Site]:
    """Have a site whose daemon is stopped at the end."""
    found = Site.at(root, model, **settings)
    try:
        yield found
    finally:
        found.close()
    if hasattr(found, "daemon"):
        found.daemon.assert_loop_was_free()


def log_lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Return what the daemons of a state directory have logged."""
    whole = daemon.log.read_text().rpartition("\n")[0]  # the last line may not be written to its end
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def logged(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    """Return the lines of one event."""
    return [line for line in log_lines(daemon) if line["event"] == event]


def data_bytes(pid: int) -> int:
    """Return how much memory of its own a process has."""
    used = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert used is not None
    return int(used[1]) * 1024


def open_files(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
