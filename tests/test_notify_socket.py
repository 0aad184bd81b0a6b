"""Notifications to systemd, over real datagram sockets."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
import structlog

from inferencecenter.systemd_notifier import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """The address of a socket of each kind, and the socket."""
    abstract = request.param == "abstract"
    name = f"@inferencecenter-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0{name[1:]}" if abstract else name)
        heard.settimeout(60)
        yield name, heard


def test_variables_are_one_datagram(manager: tuple[str, socket.socket]) -> None:
    """Each variable is a line of its own."""
    address, heard = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": address}, pid=1)
    assert notifier is not None
    notifier.send(READY=1, STATUS="ready: 3 sessions")
    assert heard.recv(4096) == b"READY=1\nSTATUS=ready: 3 sessions"


def test_value_cannot_inject_variables(manager: tuple[str, socket.socket]) -> None:
    """Line ends within a value become spaces."""
    address, heard = manager
    Notifier(address).send(STATUS="the engine said:\nREADY=1\r\nbye")
    assert heard.recv(4096) == b"STATUS=the engine said: READY=1 bye"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"WATCHDOG_USEC": "1000000"}])
def test_without_a_manager_there_is_no_notifier(environment: dict[str, str]) -> None:
    """There is no watchdog, either."""
    assert Notifier.from_environment(environment, pid=1) is None


@pytest.mark.parametrize("address", ["vsock:2:1234", "relative", "@", "/"])
def test_unsupported_address_is_ignored(address: str) -> None:
    """It is logged, and the daemon starts."""
    with structlog.testing.capture_logs() as logs:
        assert Notifier.from_environment({"NOTIFY_SOCKET": address}, pid=1) is None
    assert [line["event"] for line in logs] == ["notify_socket_unknown"]


@pytest.mark.parametrize(
    ("watchdog", "expected_s"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_must_be_of_this_process(watchdog: dict[str, str], expected_s: float | None) -> None:
    """One for another pid, or of no length, is ignored."""
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": "/run/notify", **watchdog}, pid=7)
    assert notifier is not None
    assert notifier.watchdog_s == expected_s


def test_missing_manager_is_logged(tmp_path: Path) -> None:
    """The log names the variables."""
    with structlog.testing.capture_logs() as logs:
        Notifier(str(tmp_path / "absent")).send(STOPPING=1)
    assert [(line["event"], line["words"]) for line in logs] == [("service_manager_not_told", ["STOPPING"])]
