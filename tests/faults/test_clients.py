"""A client is lost, or stops reading, at every phase of a turn: it comes back and finds all that it has missed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import connect

from tests.e2e.harness import ENDLESS, Talk, talk
from tests.e2e.witness import Witness
from tests.faults.harness import ECHO, LINE, logged, open_files, site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon
    from tests.faults.harness import Site

QUESTION = LINE.format("Ada") * 3


async def vanish(client: Talk) -> None:
    """End a socket without a word."""
    client.socket.transport.abort()
    await client.socket.wait_closed()


@pytest.mark.parametrize("phase", ["at once", "queued", "progress", "token", "end"])
async def test_it_is_gone(echo: Site, phase: str) -> None:
    """Its turn goes on; on another socket it gets the missing events, those of each kind in their order, once."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client, system=os.urandom(8).hex())
        await witness.infer(QUESTION, key="k")
        if phase != "at once":
            await witness.until(phase)
        await vanish(client)
    async with talk(echo.daemon) as client:
        answer = await witness.resume(client)
        assert answer["resumed"] is True
        await witness.infer(QUESTION, key="k")
        assert await witness.finish() == QUESTION
        assert len(witness.turns) == 1
        assert await witness.turn("And then?") == "And then?"
        assert len((await witness.described())["turns"]) == 2


async def test_it_drops_its_socket_all_the_time(echo: Site) -> None:
    """A new socket for every few tokens: the text is the same as on one."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(QUESTION)
        await witness.until("token")
        await vanish(client)
    for _ in range(12):
        async with talk(echo.daemon) as client:
            assert (await witness.resume(client))["resumed"] is True
            for _ in range(3):
                await client.receive()
            await vanish(client)
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert await witness.finish() == QUESTION
        await witness.described()


async def test_another_socket_takes_a_session_over(echo: Site) -> None:
    """The first is told so, hears no more of it, and goes on with its other session."""
    async with talk(echo.daemon) as first, talk(echo.daemon) as second:
        moved, stays = await Witness.open(first), await Witness.open(first)
        await moved.infer(QUESTION)
        await stays.infer(QUESTION)
        await moved.until("token")
        assert (await moved.resume(second))["resumed"] is True
        detached = await first.until(lambda message: message["op"] == "session_detached")
        assert (detached["session_id"], detached["reason"]) == (moved.session_id, "resumed_elsewhere")
        n_seen = len(first.seen)
        assert await moved.finish() == QUESTION
        assert await stays.finish() == QUESTION
        assert not [message for message in first.seen[n_seen:] if message.get("session_id") == moved.session_id]
        assert await moved.turn("Here.") == "Here."
        assert await stays.turn("There.") == "There."


async def test_a_question_that_is_sent_twice(echo: Site) -> None:
    """With one turn_key it runs once, on whatever sockets it is sent; without one the second is refused."""
    async with talk(echo.daemon) as first, talk(echo.daemon) as second:
        witness = await Witness.open(first)
        await witness.infer(QUESTION, key="k")
        await witness.infer(QUESTION, key="k")
        await witness.until("token")
        assert (await witness.resume(second))["resumed"] is True
        await witness.infer(QUESTION, key="k")
        await witness.infer(QUESTION)
        busy = await second.until(lambda message: message["op"] == "error")
        assert busy["code"] == "session_busy"
        assert await witness.finish() == QUESTION
        assert len(witness.turns) == 1
        await witness.infer(QUESTION, key="k")
        await witness.until("end")
        assert len((await witness.described())["turns"]) == 1


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Site]:
    """A daemon that generates as fast as it can and keeps little for those who do not read."""
    settings = {
        "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "0",
        "INFERENCECENTER_SERVER__OUTBOX_BYTES": "65536",
        "INFERENCECENTER_SESSIONS__REPLAY_KIB": "64",
    }
    with site(tmp_path_factory.mktemp("talkative"), demo_model_path, **(ECHO | settings)) as found:
        found.start()
        yield found


@contextlib.asynccontextmanager
async def narrow(daemon: Daemon) -> AsyncIterator[Talk]:
    """A socket for which the kernel keeps little, and of which nothing is read unless somebody asks."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
    raw.connect(("127.0.0.1", daemon.port))
    raw.setblocking(False)
    headers = {"Authorization": f"Bearer {daemon.admin_token}"}
    async with connect(
        daemon.url,
        sock=raw,
        additional_headers=headers,
        subprotocols=["inferencecenter.v1"],  # type: ignore[list-item]
        max_queue=1,
        ping_interval=None,
    ) as websocket:
        yield Talk(websocket)


async def test_it_never_reads(talkative: Site) -> None:
    """It asks for more than it reads while others talk: its socket is aborted, theirs are not, and it comes back."""
    async with talk(talkative.daemon) as client, narrow(talkative.daemon) as deaf:
        witness = await Witness.open(deaf)
        others = [await Witness.open(client) for _ in range(3)]
        n_open = open_files(talkative.daemon.process.pid)
        await witness.infer(LINE, n_probs=1, **ENDLESS)
        rounds = 0
        while open_files(talkative.daemon.process.pid) >= n_open:
            for other in others:
                await other.infer(f"{rounds}: {LINE}")
            for other in others:
                assert await other.finish() == f"{rounds}: {LINE}"
            rounds += 1
        assert logged(talkative.daemon, "slow_reader")
        await vanish(deaf)
    async with talk(talkative.daemon) as client:
        answer = await witness.resume(client)
        assert answer["reason"] == "too_old"
        if not witness.is_over:
            await client.send(op="abort", session_id=witness.session_id)
            await witness.finish()
        assert await witness.turn("I am back.") == "I am back."
        await witness.described()


@pytest.mark.slow
async def test_it_reads_late(talkative: Site) -> None:
    """One that reads again before there is too much for it gets everything, in fewer frames."""
    prompt = LINE * 8
    async with narrow(talkative.daemon) as slow, talk(talkative.daemon) as client:
        witness, other = await Witness.open(slow), await Witness.open(client)
        await witness.infer(prompt)
        assert await other.turn(prompt) == prompt
        assert await witness.finish() == prompt
        assert json.dumps(witness.text) == json.dumps(other.text)
        n_frames = [sum(message["op"] == "token" for message in each.seen) for each in (slow, client)]
        assert n_frames[0] <= n_frames[1]
        assert await witness.turn("Next.") == "Next."
