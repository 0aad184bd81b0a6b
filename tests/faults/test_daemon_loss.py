"""The daemon is lost at every step of a turn, and the next one resumes it with all that clients received."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import LINE, SHORT_SHUTDOWN

if TYPE_CHECKING:
    from tests.faults.harness import DaemonHarness

PAST = "It was long ago."
QUESTION = LINE.format("Ada") * 3
"""Is read in several batches."""


async def assert_resumed(echo: DaemonHarness, recorder: RecordingClient, *, key: str) -> None:
    """Start another daemon, and check that the session has a new epoch and its turn ends normally.

    Submitting the question again does not run it again, and the next turn works.
    """
    echo.start()
    before, known = recorder.epoch, dict(recorder.turns)
    async with connect_client(echo.daemon) as client:
        answer = await recorder.resume(client)
        assert (answer["resumed"], answer["reason"]) == (False, "other_epoch")
        assert recorder.epoch != before
        await recorder.infer(QUESTION, key=key)
        await client.until(
            lambda message: message["op"] in ("queued", "end") and message["session_id"] == recorder.session_id
        )
        assert await recorder.finish() == QUESTION
        assert recorder.end["op"] == "end"
        session = await recorder.described()
        assert len(session["turns"]) == len(recorder.turns) == 2
        assert set(known) <= set(recorder.turns)
        assert await recorder.turn("And then?") == "And then?"
        texts = [message["content"] for message in (await recorder.described())["transcript"]]
    assert texts[-6:] == [PAST, PAST, QUESTION, QUESTION, "And then?", "And then?"]


SLOW = pytest.mark.slow
COMMITS = [
    pytest.param("before-TurnQueued", 0, "nothing", id="before it is written down", marks=SLOW),
    pytest.param("after-TurnQueued", 0, "nothing", id="before the first word"),
    pytest.param("before-TokensAppended", 0, "nothing queued", id="before any text", marks=SLOW),
    pytest.param("after-TokensAppended", 0, "nothing queued", id="with unpublished text", marks=SLOW),
    pytest.param("before-TokensAppended", 100, "some", id="in the middle", marks=SLOW),
    pytest.param("after-TokensAppended", 100, "some", id="in the middle, with unpublished text"),
    pytest.param("before-TurnEnded", 0, "queued some all", id="before the end is written down", marks=SLOW),
    pytest.param("after-TurnEnded", 0, "queued some all", id="before the end is told"),
]
"""Where, how often that is passed before, and what may have been shown then: a commit takes what is there with it.

On a slow disk that is the whole answer.
"""


def received_text(recorder: RecordingClient) -> str:
    """Return how much of the question's turn was received."""
    turns = list(recorder.turns.values())[1:]
    if not turns:
        return "nothing"
    assert turns[0].end is None
    return {"": "queued", QUESTION: "all"}.get(turns[0].text, "some")


@pytest.mark.parametrize(("point", "passes", "shown"), COMMITS)
async def test_kill_at_a_commit(echo: DaemonHarness, point: str, passes: int, shown: str) -> None:
    """The daemon is killed right before or after a record is committed."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(PAST) == PAST
        echo.faults.set(point, passes=passes)
        await recorder.infer(QUESTION, key="k")
        await recorder.drain()
    echo.wait_killed()
    assert received_text(recorder) in shown.split()
    await assert_resumed(echo, recorder, key="k")


@pytest.mark.parametrize(("point", "passes"), [pytest.param("prefill", 2, marks=SLOW), ("decode", 100)])
async def test_kill_during_a_batch(echo: DaemonHarness, point: str, passes: int) -> None:
    """The daemon is killed from its engine during prefill and decode."""
    async with connect_client(echo.daemon) as client:
        # The engine may still know what another test has asked; this it does not.
        recorder = await RecordingClient.open(client, system=os.urandom(8).hex())
        assert await recorder.turn(PAST) == PAST
        echo.faults.set(point, "kill-front", passes=passes)
        await recorder.infer(QUESTION, key="k")
        await recorder.drain()
    echo.wait_killed()
    await assert_resumed(echo, recorder, key="k")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["queued", "token", "end"])
async def test_kill_after_an_event(echo: DaemonHarness, op: str) -> None:
    """The daemon is killed as soon as a client knows that its turn is queued, generates or has ended."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(PAST) == PAST
        await recorder.infer(QUESTION, key="k")
        await recorder.until(op)
        echo.kill()
        await recorder.drain()
    await assert_resumed(echo, recorder, key="k")


@pytest.mark.slow
async def test_kill_with_many_turns(echo: DaemonHarness) -> None:
    """Running, queued and offloaded turns all end in the next daemon, in order of submission."""
    async with connect_client(echo.daemon) as client:
        recorders = [await RecordingClient.open(client) for _ in range(6)]
        for number, recorder in enumerate(recorders):
            await recorder.infer(f"{number}: {LINE * 2}")
        for recorder in recorders[:3]:
            await recorder.until("token")
        echo.kill()
        for recorder in recorders:
            await recorder.drain()
    echo.start()
    async with connect_client(echo.daemon) as client:
        for recorder in recorders:
            assert (await recorder.resume(client))["resumed"] is False
        for number, recorder in enumerate(recorders):
            assert await recorder.finish() == f"{number}: {LINE * 2}"
            assert await recorder.turn("Next.") == "Next."
            assert len((await recorder.described())["turns"]) == 2


