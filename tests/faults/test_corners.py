"""Two things happen at once: an end and a loss, half a character and a crash, a shorter prompt and a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import stopped, talk
from tests.e2e.witness import Witness
from tests.faults.harness import CROWDED, ECHO, IN_NO_HURRY, LINE, site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.harness import Site

SLOW = pytest.mark.slow
SPELLED = "Grüße, 漢字 und 🙂 - "
"""Characters of two, three and four tokens, as echo counts."""
HALVES = [pytest.param(passes, marks=() if passes == 4 else SLOW) for passes in range(len(SPELLED.encode()) + 3)]


@pytest.mark.parametrize("passes", HALVES)
async def test_half_a_character_and_half_a_stop_string(echo: Site, passes: int) -> None:
    """The engine dies at any token: characters stay whole, and nothing of a stop string is shown or lost."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        echo.traps.set("decode", passes=passes)
        text = await witness.turn(f"{SPELLED}STOP and no more", stop=["STOP"])
        assert text == SPELLED
        assert (witness.end["finish_reason"], witness.end["stop"]) == ("stop", "STOP")
        assert echo.traps.left == []
        await witness.described()
        assert await witness.turn("STOPP!", stop=["STOP it"]) == "STOPP!"


@pytest.mark.parametrize("place", ["before-TokensAppended", "after-TokensAppended"])
@pytest.mark.parametrize("passes", [pytest.param(passes, marks=SLOW) for passes in (3, 9, 14, 21, 27)])
async def test_half_a_character_and_another_daemon(echo: Site, place: str, passes: int) -> None:
    """The same when it is the daemon that dies."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        echo.traps.set(place, passes=passes)
        await witness.infer(f"{SPELLED}STOP and no more", stop=["STOP"])
        await witness.drain()
    echo.dead()
    echo.start()
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert await witness.finish() == SPELLED
        assert witness.end["finish_reason"] == "stop"
        await witness.described()


@pytest.mark.parametrize("lost", ["abort first", pytest.param("kill first", marks=SLOW)])
async def test_a_turn_is_aborted_as_its_engine_dies(echo: Site, lost: str) -> None:
    """It ends as aborted, once, with what was shown."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(LINE * 10)
        await witness.until("token")
        if lost == "kill first":
            os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
            await client.send(op="abort", session_id=witness.session_id)
        else:
            with stopped(echo.daemon.engine_pid()):
                await client.send(op="abort", session_id=witness.session_id)
                await client.ask(op="ping")
                os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
        assert (LINE * 10).startswith(await witness.finish())
        assert witness.end["finish_reason"] == "aborted"
        await witness.described()
        assert await witness.turn("Next.") == "Next."


@pytest.mark.slow
async def test_a_turn_is_aborted_as_its_daemon_stops(echo: Site) -> None:
    """An abort that the engine had no time for holds in the next daemon: the turn does not go on, and says so."""
    echo.daemon.stop()
    echo.start(**IN_NO_HURRY, INFERENCECENTER_ENGINE__HANG_TIMEOUT_S="60")  # type: ignore[arg-type]
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(LINE * 10)
        await witness.until("token")
        with stopped(echo.daemon.engine_pid()):
            await client.send(op="abort", session_id=witness.session_id)
            await client.ask(op="ping")
            echo.daemon.process.terminate()
            await witness.drain()
            assert await asyncio.to_thread(echo.daemon.process.wait, 30) == 0
    assert not witness.is_over
    echo.start()
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert (LINE * 10).startswith(await witness.finish())
        assert witness.end["finish_reason"] == "aborted"
        await witness.described()
        assert await witness.turn("Next.") == "Next."


