"""What the tests of abuse share."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon


async def attack(daemon: Daemon, token: str, name: str, count: int, *, at_once: bool = False) -> dict[str, int]:
    """Have the abusive client do an act ``count`` times, and return how often it got which answer.

    It is another process, so that it does not take its time from the client that is watched. ``at_once`` leaves out the
    pauses that its rate wants.
    """
    arguments = [name, str(count), daemon.url, *(["--at-once"] if at_once else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.abuse.attack", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    written, _ = await process.communicate(f"{token}\n".encode())
    assert process.returncode == 0
    outcomes: dict[str, int] = json.loads(written)
    return outcomes
