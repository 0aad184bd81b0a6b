"""Spawns the interpreter of an engine; the first engine's is spawned in advance.

The imports of an engine and of the daemon each take a large part of a second and are independent. So ``serve`` spawns
an interpreter before it imports the daemon (``prespawned``), and the first engine uses it (``take``). Once the settings
are read, it imports what their backend needs (``import_ahead``). What only the daemon can provide is sent over the
socket afterwards: descriptors (``send_descriptors``), then ``Configure``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MODULE: Final = "inferencecenter.engine"
_MAX_DESCRIPTORS: Final = 8
_DESCRIPTORS: Final = b"\0"
_IMPORT: Final = b"\1"
_SEND_BUFFER_BYTES: Final = 4 * 2**20
_PR_SET_PDEATHSIG: Final = 1
# How often llama.cpp's threads poll a barrier before they sleep (docs/decisions/0005-spinning-threads.md).
_SPIN_COUNT: Final = "5000"

_prespawned: list[EngineChild] = []


class EngineChild:
    """A started ``python -m inferencecenter.engine``, with the daemon's end of the socket to it.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        # An engine that is launched ahead sends some hundred messages before they are read; the kernel limits the size.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with theirs:
            try:
                self.process = subprocess.Popen(  # noqa: S603 - its own interpreter and module
                    [sys.executable, "-m", MODULE, "--fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=engine_environment(os.environ),
                )
            except OSError:
                self.socket.close()
                raise

    def discard(self) -> None:
        """End a process that was not taken."""
        self.socket.close()
        self.process.kill()
        self.process.communicate()


def engine_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that computes; how OpenMP's threads wait is the operator's if it is set."""
    if "GOMP_SPINCOUNT" in ours or "OMP_WAIT_POLICY" in ours:
        return dict(ours)
    return {**ours, "GOMP_SPINCOUNT": _SPIN_COUNT}


@contextmanager
def prespawned() -> Iterator[None]:
    """Spawn an interpreter for the next ``take``; to be entered in the main thread, with which the engine ends.

    Raises:
        OSError: The process cannot be started.
    """
    _prespawned.append(EngineChild())
    try:
        yield
    finally:
        while _prespawned:
            _prespawned.pop().discard()


def is_prespawned() -> bool:
    """Return whether the next ``take`` returns an interpreter that was spawned before."""
    return bool(_prespawned)


def import_ahead() -> None:
    """Have the prespawned interpreter, if there is one, import the llama backend while the daemon is imported."""
    for child in _prespawned:
        with suppress(OSError):  # it has ended, which ``take`` finds
            child.socket.send(_IMPORT)


def take() -> EngineChild:
    """Return the prespawned interpreter, or a new one.

    Raises:
        OSError: The process cannot be started.
    """
    while _prespawned:
        child = _prespawned.pop()
        if child.process.poll() is None:
            return child
        child.discard()
    return EngineChild()


def send_descriptors(sock: socket.socket, fds: Sequence[int]) -> None:
    """Send the engine the descriptor of its heartbeat page and those that it keeps open."""
    socket.send_fds(sock, [_DESCRIPTORS], fds)


def receive_descriptors(sock: socket.socket, *, on_import: Callable[[], None] = lambda: None) -> list[int]:
    """Wait for the descriptors; call ``on_import`` if ``import_ahead`` was called before.

    Raises:
        ConnectionError: The daemon has closed its end.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1, _MAX_DESCRIPTORS)
        if not data:
            raise ConnectionError("the daemon has ended")
        if data == _DESCRIPTORS:
            return fds
        on_import()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; to be called from the main thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
