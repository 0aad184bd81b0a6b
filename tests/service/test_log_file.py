"""A daemon that logs to a file which somebody else renames."""

from __future__ import annotations

import dataclasses
import json
import signal
import stat
from typing import TYPE_CHECKING

import pytest

from tests.service.harness import started

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_the_log_goes_on_in_a_new_file_after_a_reload(tmp_path: Path) -> None:
    """As ``logrotate`` does it: no line is lost, and nothing of the log is on the standard streams."""
    path, moved = tmp_path / "daemon.log", tmp_path / "daemon.log-1"
    with started(tmp_path, INFERENCECENTER_LOG__FILE=str(path)) as daemon:
        logged = dataclasses.replace(daemon, log=path)
        path.touch(mode=0o600)
        logged.wait_for_log("engine_ready")
        path.rename(moved)
        daemon.process.send_signal(signal.SIGHUP)
        while not path.exists():
            assert daemon.process.poll() is None
        logged.wait_for_log("reloaded")
        assert logged.stop() == 0
        assert "engine_ready" not in daemon.log.read_text()
    before, after = ([json.loads(line)["event"] for line in file.read_text().splitlines()] for file in (moved, path))
    assert "engine_ready" in before
    assert after[0] == "reloaded"
    assert after[-1] == "stopped"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    """With the status of a wrong setting, and its name on standard error."""
    with started(tmp_path, INFERENCECENTER_LOG__FILE=str(tmp_path / "no" / "daemon.log")) as daemon:
        assert daemon.process.wait(timeout=30) == 78
        assert "log.file" in daemon.log.read_text() or "daemon.log cannot be written" in daemon.log.read_text()
