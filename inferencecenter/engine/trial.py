"""Compiling a grammar where nothing can come of it: ``python -m inferencecenter.engine.trial`` is the other process.

llguidance bounds what a grammar may grow to, but not everything that it does before: a schema of 80 characters takes
half a minute and 400 MB, a chain of 15,000 rules overflows the stack, and neither can be stopped from outside. So each
grammar is compiled once in a process that may be killed, on a small stack and with little memory, and only if it
survives in the engine's. What the other process finds wrong with it is not asked: its vocabulary is another.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.ipc.messages import Grammar

TIMEOUT_S: Final = 5.0
"""How long a compilation may take; those that applications send take milliseconds."""

_START_TIMEOUT_S: Final = 30.0
_MEMORY_BYTES: Final = 512 * 1024 * 1024
# The engine's threads have 8 MiB, most of them not in use.
_STACK_BYTES: Final = 1024 * 1024
# A process that has grown by so much is replaced, so that the next grammar's growth can be told.
_GROWN_BYTES: Final = 32 * 1024 * 1024


class Trial:
    """Has grammars compiled in another process, which lives until it is closed or a grammar ends it.

    Used by one thread at a time.

    Args:
        timeout_s: How long a compilation may take.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the other process if there is none, so that it is ready when it is needed."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._ready = False
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )

    def run(self, grammar: Grammar) -> int:
        """Compile a grammar and return how many bytes that took; also if there is something wrong with it.

        Raises:
            InferenceCenterError: ``invalid_grammar`` where it takes too long, or more memory or stack than it may;
                ``internal`` where the other process does not start.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([grammar.kind, grammar.text]).encode() + b"\n")
            process.stdin.flush()
            answer = _line(process.stdout, timeout_s=self._timeout_s)
        except BrokenPipeError:
            answer = b""
        if answer is None:
            self.close()
            raise _refused(f"this grammar takes more than {self._timeout_s:g} s to compile")
        if not answer:
            self.close()
            raise _refused("this grammar is too large, or nested too deeply, to be compiled")
        grown_bytes = int(answer)
        if grown_bytes > _GROWN_BYTES:
            self.close()
        return grown_bytes

    def close(self) -> None:
        """End the other process, if there is one; another ``run`` starts the next."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        self.start()
        assert self._process is not None
        assert self._process.stdout is not None
        if not self._ready and not _line(self._process.stdout, timeout_s=_START_TIMEOUT_S):
            self.close()
            raise InferenceCenterError(ErrorCode.INTERNAL, "The process that tries grammars does not start.")
        self._ready = True
        return self._process


def _line(pipe: IO[bytes], *, timeout_s: float) -> bytes | None:
    """Return the line that comes next, which is short; empty at the end, ``None`` when nothing comes in time."""
    ready, _, _ = select.select([pipe], [], [], timeout_s)
    return os.read(pipe.fileno(), 64) if ready else None


def _refused(reason: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_GRAMMAR, reason)


def main() -> int:
    """Compile the grammars that come, one a line, until none will come any more."""
    from llguidance import LLTokenizer  # noqa: PLC0415 - not wanted by who only asks

    from inferencecenter.engine.sampling.structured import compiled  # noqa: PLC0415
    from inferencecenter.ipc.messages import Grammar  # noqa: PLC0415

    # Where a byte is a token nothing has to be told of the model's vocabulary, and the work is of the same order.
    tokenizer = LLTokenizer("byte")
    threading.stack_size(_STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes(0) + _MEMORY_BYTES,) * 2)

    def compile_one(grammar: Grammar) -> None:
        with suppress(InferenceCenterError):  # the engine will find it too, and say so with its own vocabulary
            compiled(tokenizer, grammar, {})

    _say(b"ready")
    for line in sys.stdin.buffer:
        before_bytes = _size_bytes(1)
        _limit_cpu(TIMEOUT_S)
        # On a thread, whose stack has the size that was asked for.
        thread = threading.Thread(target=compile_one, args=(Grammar(*json.loads(line)),))
        thread.start()
        thread.join()
        _say(str(max(0, _size_bytes(1) - before_bytes)).encode())
    return os.EX_OK


def _say(text: bytes) -> None:
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def _limit_cpu(seconds: float) -> None:
    """Have the kernel end the process when it works for so much longer: whoever started it may be gone by then."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = int(used.ru_utime + used.ru_stime + 2 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))


def _size_bytes(column: int) -> int:
    """Return the size of this process in memory: all that it has mapped in column 0, what is there in column 1."""
    return int(Path("/proc/self/statm").read_bytes().split()[column]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
