"""llama.cpp's log, line by line.

llama.cpp writes it to stderr by default; importing this module stops that.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections import Counter, defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from llama_cpp import llama_cpp as lib

from inferencecenter.ipc.messages import BufferUse

if TYPE_CHECKING:
    from collections.abc import Callable


# ``ggml_log_level`` of ggml.h; llama.cpp's INFO is hundreds of lines per load, useful only for debugging.
_LEVELS = {1: "debug", 2: "debug", 3: "warning", 4: "error"}
_CONTINUES = 5
_KEPT_PROBLEMS = 6
# Logged as a warning for every tensor of a LoRA adapter where weights are repacked for the CPU; harmless.
_NO_PROBLEM = "cannot use buft"


_discard = lib.llama_log_callback(lambda _level, _text, _user_data: None)
lib.llama_log_set(_discard, ctypes.c_void_p(0))


class LlamaLog:
    """Joins the fragments that llama.cpp logs into lines and forwards them as ``(level, line)``.

    There is one log callback per process, so one installed ``LlamaLog``. llama.cpp keeps a bare pointer to the
    callback: the caller of ``install`` keeps the object alive until ``close``.
    """

    def __init__(self, forward: Callable[[str, str], None]) -> None:
        self._forward = forward
        self._lock = threading.Lock()
        self._level = "debug"
        self._pending = ""
        self._problems: deque[str] = deque(maxlen=_KEPT_PROBLEMS)
        self._callback = lib.llama_log_callback(self._receive)

    def install(self, set_log: Callable[..., None] = lib.llama_log_set) -> None:
        """Redirect the log of llama.cpp, or of the library that ``set_log`` belongs to, to this object."""
        set_log(self._callback, ctypes.c_void_p(0))

    def close(self, set_log: Callable[..., None] = lib.llama_log_set) -> None:
        """Discard the log that ``install`` redirected, so that this object may be dropped."""
        set_log(_discard, ctypes.c_void_p(0))

    def take_problems(self) -> tuple[str, ...]:
        """Return the last warnings and errors since the previous call, oldest first."""
        with self._lock:
            problems = tuple(self._problems)
            self._problems.clear()
        return problems

    def write(self, level: int, text: str) -> None:
        """Add a fragment at a ``ggml_log_level`` and forward the completed lines."""
        with self._lock:
            lines = self._complete(level, text)
        for line_level, line in lines:
            self._forward(line_level, line)

    def _complete(self, level: int, text: str) -> list[tuple[str, str]]:
        lines = []
        if level != _CONTINUES:
            if self._pending:
                lines.append((self._level, self._pending))
            self._pending, self._level = "", _LEVELS.get(level, "debug")
        *whole, self._pending = (self._pending + text).split("\n")
        lines += [(self._level, line) for line in whole]
        lines = [
            ("debug" if _NO_PROBLEM in line else line_level, line.rstrip())
            for line_level, line in lines
            if line.strip()
        ]
        self._problems.extend(line for line_level, line in lines if line_level != "debug")
        return lines

    def _receive(self, level: int, text: bytes, _user_data: int | None) -> None:
        # C calls this; no exception may propagate through it.
        with suppress(Exception):
            self.write(level, text.decode("utf-8", errors="replace"))


_LINE: Final = re.compile(r"(\S+) +(model|KV|RS|output|compute) buffer size = +(\d+\.\d+) MiB")
# A model may have several buffers of weights or KV of one kind; the others are logged again when they grow.
_ADDS_UP: Final = ("model", "KV", "RS")


class BufferSizes:
    """Collects buffer sizes from the log lines of a load."""

    def __init__(self) -> None:
        self._models: list[dict[str, dict[str, int]]] = []
        self.begin_model()

    def begin_model(self) -> None:
        """Add the sizes of a further model to those read so far."""
        self._models.append(defaultdict(lambda: defaultdict(int)))

    def read(self, line: str) -> None:
        """Record the size in a line, if it states one."""
        match = _LINE.search(line)
        if match is None:
            return
        name, what, mib = match.groups()
        n_bytes = round(float(mib) * 2**20)
        of_name = self._models[-1][name]
        of_name[what] = of_name[what] + n_bytes if what in _ADDS_UP else n_bytes

    def uses(self) -> tuple[BufferUse, ...]:
        """Return the sizes so far, by llama.cpp's names of the kinds of memory."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for model in self._models:
            for name, sizes in model.items():
                totals[name].update(sizes)
        return tuple(
            BufferUse(
                name=name,
                weight_bytes=sizes["model"],
                kv_bytes=sizes["KV"] + sizes["RS"],
                compute_bytes=sizes["compute"],
                output_bytes=sizes["output"],
            )
            for name, sizes in totals.items()
        )
