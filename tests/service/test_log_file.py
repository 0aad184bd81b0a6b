"""A daemon that logs to a file which logrotate renames."""

from __future__ import annotations

import dataclasses
import json
import signal
import stat
from typing import TYPE_CHECKING

import pytest

from tests.service.harness import start_service

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_reload_reopens_the_log_file(tmp_path: Path) -> None:
    """No line is lost, and none is on the standard streams."""
    path, moved = tmp_path / "daemon.log", tmp_path / "daemon.log-1"
    with start_service(tmp_path, INFERENCECENTER_LOG__FILE=str(path)) as daemon:
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


def test_unwritable_log_file_fails_the_start(tmp_path: Path) -> None:
    """The exit code is that of a wrong setting, and standard error names it."""
    with start_service(tmp_path, INFERENCECENTER_LOG__FILE=str(tmp_path / "no" / "daemon.log")) as daemon:
        assert daemon.process.wait(timeout=30) == 78
        assert "log.file" in daemon.log.read_text() or "daemon.log cannot be written" in daemon.log.read_text()
