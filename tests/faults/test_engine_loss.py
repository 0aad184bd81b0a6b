"""The engine is lost at every moment of its work, and turns resume where they were."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client, stopped
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import ECHO, FEW_SLOTS, LINE, daemon_harness, data_bytes, logged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.e2e.harness import SocketClient
    from tests.faults.harness import DaemonHarness

NAMES = ["Ada", "Boris", "Clara", "Diego"]


async def finish(recorders: list[RecordingClient]) -> None:
    """Wait until all turns have ended."""
    for recorder in recorders:
        await recorder.finish()


async def run_turns(recorders: list[RecordingClient], prompts: list[str]) -> None:
    """Submit a prompt in every session at once, and check that echo's answers are complete."""
    for recorder, prompt in zip(recorders, prompts, strict=True):
        await recorder.infer(prompt)
    await finish(recorders)
    for recorder, prompt in zip(recorders, prompts, strict=True):
        assert recorder.end["op"] == "end", recorder.end
        assert recorder.text == prompt


def restarts(client: SocketClient) -> int:
    """Return how many engine restarts the client was notified of."""
    return sum(message["op"] == "engine" and message["state"] == "ready" for message in client.seen)


@contextlib.asynccontextmanager
async def busy_sessions(echo: DaemonHarness) -> AsyncIterator[tuple[SocketClient, list[RecordingClient]]]:
    """Four sessions with history on two slots, so that KV moves all the time; all are checked at the end.

    The next turn of each works, and the transcripts hold what was received.
    """
    async with connect_client(echo.daemon) as client:
        recorders = [await RecordingClient.open(client) for _ in NAMES]
        # A random prefix: the engine may still hold prompts of other tests.
        await run_turns(recorders, [f"{os.urandom(4).hex()}: I am {name}." for name in NAMES])
        yield client, recorders
        assert echo.faults.left == []
        await run_turns(recorders, [f"And {name} goes on." for name in NAMES])
        for recorder in recorders:
            session = await recorder.described()
            assert len(session["turns"]) == len(recorder.turns) == 3


SLOW = pytest.mark.slow
POINTS = [
    ("prefill", 0),
    pytest.param("prefill", 1, marks=SLOW),
    pytest.param("decode", 0, marks=SLOW),
    ("decode", 40),
    ("save", 0),
    pytest.param("save", 5, marks=SLOW),
    ("restore", 0),
    pytest.param("restore", 4, marks=SLOW),
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "passes"), POINTS)
async def test_engine_kill_at_any_step_loses_no_text(echo: DaemonHarness, point: str, passes: int) -> None:
    """Killed in prefill, decode, save or restore, early or late: every answer is complete and unrepeated."""
    async with busy_sessions(echo) as (client, recorders):
        echo.faults.set(point, passes=passes)
        await run_turns(recorders, [LINE.format(name) for name in NAMES])
        assert restarts(client) == 1


@pytest.mark.parametrize(
    "action", [pytest.param("abort", marks=SLOW), pytest.param("segfault", marks=SLOW), "exhaust", "garbage"]
)
async def test_other_engine_failures_lose_no_text(echo: DaemonHarness, action: str) -> None:
    """An abort, a segmentation fault, memory exhaustion or an invalid frame has the effect of a kill."""
    async with busy_sessions(echo) as (client, recorders):
        echo.faults.set("decode", action, passes=30)
        await run_turns(recorders, [LINE.format(name) for name in NAMES])
        assert restarts(client) == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", [pytest.param("load", marks=SLOW), "loaded"])
async def test_engine_kill_while_loading(echo: DaemonHarness, point: str) -> None:
    """A replacement killed before it is ready is replaced; old and new turns end normally."""
    async with busy_sessions(echo) as (client, recorders):
        echo.faults.set("decode", passes=30)
        echo.faults.set(point)
        late = await RecordingClient.open(client)
        for recorder, name in zip(recorders, NAMES, strict=True):
            await recorder.infer(LINE.format(name))
        await client.until(lambda message: message["op"] == "engine" and message["state"] == "restarting")
        await late.infer("Are you there?")
        await finish([*recorders, late])
        assert late.text == "Are you there?"
        assert [recorder.text for recorder in recorders] == [LINE.format(name) for name in NAMES]
        assert restarts(client) == 1, "one engine never became ready"


