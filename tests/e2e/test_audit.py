"""The audit log of a real daemon, read by the command line while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.e2e.harness import REPLY_TIMEOUT_S, run_daemon

if TYPE_CHECKING:
    from pathlib import Path


def audit(state_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what ``inferencecenter audit`` shows."""
    done = subprocess.run(
        [sys.executable, "-m", "inferencecenter", "audit", "--json", *arguments],
        env={"INFERENCECENTER_STATE_DIR": str(state_dir), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    lines: list[dict[str, Any]] = json.loads(done.stdout)
    return lines


def wait_for_event(state_dir: Path, event: str) -> dict[str, Any]:
    """Return the newest line of an event once it is logged."""
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    while not (lines := audit(state_dir, "--event", event)):
        assert time.monotonic() < deadline, f"no line of {event}"
    return lines[-1]


@pytest.mark.slow
def test_audit_log_covers_the_life_of_a_daemon(tmp_path: Path, demo_model_path: Path) -> None:
    """The log has the first start, a login, a refusal and the stop, and no secret."""
    state_dir = tmp_path / "state"
    with run_daemon(state_dir, demo_model_path, INFERENCECENTER_ENGINE__BACKEND="echo") as daemon:
        token = daemon.admin_token
        token_id = token.split("_")[1]
        wrong = token[:-8] + "00000000"

        async def log_in() -> None:
            for presented in (token, wrong):
                refused = pytest.raises(InvalidStatus) if presented == wrong else contextlib.nullcontext()
                with refused:
                    async with connect(daemon.url, additional_headers={"Authorization": f"Bearer {presented}"}):
                        pass

        asyncio.run(log_in())
        login = wait_for_event(state_dir, "login")
        assert (login["client_id"], login["token_id"], login["address"]) == ("admin", token_id, "127.0.0.1")
        refusal = wait_for_event(state_dir, "login_refused")
        assert (refusal["client_id"], refusal["token_id"], refusal["address"]) == (None, token_id, "127.0.0.1")
    lines = audit(state_dir)
    assert [line["event"] for line in lines] == [
        "daemon_started",
        "client_created",
        "token_created",
        "first_admin",
        "login",
        "login_refused",
        "daemon_stopped",
    ]
    assert token.split("_")[2][:16] not in json.dumps(lines)
