"""Engines that die, hang or send invalid frames, and their turns."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.channel import MAX_UNREAD_BYTES
from inferencecenter.ipc.messages import Cancelled, Failed, Submit, TokenDelta
from inferencecenter.ipc.port import EngineState, EngineStatus
from inferencecenter.supervisor import process
from inferencecenter.supervisor.lifecycle import POLLS
from tests.supervisor.conftest import STUB
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, RecordingTurn, end_of, order
from tests.supervisor.stub_engine import HANGS, answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.loop_clock import LoopClock

pytestmark = pytest.mark.usefixtures("stopped")
LONG = "a long answer " * 20
HANG_TIMEOUT_S = 60.0


async def ready(**options: object) -> ObservedSupervisor:
    """Return a supervisor whose engine is ready."""
    watched = ObservedSupervisor(**options)  # type: ignore[arg-type]
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    return watched


async def crashed(heard: RecordingTurn) -> Failed:
    """Wait until a turn has failed and return its error."""
    await asyncio.wait_for(heard.ended.wait(), TIMEOUT_S)
    (end,) = heard.terminal
    assert isinstance(end, Failed)
    return end


# An engine that is killed.


@STUB
async def test_engine_kill_while_loading_keeps_waiting_turns(tmp_path: Path) -> None:
    """They wait for the next engine."""
    watched = ObservedSupervisor(model_name="wait", model_path=str(tmp_path / "steps"))
    turn = watched.submit("t", "count 3")

    def kill(status: EngineStatus) -> None:
        if status.state is EngineState.STARTING and status.load_fraction == 0.5 and not status.restarts:
            watched.kill()

    watched.supervisor.subscribe(kill)
    watched.supervisor.start()
    await end_of(turn)
    assert (turn.text, turn.interruptions, turn.submissions) == (answer(3), 0, 1)
    assert watched.supervisor.status.restarts == 1
    await watched.supervisor.stop()


async def test_engine_kill_during_prefill_loses_no_text() -> None:
    """The turns had no output; they are prefilled again and complete."""
    watched = await ready(echo_delay_ms=5, slots=2)
    turns = [watched.submit(f"t{n}", LONG[:50]) for n in range(3)]
    watched.kill()
    for turn in turns:
        await end_of(turn)
        assert (turn.text, turn.interruptions, turn.submissions) == (LONG[:50], 1, 2)
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_repeated_engine_kills_lose_no_text() -> None:
    """Three kills, each a few words later: the text is complete and has no repetition."""
    watched = await ready(echo_delay_ms=5, slots=4)
    turns = [watched.submit(f"t{n}", f"{n}" + LONG) for n in range(4)]
    for _ in range(3):
        for turn in turns:
            await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
        for turn in turns:
            turn.spoke.clear()
        watched.kill()
        await watched.until(EngineState.READY)
    for n, turn in enumerate(turns):
        await end_of(turn)
        assert turn.text == f"{n}" + LONG
    await watched.supervisor.stop()


async def hang(clock: LoopClock) -> None:
    """Advance past the hang timeout."""
    for _ in range(POLLS):
        await clock.go_on(HANG_TIMEOUT_S / POLLS)


@STUB
async def test_hanging_engine_is_killed(clock: LoopClock) -> None:
    """SIGSTOP while turns run is a hang; it is detected by the heartbeat alone, and the turns resume."""
    watched = await ready(echo_delay_ms=5, hang_timeout_s=HANG_TIMEOUT_S)
    turn = watched.submit("t", LONG)
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    pid = watched.supervisor.status.pid
    assert pid is not None
    with capture_logs() as logs:
        os.kill(pid, signal.SIGSTOP)
        await hang(clock)
        assert watched.supervisor.status.state is EngineState.READY, "it has moved since the watch began"
        await hang(clock)
        await watched.until(EngineState.BACKOFF)
    assert watched.supervisor.status.detail == "the engine made no progress for 60 s"
    assert [line["pid"] for line in logs if line["event"] == "engine_hangs"] == [pid]
    await end_of(turn)
    assert turn.text == LONG
    await watched.supervisor.stop()


@STUB
async def test_idle_engine_has_no_watchdog() -> None:
    """An engine without turns is not monitored: the timer runs only while there are some."""

    def watching() -> bool:
        timers = [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        return "_poll" in {getattr(each._callback, "__name__", "") for each in timers}

    watched = await ready(echo_delay_ms=5)
    assert not watching()
    turn = watched.submit("t", LONG)
    assert watching()
    await end_of(turn)
    assert not watching()
    await watched.supervisor.stop()


# Engines that hang or send invalid frames.


@STUB
async def test_only_the_poison_turn_fails(tmp_path: Path) -> None:
    """Of eight turns it is found by running alone; the seven others complete, and new ones run."""
    log = tmp_path / "steps"
    watched = await ready(slots=8, model_path=str(log), max_restarts=4)
    turns = [watched.submit(f"t{n}", "count 1000") for n in range(7)]
    poison = watched.submit("poison", "die 5")
    failed = await crashed(poison)
    late = watched.submit("late", "count 3")
    assert failed.code == ErrorCode.ENGINE_CRASHED
    assert "SIGABRT" in failed.message
    assert failed.hint
    for turn in turns:
        assert (await end_of(turn)).reason == "stop"
        assert turn.text == answer(1000)
        assert turn.interruptions >= 2
    await end_of(late)
    steps = [line.split() for line in log.read_text().splitlines()]
    last_with_poison = max(index for index, step in enumerate(steps) if "poison" in step)
    assert steps[last_with_poison][1:] == ["poison"]
    assert len({step[0] for step in steps}) == 4
    await watched.supervisor.stop()


@STUB
async def test_two_poison_turns_are_found(tmp_path: Path) -> None:
    """Each is found while isolated, and the restarts it took are not counted."""
    watched = await ready(slots=8, max_restarts=3)
    fine = watched.submit("fine", "count 40")
    poisons = [watched.submit("one", "die 3"), watched.submit("two", "die 3")]
    for poison in poisons:
        assert (await crashed(poison)).code == ErrorCode.ENGINE_CRASHED
    await end_of(fine)
    assert fine.text == answer(40)
    assert not watched.supervisor.given_up
    await watched.supervisor.stop()


@STUB
async def test_poison_prompt_is_found() -> None:
    """A prompt that crashes a worker, before any step, is found in the same way."""
    watched = await ready(slots=8)
    poison = watched.submit("poison", "die-reading 0")
    fine = watched.submit("fine", "count 40")
    assert (await crashed(poison)).code == ErrorCode.ENGINE_CRASHED
    await end_of(fine)
    assert fine.text == answer(40)
    await watched.supervisor.stop()


@STUB
async def test_turn_that_exhausts_memory_is_found() -> None:
    """The OOM killer's SIGKILL looks like any other, so one more crash is needed."""
    watched = await ready(slots=8, max_restarts=4)
    poison, fine = watched.submit("poison", "oom 4"), watched.submit("fine", "count 1000")
    failed = await crashed(poison)
    assert "SIGKILL" in failed.message
    await end_of(fine)
    assert fine.text == answer(1000)
    assert watched.supervisor.status.restarts == 4
    await watched.supervisor.stop()


