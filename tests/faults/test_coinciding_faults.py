"""Faults that coincide: an end and a loss, half a character and a crash, a shorter prompt and a kill."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client, stopped
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import ECHO, FEW_SLOTS, LINE, SHORT_SHUTDOWN, daemon_harness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.harness import DaemonHarness

SLOW = pytest.mark.slow
SPELLED = "Grüße, 漢字 und 🙂 - "
"""Characters of two, three and four tokens, as echo counts."""
HALVES = [pytest.param(passes, marks=() if passes == 4 else SLOW) for passes in range(len(SPELLED.encode()) + 3)]


@pytest.mark.slow
@pytest.mark.parametrize("passes", HALVES)
async def test_engine_kill_keeps_characters_and_stop_strings_whole(echo: DaemonHarness, passes: int) -> None:
    """A kill at any token splits no character and leaks or loses no stop string."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        echo.faults.set("decode", passes=passes)
        text = await recorder.turn(f"{SPELLED}STOP and no more", stop=["STOP"])
        assert text == SPELLED
        assert (recorder.end["finish_reason"], recorder.end["stop"]) == ("stop", "STOP")
        assert echo.faults.left == []
        await recorder.described()
        assert await recorder.turn("STOPP!", stop=["STOP it"]) == "STOPP!"


@pytest.mark.parametrize("point", ["before-TokensAppended", "after-TokensAppended"])
@pytest.mark.parametrize("passes", [pytest.param(passes, marks=SLOW) for passes in (3, 9, 14, 21, 27)])
async def test_daemon_kill_keeps_characters_and_stop_strings_whole(
    echo: DaemonHarness, point: str, passes: int
) -> None:
    """The same holds when the daemon is killed."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        echo.faults.set(point, passes=passes)
        await recorder.infer(f"{SPELLED}STOP and no more", stop=["STOP"])
        await recorder.drain()
    echo.wait_killed()
    echo.start()
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert await recorder.finish() == SPELLED
        assert recorder.end["finish_reason"] == "stop"
        await recorder.described()


@pytest.mark.parametrize("lost", ["abort first", pytest.param("kill first", marks=SLOW)])
async def test_abort_during_engine_loss_ends_the_turn_once(echo: DaemonHarness, lost: str) -> None:
    """The turn ends as aborted, once, with the text received."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(LINE * 10)
        await recorder.until("token")
        if lost == "kill first":
            os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
            await client.send(op="abort", session_id=recorder.session_id)
        else:
            with stopped(echo.daemon.engine_pid()):
                await client.send(op="abort", session_id=recorder.session_id)
                await client.ask(op="ping")
                os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
        assert (LINE * 10).startswith(await recorder.finish())
        assert recorder.end["finish_reason"] == "aborted"
        await recorder.described()
        assert await recorder.turn("Next.") == "Next."


@pytest.mark.slow
async def test_abort_during_shutdown_applies_in_the_next_daemon(echo: DaemonHarness) -> None:
    """An abort that the engine did not process ends the turn in the next daemon."""
    echo.daemon.stop()
    echo.start(**SHORT_SHUTDOWN, INFERENCECENTER_ENGINE__HANG_TIMEOUT_S="60")  # type: ignore[arg-type]
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(LINE * 10)
        await recorder.until("token")
        with stopped(echo.daemon.engine_pid()):
            await client.send(op="abort", session_id=recorder.session_id)
            await client.ask(op="ping")
            echo.daemon.process.terminate()
            await recorder.drain()
            assert await asyncio.to_thread(echo.daemon.process.wait, 30) == 0
    assert not recorder.is_over
    echo.start()
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert (LINE * 10).startswith(await recorder.finish())
        assert recorder.end["finish_reason"] == "aborted"
        await recorder.described()
        assert await recorder.turn("Next.") == "Next."


