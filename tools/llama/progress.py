"""Shows progress: on one line of a terminal, elsewhere every 15 seconds."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, Self, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_EVERY_S: Final = 15.0
_CLEAR: Final = "\r\033[K"
# A target of ninja: "PATH: CXX_COMPILER__ggml_Release". Only compilations take time worth counting.
_TARGET: Final = re.compile(r"(?P<path>\S+): \w+_COMPILER__")
# A line of ninja: "[34/83] Building CXX object PATH".
_STEP: Final = re.compile(r"\[(?P<at>\d+)/\d+\] Building \S+ object (?P<path>\S+)")
# Measured compile times of the sources that take longer than the usual second; only their ratios matter.
_SECONDS: Final = {
    "unity_text": 21.0,
    "unity_memory": 15.0,
    "unity_loading": 12.0,
    "unity_context": 9.0,
    "unity_graphs": 4.0,
    "ggml-cuda.dir": 15.0,
    "ggml-vulkan.cpp": 60.0,
    "ggml-cpu/ops.cpp": 8.0,
    "ggml-cpu/repack.cpp": 5.0,
    "x86/repack.cpp": 4.0,
    "sgemm.cpp": 4.0,
    "tiled.cpp": 4.0,
    "ggml-quants.c": 5.0,
    "ggml-backend-meta.cpp": 4.0,
    "gguf.cpp": 4.0,
}
_KNOWN_SHARE: Final = 0.1  # of the work, before which the rest is not estimated


class Progress:
    """Progress output of a build."""

    def __init__(self, out: TextIO, *, terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._terminal = terminal
        self._clock = clock
        self._printed_at: float | None = None
        self._title = ""

    @classmethod
    def to(cls, out: TextIO) -> Self:
        """Return progress output to a file, on one line if that is a terminal."""
        return cls(out, terminal=out.isatty())

    def begin(self, title: str) -> None:
        """Begin a step."""
        self._title = title
        self._printed_at = None
        self.update("")

    def update(self, what: str) -> None:
        """Show the progress of the step: always on a terminal, elsewhere at intervals."""
        now = self._clock()
        line = f"{self._title}: {what}" if what else self._title
        if self._terminal:
            self._write(f"{_CLEAR}{line}")
        elif self._printed_at is None or now - self._printed_at >= _EVERY_S:
            self._printed_at = now
            self._write(f"{line}\n")

    def print_line(self, line: str) -> None:
        """Print a permanent line."""
        self._write(f"{_CLEAR if self._terminal else ''}{line}\n")

    def close(self) -> None:
        """Clear the unfinished line of a terminal."""
        if self._terminal:
            self._write(_CLEAR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Compilation:
    """Progress of ninja, derived from its targets and its output."""

    def __init__(self, targets: Iterable[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = {found["path"] for line in targets if (found := _TARGET.match(line))}
        self._done: set[str] = set()
        self._clock = clock
        self._began = clock()

    def read(self, line: str) -> None:
        """Process a line of ninja's output."""
        if found := _STEP.match(line):
            self._done.add(found["path"])

    def __str__(self) -> str:
        counts = f"{len(self._done)} of {len(self._paths)} compiled"
        whole, done = sum(map(_seconds, self._paths)), sum(map(_seconds, self._done))
        if done == 0 or done < _KNOWN_SHARE * whole:
            return counts
        left_s = (self._clock() - self._began) * (whole - done) / done
        return f"{counts}, about {shown(left_s)} left"


def shown(seconds: float) -> str:
    """Return a duration as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _seconds(path: str) -> float:
    return next((cost for part, cost in _SECONDS.items() if part in path), 1.0)
