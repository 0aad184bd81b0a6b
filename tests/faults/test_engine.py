"""The engine is lost at every moment of its work: turns go on where they were, and nobody notices but by a pause."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import stopped, talk
from tests.e2e.witness import Witness
from tests.faults.harness import CROWDED, ECHO, LINE, data_bytes, logged, site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.e2e.harness import Talk
    from tests.faults.harness import Site

NAMES = ["Ada", "Boris", "Clara", "Diego"]


async def finish(witnesses: list[Witness]) -> None:
    """Listen until all turns are over."""
    for witness in witnesses:
        await witness.finish()


async def all_ask(witnesses: list[Witness], prompts: list[str]) -> None:
    """Ask in every session at once, and check that the answers are what echo says, ended well."""
    for witness, prompt in zip(witnesses, prompts, strict=True):
        await witness.infer(prompt)
    await finish(witnesses)
    for witness, prompt in zip(witnesses, prompts, strict=True):
        assert witness.end["op"] == "end", witness.end
        assert witness.text == prompt


def losses(client: Talk) -> int:
    """Return how many engines were started again that the client has heard of."""
    return sum(message["op"] == "engine" and message["state"] == "ready" for message in client.seen)


@contextlib.asynccontextmanager
async def crowd(echo: Site) -> AsyncIterator[tuple[Talk, list[Witness]]]:
    """Four sessions on two slots with a past, so that KV moves all the time; at the end all are as they should be.

    The next turn of each works, and the transcripts hold what was shown.
    """
    async with talk(echo.daemon) as client:
        witnesses = [await Witness.open(client) for _ in NAMES]
        # What another test has said the engine may still know.
        await all_ask(witnesses, [f"{os.urandom(4).hex()}: I am {name}." for name in NAMES])
        yield client, witnesses
        assert echo.traps.left == []
        await all_ask(witnesses, [f"And {name} goes on." for name in NAMES])
        for witness in witnesses:
            session = await witness.described()
            assert len(session["turns"]) == len(witness.turns) == 3


SLOW = pytest.mark.slow
PLACES = [
    ("prefill", 0),
    pytest.param("prefill", 1, marks=SLOW),
    pytest.param("decode", 0, marks=SLOW),
    ("decode", 40),
    ("save", 0),
    pytest.param("save", 5, marks=SLOW),
    ("restore", 0),
    pytest.param("restore", 4, marks=SLOW),
]


@pytest.mark.parametrize(("place", "passes"), PLACES)
async def test_it_dies_at_work(echo: Site, place: str, passes: int) -> None:
    """Killed while it reads, generates, parks or restores, early and late: every answer is whole, and said once."""
    async with crowd(echo) as (client, witnesses):
        echo.traps.set(place, passes=passes)
        await all_ask(witnesses, [LINE.format(name) for name in NAMES])
        assert losses(client) == 1


@pytest.mark.parametrize(
    "action", [pytest.param("abort", marks=SLOW), pytest.param("segfault", marks=SLOW), "exhaust", "garbage"]
)
async def test_it_ends_in_another_way(echo: Site, action: str) -> None:
    """An abort of llama.cpp, a segmentation fault, no memory left, or nonsense on the pipe are as a kill."""
    async with crowd(echo) as (client, witnesses):
        echo.traps.set("decode", action, passes=30)
        await all_ask(witnesses, [LINE.format(name) for name in NAMES])
        assert losses(client) == 1


@pytest.mark.parametrize("place", [pytest.param("load", marks=SLOW), "loaded"])
async def test_it_dies_while_it_loads(echo: Site, place: str) -> None:
    """So does the one that replaces it, before it is ready: the third has its turns, and those asked meanwhile."""
    async with crowd(echo) as (client, witnesses):
        echo.traps.set("decode", passes=30)
        echo.traps.set(place)
        late = await Witness.open(client)
        for witness, name in zip(witnesses, NAMES, strict=True):
            await witness.infer(LINE.format(name))
        await client.until(lambda message: message["op"] == "engine" and message["state"] == "restarting")
        await late.infer("Is anybody there?")
        await finish([*witnesses, late])
        assert late.text == "Is anybody there?"
        assert [witness.text for witness in witnesses] == [LINE.format(name) for name in NAMES]
        assert losses(client) == 1, "one was never ready"


async def test_it_dies_twice_in_a_row(echo: Site) -> None:
    """So does the next one, right when it goes on; then those turns run alone, and all end well."""
    async with crowd(echo) as (client, witnesses):
        echo.traps.set("decode", passes=30, name="first")
        echo.traps.set("decode", passes=0, name="second")
        await all_ask(witnesses, [LINE.format(name) for name in NAMES])
        assert losses(client) == 2


@pytest.mark.slow
async def test_one_after_the_other(echo: Site) -> None:
    """Five engines in a row die at work, each after it has generated a little: the answers are theirs together."""
    async with crowd(echo) as (client, witnesses):
        for number in range(5):
            echo.traps.set("decode", passes=50, name=str(number))
        await all_ask(witnesses, [LINE.format(name) * 2 for name in NAMES])
        assert losses(client) == 5


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "flood"])
async def test_it_hangs(echo: Site, action: str) -> None:
    """One that is stopped, or floods its pipe instead of working, is ended after the time that a hang takes."""
    async with crowd(echo) as (client, witnesses):
        first = echo.daemon.engine_pid()
        if action == "flood":
            echo.traps.set("decode", action, passes=30)
        for witness, name in zip(witnesses, NAMES, strict=True):
            await witness.infer(LINE.format(name))
        await witnesses[0].until("token")
        with stopped(first) if action == "stop" else contextlib.nullcontext():
            async with talk(echo.daemon) as other:
                assert (await other.ask(op="ping"))["op"] == "pong", "the front answers meanwhile"
            await finish(witnesses)
        assert losses(client) == 1
        assert logged(echo.daemon, "engine_hangs")[-1]["pid"] == first


@pytest.mark.slow
async def test_it_gets_no_more_memory(tmp_path: Path, demo_model_path: Path) -> None:
    """A limit on its memory that a question of a megabyte runs into costs an engine, and no answer."""
    # Of so many characters that the front cannot tell that they do not fit.
    settings = ECHO | CROWDED | {"INFERENCECENTER_ENGINE__N_CTX": "131072"}
    with site(tmp_path, demo_model_path, **settings) as large:
        large.start()
        async with crowd(large) as (client, witnesses):
            glutton = await Witness.open(client, on_full="stop")
            pid = large.daemon.engine_pid()
            resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid), resource.RLIM_INFINITY))
            await glutton.infer(LINE * 10_000)
            await all_ask(witnesses, [LINE.format(name) for name in NAMES])
            await glutton.finish()
            assert (glutton.end["op"], glutton.end["code"]) == ("error", "prompt_too_long")
            assert losses(client) == 1
            assert await glutton.turn("Less.") == "Less."


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Site]:
    """A daemon that decodes eight turns at once, and starts engines again a few times only."""
    settings = {"INFERENCECENTER_ENGINE__SLOTS": "8", "INFERENCECENTER_ENGINE__MAX_RESTARTS": "5"}
    with site(tmp_path_factory.mktemp("wide"), demo_model_path, **(ECHO | settings)) as found:
        found.start()
        yield found


@pytest.mark.parametrize(("action", "n_engines"), [("segfault", 3), pytest.param("kill", 4, marks=SLOW)])
async def test_a_turn_that_kills_engines(wide: Site, action: str, n_engines: int) -> None:
    """Of eight turns at once only the one that kills ends with engine_crashed; its session and the others go on."""
    wide.traps.set("poison", action)
    async with talk(wide.daemon) as client:
        witnesses = [await Witness.open(client) for _ in range(8)]
        prompts = [f"{number}: {LINE.format('Ada')}" for number in range(8)]
        prompts[5] = "This is poison for an engine, and for nobody else."
        for witness, prompt in zip(witnesses, prompts, strict=True):
            await witness.infer(prompt)
        await finish(witnesses)
        culprit = witnesses.pop(5)
        assert culprit.end["op"] == "error"
        assert culprit.end["code"] == "engine_crashed"
        for witness, prompt in zip(witnesses, prompts[:5] + prompts[6:], strict=True):
            assert (witness.end["op"], witness.text) == ("end", prompt)
        assert losses(client) == n_engines, "two to suspect, one to convict; a SIGKILL may come from elsewhere"
        assert await culprit.turn("Something harmless.") == "Something harmless."
        session = await culprit.described()
        assert [message["content"] for message in session["transcript"]] == ["Something harmless."] * 2
    wide.traps.clear()


async def test_an_idle_engine_dies(wide: Site) -> None:
    """Nobody is told more than that there is another one; the next turn has lost nothing but time."""
    async with talk(wide.daemon) as client:
        witness = await Witness.open(client)
        assert await witness.turn("Before.") == "Before."
        os.kill(wide.daemon.engine_pid(), signal.SIGKILL)
        await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
        assert await witness.turn("After.") == "After."
        assert [message["content"] for message in (await witness.described())["transcript"]][::2] == [
            "Before.",
            "After.",
        ]


@pytest.mark.slow
async def test_it_is_given_up(tmp_path: Path, demo_model_path: Path) -> None:
    """Lost too often its turn ends, once; the daemon stays to be read, and the next one answers again."""
    with site(tmp_path, demo_model_path, **(ECHO | {"INFERENCECENTER_ENGINE__MAX_RESTARTS": "1"})) as found:
        found.start()
        async with talk(found.daemon) as client:
            witness = await Witness.open(client)
            assert await witness.turn("Before.") == "Before."
            for name in ("first", "second"):
                found.traps.set("load", name=name)
            os.kill(found.daemon.engine_pid(), signal.SIGKILL)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "restarting")
            await witness.infer("Is anybody there?", key="k")
            await witness.finish()
            assert (witness.end["op"], witness.end["code"]) == ("error", "engine_unavailable")
            assert (await client.ask(op="hello"))["status"] == "degraded"
            session = await witness.described()
            assert [message["content"] for message in session["transcript"]] == ["Before."] * 2
            refusal = await client.ask(op="infer", session_id=witness.session_id, prompt="And now?")
            assert refusal["code"] == "engine_unavailable"
        found.traps.clear()
        assert found.daemon.stop() == 0
        found.start()
        async with talk(found.daemon) as client:
            await witness.resume(client)
            assert await witness.turn("Is anybody there?", key="k") == "Is anybody there?"


@pytest.mark.slow
async def test_the_daemon_ends_with_it_if_it_shall(tmp_path: Path, demo_model_path: Path) -> None:
    """With exit_when_failed whoever watches the daemon is told by its status; the next one goes on with the turn."""
    settings = {"INFERENCECENTER_ENGINE__MAX_RESTARTS": "0", "INFERENCECENTER_ENGINE__EXIT_WHEN_FAILED": "true"}
    with site(tmp_path, demo_model_path, **(ECHO | settings)) as found:
        found.start()
        async with talk(found.daemon) as client:
            witness = await Witness.open(client)
            await witness.infer(LINE * 3)
            await witness.until("token")
            os.kill(found.daemon.engine_pid(), signal.SIGKILL)
            assert await witness.drain() == 1012
            assert not witness.is_over
        assert await asyncio.to_thread(found.daemon.process.wait, 60) == 1
        found.start()
        async with talk(found.daemon) as client:
            assert (await witness.resume(client))["resumed"] is True
            assert await witness.finish() == LINE * 3
            assert witness.end["op"] == "end"
            assert await witness.turn("Next.") == "Next."
            await witness.described()