@pytest.mark.slow
async def test_session_closed_without_an_engine_stays_closed(echo: DaemonHarness) -> None:
    """Its turn does not return with the next engine or daemon."""
    async with connect_client(echo.daemon) as client:
        recorder, other = await RecordingClient.open(client), await RecordingClient.open(client)
        await recorder.infer(LINE * 10)
        await other.infer(LINE)
        await other.until("token")
        os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
        assert (await client.ask(op="close_session", session_id=recorder.session_id))["op"] == "session_closed"
        assert await other.finish() == LINE
        closed = len([message for message in client.seen if message["op"] == "end"])
        assert closed <= 2
    echo.kill()
    echo.start()
    async with connect_client(echo.daemon) as client:
        refusal = await client.ask(op="get_session", session_id=recorder.session_id)
        assert refusal["code"] == "session_not_found"
        await other.resume(client)
        await other.described()


@pytest.mark.slow
async def test_engine_loss_during_shutdown_is_recovered(echo: DaemonHarness) -> None:
    """Another engine ends the turn; then the socket closes, and the daemon exits normally."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(LINE * 5)
        await recorder.until("token")
        echo.daemon.process.terminate()
        await client.until(lambda message: message["op"] == "going_away")
        os.kill(echo.daemon.engine_pid(), signal.SIGKILL)
        assert await recorder.finish() == LINE * 5
        assert await recorder.drain() == 1012
    assert await asyncio.to_thread(echo.daemon.process.wait, 60) == 0
    echo.start()
    async with connect_client(echo.daemon) as client:
        assert (await recorder.resume(client))["resumed"] is True
        await recorder.described()


@pytest.mark.slow
async def test_second_sigterm_stops_at_once(echo: DaemonHarness) -> None:
    """The daemon exits at once, and the next one resumes the turn."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(LINE * 20)
        await recorder.until("token")
        echo.daemon.process.terminate()
        await client.until(lambda message: message["op"] == "going_away")
        echo.daemon.process.terminate()
        await recorder.drain()
    await asyncio.to_thread(echo.daemon.process.wait, 60)
    echo.start()
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert await recorder.finish() == LINE * 20
        await recorder.described()


@pytest.mark.slow
async def test_shutdown_with_a_hanging_engine_is_bounded(echo: DaemonHarness) -> None:
    """The daemon exits within its deadlines, without KV, and the next one resumes the turn."""
    echo.daemon.stop()
    echo.start(**SHORT_SHUTDOWN, INFERENCECENTER_ENGINE__HANG_TIMEOUT_S="60")  # type: ignore[arg-type]
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(LINE * 5)
        await recorder.until("token")
        with stopped(echo.daemon.engine_pid()):
            echo.daemon.process.terminate()
            assert await recorder.drain() == 1012
            assert await asyncio.to_thread(echo.daemon.process.wait, 30) == 0
    echo.start()
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert await recorder.finish() == LINE * 5
        await recorder.described()


@pytest.fixture(scope="module")
def small_context(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[DaemonHarness]:
    """A daemon with a small context."""
    settings = ECHO | FEW_SLOTS | {"INFERENCECENTER_ENGINE__N_CTX": "512"}
    with daemon_harness(tmp_path_factory.mktemp("small"), demo_model_path, **settings) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["engine", "daemon"])
@pytest.mark.parametrize("n_words", [0, 1, 30])
async def test_shifted_context_survives_a_loss(small_context: DaemonHarness, lost: str, n_words: int) -> None:
    """A turn with a shifted context resumes after a loss and ends; dropped turns stay dropped."""
    small_context.ensure()
    prompt = LINE.format("Ada") * 2
    async with connect_client(small_context.daemon) as client:
        recorder = await RecordingClient.open(client)
        for number in range(3):
            await recorder.turn(f"{number}: This is how it began.")
        await recorder.infer(prompt)
        await recorder.until("context_shifted")
        for _ in range(n_words):
            await recorder.until("token")
        if lost == "engine":
            os.kill(small_context.daemon.engine_pid(), signal.SIGKILL)
        else:
            small_context.kill()
            await recorder.drain()
            small_context.start()
    async with connect_client(small_context.daemon) as client:
        await recorder.resume(client)
        assert await recorder.finish() == prompt
        assert recorder.end["finish_reason"] == "stop"
        session = await recorder.described()
        assert session["dropped_messages"] > 0
        assert len(session["transcript"]) == 8
        assert await recorder.turn("Next.") == "Next."
