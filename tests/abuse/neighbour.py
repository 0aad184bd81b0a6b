"""A client that streams beside the abusive one: its texts, its errors, and the worst gap between two of its frames.

A gap is counted in ticks of a thread that wakes every 10 ms, and not in seconds: while the machine stands still, there
are no ticks either.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.e2e.harness import talk

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.e2e.harness import Daemon, Talk

TICK_S = 0.01
PROMPT = "The harbour was quiet, and the wind came from the sea. "
PARAMS = {"ignore_eos": True, "max_tokens": 200, "temperature": 0.0}


class Ticks:
    """Counts while its context is open."""

    def __init__(self) -> None:
        self.n = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            self.n += 1


@dataclass
class Heard:
    """What the neighbour met with in all of its turns."""

    texts: set[str] = field(default_factory=set)
    errors: list[dict[str, object]] = field(default_factory=list)
    turns: int = 0
    worst_gap_ticks: int = 0


async def listen(daemon: Daemon, until: Coroutine[Any, Any, object], *, least_turns: int) -> Heard:
    """Run the same turn in one new session after the other until something is done, and ``least_turns`` at least."""
    heard = Heard()
    async with asyncio.TaskGroup() as group:
        other = group.create_task(until)
        with Ticks() as ticks:
            while not other.done() or heard.turns < least_turns:
                async with talk(daemon) as client, talk(daemon):  # a second socket of its own finds room too
                    await _turn(client, ticks, heard)
    return heard


async def _turn(client: Talk, ticks: Ticks, heard: Heard) -> None:
    session_id = await client.create(mode="raw", store=True)
    await client.send(op="infer", session_id=session_id, prompt=PROMPT, params=PARAMS)
    text, last = "", ticks.n
    while True:
        message = await client.receive()
        if message.get("session_id") != session_id:
            continue
        heard.worst_gap_ticks, last = max(heard.worst_gap_ticks, ticks.n - last), ticks.n
        if message["op"] == "token":
            text += message["content"]
        elif message["op"] == "error":
            heard.errors.append(message)
            break
        elif message["op"] == "end":
            break
    heard.texts.add(text)
    heard.turns += 1
    await client.ask(op="close_session", session_id=session_id)
