"""A stored turn that crashes the daemon repeatedly is found and quarantined."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client
from tests.faults.harness import ECHO, daemon_harness, logged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.faults.harness import DaemonHarness

pytestmark = pytest.mark.slow

NO_TOKEN_EVER = {"INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "60000"}
"""A turn makes no progress before the daemon is killed, as one would that ends the daemon."""


def wait_until(holds: Callable[[], bool]) -> None:
    """Block until a condition holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it is not so in time"
        time.sleep(0.05)


def isolated_turn(found: DaemonHarness) -> str | None:
    """Return the turn that the daemon remembers as running in isolation."""
    path = found.state_dir / "suspects.json"
    models = json.loads(path.read_bytes()) if path.exists() else {}
    return next((model["alone"] for model in models.values()), None)


async def test_poison_turn_is_quarantined_by_the_fifth_daemon(tmp_path: Path, demo_model_path: Path) -> None:
    """Its turn ends with engine_crashed, the other turn resumes, and both sessions work."""
    with daemon_harness(tmp_path, demo_model_path, **ECHO | NO_TOKEN_EVER) as found:
        daemon = found.start()
        async with connect_client(daemon) as client:
            sessions = [await client.create() for _ in range(2)]
            turns = [
                (await client.ask(op="infer", session_id=each, prompt="What ends a daemon?"))["turn_id"]
                for each in sessions
            ]
        for tried in (None, None, turns[0], turns[0]):
            wait_until(lambda tried=tried: isolated_turn(found) == tried)  # type: ignore[misc]
            found.kill()
            found.start()
        assert [line["turn"] for line in logged(found.daemon, "turn_quarantined")] == turns[:1]
        wait_until(lambda: isolated_turn(found) == turns[1])
        found.kill()
        daemon = found.start(INFERENCECENTER_ENGINE__ECHO_DELAY_MS="1")
        async with connect_client(daemon) as client:
            wait_until(lambda: isolated_turn(found) is None)
            for session in sessions:
                _, end = await client.turn(session, "Hello?")
                assert end["finish_reason"] == "stop"
