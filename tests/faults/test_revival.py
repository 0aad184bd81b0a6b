"""An engine given up because its model's file was missing recovers without a restart of the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client
from tests.faults.harness import daemon_harness, log_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

pytestmark = pytest.mark.slow


def wait_logged(daemon: Daemon, event: str) -> None:
    """Block until the log has a line of this event."""
    deadline = time.monotonic() + 60
    while not any(line["event"] == event for line in log_lines(daemon)):
        assert time.monotonic() < deadline, f"no {event} in time"
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["reload", "load"])
async def test_given_up_engine_is_revived(tmp_path: Path, demo_model_path: Path, how: str) -> None:
    """SIGHUP or a load revives it; until then readiness and errors report it as not retryable."""
    model = tmp_path / "model.gguf"
    shutil.copy(demo_model_path, model)
    with daemon_harness(
        tmp_path, model, INFERENCECENTER_ENGINE__MAX_RESTARTS="1", INFERENCECENTER_MODEL__NAME="demo"
    ) as found:
        daemon = found.start()
        async with connect_client(daemon) as client:
            session = await client.create()
            await client.turn(session, "What is 7 plus 8?", max_tokens=4)
            model.unlink()
            os.kill(daemon.engine_pid(), signal.SIGKILL)
            wait_logged(daemon, "engine_given_up")
            status, body = daemon.get("/readyz")
            assert (status, json.loads(body)["state"]) == (503, "failed")
            refused = await client.ask(op="infer", session_id=session, prompt="What is 7 plus 8?")
            assert (refused["op"], refused["code"]) == ("error", "engine_unavailable")
            assert refused.get("retry_after_ms") is None
            assert "model load" in refused["hint"]
            shutil.copy(demo_model_path, model)
            if how == "reload":
                daemon.process.send_signal(signal.SIGHUP)
            else:
                command = [sys.executable, "-m", "inferencecenter", "model", "load", "demo", "--url", daemon.url]
                environment = os.environ | {"INFERENCECENTER_STATE_DIR": str(daemon.state_dir)}
                load = partial(subprocess.run, command, check=True, env=environment, capture_output=True, timeout=60)
                await asyncio.to_thread(load)
            daemon.wait_ready()
            await client.turn(session, "What is 7 plus 8?", max_tokens=4)
