"""Faults that lie in wait: a test sets them, and a process of the daemon runs into them at an exact place.

A trap is a file in a directory that both know: its name says where, its content what happens there and how often the
place is passed unharmed before. A trap springs once, whichever process gets there first.
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
class Traps:
    """The traps of one daemon."""

    directory: Path

    def set(self, place: str, action: str = "kill", *, passes: int = 0, name: str = "") -> None:
        """Lay a trap at a place that is passed ``passes`` times before; several at one place have different names."""
        self.directory.mkdir(exist_ok=True)
        unseen = self.directory.with_name(f"{self.directory.name}.new")
        unseen.write_text(f"{action} {passes}")
        unseen.rename(self.directory / f"{place}{'.' if name else ''}{name}")

    def clear(self) -> None:
        """Take all traps away."""
        for path in self.directory.glob("*"):
            path.unlink()

    @property
    def left(self) -> list[str]:
        """The traps that have not sprung."""
        return sorted(path.name for path in self.directory.glob("*"))


@dataclass
class Walk:
    """A process on its way past the traps.

    Args:
        directory: Where they are.
        actions: What may happen besides what every process can do.
    """

    directory: Path
    actions: dict[str, Callable[[], object]] = field(default_factory=dict)
    _passed: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def from_environment(cls) -> Walk:
        """Return the way past the traps that the environment names."""
        return cls(Path(os.environ[DIRECTORY_VARIABLE]))

    def is_set(self, place: str) -> bool:
        """Tell whether there is a trap."""
        return (self.directory / place).exists()

    def into(self, place: str) -> None:
        """Do what the trap at a place says; it stays."""
        self._act((self.directory / place).read_text().split()[0])

    def past(self, place: str) -> None:
        """Pass a place, or spring the trap there."""
        for path in sorted(self.directory.glob(f"{place}*")):
            if path.name.partition(".")[0] != place:
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
    """End the daemon from its engine, which the kernel ends then."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def _exhaust() -> NoReturn:
    """Ask for memory until there is no more; the limit keeps that from being the machine's."""
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