@pytest.mark.slow
async def test_second_kill_during_recovery(echo: DaemonHarness) -> None:
    """After a second kill the affected turns run alone, and all end normally."""
    async with busy_sessions(echo) as (client, recorders):
        echo.faults.set("decode", passes=30, name="first")
        echo.faults.set("decode", passes=0, name="second")
        await run_turns(recorders, [LINE.format(name) for name in NAMES])
        assert restarts(client) == 2


@pytest.mark.slow
async def test_five_engine_kills_lose_no_text(echo: DaemonHarness) -> None:
    """Five engines in a row die, each after a few tokens, and the answers are complete."""
    async with busy_sessions(echo) as (client, recorders):
        for number in range(5):
            echo.faults.set("decode", passes=50, name=str(number))
        await run_turns(recorders, [LINE.format(name) * 2 for name in NAMES])
        assert restarts(client) == 5


@pytest.mark.slow
@pytest.mark.parametrize("action", ["stop", "flood"])
async def test_hanging_engine_is_replaced(echo: DaemonHarness, action: str) -> None:
    """An engine that is stopped or floods its pipe is killed after the hang timeout."""
    async with busy_sessions(echo) as (client, recorders):
        first = echo.daemon.engine_pid()
        if action == "flood":
            echo.faults.set("decode", action, passes=30)
        for recorder, name in zip(recorders, NAMES, strict=True):
            await recorder.infer(LINE.format(name))
        await recorders[0].until("token")
        with stopped(first) if action == "stop" else contextlib.nullcontext():
            async with connect_client(echo.daemon) as other:
                assert (await other.ask(op="ping"))["op"] == "pong", "the daemon answers meanwhile"
            await finish(recorders)
        assert restarts(client) == 1
        assert logged(echo.daemon, "engine_hangs")[-1]["pid"] == first


@pytest.mark.slow
async def test_engine_out_of_memory_loses_no_text(tmp_path: Path, demo_model_path: Path) -> None:
    """A prompt of a megabyte exhausts the engine's memory limit, and no answer is lost."""
    # With so large a context the daemon cannot refuse the prompt by its length.
    settings = ECHO | FEW_SLOTS | {"INFERENCECENTER_ENGINE__N_CTX": "131072"}
    with daemon_harness(tmp_path, demo_model_path, **settings) as large:
        large.start()
        async with busy_sessions(large) as (client, recorders):
            huge = await RecordingClient.open(client, on_full="stop")
            pid = large.daemon.engine_pid()
            resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid), resource.RLIM_INFINITY))
            await huge.infer(LINE * 10_000)
            await run_turns(recorders, [LINE.format(name) for name in NAMES])
            await huge.finish()
            assert (huge.end["op"], huge.end["code"]) == ("error", "prompt_too_long")
            assert restarts(client) == 1
            assert await huge.turn("Less.") == "Less."


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[DaemonHarness]:
    """A daemon with eight slots and few restarts."""
    settings = {"INFERENCECENTER_ENGINE__SLOTS": "8", "INFERENCECENTER_ENGINE__MAX_RESTARTS": "5"}
    with daemon_harness(tmp_path_factory.mktemp("wide"), demo_model_path, **(ECHO | settings)) as found:
        found.start()
        yield found


