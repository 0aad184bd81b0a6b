"""The local wire between the command line and a running daemon: a datagram that says what has changed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKENS_CHANGED: Final = b"tokens"
_NAME: Final = "control.sock"
_MAX_DATAGRAM_BYTES: Final = 64

_log = structlog.get_logger(__name__)


def notify(state_dir: Path) -> bool:
    """Tell the daemon of ``state_dir`` that tokens have changed; ``False`` when none is listening."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            with _short_path(state_dir) as path:
                sender.sendto(TOKENS_CHANGED, path)
        except OSError:
            return False
    return True


class ControlSocket:
    """The daemon's end; open it on the event loop.

    Args:
        state_dir: Directory the socket is made in. The caller holds it for itself, so a socket left there is stale.
        tokens_changed: Called on the event loop.
    """

    def __init__(self, state_dir: Path, *, tokens_changed: Callable[[], None]) -> None:
        self._state_dir = state_dir
        self._tokens_changed = tokens_changed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def open(self) -> None:
        """Listen.

        Raises:
            InferenceCenterError: ``storage_unavailable`` when the socket cannot be made.
        """
        self._socket.setblocking(False)
        # Set before bind, this is the mode of the file: there is no moment at which others could write to it.
        os.fchmod(self._socket.fileno(), 0o600)
        try:
            (self._state_dir / _NAME).unlink(missing_ok=True)
            with _short_path(self._state_dir) as path:
                self._socket.bind(path)
        except OSError as error:
            self._socket.close()
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                f"{self._state_dir / _NAME} cannot be made: {error.strerror}",
                hint="The state directory must exist and be writable.",
            ) from error
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Stop listening and remove the socket."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        (self._state_dir / _NAME).unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            word = self._socket.recv(_MAX_DATAGRAM_BYTES)
        except BlockingIOError:
            return
        if word == TOKENS_CHANGED:
            self._tokens_changed()
        else:
            _log.warning("control_word_unknown", length=len(word))


@contextlib.contextmanager
def _short_path(state_dir: Path) -> Iterator[str]:
    """A path of the socket that fits sockaddr_un's 108 bytes however deep the directory lies."""
    directory = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{_NAME}"
    finally:
        os.close(directory)
