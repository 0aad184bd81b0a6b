"""A daemon on the demo model, and guests that run in this process with one client of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.client import Client
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.wasm.guest_loop import GuestLoop
from inferencecenter.wasm.host import GuestLog
from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.wasm.guests import Guest


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model, which does not slow down guests with many contexts."""
    rate = {"INFERENCECENTER_SERVER__OPERATIONS_PER_MINUTE": "1000000"}
    with run_daemon(tmp_path_factory.mktemp("wasm") / "state", demo_model_path, **rate) as running:
        yield running


@dataclass(frozen=True)
class Outcome:
    """How a guest ended, and what was written.

    Attributes:
        code: Exit code of the guest; ``None`` if the host ended it.
        error: Why the host ended it.
        out: Its standard output.
        log: The host's lines.
    """

    code: int | None
    error: InferenceCenterError | None
    out: str
    log: list[str]

    @property
    def lines(self) -> list[str]:
        """Lines of the output."""
        return self.out.splitlines()


class GuestRunner:
    """Runs guests with one client.

    Args:
        daemon: The daemon.
        url: Its address, if it is not that of its port.
        capfd: Captures what they write.
    """

    def __init__(self, daemon: Daemon, capfd: pytest.CaptureFixture[str], url: str | None = None) -> None:
        pytest.importorskip("wasmtime", reason="the extra wasm is not installed")
        self._capfd = capfd
        self.loop = GuestLoop()
        self.client = Client(url or daemon.url, daemon.admin_token)
        self.loop.call(self.client.open())

    def run(self, guest: Guest | str | bytes, **options: Any) -> Outcome:
        """Run a guest to its end."""
        from inferencecenter.wasm.run import GuestLimits, GuestOptions, GuestRun  # noqa: PLC0415 - see above

        wat = guest if isinstance(guest, str | bytes) else guest.wat()
        limits = {name: options.pop(name) for name in ("fuel", "memory_bytes", "timeout_s") if name in options}
        traces = options.pop("traces", False)
        given = GuestOptions(limits=GuestLimits(**limits), **options)
        lines: list[str] = []
        self._capfd.readouterr()
        code = failure = None
        try:
            binary = wat.encode() if isinstance(wat, str) else wat
            log = GuestLog(lines.append, traces=traces)
            code = GuestRun("guest", binary, self.client, self.loop, options=given, log=log).run()
        except InferenceCenterError as error:
            failure = error
        return Outcome(code, failure, self._capfd.readouterr().out, lines)

    def n_sessions(self) -> int:
        """Number of the account's sessions."""
        return len(self.loop.call(self.client.sessions()))

    def close(self) -> None:
        """Close the client."""
        self.loop.call(self.client.close())
        self.loop.close()


@pytest.fixture
def runner(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> Iterator[GuestRunner]:
    """Runs guests."""
    running = GuestRunner(daemon, capfd)
    yield running
    assert running.n_sessions() == 0, "a guest left sessions"
    running.close()
