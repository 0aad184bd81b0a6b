"""The daemon is lost at every step of a turn: the next one goes on with it, and has all that anybody was shown."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import talk
from tests.e2e.witness import Witness
from tests.faults.harness import IN_NO_HURRY, LINE

if TYPE_CHECKING:
    from tests.faults.harness import Site

PAST = "It was long ago."
QUESTION = LINE.format("Ada") * 3
"""Is read in several batches."""


async def goes_on(echo: Site, witness: Witness, *, key: str) -> None:
    """Start another daemon: the session is there under another epoch, and its turn ends as if nothing had been.

    The question sent again does not make it run again, and the next turn works.
    """
    echo.start()
    before, known = witness.epoch, dict(witness.turns)
    async with talk(echo.daemon) as client:
        answer = await witness.resume(client)
        assert (answer["resumed"], answer["reason"]) == (False, "other_epoch")
        assert witness.epoch != before
        await witness.infer(QUESTION, key=key)
        await client.until(
            lambda message: message["op"] in ("queued", "end") and message["session_id"] == witness.session_id
        )
        assert await witness.finish() == QUESTION
        assert witness.end["op"] == "end"
        session = await witness.described()
        assert len(session["turns"]) == len(witness.turns) == 2
        assert set(known) <= set(witness.turns)
        assert await witness.turn("And then?") == "And then?"
        texts = [message["content"] for message in (await witness.described())["transcript"]]
    assert texts[-6:] == [PAST, PAST, QUESTION, QUESTION, "And then?", "And then?"]


SLOW = pytest.mark.slow
COMMITS = [
    pytest.param("before-TurnQueued", 0, "nothing", id="before it is written down", marks=SLOW),
    pytest.param("after-TurnQueued", 0, "nothing", id="before the first word"),
    pytest.param("before-TokensAppended", 0, "nothing queued", id="before any text", marks=SLOW),
    pytest.param("after-TokensAppended", 0, "nothing queued", id="with text that nobody has seen", marks=SLOW),
    pytest.param("before-TokensAppended", 100, "some", id="in the middle", marks=SLOW),
    pytest.param("after-TokensAppended", 100, "some", id="in the middle, with text that nobody has seen"),
    pytest.param("before-TurnEnded", 0, "queued some all", id="before the end is written down", marks=SLOW),
    pytest.param("after-TurnEnded", 0, "queued some all", id="before the end is told"),
]
"""Where, how often that is passed before, and what may have been shown then: a commit takes what is there with it.

On a slow disk that is the whole answer.
"""


def extent(witness: Witness) -> str:
    """Return how much of the question's turn was shown."""
    turns = list(witness.turns.values())[1:]
    if not turns:
        return "nothing"
    assert turns[0].end is None
    return {"": "queued", QUESTION: "all"}.get(turns[0].text, "some")


@pytest.mark.parametrize(("place", "passes", "shown"), COMMITS)
async def test_it_dies_at_a_commit(echo: Site, place: str, passes: int, shown: str) -> None:
    """Killed right before or after something of the turn is in the file."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn(PAST) == PAST
        echo.traps.set(place, passes=passes)
        await witness.infer(QUESTION, key="k")
        await witness.drain()
    echo.dead()
    assert extent(witness) in shown.split()
    await goes_on(echo, witness, key="k")


@pytest.mark.parametrize(("place", "passes"), [pytest.param("prefill", 2, marks=SLOW), ("decode", 100)])
async def test_it_dies_with_its_engine(echo: Site, place: str, passes: int) -> None:
    """Killed in the middle of a batch, while a question is read and while an answer is generated."""
    async with talk(echo.daemon) as client:
        # The engine may still know what another test has asked; this it does not.
        witness = await Witness.open(client, system=os.urandom(8).hex())
        assert await witness.turn(PAST) == PAST
        echo.traps.set(place, "kill-front", passes=passes)
        await witness.infer(QUESTION, key="k")
        await witness.drain()
    echo.dead()
    await goes_on(echo, witness, key="k")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["queued", "token", "end"])
async def test_it_dies_when_something_was_told(echo: Site, op: str) -> None:
    """Killed as soon as a client has heard that its turn waits, speaks, or is over."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn(PAST) == PAST
        await witness.infer(QUESTION, key="k")
        await witness.until(op)
        echo.kill()
        await witness.drain()
    await goes_on(echo, witness, key="k")


@pytest.mark.slow
async def test_many_turns_at_once(echo: Site) -> None:
    """Turns that run, wait and are parked when the daemon dies all end in the next one, in the order of their age."""
    async with talk(echo.daemon) as client:
        witnesses = [await Witness.open(client) for _ in range(6)]
        for number, witness in enumerate(witnesses):
            await witness.infer(f"{number}: {LINE * 2}")
        for witness in witnesses[:3]:
            await witness.until("token")
        echo.kill()
        for witness in witnesses:
            await witness.drain()
    echo.start()
    async with talk(echo.daemon) as client:
        for witness in witnesses:
            assert (await witness.resume(client))["resumed"] is False
        for number, witness in enumerate(witnesses):
            assert await witness.finish() == f"{number}: {LINE * 2}"
            assert await witness.turn("Next.") == "Next."
            assert len((await witness.described())["turns"]) == 2


