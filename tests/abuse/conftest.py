"""Helpers shared by the abuse tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon


async def attack(daemon: Daemon, token: str, name: str, count: int, *, at_once: bool = False) -> dict[str, int]:
    """Run the abusive client in its own process and return how often it received each answer.

    A separate process keeps its CPU time off the observed client. ``at_once`` disables the pauses of the action's rate.
    """
    arguments = [name, str(count), daemon.url, *(["--at-once"] if at_once else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.abuse.attack", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    written, _ = await process.communicate(f"{token}\n".encode())
    assert process.returncode == 0
    outcomes: dict[str, int] = json.loads(written)
    return outcomes
