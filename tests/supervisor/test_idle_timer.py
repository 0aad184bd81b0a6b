"""An idle engine is stopped, and the next turn starts another."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.core import tasks
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.engine_options import EngineOptions, KvCachePaths
from inferencecenter.ipc.messages import Cancelled, Failed
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor import process
from inferencecenter.supervisor.lifecycle import IdleTimer
from tests.supervisor.conftest import STUB
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, RecordingTurn, end_of, order
from tests.supervisor.timers import Timers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.loop_clock import LoopClock

pytestmark = pytest.mark.usefixtures("stopped")
SLEEP_AFTER_S = 30.0
LONG = "a text that is long enough to be worth parking, which a few words would not be"


@dataclass
class IdleTimerHarness(Timers):
    """An idle timer whose timers fire when the test says so."""

    after_s: float | None = 60.0
    n_expired: int = 0

    def __post_init__(self) -> None:
        self.sleep = IdleTimer(self.after_s, on_idle=self._expire, call_later=self.call_later)

    def _expire(self) -> None:
        self.n_expired += 1


@given(st.lists(st.sampled_from(["idle", "busy", "fire"])))
def test_idle_timer_runs_once_per_idle_period(steps: list[str]) -> None:
    """The engine sleeps only after a timer has run to its end."""
    timers, idle_since_timer = IdleTimerHarness(), False
    for step in steps:
        before, arranged = timers.n_expired, len(timers.calls)
        if step == "fire":
            if not timers.pending:
                continue
            timers.fire()
            assert (timers.n_expired, timers.pending) == (before + 1, [])
            idle_since_timer = False
            continue
        timers.sleep.keep(idle=step == "idle")
        assert len(timers.pending) == (step == "idle")
        assert len(timers.calls) == arranged + (step == "idle" and not idle_since_timer)
        assert timers.n_expired == before
        idle_since_timer = step == "idle"
    assert {call.delay_s for call in timers.calls} <= {60.0}


def test_without_sleep_there_is_no_timer() -> None:
    """An idle engine has no timer if it may not sleep."""
    timers = IdleTimerHarness(after_s=None)
    timers.sleep.keep(idle=True)
    assert timers.calls == []


async def idle_supervisor(clock: LoopClock, watched: ObservedSupervisor) -> None:
    """Start a supervisor, and let its first engine's idle timer expire once it is ready."""
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    await clock.go_on(SLEEP_AFTER_S)


async def asleep(clock: LoopClock, **options: object) -> ObservedSupervisor:
    """Return a supervisor whose engine is asleep."""
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, **options)  # type: ignore[arg-type]
    await idle_supervisor(clock, watched)
    await watched.until(EngineState.ASLEEP)
    return watched


async def test_idle_engine_ends_and_a_turn_starts_the_next(clock: LoopClock) -> None:
    """Only the model's description is kept; a wake counts as a start, not as a restart."""
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, max_restarts=0)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    for number in range(3):
        pid = watched.supervisor.status.pid
        assert pid is not None
        await clock.go_on(SLEEP_AFTER_S)
        await watched.until(EngineState.SUSPENDING)
        assert watched.supervisor.status.serves
        await watched.until(EngineState.ASLEEP)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        status = watched.supervisor.status
        assert (status.pid, status.detail, status.restarts, status.rss_bytes) == (None, "", 0, 0)
        assert status.serves
        assert status.model is not None
        heard = RecordingTurn(order(f"t{number}"))
        assert watched.supervisor.submit(heard) == 1
        await watched.until(EngineState.STARTING)
        assert watched.supervisor.status.detail == ""
        assert (await end_of(heard)).reason == "stop"
        assert (heard.text, heard.submissions, heard.interruptions) == ("hello", 1, 0)
        await watched.until(EngineState.READY)
    await watched.supervisor.stop()


@STUB
async def test_engine_with_turns_does_not_sleep(clock: LoopClock) -> None:
    """Long turns do not change this; idle time counts from the end of the last."""
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, echo_delay_ms=20)
    early = watched.submit("t1", "a long answer " * 4)
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    await asyncio.wait_for(early.spoke.wait(), TIMEOUT_S)
    await clock.go_on(SLEEP_AFTER_S)
    await end_of(early)
    await clock.go_on(SLEEP_AFTER_S / 2)
    assert EngineState.SUSPENDING not in watched.states
    assert early.interruptions == 0
    await clock.go_on(SLEEP_AFTER_S / 2)
    await watched.until(EngineState.ASLEEP)
    await watched.supervisor.stop()


@STUB
async def test_turns_submitted_during_suspend_run_in_the_next_engine(clock: LoopClock) -> None:
    """It is started as soon as the previous one has ended, and the turns are not interrupted."""
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S)
    late: list[RecordingTurn] = []

    def submit_late(status: EngineStatus) -> None:
        if status.state is EngineState.SUSPENDING and not late:
            late.extend(watched.submit(f"t{number}") for number in range(3))

    watched.supervisor.subscribe(submit_late)
    await idle_supervisor(clock, watched)
    await watched.until(EngineState.SUSPENDING)
    await watched.until(EngineState.ASLEEP)
    for turn in late:
        assert (await end_of(turn)).reason == "stop"
        assert (turn.submissions, turn.interruptions) == (1, 0)
    assert watched.states[:2] == [EngineState.STARTING, EngineState.READY]
    await watched.supervisor.stop()


