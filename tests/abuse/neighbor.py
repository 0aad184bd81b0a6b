"""A client that streams beside the abusive one and records its texts, its errors and the worst gap between two frames.

A gap is counted in ticks of a thread that wakes every 10 ms instead of in seconds: while the machine is stalled, no
ticks pass either.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.e2e.harness import connect_client

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.e2e.harness import Daemon, SocketClient

TICK_S = 0.01
PROMPT = "The harbour was quiet, and the wind came from the sea. "
PARAMS = {"ignore_eos": True, "max_tokens": 200, "temperature": 0.0}


class Ticks:
    """Counts ticks while its context is open."""

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
class StreamObservation:
    """Texts, errors and the worst gap of all turns of the neighbor."""

    texts: set[str] = field(default_factory=set)
    errors: list[dict[str, object]] = field(default_factory=list)
    turns: int = 0
    worst_gap_ticks: int = 0


async def stream_until(daemon: Daemon, until: Coroutine[Any, Any, object], *, least_turns: int) -> StreamObservation:
    """Run the same turn in successive new sessions until ``until`` ends, for at least ``least_turns`` turns."""
    observed = StreamObservation()
    async with asyncio.TaskGroup() as group:
        other = group.create_task(until)
        with Ticks() as ticks:
            while not other.done() or observed.turns < least_turns:
                async with (
                    connect_client(daemon) as client,
                    connect_client(daemon),
                ):  # a second socket of its own finds room too
                    await _turn(client, ticks, observed)
    return observed


async def _turn(client: SocketClient, ticks: Ticks, observed: StreamObservation) -> None:
    session_id = await client.create(mode="raw", store=True)
    await client.send(op="infer", session_id=session_id, prompt=PROMPT, params=PARAMS)
    text, last = "", ticks.n
    while True:
        message = await client.receive()
        if message.get("session_id") != session_id:
            continue
        observed.worst_gap_ticks, last = max(observed.worst_gap_ticks, ticks.n - last), ticks.n
        if message["op"] == "token":
            text += message["content"]
        elif message["op"] == "error":
            observed.errors.append(message)
            break
        elif message["op"] == "end":
            break
    observed.texts.add(text)
    observed.turns += 1
    await client.ask(op="close_session", session_id=session_id)