@pytest.mark.slow
async def test_answer_survives_five_daemons(echo: DaemonHarness) -> None:
    """Each daemon has all that the ones before it published."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(QUESTION)
        await recorder.until("token")
        echo.kill()
        await recorder.drain()
    for _ in range(3):
        echo.start()
        async with connect_client(echo.daemon) as client:
            await recorder.resume(client)
            await recorder.until("token")
            echo.kill()
            await recorder.drain()
    echo.start()
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert await recorder.finish() == QUESTION
        await recorder.described()


@pytest.mark.slow
async def test_unfinished_turn_waits_for_a_working_engine(echo: DaemonHarness) -> None:
    """The unfinished turn waits while the next daemon's first engines die."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(PAST) == PAST
        await recorder.infer(QUESTION, key="k")
        await recorder.until("token")
        echo.kill()
        await recorder.drain()
    for point in ("load", "loaded"):
        echo.faults.set(point)
    await assert_resumed(echo, recorder, key="k")
    assert echo.faults.left == []


@pytest.mark.slow
async def test_sigterm_suspends_a_long_turn(echo: DaemonHarness) -> None:
    """A turn still running at the deadline is suspended, its socket closes with 1012, the next daemon resumes it.

    All events are stored, so the epoch is the same, even where more is stored than the socket received.
    """
    echo.daemon.stop()
    echo.start(**SHORT_SHUTDOWN)  # type: ignore[arg-type]
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(QUESTION)
        await recorder.until("token")
        echo.daemon.process.terminate()
        going = await client.until(lambda message: message["op"] == "going_away")
        assert going["resume"] is True
        assert await recorder.drain() == 1012
    assert await asyncio.to_thread(echo.daemon.process.wait, 60) == 0
    assert recorder.last.end is None
    shown, epoch = recorder.text, recorder.epoch
    echo.start()
    async with connect_client(echo.daemon) as client:
        answer = await recorder.resume(client)
        assert answer.get("reason") in (None, "too_old")
        assert recorder.epoch == epoch
        assert (await recorder.finish()).startswith(shown)
        assert recorder.text == QUESTION
        assert await recorder.turn("Next.") == "Next."
        await recorder.described()


async def test_kv_of_a_long_session_survives_a_restart(echo: DaemonHarness) -> None:
    """After an orderly stop the KV of a session of a thousand tokens is restored from disk."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn(LINE * 12, max_tokens=4) == LINE[:4]
    echo.daemon.stop()
    assert list((echo.state_dir / "kv").glob("*/*")), "nothing was brought to disk"
    echo.start()
    async with connect_client(echo.daemon) as client:
        assert (await recorder.resume(client))["resumed"] is True
        assert await recorder.turn("And then?") == "And then?"
        assert recorder.end["stats"]["prompt_tokens"] > 1000
        assert recorder.end["stats"]["cached_tokens"] > 1000
        await recorder.described()


@pytest.mark.parametrize("lost", ["daemon", pytest.param("engine", marks=SLOW)])
async def test_idle_session_is_restored_after_a_kill(echo: DaemonHarness, lost: str) -> None:
    """The next turn prefills only new tokens, although no shutdown saved the KV."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client, system=os.urandom(8).hex())
        before = echo.daemon.metric("parked_sessions")
        assert await recorder.turn(QUESTION) == QUESTION
        history = recorder.end["stats"]["prompt_tokens"] + recorder.end["stats"]["tokens"]
        async with asyncio.timeout(60):
            while echo.daemon.metric("parked_sessions") <= before:
                await client.ask(op="ping")
        if lost == "daemon":
            echo.kill()
            await recorder.drain()
        else:
            os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
    if lost == "daemon":
        echo.start()
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert await recorder.turn("And then?") == "And then?"
        assert recorder.end["stats"]["cached_tokens"] >= history - 2
        await recorder.described()


@pytest.mark.slow
async def test_unstored_session_leaves_no_files(echo: DaemonHarness) -> None:
    """Neither its text nor its KV is in any file."""
    secret = "This must not be stored."
    async with connect_client(echo.daemon) as client:
        private = await RecordingClient.open(client, store=False)
        assert await private.turn(secret) == secret
        kept = await RecordingClient.open(client)
        assert await kept.turn(PAST) == PAST
    echo.daemon.stop()
    stored = [path.read_bytes() for path in echo.state_dir.rglob("*") if path.is_file()]
    assert any(PAST.encode() in each for each in stored)
    spelled = b"".join(bytes((byte, 0)) for byte in secret.encode())
    assert not any(secret.encode() in each or spelled in each for each in stored)
    echo.start()
    async with connect_client(echo.daemon) as client:
        refusal = await client.ask(op="resume_session", session_id=private.session_id, epoch=private.epoch, last_seq=1)
        assert refusal["code"] == "session_not_found"
        assert (await kept.resume(client))["resumed"] is True
