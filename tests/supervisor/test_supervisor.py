"""The supervisor with a real engine process, on the echo backend where the engine matters."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Cancelled, Failed, Finished, TurnEvent
from inferencecenter.ipc.port import EngineState, EngineStatus
from tests.supervisor.conftest import STUB
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, RecordingTurn, end_of, order

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("stopped")
LONG = "a long answer " * 6
ENDLESS = LONG * 30
"""No test waits for its end."""


@pytest.fixture
async def slow(stub: None) -> AsyncIterator[ObservedSupervisor]:
    """A ready engine that is slow for each token."""
    del stub
    watched = ObservedSupervisor(echo_delay_ms=20)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    yield watched
    await watched.supervisor.stop()


async def test_turn_runs_to_its_end() -> None:
    """Events reach the turn's listener, the last is the end, and the gauges follow."""
    watched = ObservedSupervisor()
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    heard = watched.submit("t1", "hi")
    await asyncio.wait_for(heard.ended.wait(), TIMEOUT_S)
    assert heard.text == "hi"
    (end,) = heard.terminal
    assert isinstance(end, Finished)
    assert end.reason == "stop"
    status = watched.supervisor.status
    assert (status.state, status.detail, status.restarts, status.load_fraction) == (EngineState.READY, "", 0, 1.0)
    assert status.model is not None
    assert status.model.backend == "echo"
    await watched.supervisor.stop()


@STUB
async def test_engine_kill_loses_no_text() -> None:
    """Every turn goes on with the next engine and says what it would have said; turns taken meanwhile run too.

    The first engine says so little in a minute that no turn has ended when it is killed, however late that is.
    """

    def faster(options: EngineOptions) -> EngineOptions:
        return options.replace(echo_delay_ms=1)

    watched = ObservedSupervisor(echo_delay_ms=1000, plan_again=faster)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    turns = [watched.submit(f"t{n}", LONG) for n in range(4)]
    await asyncio.wait_for(turns[0].spoke.wait(), TIMEOUT_S)
    early: list[RecordingTurn] = []

    def submit_when_lost(status: EngineStatus) -> None:
        if status.state in (EngineState.BACKOFF, EngineState.STARTING):
            early.append(watched.submit(f"early{len(early)}"))

    watched.supervisor.subscribe(submit_when_lost)
    before = watched.supervisor.status
    watched.kill()
    await watched.until(EngineState.BACKOFF)
    status = watched.supervisor.status
    assert "SIGKILL" in status.detail
    assert (status.running, status.waiting) == (0, 5)
    await watched.until(EngineState.READY)
    after = watched.supervisor.status
    assert (after.restarts, after.detail) == (1, "")
    assert after.pid != before.pid
    for turn in turns:
        assert (await end_of(turn)).reason == "stop"
        assert (turn.text, turn.interruptions, turn.submissions) == (LONG, 1, 2)
    assert len(early) == 2
    for turn in early:
        await end_of(turn)
        assert (turn.text, turn.interruptions, turn.submissions) == ("hello", 0, 1)


