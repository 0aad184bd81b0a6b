"""Compiles grammars in a disposable process: ``python -m inferencecenter.engine.grammar_sandbox``.

llguidance bounds the size of a compiled grammar, but not all work before that: a schema of 80 characters takes half a
minute and 400 MB, a chain of 15,000 rules overflows the stack, and neither can be stopped from outside. So each grammar
is first compiled in a process that can be killed, on a small stack and with little memory, and in the engine only if
that succeeded. The other process has a vocabulary with the same names, whose text is single bytes.

Each line it reads and writes is JSON: first the names, then grammars; for each of these a result.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.process_limits import limit_cpu, limit_memory, resident_bytes
from inferencecenter.engine.fair_workers import JobCancelledError
from inferencecenter.engine.sampling.constraint import VocabularyNames, compiled, tokenizer_of
from inferencecenter.ipc.messages import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llguidance import LLTokenizer

TIMEOUT_S: Final = 5.0
"""Time limit of a compilation; usual grammars take milliseconds."""

GRACE_S: Final = 0.3
"""Time that a cancelled compilation gets to end, since to start another process takes about as long."""
_NICE: Final = 5
"""A client may keep the process compiling permanently, so decoding gets priority on the cores."""

_START_TIMEOUT_S: Final = 30.0
_MEMORY_BYTES: Final = 512 * 1024 * 1024
# The engine's threads have 8 MiB, most of them unused.
_STACK_BYTES: Final = 1024 * 1024
# A process that has grown by this much is replaced, so that the next grammar's growth can be measured.
_GROWN_BYTES: Final = 32 * 1024 * 1024


class GrammarSandbox:
    """Compiles grammars in another process, which lives until it is closed or a grammar crashes it.

    Used by one thread at a time, except for ``interrupt``.

    Args:
        timeout_s: Time limit of a compilation.
        grace_s: Time that a cancelled compilation gets to end.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S, grace_s: float = GRACE_S) -> None:
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._interrupt = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._interrupt)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._line = b""

    def start(self, names: VocabularyNames) -> None:
        """Start the other process if there is none, so that it is ready when it is needed."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._ready = False
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._send([names.n_vocab, list(names.special.items()), names.ends])

    def interrupt(self) -> None:
        """Have the current or next ``run`` check ``wanted``; from any thread."""
        os.eventfd_write(self._interrupt, 1)

    def run(
        self,
        names: VocabularyNames,
        grammar: Grammar,
        markers: Mapping[str, int],
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Compile a grammar and return the memory it took in bytes.

        Args:
            names: Names of the vocabulary.
            grammar: The grammar.
            markers: The tokens that it may name, by their texts.
            wanted: Whether the result is still needed; called at the start and after each ``interrupt``. If it is not,
                the other process is killed after ``grace_s``.

        Raises:
            JobCancelledError: The result is no longer needed.
            InferenceCenterError: ``invalid_grammar`` if it is invalid or exceeds the limits of time, memory or stack;
                ``internal`` if the other process does not start.
        """
        self.start(names)
        if not self._ready and not self._receive(_START_TIMEOUT_S, wanted):
            self.close()
            raise InferenceCenterError(ErrorCode.INTERNAL, "The grammar sandbox process does not start.")
        self._ready = True
        self._send([grammar.kind, grammar.text, grammar.frame, dict(markers)])
        try:
            answer = self._receive(self._timeout_s, wanted)
        except JobCancelledError:
            answer = self._receive(self._grace_s, lambda: True)
            if not answer or json.loads(answer)[0] > _GROWN_BYTES:
                self.close()
            raise
        if answer is None:
            self.close()
            raise _refused(f"this grammar takes more than {self._timeout_s:g} s to compile")
        if not answer:
            self.close()
            raise _refused("this grammar is too large, or nested too deeply, to be compiled")
        grown_bytes, reason = json.loads(answer)
        if grown_bytes > _GROWN_BYTES:
            self.close()
        if reason is not None:
            raise _refused(reason)
        return int(grown_bytes)

    def close(self) -> None:
        """Kill the other process, if there is one; the next ``run`` starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._line = b""
        with suppress(BrokenPipeError):  # ``_receive`` detects that it has exited
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, timeout_s: float, wanted: Callable[[], bool]) -> bytes | None:
        """Return the next line; empty if the process has exited, ``None`` after the time limit.

        Raises:
            JobCancelledError: The result is no longer needed.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        ends_s = time.monotonic() + timeout_s
        while not self._line.endswith(b"\n"):
            if not wanted():
                raise JobCancelledError
            ready, _, _ = select.select([pipe, self._interrupt], [], [], max(0.0, ends_s - time.monotonic()))
            if not ready:
                return None
            if self._interrupt in ready:
                os.eventfd_read(self._interrupt)  # before ``wanted`` is called, so that no interrupt is lost
                continue
            data = os.read(pipe, 65_536)
            if not data:
                return b""
            self._line += data
        line, self._line = self._line, b""
        return line


def _refused(reason: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_GRAMMAR, reason)


def main() -> int:
    """Compile the grammars read from standard input until it is closed."""
    lines = map(json.loads, sys.stdin.buffer)
    n_vocab, special, ends = next(lines)
    tokenizer = _byte_tokenizer(VocabularyNames(n_vocab, dict(special), tuple(ends)))
    threading.stack_size(_STACK_BYTES)
    limit_memory(_MEMORY_BYTES)
    reasons: list[str] = []

    def compile_one(kind: str, text: str, frame: str, markers: dict[str, int]) -> None:
        try:
            compiled(tokenizer, Grammar(kind, text, frame), markers)
        except InferenceCenterError as error:
            reasons.append(error.message)

    _reply("ready")
    os.nice(_NICE)
    for request in lines:
        before_bytes = resident_bytes()
        reasons.clear()
        limit_cpu(2 * TIMEOUT_S)
        # On a thread, whose stack has the configured size.
        thread = threading.Thread(target=compile_one, args=request)
        thread.start()
        thread.join()
        _reply([max(0, resident_bytes() - before_bytes), reasons[0] if reasons else None])
    return os.EX_OK


def _byte_tokenizer(names: VocabularyNames) -> LLTokenizer:
    """Return a vocabulary with these names, in which each byte is a token and all other tokens are empty."""
    n_vocab = max(names.n_vocab, len(names.special) + 256)
    plain = [token for token in range(n_vocab) if token not in names.special]
    spelled = {token: bytes((byte,)) for byte, token in enumerate(plain[:256])}
    whole = VocabularyNames(n_vocab, names.special, names.ends)
    return tokenizer_of(
        whole, lambda token: spelled.get(token, b""), tokenize=lambda text: [plain[byte] for byte in text.encode()]
    )


def _reply(message: Any) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