async def test_sessions_are_offloaded_across_sleep(tmp_path: Path, clock: LoopClock) -> None:
    """Slots are offloaded, too, even if none may be on disk; sessions closed meanwhile are dropped at the wake."""
    live = {"one", "secret", "closed"}
    watched = await asleep(
        clock,
        kv=KvCachePaths(
            ram_dir=tmp_path / "ram",
            ram_bytes=2**20,
            disk_dir=tmp_path / "disk",
            disk_bytes=2**20,
            client_share=1.0,
        ),
        slots=4,
        live_sessions=lambda: live,
    )
    for turn in [watched.submit(name, LONG, client_id=name, durable=name != "secret") for name in sorted(live)]:
        await end_of(turn)
    await clock.go_on(SLEEP_AFTER_S)
    await watched.until(EngineState.ASLEEP)
    status = watched.supervisor.status
    assert (status.parked_sessions, status.running, status.waiting) == (3, 0, 0)
    assert status.parked_bytes > 0
    assert len(list((tmp_path / "disk").iterdir())) == 2
    watched.supervisor.release("closed")
    live.remove("closed")
    again = [watched.submit(f"{name} again", LONG, session_id=name, client_id=name) for name in ("one", "secret")]
    gone = watched.submit("closed again", LONG, session_id="closed", client_id="closed")
    assert all([(await end_of(turn)).cached_tokens > 0 for turn in again])
    assert (await end_of(gone)).cached_tokens == 0
    await watched.supervisor.stop()


@STUB
async def test_turn_withdrawn_while_asleep_wakes_no_engine(clock: LoopClock) -> None:
    """An unknown turn wakes none, either; the next turn does."""
    watched = await asleep(clock)
    watched.supervisor.abort("unknown")
    watched.supervisor.release("unknown")
    assert watched.supervisor.status.state is EngineState.ASLEEP
    turn = watched.submit("t1")
    watched.supervisor.abort("t1")
    assert turn.terminal == [Cancelled("t1")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert watched.supervisor.status.state is EngineState.ASLEEP
    assert (await end_of(watched.submit("t2"))).reason == "stop"
    await watched.supervisor.stop()


@STUB
async def test_engine_death_while_suspending_is_no_loss(clock: LoopClock) -> None:
    """It had no turn: it is not restarted before one is submitted."""
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, max_restarts=0)
    kills = iter([watched.kill])

    def kill_once(status: EngineStatus) -> None:
        if status.state is EngineState.SUSPENDING:
            next(kills, lambda: None)()

    watched.supervisor.subscribe(kill_once)
    with capture_logs() as logs:
        await idle_supervisor(clock, watched)
        await watched.until(EngineState.ASLEEP)
    (line,) = [line for line in logs if line["event"] == "engine_asleep"]
    assert "SIGKILL" in line["detail"]
    assert watched.supervisor.status.restarts == 0
    assert (await end_of(watched.submit("t1"))).reason == "stop"
    await watched.supervisor.stop()


@STUB
async def test_engine_that_hangs_while_suspending_is_killed(monkeypatch: pytest.MonkeyPatch, clock: LoopClock) -> None:
    """It is killed after its timeout; a turn submitted in the meantime then runs."""
    deadlines = process.EngineProcess.end.__kwdefaults__
    assert deadlines is not None
    monkeypatch.setitem(deadlines, "suspend_deadline_s", 0.1)
    monkeypatch.setitem(deadlines, "deadline_s", 0.1)
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, max_restarts=0)
    late: list[RecordingTurn] = []

    def stop_once(status: EngineStatus) -> None:
        if status.state is EngineState.SUSPENDING and not late:
            assert status.pid is not None
            os.kill(status.pid, signal.SIGSTOP)
            late.append(watched.submit("t1"))

    watched.supervisor.subscribe(stop_once)
    with capture_logs() as logs:
        await idle_supervisor(clock, watched)
        await watched.until(EngineState.ASLEEP)
    assert "engine_not_suspended" in {line["event"] for line in logs}
    assert (await end_of(late[0])).reason == "stop"
    assert watched.supervisor.status.restarts == 0
    await watched.supervisor.stop()


@STUB
async def test_engine_lost_after_waking_is_restarted(clock: LoopClock) -> None:
    """It counts as the first of the allowed restarts; the turn that woke it resumes."""
    watched = await asleep(clock, max_restarts=1, echo_delay_ms=20)
    turn = watched.submit("t1", LONG)
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    watched.kill()
    await watched.until(EngineState.BACKOFF)
    assert "SIGKILL" in watched.supervisor.status.detail
    assert (await end_of(turn)).reason == "stop"
    assert turn.text == LONG
    assert (watched.supervisor.status.restarts, watched.supervisor.given_up) == (1, False)
    await clock.go_on(SLEEP_AFTER_S)
    await watched.until(EngineState.ASLEEP)
    assert watched.supervisor.status.detail == ""
    await watched.supervisor.stop()


