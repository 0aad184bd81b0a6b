"""Faults at exact points: a test sets them, and a process of the daemon runs into them.

A fault is a file in a directory that both know: its name is the fault point, its content the action and how often the
point is passed unharmed before. A fault occurs once, in whichever process reaches the point first.
"""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

DIRECTORY_VARIABLE: Final = "FAULTS_DIR"
_SPARE_BYTES: Final = 4 * 2**20


@dataclass(frozen=True)
class FaultInjector:
    """The faults that are set for one daemon."""

    directory: Path

    def set(self, point: str, action: str = "kill", *, passes: int = 0, name: str = "") -> None:
        """Set a fault at a point that is passed ``passes`` times before; several at one point need different names."""
        self.directory.mkdir(exist_ok=True)
        unseen = self.directory.with_name(f"{self.directory.name}.new")
        unseen.write_text(f"{action} {passes}")
        unseen.rename(self.directory / f"{point}{'.' if name else ''}{name}")

    def clear(self) -> None:
        """Remove all faults."""
        for path in self.directory.glob("*"):
            path.unlink()

    @property
    def left(self) -> list[str]:
        """The faults that have not occurred."""
        return sorted(path.name for path in self.directory.glob("*"))


@dataclass
class FaultPoints:
    """The fault points of one process.

    directory: Where the faults are. actions: Actions besides those that every process has.
    """

    directory: Path
    actions: dict[str, Callable[[], object]] = field(default_factory=dict)
    _passed: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> FaultPoints:
        """Return the points of the directory that the environment names."""
        return cls(Path(os.environ[DIRECTORY_VARIABLE]))

    def is_set(self, point: str) -> bool:
        """Whether a fault is set."""
        return (self.directory / point).exists()

    def trigger(self, point: str) -> None:
        """Run the action set at a point; the fault stays."""
        self._act((self.directory / point).read_text().split()[0])

    def reach(self, point: str) -> None:
        """Pass a point, or run the action of the fault set there."""
        for path in sorted(self.directory.glob(f"{point}*")):
            if path.name.partition(".")[0] != point:
                continue
            action, passes = path.read_text().split()
            trap = path.name, path.stat().st_mtime_ns
            count = self._passed.get(trap, 0)
            self._passed[trap] = count + 1
            if count == int(passes):
                path.unlink()
                self._act(action)
            return

    def _act(self, action: str) -> None:
        (_ACTIONS | self.actions)[action]()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_front() -> None:
    """Kill the daemon from its engine, which the kernel then ends."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def _exhaust() -> NoReturn:
    """Allocate memory up to a limit that protects the machine."""
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + _SPARE_BYTES, mapped_bytes + _SPARE_BYTES))
    hoard = []
    while True:
        hoard.append(bytearray(2**16))


_ACTIONS: Final[dict[str, Callable[[], object]]] = {
    "kill": _kill,
    "abort": os.abort,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill-front": _kill_front,
    "exhaust": _exhaust,
}