@pytest.mark.slow
@STUB
async def test_engine_recovers_when_its_device_returns() -> None:
    """The attempts count as no restarts: started turns wait, new ones get the reason."""
    gone = [InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.")] * 3

    def plan_again(options: EngineOptions) -> EngineOptions:
        if gone:
            raise gone.pop()
        return options

    watched = ObservedSupervisor(echo_delay_ms=20, plan_again=plan_again, max_restarts=1)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    begun = watched.submit("begun", LONG)
    await asyncio.wait_for(begun.spoke.wait(), TIMEOUT_S)
    with capture_logs() as logs:
        watched.kill()
        await watched.until(EngineState.BACKOFF)
        early = watched.submit("early")
        await watched.until(EngineState.FAILED)
        status = watched.supervisor.status
        assert (status.serves, "There is no GPU 7." in status.detail) == (False, True)
        with pytest.raises(InferenceCenterError) as refusal:
            watched.submit("late")
        assert (refusal.value.code, refusal.value.retry_after_ms is None) == (ErrorCode.ENGINE_UNAVAILABLE, False)
        await watched.until(EngineState.READY)
    assert [line["event"] for line in logs].count("engine_not_woken") == 3
    assert (await end_of(begun)).reason == "stop"
    assert begun.text == LONG
    assert [type(end) for end in early.terminal] == [Failed]
    assert (watched.supervisor.status.restarts, watched.supervisor.status.detail) == (1, "")
    watched.kill()
    await watched.until(EngineState.READY)
    watched.kill()
    await watched.until(EngineState.FAILED)
    assert watched.supervisor.given_up


@STUB
async def test_turns_wait_for_the_first_engine() -> None:
    """One that is submitted before there is an engine, or while it loads, is asked what it is when the engine is ready.

    Its place is never 0 until then.
    """
    watched = ObservedSupervisor()
    before, during = RecordingTurn(order("t1")), RecordingTurn(order("t2"))
    assert watched.supervisor.submit(before) == 1
    watched.supervisor.start()
    await watched.until(EngineState.STARTING)
    assert watched.supervisor.submit(during) == 1
    assert (before.submissions, watched.supervisor.status.waiting) == (0, 2)
    for turn in (before, during):
        await end_of(turn)
        assert turn.text == "hello"
    await watched.supervisor.stop()


async def test_aborted_turn_ends_as_aborted(slow: ObservedSupervisor) -> None:
    """The engine reports what was kept; unknown turns are ignored."""
    heard = slow.submit("t1", ENDLESS)
    await asyncio.wait_for(heard.spoke.wait(), TIMEOUT_S)
    slow.supervisor.abort("t1")
    slow.supervisor.abort("unknown")
    slow.supervisor.release("t1")
    await asyncio.wait_for(heard.ended.wait(), TIMEOUT_S)
    (end,) = heard.terminal
    assert isinstance(end, Finished)
    assert end.reason == "aborted"
    assert heard.text != ENDLESS


async def test_failing_listener_is_logged(slow: ObservedSupervisor) -> None:
    """The turn beside it continues."""

    class Broken(RecordingTurn):
        def on_engine_event(self, event: TurnEvent) -> None:
            raise RuntimeError(type(event).__name__)

    with capture_logs() as logs:
        slow.supervisor.submit(Broken(order("broken")))
        heard = slow.submit("fine", "fine answer")
        await asyncio.wait_for(heard.ended.wait(), TIMEOUT_S)
    assert heard.text == "fine answer"
    assert "turn_listener_failed" in {line["event"] for line in logs}


async def test_queue_is_bounded_and_positions_are_published() -> None:
    """Beyond slots and queue a turn is refused; its position is the number of turns ahead of it."""
    watched = ObservedSupervisor(max_queue=1, echo_delay_ms=50)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    turns = [watched.submit(f"t{n}", ENDLESS) for n in range(3)]
    with pytest.raises(InferenceCenterError) as caught:
        watched.submit("t3")
    assert caught.value.code is ErrorCode.QUEUE_FULL
    await watched.supervisor.stop()
    assert [(turn.terminal, turn.interruptions) for turn in turns] == [([], 1)] * 3


@STUB
async def test_stopping_interrupts_turns_and_ends_the_process() -> None:
    """Turns get no end and no other event, the process has exited when stop returns, and a second stop does nothing."""
    watched = ObservedSupervisor(echo_delay_ms=20)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    pid = watched.supervisor.status.pid
    assert pid is not None
    heard = watched.submit("t1", ENDLESS)
    await asyncio.wait_for(heard.spoke.wait(), TIMEOUT_S)
    stopping = watched.supervisor.stop()
    with capture_logs() as logs:
        await stopping
        await watched.supervisor.stop()
    assert "engine_suspended" in {line["event"] for line in logs}
    assert (heard.terminal, heard.interruptions) == ([], 1)
    assert watched.states == [EngineState.DRAINING, EngineState.STOPPED]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(InferenceCenterError) as caught:
        watched.submit("t2")
    assert caught.value.code is ErrorCode.ENGINE_UNAVAILABLE
    watched.supervisor.abort("t1")
    assert heard.terminal == [Cancelled("t1")]


async def test_hanging_engine_is_killed_at_the_stop(slow: ObservedSupervisor) -> None:
    """It can neither suspend nor exit, and is killed after both deadlines."""
    pid = slow.supervisor.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with capture_logs() as logs:
        async with asyncio.timeout(TIMEOUT_S):
            await slow.supervisor.stop(suspend_deadline_s=0.1, deadline_s=0.1)
    assert "engine_not_suspended" in {line["event"] for line in logs}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_stop_does_not_wait_for_a_dead_engine(slow: ObservedSupervisor) -> None:
    """It continues as soon as the process has exited; nothing else is lost."""

    def die(status: EngineStatus) -> None:
        if status.state is EngineState.DRAINING:
            slow.kill()

    slow.supervisor.subscribe(die)
    async with asyncio.timeout(TIMEOUT_S):
        await slow.supervisor.stop(suspend_deadline_s=TIMEOUT_S * 2)
    assert slow.supervisor.status.state is EngineState.STOPPED


@STUB
async def test_stop_during_the_start_leaves_no_process() -> None:
    """It ends as any other stop."""
    watched = ObservedSupervisor()
    watched.supervisor.start()
    await asyncio.sleep(0)
    await watched.supervisor.stop()
    assert watched.states[-1] is EngineState.STOPPED
    assert watched.supervisor.status.pid is None


@pytest.mark.parametrize("daemon_ends", [True, False])
async def test_unloadable_model_is_not_tried_again(tmp_path: Path, *, daemon_ends: bool) -> None:
    """The reason is kept; waiting turns get it, unless they are left to the next daemon."""
    watched = ObservedSupervisor(
        backend="llama", model_path=str(tmp_path / "missing.gguf"), ends_with_it=lambda: daemon_ends
    )
    turn, begun = watched.submit("t0"), watched.submit("t1", answer=bytes(4))
    watched.supervisor.start()
    await watched.until(EngineState.FAILED)
    failure = watched.supervisor.load_failure
    assert failure is not None
    assert "missing.gguf" in failure.message
    assert EngineState.BACKOFF not in watched.states
    assert watched.supervisor.status.detail == failure.message
    with pytest.raises(InferenceCenterError, match=r"missing\.gguf"):
        watched.submit("t2")
    await watched.supervisor.stop()
    assert [end.code for end in turn.terminal if isinstance(end, Failed)] == ["engine_unavailable"] * (not daemon_ends)
    assert (begun.terminal, turn.submissions, begun.submissions) == ([], 0, 0)


async def test_load_progress_is_published_and_llama_cpp_is_logged(demo_model_path: Path) -> None:
    """Progress has steps of a tenth; llama.cpp's messages are logged under its name."""
    watched = ObservedSupervisor(backend="llama", model_path=str(demo_model_path), n_ctx=256)
    fractions: list[float] = []
    watched.supervisor.subscribe(lambda status: fractions.append(status.load_fraction))
    with capture_logs() as logs:
        watched.supervisor.start()
        await watched.until(EngineState.READY)
    await watched.supervisor.stop()
    assert fractions == sorted(fractions)
    assert 3 <= len(set(fractions)) <= 12
    assert "llama.cpp" in {line.get("logger") for line in logs}


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target.resolve())