@pytest.mark.slow
async def test_killed_again_and_again(echo: Site) -> None:
    """Five daemons share one answer; each has all that the ones before it have shown."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(QUESTION)
        await witness.until("token")
        echo.kill()
        await witness.drain()
    for _ in range(3):
        echo.start()
        async with talk(echo.daemon) as client:
            await witness.resume(client)
            await witness.until("token")
            echo.kill()
            await witness.drain()
    echo.start()
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert await witness.finish() == QUESTION
        await witness.described()


@pytest.mark.slow
async def test_the_first_engines_of_the_next_one_die(echo: Site) -> None:
    """Before any model is known: the turn that was left unfinished waits for the third."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn(PAST) == PAST
        await witness.infer(QUESTION, key="k")
        await witness.until("token")
        echo.kill()
        await witness.drain()
    for place in ("load", "loaded"):
        echo.traps.set(place)
    await goes_on(echo, witness, key="k")
    assert echo.traps.left == []


async def test_it_is_stopped_in_the_middle(echo: Site) -> None:
    """SIGTERM: a turn that is not over in time is cut, its socket closes with 1012, the next daemon goes on with it.

    All was written down, so the epoch is the same, also if that is more than the socket was told.
    """
    echo.daemon.stop()
    echo.start(**IN_NO_HURRY)  # type: ignore[arg-type]
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        await witness.infer(QUESTION)
        await witness.until("token")
        echo.daemon.process.terminate()
        going = await client.until(lambda message: message["op"] == "going_away")
        assert going["resume"] is True
        assert await witness.drain() == 1012
    assert await asyncio.to_thread(echo.daemon.process.wait, 60) == 0
    assert witness.last.end is None
    shown, epoch = witness.text, witness.epoch
    echo.start()
    async with talk(echo.daemon) as client:
        answer = await witness.resume(client)
        assert answer.get("reason") in (None, "too_old")
        assert witness.epoch == epoch
        assert (await witness.finish()).startswith(shown)
        assert witness.text == QUESTION
        assert await witness.turn("Next.") == "Next."
        await witness.described()


async def test_a_long_session_is_not_read_again(echo: Site) -> None:
    """After an orderly stop the KV of a session of a thousand tokens comes from disk."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn(LINE * 12, max_tokens=4) == LINE[:4]
    echo.daemon.stop()
    assert list((echo.state_dir / "kv").glob("*/*")), "nothing was brought to disk"
    echo.start()
    async with talk(echo.daemon) as client:
        assert (await witness.resume(client))["resumed"] is True
        assert await witness.turn("And then?") == "And then?"
        assert witness.end["stats"]["prompt_tokens"] > 1000
        assert witness.end["stats"]["cached_tokens"] > 1000
        await witness.described()


@pytest.mark.parametrize("lost", ["daemon", pytest.param("engine", marks=SLOW)])
async def test_an_idle_session_is_not_read_again(echo: Site, lost: str) -> None:
    """Killed while nobody asked anything: the next turn reads what is new in it, though nothing was put away."""
    async with talk(echo.daemon) as client:
        witness = await Witness.open(client, system=os.urandom(8).hex())
        before = echo.daemon.figure("parked_sessions")
        assert await witness.turn(QUESTION) == QUESTION
        history = witness.end["stats"]["prompt_tokens"] + witness.end["stats"]["tokens"]
        async with asyncio.timeout(60):
            while echo.daemon.figure("parked_sessions") <= before:
                await client.ask(op="ping")
        if lost == "daemon":
            echo.kill()
            await witness.drain()
        else:
            os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
    if lost == "daemon":
        echo.start()
    async with talk(echo.daemon) as client:
        await witness.resume(client)
        assert await witness.turn("And then?") == "And then?"
        assert witness.end["stats"]["cached_tokens"] >= history - 2
        await witness.described()


@pytest.mark.slow
async def test_a_session_that_is_not_stored_ends_with_its_daemon(echo: Site) -> None:
    """It is in no file, neither its text nor its KV."""
    secret = "Nobody shall ever know."
    async with talk(echo.daemon) as client:
        private = await Witness.open(client, store=False)
        assert await private.turn(secret) == secret
        kept = await Witness.open(client)
        assert await kept.turn(PAST) == PAST
    echo.daemon.stop()
    stored = [path.read_bytes() for path in echo.state_dir.rglob("*") if path.is_file()]
    assert any(PAST.encode() in each for each in stored)
    spelled = b"".join(bytes((byte, 0)) for byte in secret.encode())
    assert not any(secret.encode() in each or spelled in each for each in stored)
    echo.start()
    async with talk(echo.daemon) as client:
        refusal = await client.ask(op="resume_session", session_id=private.session_id, epoch=private.epoch, last_seq=1)
        assert refusal["code"] == "session_not_found"
        assert (await kept.resume(client))["resumed"] is True