@pytest.mark.parametrize(("action", "n_engines"), [("segfault", 3), pytest.param("kill", 4, marks=SLOW)])
async def test_poison_turn_fails_alone(wide: DaemonHarness, action: str, n_engines: int) -> None:
    """Of eight turns only the poison turn ends with engine_crashed; its session and the others continue."""
    wide.faults.set("poison", action)
    async with connect_client(wide.daemon) as client:
        recorders = [await RecordingClient.open(client) for _ in range(8)]
        prompts = [f"{number}: {LINE.format('Ada')}" for number in range(8)]
        prompts[5] = "This is poison for an engine, and for no other turn."
        for recorder, prompt in zip(recorders, prompts, strict=True):
            await recorder.infer(prompt)
        await finish(recorders)
        poison = recorders.pop(5)
        assert poison.end["op"] == "error"
        assert poison.end["code"] == "engine_crashed"
        for recorder, prompt in zip(recorders, prompts[:5] + prompts[6:], strict=True):
            assert (recorder.end["op"], recorder.text) == ("end", prompt)
        assert restarts(client) == n_engines, (
            "two make it suspected, one confirms it; a SIGKILL may come from elsewhere"
        )
        assert await poison.turn("Something harmless.") == "Something harmless."
        session = await poison.described()
        assert [message["content"] for message in session["transcript"]] == ["Something harmless."] * 2
    wide.faults.clear()


async def test_idle_engine_kill_is_recovered(wide: DaemonHarness) -> None:
    """Clients are notified of the restart only, and the next turn keeps the history."""
    async with connect_client(wide.daemon) as client:
        recorder = await RecordingClient.open(client)
        assert await recorder.turn("Before.") == "Before."
        os.kill(wide.daemon.engine_pid(), signal.SIGKILL)
        await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
        assert await recorder.turn("After.") == "After."
        assert [message["content"] for message in (await recorder.described())["transcript"]][::2] == [
            "Before.",
            "After.",
        ]


@pytest.mark.slow
async def test_engine_that_fails_too_often_is_given_up(tmp_path: Path, demo_model_path: Path) -> None:
    """The turn fails once, sessions stay readable, and the next daemon answers again."""
    with daemon_harness(tmp_path, demo_model_path, **(ECHO | {"INFERENCECENTER_ENGINE__MAX_RESTARTS": "1"})) as found:
        found.start()
        async with connect_client(found.daemon) as client:
            recorder = await RecordingClient.open(client)
            assert await recorder.turn("Before.") == "Before."
            for name in ("first", "second"):
                found.faults.set("load", name=name)
            os.kill(found.daemon.engine_pid(), signal.SIGKILL)
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "restarting")
            await recorder.infer("Are you there?", key="k")
            await recorder.finish()
            assert (recorder.end["op"], recorder.end["code"]) == ("error", "engine_unavailable")
            assert (await client.ask(op="hello"))["status"] == "degraded"
            session = await recorder.described()
            assert [message["content"] for message in session["transcript"]] == ["Before."] * 2
            refusal = await client.ask(op="infer", session_id=recorder.session_id, prompt="And now?")
            assert refusal["code"] == "engine_unavailable"
        found.faults.clear()
        assert found.daemon.stop() == 0
        found.start()
        async with connect_client(found.daemon) as client:
            await recorder.resume(client)
            assert await recorder.turn("Are you there?", key="k") == "Are you there?"


@pytest.mark.slow
async def test_exit_when_failed_ends_the_daemon(tmp_path: Path, demo_model_path: Path) -> None:
    """With exit_when_failed the exit status is 1, and the next daemon resumes the turn."""
    settings = {"INFERENCECENTER_ENGINE__MAX_RESTARTS": "0", "INFERENCECENTER_ENGINE__EXIT_WHEN_FAILED": "true"}
    with daemon_harness(tmp_path, demo_model_path, **(ECHO | settings)) as found:
        found.start()
        async with connect_client(found.daemon) as client:
            recorder = await RecordingClient.open(client)
            await recorder.infer(LINE * 3)
            await recorder.until("token")
            os.kill(found.daemon.engine_pid(), signal.SIGKILL)
            assert await recorder.drain() == 1012
            assert not recorder.is_over
        assert await asyncio.to_thread(found.daemon.process.wait, 60) == 1
        found.start()
        async with connect_client(found.daemon) as client:
            assert (await recorder.resume(client))["resumed"] is True
            assert await recorder.finish() == LINE * 3
            assert recorder.end["op"] == "end"
            assert await recorder.turn("Next.") == "Next."
            await recorder.described()
