"""The engine's loop: take commands, plan a step, run it, send all it produced in one frame."""

from __future__ import annotations

import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inferencecenter.engine.deadlines import Deadlines
from inferencecenter.engine.executor import Executor
from inferencecenter.engine.inbox import Closed, Fetched, Prepared, Received, Unprepared
from inferencecenter.engine.outputs import Turn, TurnOutput, failed, never_ran
from inferencecenter.engine.scheduler.plan import Restore
from inferencecenter.engine.scheduler.request import Request
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Abort, Log, Position, Progress, Release, Step, Submit, unpack_tokens
from inferencecenter.protocol import params as turn_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.inbox import Command, Inbox
    from inferencecenter.engine.kv.store import KvStore
    from inferencecenter.ipc.messages import EngineOptions, FromEngine, TurnEvent

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RSS_EVERY_S = 1.0
_BLOCKED_S = 1.0


@dataclass(slots=True)
class _Pending:
    """A submitted turn until the scheduler has it."""

    submit: Submit
    arrival: int
    at_s: float
    prepared: Prepared | Unprepared | None = None


class EngineLoop:
    """Runs turns on a backend until the front is gone.

    Args:
        backend: What decodes; the loop's thread is the only one that calls it, but for vocabulary look-ups.
        options: How steps are planned, how long turns may wait, and the number of worker threads.
        kv: Where sequences are parked; what it fetches is announced in the inbox.
        inbox: What the reader thread and the workers put in.
        send: Sends a frame to the front; may block.
        clock: Monotonic seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        backend: Backend,
        options: EngineOptions,
        *,
        kv: KvStore,
        inbox: Inbox,
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._queue_timeout_s = options.queue_timeout_s or math.inf
        self._pool = ThreadPoolExecutor(options.worker_threads, thread_name_prefix="worker")
        self._inbox = inbox
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
        )
        self._executor = Executor(
            backend,
            kv,
            pool=self._pool,
            workers=options.worker_threads,
            clock=clock,
            interrupted=lambda: inbox.urgent,
            on_log=self._on_log,
        )
        self._pending: dict[str, _Pending] = {}
        self._sessions: dict[str, deque[str]] = {}
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._events: list[TurnEvent] = []
        self._gauges = (0, 0, 0, 0)
        self._rss_bytes = 0
        self._rss_at_s = float("-inf")
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
            self._pool.shutdown(cancel_futures=True)
            self._executor.close()

    def _take_commands(self) -> bool:
        """Handle what has come in, waiting for it when there is nothing else to do; ``False`` at the end."""
        idle = not self._scheduler.has_work
        if idle:
            self._scheduler.check_integrity()
            self._kv.check_integrity()
            if not self._pending:
                self._deadlines.clear()
        if idle or self._scheduler.blocked:
            command = self._inbox.get(timeout_s=self._sleep_s(idle=idle))
            if command is not None:
                self._handle(command)
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
        if self._scheduler.has_work:
            plan = self._scheduler.step(now)
            restored = {move.key for move in plan.moves if isinstance(move, Restore)}
            for key in plan.fetches:
                self._kv.fetch(key, keep=restored)
            outcome, events = self._executor.run(plan)
            readings = self._scheduler.completed(outcome, now=self._clock())
            self._events += [Position(turn_id, place) for turn_id, place in self._scheduler.positions()]
            self._events += events
            self._events += [Progress(reading.turn_id, reading.done, reading.total) for reading in readings]

    def _report(self) -> None:
        """Send all that has happened since the last time in one frame, if anything has."""
        running, waiting = self._scheduler.running, self._scheduler.waiting + len(self._pending)
        parked_sessions, parked_bytes = self._kv.sessions, self._kv.bytes
        gauges = (running, waiting, parked_sessions, parked_bytes)
        if self._events or gauges != self._gauges:
            self._send(
                Step(
                    events=tuple(self._events),
                    running=running,
                    waiting=waiting,
                    rss_bytes=self._read_rss_bytes(),
                    parked_sessions=parked_sessions,
                    parked_bytes=parked_bytes,
                )
            )
            self._events, self._gauges = [], gauges

    def _handle(self, command: Command) -> None:
        match command:
            case Received(command=Submit() as submit, at_s=at_s):
                self._submit(submit, at_s=at_s)
            case Received(command=Abort(turn_id=turn_id)):
                self._end(turn_id, "aborted", now=self._clock())
            case Received(command=Release(session_id=session_id)):
                self._release(session_id)
            case Prepared() | Unprepared():
                self._enqueue(command)
            case Fetched():
                pass  # it woke the loop, and the next plan finds what it has become
            case Closed():
                self._closed = True

    def _submit(self, submit: Submit, *, at_s: float) -> None:
        self._arrivals += 1
        self._pending[submit.turn_id] = _Pending(submit, self._arrivals, at_s)
        self._sessions.setdefault(submit.session_id, deque()).append(submit.turn_id)
        if not submit.answer:
            self._deadlines.add(submit.turn_id, (at_s + self._queue_timeout_s,))
        self._pool.submit(self._prepare, submit, at_s=at_s)

    def _prepare(self, submit: Submit, *, at_s: float) -> None:
        """Turn a submission into tokens, on a worker thread."""
        try:
            self._inbox.put(self._prepared(submit, at_s=at_s))
        except InferenceCenterError as error:
            self._inbox.put(Unprepared(submit.turn_id, error))
        except Exception as error:  # noqa: BLE001 - a border: what one turn sent must not end the others
            self._on_log("error", f"tokenizing failed: {error!r}")
            failure = InferenceCenterError(ErrorCode.INTERNAL, "The prompt could not be turned into tokens.")
            self._inbox.put(Unprepared(submit.turn_id, failure))

    def _prepared(self, submit: Submit, *, at_s: float) -> Prepared:
        history = unpack_tokens(submit.tokens)
        prompt = history + self._backend.tokenize(submit.pieces, first=not history)
        answer = unpack_tokens(submit.answer)
        turn = Turn(
            turn_id=submit.turn_id,
            params=turn_params.decode(submit.params_json),
            submitted_s=at_s,
            prompt_tokens=len(prompt),
            answer=tuple(answer),
            may_shift=submit.may_shift,
        )
        output = TurnOutput(turn, self._backend, n_ctx=self._backend.model.n_ctx, queue_timeout_s=self._queue_timeout_s)
        return Prepared(submit.turn_id, prompt + answer, self._prefix_tokens(submit, prompt), output)

    def _prefix_tokens(self, submit: Submit, prompt: list[int]) -> int:
        """Return how many tokens the shared pieces are; none where a token reaches over their end."""
        if submit.tokens or not submit.shared_pieces:
            return 0
        prefix = self._backend.tokenize(submit.pieces[: submit.shared_pieces], first=True)
        return len(prefix) if prompt[: len(prefix)] == prefix else 0

    def _enqueue(self, prepared: Prepared | Unprepared) -> None:
        """Give the scheduler what is ready, each session's turns in the order in which they came."""
        pending = self._pending.get(prepared.turn_id)
        if pending is None:  # ended while it was tokenized
            return
        pending.prepared = prepared
        self._advance(pending.submit.session_id)

    def _advance(self, session_id: str) -> None:
        turns = self._sessions[session_id]
        while turns and (prepared := self._pending[turns[0]].prepared) is not None:
            pending = self._pending.pop(turns.popleft())
            self._schedule(pending, prepared)
        if not turns:
            del self._sessions[session_id]

    def _schedule(self, pending: _Pending, prepared: Prepared | Unprepared) -> None:
        submit = pending.submit
        if isinstance(prepared, Unprepared):
            self._events.append(failed(submit.turn_id, prepared.error))
            return
        request = Request(
            turn_id=submit.turn_id,
            session_id=submit.session_id,
            client_id=submit.client_id,
            priority=submit.priority,
            arrival=pending.arrival,
            submitted_s=pending.at_s,
            prefix_tokens=prepared.prefix_tokens,
            public=submit.public,
            durable=submit.durable,
            tokens=prepared.tokens,
        )
        try:
            self._scheduler.add(request)
        except InferenceCenterError as error:
            shifts = submit.may_shift and error.code is ErrorCode.PROMPT_TOO_LONG
            output = prepared.output
            self._events.append(output.overflow(now=self._clock()) if shifts else output.fail(error))
            return
        self._executor.add(prepared.output)
        self._deadlines.add(submit.turn_id, prepared.output.deadlines_s)

    def _end(self, turn_id: str, reason: str, *, now: float) -> None:
        """End a turn wherever it is; one that is unknown has just ended."""
        pending = self._withdraw(turn_id)
        if pending is not None:
            self._events.append(never_ran(turn_id, reason, waited_s=now - pending.at_s))
        elif self._scheduler.abort(turn_id, now=now):
            self._events += self._executor.end(turn_id, reason)

    def _withdraw(self, turn_id: str) -> _Pending | None:
        """Forget a turn that the scheduler does not have yet, if it is one, and return it."""
        pending = self._pending.pop(turn_id, None)
        if pending is not None:
            session_id = pending.submit.session_id
            self._sessions[session_id].remove(turn_id)
            self._advance(session_id)
        return pending

    def _lapse(self, turn_id: str, *, now: float) -> None:
        """End a turn of which a time has run out, if it has: it may have begun or ended, or been submitted again."""
        pending = self._pending.get(turn_id)
        lapse = self._executor.lapse(turn_id, now)
        if pending is not None and not pending.submit.answer and now >= pending.at_s + self._queue_timeout_s:
            lapse = "queue_timeout"
        if lapse == "time":
            self._end(turn_id, lapse, now=now)
        elif lapse == "queue_timeout":
            error = InferenceCenterError(
                ErrorCode.QUEUE_TIMEOUT, f"The turn waited {self._queue_timeout_s:g} s and got no slot."
            )
            if self._withdraw(turn_id) is not None:
                self._events.append(failed(turn_id, error))
            elif self._scheduler.abort(turn_id, now=now):
                self._events.append(self._executor.fail(turn_id, error))

    def _release(self, session_id: str) -> None:
        now = self._clock()
        for turn_id in tuple(self._sessions.get(session_id, ())):
            self._end(turn_id, "aborted", now=now)
        for turn_id in self._scheduler.release(session_id, now=now):
            self._events += self._executor.end(turn_id, "aborted")
        self._kv.forget_session(session_id)

    def _read_rss_bytes(self) -> int:
        now = self._clock()
        if now - self._rss_at_s >= _RSS_EVERY_S:
            self._rss_bytes = int(_STATM.read_text().split()[1]) * _PAGE_BYTES
            self._rss_at_s = now
        return self._rss_bytes

    def _on_log(self, level: str, text: str) -> None:
        self._send(Log(level, text, "engine"))