@STUB
async def test_failed_wake_is_retried(clock: LoopClock) -> None:
    """An engine that dies while it wakes counts as lost; after the last restart the turn fails."""
    options = iter([{"model_name": "die"}])

    def plan_again(engine: EngineOptions) -> EngineOptions:
        return engine.replace(**next(options, {}))

    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, max_restarts=1, plan_again=plan_again)
    await idle_supervisor(clock, watched)
    await watched.until(EngineState.ASLEEP)
    turn = watched.submit("t1", "count 3")
    await watched.until(EngineState.BACKOFF)
    await watched.until(EngineState.FAILED)
    assert watched.supervisor.given_up
    await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    (end,) = turn.terminal
    assert isinstance(end, Failed)
    assert end.code == "engine_unavailable"
    await watched.supervisor.stop()


@STUB
@pytest.mark.parametrize("state", [EngineState.SUSPENDING, EngineState.ASLEEP])
async def test_stop_works_in_every_sleep_state(state: EngineState, clock: LoopClock) -> None:
    """No process and no task is left, and turns are refused from then on."""
    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S)
    await idle_supervisor(clock, watched)
    await watched.until(state)
    async with asyncio.timeout(TIMEOUT_S):
        await watched.supervisor.stop()
    assert watched.states[-2:] == [EngineState.DRAINING, EngineState.STOPPED]
    assert watched.supervisor.status.pid is None
    others = {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}
    assert not {name for name in others if name.startswith(("supervisor:", "engine-process:"))}


@STUB
async def test_engine_refused_admission_fails_until_admitted(clock: LoopClock) -> None:
    """The turn that would wake it gets the reason, new ones a retry delay, and it recovers by itself."""
    gone = InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.")
    asked, faults = [], [gone, ValueError("a device that cannot be described"), gone]

    async def admit() -> bool:
        asked.append(True)
        if faults:
            raise faults.pop(0)
        return True

    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, admit=admit)
    await idle_supervisor(clock, watched)
    await watched.until(EngineState.ASLEEP)
    with capture_logs() as logs:
        turn, begun = watched.submit("t1"), watched.submit("t2", answer=bytes(4))
        await watched.until(EngineState.FAILED)
        status = watched.supervisor.status
        assert (status.serves, status.detail) == (False, "There is no GPU 7. It is retried until that has changed.")
        await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
        (end,) = turn.terminal
        assert isinstance(end, Failed)
        assert (end.code, "There is no GPU 7." in end.message) == ("engine_unavailable", True)
        with pytest.raises(InferenceCenterError) as refusal:
            watched.submit("t3")
        assert refusal.value.code is ErrorCode.ENGINE_UNAVAILABLE
        assert refusal.value.retry_after_ms is not None
        await watched.until(EngineState.READY)
    assert len(asked) == 4
    assert [line["event"] for line in logs if line["event"].startswith("engine_not")] == [
        "engine_not_woken",
        "engine_not_admitted",
        "engine_not_woken",
        "engine_not_woken",
    ]
    assert (watched.supervisor.given_up, watched.supervisor.status.restarts) == (False, 0)
    assert (await end_of(begun)).reason == "stop"
    assert (await end_of(watched.submit("t4"))).reason == "stop"
    await watched.supervisor.stop()


@STUB
async def test_stop_works_while_admission_is_refused(clock: LoopClock) -> None:
    """It works while the engine waits for its next attempt."""

    async def admit() -> bool:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.")

    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, admit=admit, backoff_s=3600.0)
    await idle_supervisor(clock, watched)
    await watched.until(EngineState.ASLEEP)
    watched.submit("t1")
    await watched.until(EngineState.FAILED)
    async with asyncio.timeout(TIMEOUT_S):
        await watched.supervisor.stop()
    assert watched.states[-1] is EngineState.STOPPED


@STUB
async def test_start_error_counts_as_a_restart(monkeypatch: pytest.MonkeyPatch, clock: LoopClock) -> None:
    """For any error, the waiting turn runs on the next engine; too many errors give the engine up."""
    monkeypatch.setattr(tasks, "RESTART_MIN_S", 0.0)
    plans = iter([ValueError("a header that was not expected"), OSError("a file that is gone")])

    def plan_again(engine: EngineOptions) -> EngineOptions:
        for fault in plans:
            raise fault
        return engine

    watched = ObservedSupervisor(sleep_after_s=SLEEP_AFTER_S, plan_again=plan_again, max_restarts=2)
    await idle_supervisor(clock, watched)
    await watched.until(EngineState.ASLEEP)
    turn = watched.submit("t1")
    for _ in range(2):
        await watched.until(EngineState.BACKOFF)
        assert "internal error" in watched.supervisor.status.detail
    assert (await end_of(turn)).reason == "stop"
    plans = iter([ValueError("a header that was not expected")] * 3)
    watched.kill()
    await watched.until(EngineState.FAILED)
    assert watched.supervisor.given_up
    await watched.supervisor.stop()
