"""The engine's loop: take commands, plan a step, run it, send all it produced in one frame."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inferencecenter.engine.executor import Executor
from inferencecenter.engine.inbox import Closed, Prepared, Received
from inferencecenter.engine.outputs import Turn, TurnOutput, failed, never_ran
from inferencecenter.engine.scheduler.parking import NoParking
from inferencecenter.engine.scheduler.request import Request
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Abort, Log, Position, Progress, Release, Step, Submit, unpack_tokens
from inferencecenter.protocol import params as turn_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.inbox import Command, Inbox
    from inferencecenter.ipc.messages import EngineOptions, FromEngine, TurnEvent
    from inferencecenter.protocol.params import Params

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RSS_EVERY_S = 1.0


@dataclass(slots=True)
class _Pending:
    """A submitted turn until the scheduler has it."""

    submit: Submit
    arrival: int
    at_s: float
    prepared: Prepared | None = None


class EngineLoop:
    """Runs turns on a backend until the front is gone.

    Args:
        backend: What decodes; the loop's thread is the only one that calls it, but for vocabulary look-ups.
        options: The grid, the target step, the batch sizes and the number of worker threads.
        inbox: What the reader thread and the workers put in.
        send: Sends a frame to the front; may block.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        *,
        inbox: Inbox,
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
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
            parked=NoParking(),
            can_rewind=True,
            quantum_tokens=options.quantum_tokens,
            ageing_s=options.ageing_s,
        )
        self._executor = Executor(
            backend,
            pool=self._pool,
            workers=options.worker_threads,
            clock=clock,
            interrupted=lambda: inbox.urgent,
            on_log=self._on_log,
        )
        self._pending: dict[str, _Pending] = {}
        self._sessions: dict[str, deque[str]] = {}
        self._arrivals = 0
        self._events: list[TurnEvent] = []
        self._gauges = (0, 0)
        self._rss_bytes = 0
        self._rss_at_s = float("-inf")
        self._closed = False

    def run(self) -> None:
        """Serve until ``Closed`` comes in.

        Raises:
            ConnectionError: The front is gone.
        """
        try:
            while self._take_commands():
                self._step()
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._executor.close()

    def _take_commands(self) -> bool:
        """Handle what has come in, waiting for it when there is nothing else to do; ``False`` at the end."""
        if not self._scheduler.has_work:
            self._scheduler.check_integrity()
            self._handle(self._inbox.get())
        for command in self._inbox.drain():
            self._handle(command)
        return not self._closed

    def _step(self) -> None:
        now = self._clock()
        for turn_id in self._executor.overdue(now):
            self._end(turn_id, "time", now=now)
        if self._scheduler.has_work:
            plan = self._scheduler.step(now)
            outcome, events = self._executor.run(plan)
            readings = self._scheduler.completed(outcome, now=self._clock())
            self._events += [Position(turn_id, place) for turn_id, place in self._scheduler.positions()]
            self._events += events
            self._events += [Progress(reading.turn_id, reading.done, reading.total) for reading in readings]
        gauges = (self._scheduler.running, self._scheduler.waiting + len(self._pending))
        if self._events or gauges != self._gauges:
            self._send(Step(tuple(self._events), *gauges, self._read_rss_bytes(now)))
            self._events, self._gauges = [], gauges

    def _handle(self, command: Command) -> None:
        match command:
            case Received(command=Submit() as submit, at_s=at_s):
                self._submit(submit, at_s=at_s)
            case Received(command=Abort(turn_id=turn_id)):
                self._end(turn_id, "aborted", now=self._clock())
            case Received(command=Release(session_id=session_id)):
                self._release(session_id)
            case Prepared():
                self._enqueue(command)
            case Closed():
                self._closed = True

    def _submit(self, submit: Submit, *, at_s: float) -> None:
        self._arrivals += 1
        self._pending[submit.turn_id] = _Pending(submit, self._arrivals, at_s)
        self._sessions.setdefault(submit.session_id, deque()).append(submit.turn_id)
        self._pool.submit(self._prepare, submit)

    def _prepare(self, submit: Submit) -> None:
        """Turn a submission into tokens, on a worker thread."""
        try:
            history = unpack_tokens(submit.tokens)
            tokens = history + self._backend.tokenize(submit.pieces, first=not history)
            prepared = Prepared(submit.turn_id, tokens, turn_params.decode(submit.params_json))
        except InferenceCenterError as error:
            prepared = Prepared(submit.turn_id, [], None, error)
        except Exception as error:  # noqa: BLE001 - a border: what one turn sent must not end the others
            self._on_log("error", f"tokenizing failed: {error!r}")
            failure = InferenceCenterError(ErrorCode.INTERNAL, "The prompt could not be turned into tokens.")
            prepared = Prepared(submit.turn_id, [], None, failure)
        self._inbox.put(prepared)

    def _enqueue(self, prepared: Prepared) -> None:
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

    def _schedule(self, pending: _Pending, prepared: Prepared) -> None:
        submit = pending.submit
        request = Request(
            turn_id=submit.turn_id,
            session_id=submit.session_id,
            client_id=submit.client_id,
            priority=submit.priority,
            arrival=pending.arrival,
            submitted_s=pending.at_s,
            public=submit.public,
            durable=submit.durable,
            tokens=prepared.tokens,
        )
        try:
            if prepared.error is not None:
                raise prepared.error
            self._scheduler.add(request)
        except InferenceCenterError as error:
            self._events.append(failed(submit.turn_id, error))
            return
        assert prepared.params is not None
        turn = Turn(
            turn_id=submit.turn_id,
            params=prepared.params,
            submitted_s=pending.at_s,
            prompt_tokens=request.prompt_tokens,
        )
        self._executor.add(TurnOutput(turn, self._backend, n_ctx=self._backend.model.n_ctx))

    def _end(self, turn_id: str, reason: str, *, now: float) -> None:
        """End a turn wherever it is; one that is unknown has just ended."""
        pending = self._pending.pop(turn_id, None)
        if pending is not None:
            self._events.append(never_ran(turn_id, reason, waited_s=now - pending.at_s))
            session_id = pending.submit.session_id
            self._sessions[session_id].remove(turn_id)
            self._advance(session_id)
        elif self._scheduler.abort(turn_id, now=now):
            self._events += self._executor.end(turn_id, reason)

    def _release(self, session_id: str) -> None:
        now = self._clock()
        for turn_id in tuple(self._sessions.get(session_id, ())):
            self._end(turn_id, "aborted", now=now)
        for turn_id in self._scheduler.release(session_id, now=now):
            self._events += self._executor.end(turn_id, "aborted")

    def _read_rss_bytes(self, now: float) -> int:
        if now - self._rss_at_s >= _RSS_EVERY_S:
            self._rss_bytes = int(_STATM.read_text().split()[1]) * _PAGE_BYTES
            self._rss_at_s = now
        return self._rss_bytes

    def _on_log(self, level: str, text: str) -> None:
        self._send(Log(level, text, "engine"))
