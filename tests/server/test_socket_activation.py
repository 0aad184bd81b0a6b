"""Tests of sockets that the daemon is started with."""

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
    """Return what makes a descriptor of the test's the first that is inherited."""
    return lambda fd: monkeypatch.setattr(listener, "FIRST_FD", fd)


def test_connections_wait_for_whoever_takes_the_socket() -> None:
    """A client that connects before the process is there is accepted by it."""
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
def test_what_is_meant_for_others_is_left_alone(environment: dict[str, str]) -> None:
    """Without descriptors for this very process there is nothing to take."""
    assert inherited_sockets(environment, pid=PID) == []


@pytest.mark.parametrize("given", ["", "one", "-1", "²"])
def test_a_number_that_is_none_is_refused(given: str) -> None:
    """The message has what was given."""
    with pytest.raises(InferenceCenterError, match="LISTEN_FDS") as caught:
        inherited_sockets({"LISTEN_FDS": given, "LISTEN_PID": str(PID)}, pid=PID)
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def refusal() -> InferenceCenterError:
    """Take one descriptor, named ``web``, and return how it was refused."""
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": str(PID), "LISTEN_FDNAMES": "web"}
    with pytest.raises(InferenceCenterError, match=r"\(web\)") as caught:
        inherited_sockets(environment, pid=PID)
    return caught.value


def test_a_descriptor_that_is_no_socket_is_refused(at: Callable[[int], None], tmp_path: Path) -> None:
    """A file says so, and so does one that is not open."""
    with (tmp_path / "file").open("w") as file:
        at(file.fileno())
        assert "is no socket" in refusal().message
    assert "is not open" in refusal().message


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)]
)
def test_a_socket_of_another_kind_is_refused(
    at: Callable[[int], None], family: socket.AddressFamily, kind: socket.SocketKind
) -> None:
    """Clients come over TCP; the descriptor stays open for whoever owns it."""
    with socket.socket(family, kind) as other:
        at(other.fileno())
        assert "is no TCP socket" in refusal().message
        os.fstat(other.fileno())


def test_a_connection_in_place_of_a_listener_is_refused(at: Callable[[int], None]) -> None:
    """``Accept=yes`` hands over connections; the hint names the setting."""
    with socket.socket() as connection:
        at(connection.fileno())
        error = refusal()
    assert "does not listen" in error.message
    assert "Accept=no" in (error.hint or "")
