"""A daemon for the fuzzers of HTTP and sockets, with the checks that hold after any input."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Daemon


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon on the echo backend; at the end it has the same engine and has logged no error."""
    with run_daemon(
        tmp_path_factory.mktemp("fuzzed") / "state",
        None,
        INFERENCECENTER_ENGINE__BACKEND="echo",
        INFERENCECENTER_SERVER__LOGIN_ATTEMPTS_PER_MINUTE="100000",
        INFERENCECENTER_SERVER__OPERATIONS_PER_MINUTE="1000000000",
        INFERENCECENTER_SERVER__MAX_UNAUTHENTICATED_PER_ADDRESS="500",
        INFERENCECENTER_SESSIONS__WHEN_FULL="evict",
    ) as daemon:
        engine_pid = daemon.engine_pid()
        yield daemon
        assert daemon.process.poll() is None
        daemon.wait_ready()
        assert daemon.engine_pid() == engine_pid
        log = daemon.log.read_text()
        assert "Traceback" not in log
        records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert not [record for record in records if record["level"] in ("error", "critical")]