@pytest.mark.slow
async def test_a_session_is_closed_while_there_is_no_engine(echo: Site) -> None:
    """It is gone, and its turn does not come back with the next engine or daemon."""
    async with talk(echo.daemon) as client:
        witness, other = await Witness.open(client), await Witness.open(client)
        await witness.infer(LINE * 10)
        await other.infer(LINE)
        await other.until("token")
        os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
        assert (await client.ask(op="close_session", session_id=witness.session_id))["op"] == "session_closed"
        assert await other.finish() == LINE
        closed = len([message for message in client.seen if message["op"] == "end"])
        assert closed <= 2
    echo.kill()
    echo.start()
    async with talk(echo.daemon) as client:
        refusal = await client.ask(op="get_session", session_id=witness.session_id)
        assert refusal["code"] == "session_not_found"
        await other.resume(client)
        await other.described()


@pytest.mark.slow
async def test_the_engine_dies_while_the_daemon_stops(echo: Site) -> None:
    """There is time, so another engine ends the turn; then the socket closes, and the daemon ends as it should."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(LINE * 5)
        await witness.until("token")
        echo.daemon.process.terminate()
        await client.until(lambda message: message["op"] == "going_away")
        os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
        assert await witness.finish() == LINE * 5
        assert await witness.drain() == 1012
    assert await asyncio.to_thread(echo.daemon.process.wait, 60) == 0
    echo.start()
    async with talk(echo.daemon) as client:
        assert (await witness.resume(client))["resumed"] is True
        await witness.described()


@pytest.mark.slow
async def test_the_daemon_is_told_twice_to_stop(echo: Site) -> None:
    """The second SIGTERM ends it at once; the next daemon goes on with the turn all the same."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(LINE * 20)
        await witness.until("token")
        echo.daemon.process.terminate()
        await client.until(lambda message: message["op"] == "going_away")
        echo.daemon.process.terminate()
        await witness.drain()
    await asyncio.to_thread(echo.daemon.process.wait, 60)
    echo.start()
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert await witness.finish() == LINE * 20
        await witness.described()


@pytest.mark.slow
async def test_the_daemon_stops_while_its_engine_hangs(echo: Site) -> None:
    """It ends within its deadlines, without KV, and the turn goes on in the next one."""
    echo.daemon.stop()
    echo.start(**IN_NO_HURRY, INFERENCECENTER_ENGINE__HANG_TIMEOUT_S="60")  # type: ignore[arg-type]
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(LINE * 5)
        await witness.until("token")
        with stopped(echo.daemon.engine_pid()):
            echo.daemon.process.terminate()
            assert await witness.drain() == 1012
            assert await asyncio.to_thread(echo.daemon.process.wait, 30) == 0
    echo.start()
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert await witness.finish() == LINE * 5
        await witness.described()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Site]:
    """A daemon whose sessions are soon too long."""
    settings = ECHO | CROWDED | {"INFERENCECENTER_ENGINE__N_CTX": "512"}
    with site(tmp_path_factory.mktemp("small"), demo_model_path, **settings) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["engine", "daemon"])
@pytest.mark.parametrize("n_words", [0, 1, 30])
async def test_the_context_was_full(small: Site, lost: str, n_words: int) -> None:
    """What was dropped stays dropped: a turn that goes on with a shorter prompt does so after a loss, to its end."""
    small.ensure()
    prompt = LINE.format("Ada") * 2
    async with talk(small.daemon) as client:
        witness = await Witness.open(client)
        for number in range(3):
            await witness.turn(f"{number}: This is how it began.")
        await witness.infer(prompt)
        await witness.until("context_shifted")
        for _ in range(n_words):
            await witness.until("token")
        if lost == "engine":
            os.kill(small.daemon.engine_pid(), signal.SIGKILL)
        else:
            small.kill()
            await witness.drain()
            small.start()
    async with talk(small.daemon) as client:
        await witness.resume(client)
        assert await witness.finish() == prompt
        assert witness.end["finish_reason"] == "stop"
        session = await witness.described()
        assert session["dropped_messages"] > 0
        assert len(session["transcript"]) == 8
        assert await witness.turn("Next.") == "Next."
