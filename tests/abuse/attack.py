"""Runs the abusive client in its own process: ``python -m tests.abuse.attack ACTION COUNT URL [--at-once]``.

It reads its token from standard input, repeats one of ``benchmarks.abuse.actions`` at its rate or without pauses, and
writes the number of answers of each kind as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

from benchmarks.abuse.actions import ACTIONS
from benchmarks.abuse.attacker import Attacker
from benchmarks.target import TargetSpec

LONGEST_S: Final = 20.0


async def attack(name: str, count: int, spec: TargetSpec, *, at_once: bool) -> dict[str, int]:
    """Repeat an action ``count`` times, for at most ``LONGEST_S``; return the number of each answer."""
    (action,) = (each for each in ACTIONS if each.name == name)
    async with Attacker(spec) as attacker:
        given = await action.prepare(attacker)
        ends = time.monotonic() + LONGEST_S
        for _ in range(count):
            if time.monotonic() > ends:  # refusals are paced
                break
            await action.once(attacker, given)
            await asyncio.sleep(0 if at_once else 1 / action.rate_per_s)
        return dict(attacker.outcomes)


if __name__ == "__main__":
    target = TargetSpec(name="abused", kind="inferencecenter", url=sys.argv[3], token=sys.stdin.readline().strip())
    json.dump(asyncio.run(attack(sys.argv[1], int(sys.argv[2]), target, at_once="--at-once" in sys.argv)), sys.stdout)
