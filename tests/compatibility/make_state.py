"""Writes the state directory of a daemon killed during an answer.

Run ``python -m tests.compatibility.make_state DIR`` with a released version, and keep what it writes under
``tests/compatibility/states/``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

import inferencecenter
from tests.e2e.harness import connect_client, start_daemon

FILES = ("sessions.sqlite3", "accounts.sqlite3", "admin.token")
KEPT_FIELDS = ("session_id", "metadata", "model", "n_tokens", "params", "transcript", "turns", "usage")
"""What ``get_session`` says before the daemon is killed and after the next one has started."""
_PARAMS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
_UNFINISHED: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 2000}
_TOKENS_BEFORE_KILL = 40


async def main(target: Path) -> None:
    """Run conversations on a daemon, kill it, and copy its files and their expected content to ``target``."""
    model = Path(inferencecenter.__file__).parent / "demo" / "demo.gguf"
    with tempfile.TemporaryDirectory() as scratch:
        state_dir = Path(scratch) / "state"
        daemon = start_daemon(state_dir, model)
        try:
            daemon.wait_ready()
            async with connect_client(daemon) as client:
                kept = await client.create(metadata={"title": "kept"}, system="You are brief.")
                await client.turn(kept, "My name is Ada. I live in Vienna.", **_PARAMS)
                first = client.seen[-1]["turn_id"]
                await client.turn(kept, "What is my name?", **_PARAMS)
                forked = (await client.ask(op="fork_session", session_id=kept, turn=first))["session_id"]
                await client.turn(forked, "Where do I live?", **_PARAMS)
                cut = await client.create()
                await client.send(op="infer", session_id=cut, prompt="Tell me a story.", params=_UNFINISHED)
                shown = ""
                for _ in range(_TOKENS_BEFORE_KILL):
                    token = await client.until(lambda frame: frame["op"] == "token")
                    shown += token["content"]
                histories = {
                    name: await client.ask(op="get_session", session_id=session_id)
                    for name, session_id in (("kept", kept), ("forked", forked))
                }
                daemon.process.kill()
                daemon.process.wait()
        finally:
            if daemon.process.poll() is None:
                daemon.process.kill()
        _copy(state_dir, target)
    expected = {
        "sessions": {name: {field: found[field] for field in KEPT_FIELDS} for name, found in histories.items()},
        "unfinished": {"session_id": cut, "shown": shown, "completion_tokens": _UNFINISHED["max_tokens"]},
    }
    (target / "expected.json").write_text(json.dumps(expected, indent=2) + "\n")


def _copy(state_dir: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in FILES:
        if name.endswith(".sqlite3"):
            with contextlib.closing(sqlite3.connect(state_dir / name)) as file:
                file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copy(state_dir / name, target / name)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
