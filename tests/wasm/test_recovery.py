"""Guests whose engine or daemon ends while they wait for an answer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import start_daemon
from tests.wasm.conftest import GuestRunner
from tests.wasm.guests import CONTEXT, Guest, loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow

PROMPT = " ".join(map(str, range(100, 300)))
"""The echo backend answers with it. A model that resumes may choose otherwise between nearly equal tokens."""
SETTINGS = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "5",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.05",
    "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MAX_S": "0.1",
}


class Home:
    """A daemon that another one replaces at the same Unix socket."""

    daemon: Daemon

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.socket = folder / "s"
        self.start()

    def start(self) -> None:
        """Start a daemon on the state of the previous one."""
        settings = SETTINGS | {"INFERENCECENTER_SERVER__UNIX_SOCKET": str(self.socket)}
        self.daemon = start_daemon(self._folder / "state", None, **settings)
        self.daemon.wait_ready()

    def kill_engine(self) -> None:
        """Kill the engine, which the daemon starts again."""
        os.kill(self.daemon.engine_pid(), signal.SIGKILL)

    def kill(self) -> None:
        """Kill the daemon, and start another."""
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.start()

    def restart(self) -> None:
        """Stop the daemon, and start another."""
        assert self.daemon.stop() == 0
        self.start()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A daemon that answers slowly."""
    running = Home(tmp_path)
    yield running
    if running.daemon.process.poll() is None:
        running.daemon.stop()


@pytest.fixture
def runner(home: Home, capfd: pytest.CaptureFixture[str]) -> Iterator[GuestRunner]:
    """Runs guests through the socket."""
    running = GuestRunner(home.daemon, capfd, f"unix://{home.socket}")
    yield running
    assert running.n_sessions() == 0
    running.close()


@contextlib.contextmanager
def meanwhile(home: Home, disturb: Callable[[], None]) -> Iterator[None]:
    """Disturb the daemon in another thread once it has generated some tokens of the turn."""
    before = home.daemon.metric("generated_tokens_total")

    def run() -> None:
        while home.daemon.metric("generated_tokens_total") < before + 20:
            time.sleep(0.01)
        disturb()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize("event", ["kill_engine", "kill", "restart"])
def test_answer_is_whole_after(home: Home, runner: GuestRunner, event: str) -> None:
    """The text is that of an undisturbed turn, from `compute` and in pieces, and there is one end."""
    computing = Guest().load().open().ask(PROMPT)
    streaming = Guest().load().open().input(PROMPT).stream().print_output()
    undisturbed = runner.run(computing).out
    assert PROMPT in undisturbed
    with meanwhile(home, getattr(home, event)):
        computed = runner.run(computing, stores=True)
    assert (computed.code, computed.out) == (0, undisturbed)
    with meanwhile(home, getattr(home, event)):
        streamed = runner.run(streaming, stores=True)
    assert streamed.code == 0
    pieces, rest = streamed.out.split("]\n100\n")
    assert rest == undisturbed
    assert pieces.removeprefix("[").replace("][", "") == undisturbed.removesuffix("\n")


def test_session_that_is_not_stored_ends_with_the_daemon(home: Home, runner: GuestRunner) -> None:
    """The guest gets an error, once, and can open another context."""
    guest = Guest().load().open().input(PROMPT).errno("compute", loaded(CONTEXT)).print_last_error()
    guest.open().input(PROMPT).must("compute", loaded(CONTEXT))
    with meanwhile(home, home.kill):
        ended = runner.run(guest)
    assert ended.code == 0
    assert ended.lines[0] == "5"
    assert "session_not_found" in ended.lines[1]
