"""Sockets inherited from the service manager."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server import listener
from inferencecenter.server.listener import bind, inherited_sockets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PID: Final = 4242

# Puts its socket at descriptor 3 and becomes a process that takes it, as systemd would start one.
SUCCESSOR: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="web")
os.execv(sys.executable, [sys.executable, "-c", '''
import os
from inferencecenter.server.listener import inherited_sockets
(taken,) = inherited_sockets(os.environ, pid=os.getpid())
taken.setblocking(True)
caller, _ = taken.accept()
caller.sendall(str([taken.fileno(), os.get_inheritable(3)]).encode())
'''])
"""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes a descriptor the first inherited one."""
    return lambda fd: monkeypatch.setattr(listener, "FIRST_FD", fd)


def test_inherited_socket_queues_connections() -> None:
    """A client that connects before the process runs is accepted by it."""
    (listening,) = bind("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname(), timeout=60) as early:
        with subprocess.Popen(
            [sys.executable, "-c", SUCCESSOR, str(listening.fileno())], pass_fds=[listening.fileno()]
        ) as successor:
            assert early.recv(100) == b"[3, False]"
        assert successor.returncode == 0


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1", "LISTEN_PID": str(PID + 1)},
        {"LISTEN_FDS": "0", "LISTEN_PID": "4242"},
    ],
)
def test_descriptors_of_other_processes_are_ignored(environment: dict[str, str]) -> None:
    """Without descriptors for this pid nothing is taken."""
    assert inherited_sockets(environment, pid=PID) == []


@pytest.mark.parametrize("given", ["", "one", "-1", "²"])
def test_invalid_number_is_refused(given: str) -> None:
    """The message has the value."""
    with pytest.raises(InferenceCenterError, match="LISTEN_FDS") as caught:
        inherited_sockets({"LISTEN_FDS": given, "LISTEN_PID": str(PID)}, pid=PID)
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def refusal() -> InferenceCenterError:
    """Take one descriptor, named ``web``, and return the error."""
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": str(PID), "LISTEN_FDNAMES": "web"}
    with pytest.raises(InferenceCenterError, match=r"\(web\)") as caught:
        inherited_sockets(environment, pid=PID)
    return caught.value


def test_inherited_file_is_refused(at: Callable[[int], None], tmp_path: Path) -> None:
    """A descriptor that is not open is refused, too."""
    with (tmp_path / "file").open("w") as file:
        at(file.fileno())
        assert "is no socket" in refusal().message
    assert "is not open" in refusal().message


@pytest.mark.parametrize(("family", "kind"), [(socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_DGRAM)])
def test_inherited_socket_must_be_a_stream(
    at: Callable[[int], None], family: socket.AddressFamily, kind: socket.SocketKind
) -> None:
    """The descriptor stays open."""
    with socket.socket(family, kind) as other:
        at(other.fileno())
        assert "is no stream socket" in refusal().message
        os.fstat(other.fileno())


def test_inherited_unix_socket_is_taken(at: Callable[[int], None], tmp_path: Path) -> None:
    """A socket unit may name a path beside or instead of a port."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        at(listening.fileno())
        (taken,) = inherited_sockets({"LISTEN_FDS": "1", "LISTEN_PID": str(PID)}, pid=PID)
        assert (taken.family, taken.getsockname()) == (socket.AF_UNIX, str(tmp_path / "s"))
        taken.detach()


def test_inherited_socket_must_listen(at: Callable[[int], None]) -> None:
    """``Accept=yes`` hands over connections; the hint names the setting."""
    with socket.socket() as connection:
        at(connection.fileno())
        error = refusal()
    assert "does not listen" in error.message
    assert "Accept=no" in (error.hint or "")
