"""Sockets that whoever started the daemon listens on already, as in sd_listen_fds(3): connections wait in them."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_FD: Final = 3
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


def inherited_sockets(environment: Mapping[str, str], *, pid: int) -> list[socket.socket]:
    """Return the listening sockets that the process ``pid`` was started with; empty if it was started without.

    Read are ``LISTEN_FDS``, ``LISTEN_PID`` and, for messages, ``LISTEN_FDNAMES``. Descriptors of another process, as
    those of a shell that was itself socket-activated, are left alone.

    Raises:
        InferenceCenterError: ``invalid_config`` where one of them is no listening TCP socket.
    """
    if environment.get("LISTEN_PID") != str(pid):
        return []
    given = environment.get("LISTEN_FDS", "")
    if not given.isascii() or not given.isdecimal():
        raise _unusable(f"LISTEN_FDS is {given!r}, which is no number")
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    sockets: list[socket.socket] = []
    try:
        for index in range(int(given)):
            name = names[index] if index < len(names) else ""
            sockets.append(_listening(FIRST_FD + index, name))
    except InferenceCenterError:
        for listening in sockets:
            listening.detach()
        raise
    return sockets


def _listening(fd: int, name: str) -> socket.socket:
    what = f"inherited descriptor {fd}{f' ({name})' if name else ''}"
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        raise _unusable(f"{what} is not open") from None
    if not stat.S_ISSOCK(mode):
        raise _unusable(f"{what} is no socket")
    taken = socket.socket(fileno=fd)
    if taken.family not in _FAMILIES or taken.type != socket.SOCK_STREAM:
        taken.detach()
        raise _unusable(f"{what} is no TCP socket")
    if not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        taken.detach()
        raise _unusable(f"{what} does not listen", hint="The socket unit must have Accept=no.")
    taken.set_inheritable(False)
    taken.setblocking(False)
    return taken


def _unusable(message: str, *, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_CONFIG,
        message,
        hint=hint or "The socket unit needs ListenStream= with a port or an address and a port.",
    )