async def test_model_that_was_loaded_before_is_tried_again(demo_model_path: Path, tmp_path: Path) -> None:
    """A load failure of a known model is taken as temporary."""
    path = tmp_path / "model.gguf"
    _link(path, demo_model_path)
    watched = ObservedSupervisor(backend="llama", model_path=str(path), n_ctx=256)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    path.unlink()
    watched.kill()
    for _ in range(2):
        await watched.until(EngineState.BACKOFF)
    assert watched.supervisor.load_failure is None
    assert watched.supervisor.status.model is not None
    _link(path, demo_model_path)
    await watched.until(EngineState.READY)
    await watched.supervisor.stop()


@STUB
async def test_load_timeout_restarts_the_engine(tmp_path: Path) -> None:
    """It is killed, the status has the reason, and another one is started."""
    watched = ObservedSupervisor(load_timeout_s=0.001, model_name="wait", model_path=str(tmp_path / "steps"))
    watched.supervisor.start()
    await watched.until(EngineState.BACKOFF)
    detail = watched.supervisor.status.detail
    await watched.until(EngineState.STARTING)
    await watched.supervisor.stop()
    assert detail == "loading took longer than 0.001 s"


async def test_engine_holds_the_lock_while_it_runs(tmp_path: Path) -> None:
    """A restart takes the lock again, and the file names the engine that holds it."""
    path = tmp_path / "engine.lock"
    watched = ObservedSupervisor(lock_path=path)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    first = watched.supervisor.status.pid
    assert first is not None
    assert path.read_text() == str(first)
    os.kill(first, signal.SIGKILL)
    await watched.until(EngineState.READY)
    assert path.read_text() == str(watched.supervisor.status.pid)
    await watched.supervisor.stop()
