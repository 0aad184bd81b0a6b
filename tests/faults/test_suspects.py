"""A stored turn with which the daemon itself dies again and again is found and set aside."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import talk
from tests.faults.harness import ECHO, logged, site

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.faults.harness import Site

pytestmark = pytest.mark.slow

NO_TOKEN_EVER = {"INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "60000"}
"""A turn makes no progress before the daemon is killed, as one would that ends the daemon."""


def wait_for(holds: Callable[[], bool]) -> None:
    """Block until something is so."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it is not so in time"
        time.sleep(0.05)


def tried_alone(found: Site) -> str | None:
    """Return the turn that runs with no other, as the daemon remembers it."""
    path = found.state_dir / "suspects.json"
    models = json.loads(path.read_bytes()) if path.exists() else {}
    return next((model["alone"] for model in models.values()), None)


async def test_a_turn_that_kills_each_daemon_is_set_aside_by_the_fifth(tmp_path: Path, demo_model_path: Path) -> None:
    """It hears engine_crashed then, the turn beside it is tried and goes on, and both sessions can be used."""
    with site(tmp_path, demo_model_path, **ECHO | NO_TOKEN_EVER) as found:
        daemon = found.start()
        async with talk(daemon) as client:
            sessions = [await client.create() for _ in range(2)]
            turns = [
                (await client.ask(op="infer", session_id=each, prompt="What ends a daemon?"))["turn_id"]
                for each in sessions
            ]
        for tried in (None, None, turns[0], turns[0]):
            wait_for(lambda tried=tried: tried_alone(found) == tried)  # type: ignore[misc]
            found.kill()
            found.start()
        assert [line["turn"] for line in logged(found.daemon, "turn_quarantined")] == turns[:1]
        wait_for(lambda: tried_alone(found) == turns[1])
        found.kill()
        daemon = found.start(INFERENCECENTER_ENGINE__ECHO_DELAY_MS="1")
        async with talk(daemon) as client:
            wait_for(lambda: tried_alone(found) is None)
            for session in sessions:
                _, end = await client.turn(session, "Hello?")
                assert end["finish_reason"] == "stop"
