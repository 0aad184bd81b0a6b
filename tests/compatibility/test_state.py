"""A state directory of an earlier version opens unchanged, and its unfinished answer is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.compatibility.make_state import KEPT_FIELDS
from tests.e2e.harness import connect_client, run_daemon

STATES = sorted((Path(__file__).parent / "states").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
async def test_state_of_an_earlier_version_is_continued(state: Path, tmp_path: Path, demo_model_path: Path) -> None:
    """Its token signs in, its conversations are unchanged, and the interrupted answer resumes at its last token."""
    expected = json.loads((state / "expected.json").read_text())
    shutil.copytree(state, tmp_path / "state")
    for copied in (tmp_path / "state").iterdir():
        copied.chmod(0o600)  # the original modes, which a checkout does not keep
    with run_daemon(tmp_path / "state", demo_model_path) as daemon:
        async with connect_client(daemon) as client:
            for before in expected["sessions"].values():
                now = await client.ask(op="get_session", session_id=before["session_id"])
                assert {field: now[field] for field in KEPT_FIELDS} == before
                assert (await client.turn(before["session_id"], "What is my name?", max_tokens=8))[0]
            cut = expected["unfinished"]
            await client.ask(op="resume_session", session_id=cut["session_id"])
            while (now := await client.ask(op="get_session", session_id=cut["session_id"]))["state"] != "idle":
                await client.until(lambda frame: frame["op"] == "end")
            assert now["turns"][-1]["usage"]["completion_tokens"] == cut["completion_tokens"]
            assert now["transcript"][-1]["content"].startswith(cut["shown"])
