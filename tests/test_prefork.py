"""Processes forked from the template behave as those of ``python -m``."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from inferencecenter import __version__
from tests.leftovers import leftovers
from tests.ports import free_port
from tests.prefork import fork_program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that runs until it gets a signal."""
    with (tmp_path / "log").open("wb") as output:
        process = fork_program("http.server", str(free_port()), env=os.environ, output=output.fileno())
    leftovers.callback(process.wait)
    leftovers.callback(process.kill)
    return process


@pytest.mark.parametrize(
    ("argument", "status", "printed"),
    [("--version", 0, f"inferencecenter {__version__}"), ("--vershun", 2, "No such option")],
)
def test_status_and_output_are_those_of_the_program(tmp_path: Path, argument: str, status: int, printed: str) -> None:
    """Its status is that of the program, and its standard output and standard error are written to the log."""
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = fork_program("inferencecenter", argument, env=os.environ, output=output.fileno())
    assert process.wait(60) == status
    assert process.poll() == status
    assert printed in log.read_text()


def test_environment_is_the_given_one(tmp_path: Path) -> None:
    """Each process has its own."""
    for port in ("4711", "4712"):
        log = tmp_path / port
        given = {**os.environ, "HOME": str(tmp_path), "INFERENCECENTER_SERVER__PORT": port}
        with log.open("wb") as output:
            process = fork_program("inferencecenter", "config", "show", env=given, output=output.fileno())
        assert process.wait(60) == 0
        assert port in log.read_text()


def test_running_process_has_no_status(server: subprocess.Popen[bytes]) -> None:
    """A wait with a timeout ends."""
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.01)
    assert server.poll() is None


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_signal_ends_the_process(server: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    """The status names it; later signals are ignored."""
    server.send_signal(sent)
    assert server.wait(60) == -sent
    server.kill()
    assert server.returncode == -sent
