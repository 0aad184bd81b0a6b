"""The engine's loop: take commands, plan a step, run it, send all it produced in one frame."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from inferencecenter.engine.accounting import work_of
from inferencecenter.engine.deadlines import Deadlines
from inferencecenter.engine.executor import Executor
from inferencecenter.engine.fair_workers import FairWorkers
from inferencecenter.engine.grammars import Grammars
from inferencecenter.engine.inbox import Closed, Fetched, GrammarReady, Prepared, Received, Unprepared
from inferencecenter.engine.lookups import Lookups
from inferencecenter.engine.outputs import failed, never_ran
from inferencecenter.engine.pause import Pause
from inferencecenter.engine.preparation import Preparation
from inferencecenter.engine.resident import ResidentMemory
from inferencecenter.engine.saving import QUIET_S, IdleSaving
from inferencecenter.engine.scheduler.limits import Limits
from inferencecenter.engine.scheduler.plan import Restore
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.engine.speculation import draft_tokens
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import (
    Abort,
    CancelLookup,
    Detokenize,
    Keep,
    KvLimit,
    Limit,
    Log,
    Position,
    Progress,
    Release,
    Step,
    Submit,
    Suspend,
    Suspended,
    Tokenize,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.inbox import Command, Inbox
    from inferencecenter.engine.kv.store import KvStore
    from inferencecenter.engine.preparation import Pending
    from inferencecenter.engine.scheduler.plan import Outcome, Plan
    from inferencecenter.ipc.messages import EngineOptions, FromEngine, TurnEvent, Work
    from inferencecenter.ipc.pulse import Pulse

_BLOCKED_S = 1.0


class EngineLoop:
    """Runs turns on a backend until the front is gone.

    Args:
        backend: What decodes; the loop's thread is the only one that calls it, but for vocabulary look-ups.
        options: How steps are planned, how long turns may wait, and the number of worker threads.
        kv: Where sequences are parked; what it fetches is announced in the inbox.
        inbox: What the reader thread and the workers put in.
        pulse: Where it counts its progress: a loop that sleeps, or turns without moving anything, makes none.
        send: Sends a frame to the front; may block.
        clock: Monotonic seconds.
        quiet_s: How long nothing is to come in before what slots hold is saved.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        backend: Backend,
        options: EngineOptions,
        *,
        kv: KvStore,
        inbox: Inbox,
        pulse: Pulse,
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._queue_timeout_s = options.queue_timeout_s or math.inf
        self._pool = ThreadPoolExecutor(options.worker_threads, thread_name_prefix="worker")
        self._inbox = inbox
        self._pulse = pulse
        self._send = send
        self._clock = clock
        self._scheduler = Scheduler(
            slots=backend.model.slots,
            n_ctx=backend.model.n_ctx,
            grid_tokens=options.prefill_grid_tokens,
            pass_tokens=min(options.n_batch, options.n_ubatch),
            target_step_s=options.target_step_ms / 1000,
            parked=kv,
            can_rewind=backend.can_rewind,
            quantum_tokens=options.quantum_tokens,
            ageing_s=options.ageing_s,
            draft_tokens=draft_tokens(options, backend, on_log=self._on_log),
        )
        self._executor = Executor(
            backend,
            kv,
            pool=self._pool,
            workers=options.worker_threads,
            clock=clock,
            interrupted=lambda: inbox.urgent,
            progressed=pulse.beat,
            on_log=self._on_log,
        )
        self._grammars = Grammars(backend)
        self._workers = FairWorkers(self._pool, most=options.worker_threads)
        self._lookups = Lookups(backend, workers=self._workers, send=send, on_log=self._on_log)
        self._preparation = Preparation(
            backend,
            grammars=self._grammars,
            workers=self._workers,
            inbox=inbox,
            pulse=pulse,
            queue_timeout_s=self._queue_timeout_s,
            on_ready=self._schedule,
            on_log=self._on_log,
        )
        self._deadlines = Deadlines(self._lives)
        self._events: list[TurnEvent] = []
        self._work: Work | None = None
        self._gauges = (0, 0, 0, 0)
        self._memory = ResidentMemory(clock)
        self._pause = Pause(inbox, clock=clock)
        self._saving = IdleSaving(self._scheduler.saving, park=self._executor.park, inbox=inbox, quiet_s=quiet_s)
        self._suspended = False
        self._closed = False

    def run(self) -> None:
        """Serve until ``Closed`` comes in.

        Raises:
            ConnectionError: The front is gone.
        """
        try:
            self._report()
            while self._take_commands():
                self._step()
                self._report()
        finally:
            self._preparation.close()
            self._workers.close()
            self._grammars.close()
            self._pool.shutdown(cancel_futures=True)
            self._executor.close()

    def _take_commands(self) -> bool:
        """Handle what has come in, waiting for it when there is nothing else to do; ``False`` at the end."""
        idle = not self._scheduler.has_work
        quiet = idle and not (self._preparation or self._suspended or self._pause.is_set)
        if idle:
            self._scheduler.check_integrity()
            self._kv.check_integrity()
            if not self._preparation:
                self._deadlines.clear()
        if idle or self._scheduler.blocked:
            command = self._inbox.get(timeout_s=self._saving.wait_s if quiet else self._sleep_s(idle=idle))
            if command is not None:
                self._handle(command)
            elif quiet:
                self._saving.run()
            elif not idle:
                self._pulse.beat()  # a disk that does not answer is given up, which is no hang
        while not self._closed and (command := self._pause.command()) is not None:
            self._handle(command)
            self._report()
        for command in self._inbox.drain():
            self._handle(command)
        return not self._closed

    def _sleep_s(self, *, idle: bool) -> float | None:
        """Return how long nothing has to be done; ``None`` for as long as nothing comes in."""
        wait_s = self._deadlines.wait_s(self._clock())
        if idle:
            return wait_s
        # The scheduler gives up a disk that does not answer.
        return _BLOCKED_S if wait_s is None else min(wait_s, _BLOCKED_S)

    def _step(self) -> None:
        now = self._clock()
        for turn_id in self._deadlines.passed(now):
            self._lapse(turn_id, now=now)
        for key in self._scheduler.unwanted_fetches():
            self._kv.cancel_fetch(key)
        if self._scheduler.has_work:
            plan = self._scheduler.step(now)
            restored = {move.key for move in plan.moves if isinstance(move, Restore)}
            for key in plan.fetches:
                self._kv.fetch(key, keep=restored)
            outcome, events = self._run(plan)
            ended_s = self._clock()
            readings = self._scheduler.completed(outcome, now=ended_s)
            self._work = work_of(plan, outcome, step_s=ended_s - now)
            self._events += [Position(turn_id, place) for turn_id, place in self._scheduler.positions()]
            self._events += events
            self._events += [Progress(reading.turn_id, reading.done, reading.total) for reading in readings]

    def _run(self, plan: Plan) -> tuple[Outcome, tuple[TurnEvent, ...]]:
        """Carry a plan out, with its turns named beforehand: what ends the process meanwhile may be their fault."""
        if plan.empty:
            return self._executor.run(plan)
        self._pulse.step(plan.turn_ids)
        ran = self._executor.run(plan)
        self._pulse.step(())
        self._pause.begin()
        return ran

    def _report(self) -> None:
        """Send all that has happened since the last time in one frame, if anything has."""
        running, waiting = self._scheduler.running, self._scheduler.waiting + len(self._preparation)
        parked_sessions, parked_bytes = self._kv.sessions, self._kv.total_bytes
        gauges = (running, waiting, parked_sessions, parked_bytes)
        if self._events or self._work is not None or gauges != self._gauges:
            self._send(
                Step(
                    events=tuple(self._events),
                    running=running,
                    waiting=waiting,
                    rss_bytes=self._memory.read(),
                    parked_sessions=parked_sessions,
                    parked_bytes=parked_bytes,
                    parked_ram_bytes=self._kv.ram_bytes,
                    work=self._work,
                )
            )
            self._events, self._work, self._gauges = [], None, gauges

    def _handle(self, command: Command) -> None:
        self._pulse.beat()
        if self._suspended and not isinstance(command, Closed):
            return
        match command:
            case Received():
                self._obey(command)
            case GrammarReady() | Prepared() | Unprepared():
                self._preparation.take(command)
            case Fetched():
                pass  # it woke the loop, and the next plan finds what it has become
            case Closed():
                self._closed = True

    def _obey(self, received: Received) -> None:
        match received.command:
            case Submit() as submit:
                self._submit(submit, at_s=received.at_s)
            case Abort(turn_id=turn_id):
                self._end(turn_id, "aborted", now=self._clock())
            case Release(session_id=session_id):
                self._release(session_id)
            case Keep(session_ids=session_ids):
                self._kv.keep(session_ids)
            case Tokenize() | Detokenize() as question:
                self._lookups.take(question)
            case CancelLookup(ask_id=ask_id):
                self._lookups.withdraw(ask_id)
            case Limit() as limit:
                self._limit(limit)
            case KvLimit(ram_bytes=ram_bytes):
                self._kv.limit_ram(ram_bytes)
                self._scheduler.saving.begin_again()
            case Suspend(park_all=park_all):
                self._suspend(park_all=park_all)

    def _submit(self, submit: Submit, *, at_s: float) -> None:
        self._preparation.add(submit, at_s=at_s)
        if not submit.answer:
            self._deadlines.add(submit.turn_id, (at_s + self._queue_timeout_s,))

    def _lives(self, turn_id: str) -> bool:
        return self._preparation.get(turn_id) is not None or turn_id in self._executor

    def _schedule(self, pending: Pending, prepared: Prepared | Unprepared) -> None:
        """Give the scheduler a turn that is ready, unless it is over."""
        submit = pending.submit
        if isinstance(prepared, Unprepared):
            self._events.append(failed(submit.turn_id, prepared.error))
            return
        output, now = prepared.output, self._clock()
        if output.complete:
            self._events += output.conclude(prepared.prompt, now=now)
            return
        if pending.ending is not None:
            self._events += output.end(pending.ending, now=now)
            return
        try:
            self._scheduler.add(pending.request(prepared))
        except InferenceCenterError as error:
            shifts = submit.may_shift and error.code is ErrorCode.PROMPT_TOO_LONG
            self._events.append(output.overflow(now=now) if shifts else output.fail(error, now=now))
            return
        self._executor.add(output)
        self._deadlines.add(submit.turn_id, output.deadlines_s)

    def _end(self, turn_id: str, reason: str, *, now: float) -> None:
        """End a turn wherever it is; one that is unknown has just ended."""
        pending = self._preparation.get(turn_id)
        if pending is not None and pending.submit.answer:
            self._preparation.conclude(pending, reason)  # what of its answer stays is known when it is prepared
        elif pending is not None:
            self._preparation.withdraw(turn_id)
            self._events.append(never_ran(turn_id, reason, waited_s=now - pending.at_s))
        elif self._scheduler.abort(turn_id, now=now):
            self._events += self._executor.end(turn_id, reason)

    def _lapse(self, turn_id: str, *, now: float) -> None:
        """End a turn of which a time has run out, if it has: it may have begun or ended, or been submitted again."""
        pending = self._preparation.get(turn_id)
        lapse = self._executor.lapse(turn_id, now)
        if pending is not None and not pending.submit.answer and now >= pending.at_s + self._queue_timeout_s:
            lapse = "queue_timeout"
        if lapse == "time":
            self._end(turn_id, lapse, now=now)
        elif lapse == "queue_timeout":
            error = InferenceCenterError(
                ErrorCode.QUEUE_TIMEOUT, f"The turn waited {self._queue_timeout_s:g} s and got no slot."
            )
            if self._preparation.withdraw(turn_id) is not None:
                self._events.append(failed(turn_id, error))
            elif self._scheduler.abort(turn_id, now=now):
                self._events.append(self._executor.fail(turn_id, error))

    def _release(self, session_id: str) -> None:
        now = self._clock()
        for turn_id in self._preparation.of_session(session_id):
            self._end(turn_id, "aborted", now=now)
        for turn_id in self._scheduler.release(session_id, now=now):
            self._events += self._executor.end(turn_id, "aborted")
        self._kv.forget_session(session_id)

    def _limit(self, limit: Limit) -> None:
        limits = Limits(
            active_slots=limit.active_slots, prefill_share=limit.prefill_share, lowest_class=limit.lowest_class
        )
        self._scheduler.limit(limits, now=self._clock())
        self._pause.change(limit.pause_ms / 1000)

    def _suspend(self, *, park_all: bool) -> None:
        """Stop all turns without a word, bring their KV to disk, and take no more of them; see ``Suspend``."""
        self._suspended = True
        self._preparation.clear()
        self._deadlines.clear()
        self._events.clear()
        self._executor.close()
        for park in self._scheduler.suspend(now=self._clock(), park_all=park_all):
            if not self._executor.park(park):  # memory is full of what is on its way to the disk
                self._kv.save(self._pulse.beat)
                self._executor.park(park)
        self._kv.save(self._pulse.beat)
        self._report()
        self._send(Suspended(self._kv.sessions_on_disk))

    def _on_log(self, level: str, text: str) -> None:
        self._send(Log(level, text, "engine"))