@STUB
async def test_turn_that_hangs_engines_is_found(tmp_path: Path, clock: LoopClock) -> None:
    """A hang counts as a crash: the turn is found and the others continue."""
    log = tmp_path / "steps"
    watched = await ready(slots=8, hang_timeout_s=HANG_TIMEOUT_S, model_path=str(log))
    poison, fine = watched.submit("poison", "hang 4"), watched.submit("fine", "count 40")
    for n_hangs in range(1, 4):
        async with asyncio.timeout(TIMEOUT_S):
            while not log.exists() or log.read_text().count(HANGS) < n_hangs:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        await hang(clock)
        await hang(clock)
    failed = await crashed(poison)
    assert "no progress" in failed.message
    assert poison.text == answer(4)
    await end_of(fine)
    assert fine.text == answer(40)
    await watched.supervisor.stop()


@STUB
async def test_engine_that_floods_its_pipe_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid frame ends the engine, not the front; the turn that causes it is found."""
    monkeypatch.setattr(process, "EXIT_GRACE_S", 0.05)
    watched = await ready(slots=8)
    poison, fine = watched.submit("poison", "flood 2"), watched.submit("fine", "count 40")
    failed = await crashed(poison)
    assert failed.code == ErrorCode.ENGINE_CRASHED
    await end_of(fine)
    assert fine.text == answer(40)
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_submissions_respect_the_send_window() -> None:
    """Submissions above the window wait, and are sent without loss as the engine reads."""
    watched = ObservedSupervisor(max_queue=1000)
    large = bytes(2**20)
    turns = [
        RecordingTurn(order(f"t{number}", tokens=large)) for number in range(5 * MAX_UNREAD_BYTES // 4 // len(large))
    ]
    for turn in turns:
        watched.supervisor.submit(turn)
    watched.supervisor.start()
    for turn in turns:
        await asyncio.wait_for(turn.ended.wait(), TIMEOUT_S)
    assert {end.code for turn in turns for end in turn.terminal if isinstance(end, Failed)} == {"prompt_too_long"}
    assert [turn.submissions for turn in turns] == [1] * len(turns)
    assert watched.supervisor.status.restarts == 0
    await watched.supervisor.stop()


# Turns that end while no engine has them.


@STUB
async def test_turn_aborted_without_an_engine_is_withdrawn() -> None:
    """It ends at once, its partial answer is kept, and no engine gets it; others resume."""
    watched = await ready(echo_delay_ms=5)
    gone, stays = watched.submit("gone", LONG), watched.submit("stays", LONG)
    await asyncio.wait_for(gone.spoke.wait(), TIMEOUT_S)
    watched.kill()
    await watched.until(EngineState.BACKOFF)
    watched.supervisor.abort("gone")
    assert gone.terminal == [Cancelled("gone")]
    said = gone.text
    await end_of(stays)
    assert stays.text == LONG
    assert (gone.text, gone.submissions) == (said, 1)
    assert LONG.startswith(said)
    await watched.supervisor.stop()


@STUB
async def test_abort_survives_the_loss_of_an_engine() -> None:
    """A turn whose engine died before it answered the abort does not resume."""
    watched = await ready(echo_delay_ms=50)
    turn = watched.submit("t", LONG)
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    pid = watched.supervisor.status.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    watched.supervisor.abort("t")
    os.kill(pid, signal.SIGKILL)
    await watched.until(EngineState.READY)
    assert turn.terminal == [Cancelled("t")]
    assert (turn.interruptions, turn.submissions) == (0, 1)
    await watched.supervisor.stop()


@STUB
async def test_turn_that_cannot_be_resubmitted_fails_alone() -> None:
    """An error for its next engine ends the turn; an unexpected one is internal."""

    class Refusing(RecordingTurn):
        def submission(self, then: Callable[[], None]) -> Submit | None:
            if self.submissions:
                raise self.error
            return super().submission(then)

        error: Exception = InferenceCenterError(ErrorCode.MODEL_NOT_FOUND, "another model", hint="h", field="model")

    class Broken(Refusing):
        error = RuntimeError("a defect")

    watched = await ready(echo_delay_ms=5, slots=3)
    refusing, broken = Refusing(order("refusing", LONG)), Broken(order("broken", LONG))
    for turn in (refusing, broken):
        watched.supervisor.submit(turn)
    fine = watched.submit("fine", LONG)
    await asyncio.wait_for(fine.spoke.wait(), TIMEOUT_S)
    with capture_logs() as logs:
        watched.kill()
        await end_of(fine)
    assert fine.text == LONG
    assert refusing.terminal == [
        Failed(turn_id="refusing", code="model_not_found", message="another model", hint="h", field="model")
    ]
    (end,) = broken.terminal
    assert isinstance(end, Failed)
    assert end.code == ErrorCode.INTERNAL
    assert [line["turn"] for line in logs if line["event"] == "turn_not_submitted"] == ["broken"]
    await watched.supervisor.stop()


@STUB
async def test_submission_error_is_raised() -> None:
    """The error is raised, and the turn is not kept."""

    class Refusing(RecordingTurn):
        def submission(self, then: Callable[[], None]) -> Submit:
            raise InferenceCenterError(ErrorCode.CONTEXT_FULL)

    watched = await ready()
    with pytest.raises(InferenceCenterError) as caught:
        watched.supervisor.submit(Refusing(order("t")))
    assert caught.value.code is ErrorCode.CONTEXT_FULL
    assert "turns=0" in repr(watched.supervisor)
    await watched.supervisor.stop()


# Engines that do not come up.


@STUB
async def test_engine_is_given_up_after_too_many_restarts() -> None:
    """Turns fail, new ones are refused, and the supervisor can still be stopped."""
    watched = ObservedSupervisor(model_name="die", max_restarts=3)
    turn = watched.submit("t", "count 3")
    with capture_logs() as logs:
        watched.supervisor.start()
        failed = await crashed(turn)
    assert failed.code == ErrorCode.ENGINE_UNAVAILABLE
    assert "SIGABRT" in failed.message
    status = watched.supervisor.status
    assert (status.state, status.restarts, watched.supervisor.given_up) == (EngineState.FAILED, 3, True)
    assert watched.supervisor.load_failure is None
    with pytest.raises(InferenceCenterError) as caught:
        watched.submit("t2")
    assert caught.value.code is ErrorCode.ENGINE_UNAVAILABLE
    assert [line["restarts"] for line in logs if line["event"] == "engine_given_up"] == [3]
    await watched.supervisor.stop()
    assert watched.supervisor.status.state is EngineState.STOPPED


@STUB
async def test_turns_stay_unfinished_when_the_daemon_exits() -> None:
    """They get no event, as at a stop: the next daemon resumes them. New ones are refused."""
    watched = ObservedSupervisor(model_name="die", max_restarts=2, ends_with_it=lambda: True)
    turn = watched.submit("t", "count 3")
    watched.supervisor.start()
    await watched.until(EngineState.FAILED)
    assert watched.supervisor.given_up
    with pytest.raises(InferenceCenterError) as caught:
        watched.submit("t2")
    assert caught.value.code is ErrorCode.ENGINE_UNAVAILABLE
    await watched.supervisor.stop()
    assert turn.terminal == []


@STUB
@pytest.mark.parametrize("how", ["layers", "refuse"])
async def test_failed_gpu_load_is_retried_with_fewer_layers(how: str) -> None:
    """Half as many with each attempt, not counted as restarts, until the model loads."""
    watched = ObservedSupervisor(model_name=f"{how} 10", max_restarts=0)
    turn = watched.submit("t", "count 3")
    with capture_logs() as logs:
        watched.supervisor.start()
        await end_of(turn)
    assert [line["n_gpu_layers"] for line in logs if line["event"] == "engine_uses_fewer_layers"] == [32, 16, 8]
    assert watched.supervisor.load_failure is None
    assert turn.text == answer(3)
    await watched.supervisor.stop()


@STUB
async def test_load_failure_on_the_cpu_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the CPU alone cannot load it, it is not tried again."""
    watched = ObservedSupervisor(model_name="refuse -1", max_restarts=0, n_gpu_layers=1)
    watched.supervisor.start()
    await watched.until(EngineState.FAILED)
    failure = watched.supervisor.load_failure
    assert failure is not None
    assert "CUDA0" in failure.message
    assert not watched.supervisor.given_up
    await watched.supervisor.stop()


def test_stub_answers_are_prefixes() -> None:
    """The stub's answer begins in the same way however long it is."""
    assert answer(30).startswith(answer(27))
    assert TokenDelta("t", b"", answer(27)[-1]).text == "a"
