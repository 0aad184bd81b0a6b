"""The engine's loop: read commands, plan a step, run it, send everything it produced in one frame.

Mechanism: one thread owns scheduler, executor and backend, so a step needs no locks; the reader thread and the workers
only put commands into the inbox. Commands are handled between steps; an urgent one (abort, release, suspend) also ends
a running step after its current pass. All events of a step leave in one ``StepOutput`` together with the gauges, so the
front applies a step as a whole. While idle the loop checkpoints slots, one at a time, and returns to the inbox between
two of them. Invariant: every turn that was submitted gets exactly one terminal event, unless the engine is suspended;
until then it is either in the tokenization stage or in both scheduler and executor, never in between when a step
begins.
"""

from __future__ import annotations

import heapq
import math
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.executor import Executor
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.output_processor import failed, never_ran
from inferencecenter.engine.scheduler.placement import is_prefix_key
from inferencecenter.engine.scheduler.plan import CopySlot, RestoreSlot
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.engine.tokenization import (
    FairWorkers,
    GrammarReady,
    PreparationResult,
    TextsTokenized,
    TokenizationFailed,
    TokenizationStage,
    TokenizedTurn,
    TokenizerService,
)
from inferencecenter.ipc.messages import (
    AbortTurn,
    CancelLookup,
    DetokenizeRequest,
    Embed,
    EngineLimits,
    KvRamLimit,
    LogLine,
    QueuePosition,
    ReleaseSession,
    RetainSessions,
    StepOutput,
    StepStats,
    Submit,
    Suspend,
    Suspended,
    TokenizeRequest,
    TokenSources,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.kv_cache.store import KvStore
    from inferencecenter.engine.scheduler.placement import CheckpointPlanner
    from inferencecenter.engine.scheduler.plan import ParkSlot, StepOutcome, StepPlan
    from inferencecenter.engine.tokenization import PendingSubmission
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.heartbeat import Heartbeat
    from inferencecenter.ipc.messages import FromEngine, TurnEvent

QUIET_S: Final = 0.2
"""Quiet time before slots are checkpointed: a copy is worthless once a fast client sends its next turn."""
_RSS_INTERVAL_S: Final = 1.0


_SIZED: Final = (Submit, Embed, TokenizeRequest, DetokenizeRequest)

INBOX_BYTES: Final = 256 * 1024 * 1024
"""Bytes of commands that are read while the loop is busy; beyond that the socket is not read."""
# Below this count, pruning deadlines of ended turns is not worth it.
_FEWEST: Final = 1024


@dataclass(slots=True)
class ReceivedCommand:
    """A command from the front, with the monotonic second of its arrival; only those that carry text have a size."""

    command: (
        Submit
        | Embed
        | AbortTurn
        | ReleaseSession
        | RetainSessions
        | TokenizeRequest
        | DetokenizeRequest
        | CancelLookup
        | EngineLimits
        | KvRamLimit
        | Suspend
    )
    at_s: float
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        command = self.command
        self.size_bytes = command.size_bytes if isinstance(command, _SIZED) else 0


@dataclass(frozen=True, slots=True)
class KvFetched:
    """A load of a parked sequence from disk has finished or failed."""


@dataclass(frozen=True, slots=True)
class FrontDisconnected:
    """The connection to the front has closed."""


Command: TypeAlias = ReceivedCommand | PreparationResult | TextsTokenized | KvFetched | FrontDisconnected


class Inbox:
    """Command queue that knows whether a command must not wait for the end of a step.

    Commands of the reader thread are bounded in bytes: during a long step the reader blocks, which applies backpressure
    to the front. Results of workers are bounded by the number of turns.

    Args:
        room_bytes: Bytes of commands that may wait; a larger one is accepted alone.
    """

    def __init__(self, *, room_bytes: int = INBOX_BYTES) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._urgent = False
        self._room_bytes = room_bytes
        self._held_bytes = 0
        self._taken = threading.Condition()

    @property
    def urgent(self) -> bool:
        """Whether a turn must end; further work for it would be discarded."""
        return self._urgent

    @property
    def empty(self) -> bool:
        """Whether no command is queued."""
        return self._commands.empty()

    def put(self, command: Command) -> None:
        """Add a command, from any thread; a received one blocks until there is room."""
        if size_bytes := _size_bytes(command):
            with self._taken:
                self._taken.wait_for(lambda: not self._held_bytes or self._held_bytes + size_bytes <= self._room_bytes)
                self._held_bytes += size_bytes
        self._commands.put(command)
        if isinstance(command, FrontDisconnected) or (
            isinstance(command, ReceivedCommand) and isinstance(command.command, AbortTurn | ReleaseSession | Suspend)
        ):
            self._urgent = True

    def get(self, *, timeout_s: float | None) -> Command | None:
        """Wait for the next command; ``None`` after ``timeout_s``."""
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._free(_size_bytes(command))
        return command

    def drain(self) -> list[Command]:
        # Cleared before the queue is emptied: a concurrent put may set ``urgent`` once too often, but it is never
        # missed.
        self._urgent = False
        commands: list[Command] = []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                self._free(sum(map(_size_bytes, commands)))
                return commands

    def _free(self, size_bytes: int) -> None:
        if size_bytes:
            with self._taken:
                self._held_bytes -= size_bytes
                self._taken.notify_all()


def _size_bytes(command: Command) -> int:
    return command.size_bytes if isinstance(command, ReceivedCommand) else 0


class StepThrottle:
    """Pauses after each step while handling commands.

    Args:
        inbox: Source of commands.
        clock: Monotonic seconds.
    """

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._clock = clock
        self._length_s = 0.0
        self._until_s = -math.inf

    @property
    def is_set(self) -> bool:
        """Whether there is a pause after each step."""
        return self._length_s > 0

    def change(self, length_s: float) -> None:
        """Set the length of pauses from the next step on and end the current one."""
        self._length_s, self._until_s = length_s, -math.inf

    def begin(self, *, least_s: float = 0.0) -> None:
        """Start the pause at the end of a step, of at least ``least_s``."""
        if length_s := max(self._length_s, least_s):
            self._until_s = self._clock() + length_s

    def command(self) -> Command | None:
        """Return the next command during the pause, ``None`` when it is over."""
        if self._until_s == -math.inf:
            return None
        left_s = self._until_s - self._clock()
        command = self._inbox.get(timeout_s=left_s) if left_s > 0 else None
        if command is None:
            self._until_s = -math.inf
        return command


class Deadlines:
    """Monotonic deadlines of turns.

    A passed deadline is a hint that the caller must verify: the turn may have begun or ended since. Deadlines of ended
    turns are pruned once they are the majority.

    Args:
        is_active: Returns whether a turn has not ended.
    """

    def __init__(self, is_active: Callable[[str], bool]) -> None:
        self._is_active = is_active
        self._due: list[tuple[float, str]] = []
        self._most = _FEWEST

    def __len__(self) -> int:
        return len(self._due)

    def add(self, turn_id: str, deadlines_s: Iterable[float]) -> None:
        """Add a turn's deadlines; infinite ones are ignored."""
        for due_s in deadlines_s:
            if due_s < math.inf:
                heapq.heappush(self._due, (due_s, turn_id))
        if len(self._due) > self._most:
            self._due = [(due_s, turn_id) for due_s, turn_id in self._due if self._is_active(turn_id)]
            heapq.heapify(self._due)
            self._most = max(_FEWEST, 2 * len(self._due))

    def passed(self, now: float) -> tuple[str, ...]:
        """Remove and return the turns with a deadline up to ``now``."""
        turn_ids: list[str] = []
        while self._due and self._due[0][0] <= now:
            turn_ids.append(heapq.heappop(self._due)[1])
        return tuple(turn_ids)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next deadline, at least 0, or ``None`` when there is none."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def clear(self) -> None:
        """Remove all deadlines."""
        self._due.clear()


class IdleCheckpointer:
    """Checkpoints slots one after the other and checks the inbox between two of them.

    Args:
        planner: Plans what to save.
        park: Saves a slot.
        inbox: Received commands.
        quiet_s: Quiet time before a checkpoint.
    """

    def __init__(
        self, planner: CheckpointPlanner, *, park: Callable[[ParkSlot], bool], inbox: Inbox, quiet_s: float
    ) -> None:
        self._planner = planner
        self._park = park
        self._inbox = inbox
        self._quiet_s = quiet_s

    @property
    def wait_s(self) -> float | None:
        """Quiet seconds required before ``run``; ``None`` when there is nothing to save."""
        return self._quiet_s if self._planner.pending else None

    def run(self) -> None:
        """Save slots until a command arrives or all are saved."""
        while self._inbox.empty and (park := self._planner.next()) is not None:
            self._park(park)


_STATM: Final = Path("/proc/self/statm")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class RssReader:
    """Resident set size of this process, at most a second old.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_bytes = 0
        self._read_at_s = float("-inf")

    def read(self) -> int:
        """Return the size in bytes."""
        now = self._clock()
        if now - self._read_at_s >= _RSS_INTERVAL_S:
            self._n_bytes = int(_STATM.read_text().split()[1]) * _PAGE_BYTES
            self._read_at_s = now
        return self._n_bytes


def work_of(plan: StepPlan, outcome: StepOutcome, *, step_s: float) -> StepStats | None:
    """Return the statistics of a step that took ``step_s``; ``None`` if it did nothing."""
    if plan.empty and not plan.fetches:
        return None
    return StepStats(
        step_s=step_s,
        rows=sum(len(each.rows) for each in plan.passes if not each.prefill),
        decode_s=outcome.decode_s,
        prefill_tokens=outcome.prefill_tokens,
        prefill_s=outcome.prefill_s,
        fetches=len(plan.fetches),
        sources=_sources(plan, outcome) if plan.admissions else None,
        moves=tuple(outcome.move_times),
        drafted=outcome.drafted,
        accepted=sum(map(len, outcome.accepted.values())),
    )


def _sources(plan: StepPlan, outcome: StepOutcome) -> TokenSources:
    """Count the tokens of admitted turns by source; tokens whose KV was lost in the step count as computed."""
    filled = {move.turn_id: move for move in plan.moves if isinstance(move, RestoreSlot | CopySlot)}
    tokens = dict.fromkeys(TokenSources.__struct_fields__, 0)
    for admission in plan.admissions:
        cached = 0 if admission.turn_id in outcome.emptied else admission.cached_tokens
        tokens[_source(filled.get(admission.turn_id))] += cached
        tokens["computed"] += len(admission.prompt) - cached
    return TokenSources(**tokens)


def _source(move: RestoreSlot | CopySlot | None) -> str:
    match move:
        case None:
            return "slot"
        case CopySlot():
            return "neighbour"
        case RestoreSlot(key=key):
            return "prefix" if is_prefix_key(key) else "parked"


def draft_tokens(options: EngineOptions, backend: Backend, *, on_log: Callable[[str, str], None]) -> int:
    """Return how many tokens a turn may draft per step; 0 if disabled or if the model cannot truncate."""
    if options.speculative != "lookup" and backend.draft_model is None:
        return 0
    if not backend.can_truncate:
        on_log(
            "warning",
            "speculative decoding is disabled: this model's KV cache cannot be truncated after a rejected draft",
        )
        return 0
    return options.draft_tokens


_BLOCKED_S = 1.0
_TOKENIZATION_S = 0.002
# A step in which no scripted turn was due is repeated after this time at the latest, for the turns that arrive.
_MOST_WAIT_S: Final = 0.02


def wrong_kind(what: str) -> InferenceCenterError:
    """Return the error for a request that this kind of model cannot run."""
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, f"this model {what}", field="model")


class EngineLoop:
    """Runs turns on a backend until the front disconnects.

    Args:
        backend: The loop's thread is the only caller, except for vocabulary lookups.
        options: How steps are planned, how long turns may wait, and the number of worker threads.
        kv: The store of parked sequences; completed loads are announced in the inbox.
        inbox: Commands from the reader thread and results from the workers.
        heartbeat: Counts progress; a loop that blocks, or iterates without moving anything, makes none.
        send: Sends a frame to the front; may block.
        clock: Monotonic seconds.
        quiet_s: Quiet time before slots are checkpointed.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        backend: Backend,
        options: EngineOptions,
        *,
        kv: KvStore,
        inbox: Inbox,
        heartbeat: Heartbeat,
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._queue_timeout_s = options.queue_timeout_s or math.inf
        self._pool = ThreadPoolExecutor(options.worker_threads, thread_name_prefix="worker")
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._send = send
        self._clock = clock
        self._scheduler = Scheduler(
            slots=backend.model.slots,
            n_ctx=backend.model.n_ctx,
            grid_tokens=options.prefill_grid_tokens,
            pass_tokens=min(options.n_batch, options.n_ubatch),
            target_step_s=options.target_step_ms / 1000,
            parked=kv,
            can_truncate=backend.can_truncate,
            quantum_tokens=options.quantum_tokens,
            ageing_s=options.ageing_s,
            draft_tokens=draft_tokens(options, backend, on_log=self._on_log),
            lookup=options.speculative == "lookup",
            draft_cost=backend.draft_model.cost if backend.draft_model else None,
        )
        self._executor = Executor(
            backend,
            kv,
            pool=self._pool,
            workers=options.worker_threads,
            clock=clock,
            interrupted=lambda: inbox.urgent,
            progressed=heartbeat.tick,
            on_log=self._on_log,
        )
        self._grammars = GrammarCache(backend)
        self._workers = FairWorkers(self._pool, most=options.worker_threads)
        self._tokenizer = TokenizerService(backend, workers=self._workers, send=send, on_log=self._on_log)
        self._tokenization = TokenizationStage(
            backend,
            grammars=self._grammars,
            workers=self._workers,
            put=inbox.put,
            heartbeat=heartbeat,
            queue_timeout_s=self._queue_timeout_s,
            on_ready=self._schedule,
            on_log=self._on_log,
        )
        self._deadlines = Deadlines(self._is_active)
        # Turns whose submission was handled since the last step.
        self._arrived: list[str] = []
        self._events: list[TurnEvent] = []
        self._work: StepStats | None = None
        self._gauges = (0, 0, 0, 0)
        self._memory = RssReader(clock)
        self._throttle = StepThrottle(inbox, clock=clock)
        self._checkpointer = IdleCheckpointer(
            self._scheduler.checkpoints, park=self._executor.park, inbox=inbox, quiet_s=quiet_s
        )
        self._suspended = False
        self._closed = False

    def run(self) -> None:
        """Serve until the front disconnects.

        Raises:
            ConnectionError: A frame could not be sent because the front has disconnected.
        """
        try:
            self._report()
            while self._take_commands():
                self._step()
                self._report()
        finally:
            self._tokenization.close()
            self._workers.close()
            self._grammars.close()
            self._pool.shutdown(cancel_futures=True)
            self._executor.close()

    def _take_commands(self) -> bool:
        """Handle received commands, waiting for one when idle; ``False`` at the end."""
        idle = not self._scheduler.has_work
        quiet = idle and not (self._tokenization or self._suspended or self._throttle.is_set)
        if idle:
            self._scheduler.check_integrity()
            self._kv.check_integrity()
            if not self._tokenization:
                self._deadlines.clear()
        if idle or self._scheduler.blocked:
            command = self._inbox.get(timeout_s=self._checkpointer.wait_s if quiet else self._sleep_s(idle=idle))
            if command is not None:
                self._handle(command)
            elif quiet:
                self._checkpointer.run()
            elif not idle:
                self._heartbeat.tick()  # giving up a disk that does not respond is progress, not a hang
        while not self._closed and (command := self._throttle.command()) is not None:
            self._handle(command)
            self._report()
        for command in self._inbox.drain():
            self._handle(command)
        self._await_tokenization()
        return not self._closed

    def _await_tokenization(self) -> None:
        """Wait a moment for the tokens of turns that have just come in, if one of them could get a slot in this step.

        Otherwise such a turn would be tokenized during a decode of the others, and read only after it.
        """
        arrived, self._arrived = self._arrived, []
        until_s = self._clock() + _TOKENIZATION_S
        while 0 < self._scheduler.running < self._backend.model.slots and not self._closed:
            left_s = until_s - self._clock()
            if left_s <= 0 or not any(map(self._tokenization.get, arrived)):
                return
            command = self._inbox.get(timeout_s=left_s)
            if command is None:
                return
            self._handle(command)

    def _sleep_s(self, *, idle: bool) -> float | None:
        """Return the seconds until the next deadline; ``None`` for no deadline."""
        wait_s = self._deadlines.wait_s(self._clock())
        if idle:
            return wait_s
        # The scheduler times out a disk that does not respond.
        return _BLOCKED_S if wait_s is None else min(wait_s, _BLOCKED_S)

    def _step(self) -> None:
        now = self._clock()
        for turn_id in self._deadlines.passed(now):
            self._end_expired(turn_id, now=now)
        for key in self._scheduler.stale_fetches():
            self._kv.cancel_fetch(key)
        if self._scheduler.has_work:
            plan = self._scheduler.step(now)
            restored = {move.key for move in plan.moves if isinstance(move, RestoreSlot)}
            for key in plan.fetches:
                self._kv.fetch(key, keep=restored)
            outcome = self._run(plan)
            ended_s = self._clock()
            progress = self._scheduler.completed(outcome, now=ended_s)
            self._work = work_of(plan, outcome, step_s=ended_s - now)
            self._events += [QueuePosition(turn_id, position) for turn_id, position in self._scheduler.positions()]
            self._events += outcome.events
            self._events += progress

    def _run(self, plan: StepPlan) -> StepOutcome:
        """Run a plan. Its turns are recorded beforehand, so that a crash can be attributed to them."""
        if plan.empty:
            return self._executor.run(plan)
        self._heartbeat.step(plan.turn_ids)
        outcome = self._executor.run(plan)
        self._heartbeat.step(())
        waits = outcome.stalled and not outcome.decoded
        self._throttle.begin(least_s=min(outcome.wait_s, _MOST_WAIT_S) if waits else 0.0)
        return outcome

    def _report(self) -> None:
        """Send all events since the last report in one frame, if there are any."""
        running, waiting = self._scheduler.running, self._scheduler.waiting + len(self._tokenization)
        parked_sessions, parked_bytes = self._kv.sessions, self._kv.total_bytes
        gauges = (running, waiting, parked_sessions, parked_bytes)
        if self._events or self._work is not None or gauges != self._gauges:
            self._send(
                StepOutput(
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
        self._heartbeat.tick()
        if self._suspended and not isinstance(command, FrontDisconnected):
            return
        match command:
            case ReceivedCommand():
                self._handle_received(command)
            case GrammarReady() | TokenizedTurn() | TokenizationFailed():
                self._tokenization.take(command)
            case KvFetched():
                pass  # it woke the loop; the next plan finds the result in the store
            case FrontDisconnected():
                self._closed = True

    def _handle_received(self, received: ReceivedCommand) -> None:
        match received.command:
            case Submit() | Embed() as submit:
                self._submit(submit, at_s=received.at_s, size_bytes=received.size_bytes)
            case AbortTurn(turn_id=turn_id):
                self._end(turn_id, "aborted", now=self._clock())
            case ReleaseSession(session_id=session_id):
                self._release(session_id)
            case RetainSessions(session_ids=session_ids):
                self._kv.keep(session_ids)
            case TokenizeRequest() | DetokenizeRequest() as request:
                self._tokenizer.submit(request)
            case CancelLookup(lookup_id=lookup_id):
                self._tokenizer.cancel(lookup_id)
            case EngineLimits() as limit:
                self._limit(limit)
            case KvRamLimit(ram_bytes=ram_bytes):
                self._kv.limit_ram(ram_bytes)
                self._scheduler.checkpoints.rescan()
            case Suspend(park_all=park_all):
                self._suspend(park_all=park_all)

    def _submit(self, submit: Submit | Embed, *, at_s: float, size_bytes: int) -> None:
        if isinstance(submit, Embed):
            self._events.append(failed(submit.turn_id, wrong_kind("generates text and makes no embeddings")))
            return
        self._tokenization.add(submit, at_s=at_s, size_bytes=size_bytes)
        self._arrived.append(submit.turn_id)
        if not submit.answer:
            self._deadlines.add(submit.turn_id, (at_s + self._queue_timeout_s,))

    def _is_active(self, turn_id: str) -> bool:
        return self._tokenization.get(turn_id) is not None or turn_id in self._executor

    def _schedule(self, pending: PendingSubmission, prepared: TokenizedTurn | TokenizationFailed) -> None:
        """Add a prepared turn to the scheduler, unless it has ended."""
        submit = pending.submit
        if isinstance(prepared, TokenizationFailed):
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
            self._scheduler.add(prepared.request)
        except InferenceCenterError as error:
            shifts = submit.may_shift and error.code is ErrorCode.PROMPT_TOO_LONG
            self._events.append(output.overflow(now=now) if shifts else output.fail(error, now=now))
            return
        self._executor.add(output)
        self._deadlines.add(submit.turn_id, output.deadlines_s)

    def _end(self, turn_id: str, reason: str, *, now: float) -> None:
        """End a turn wherever it is; an unknown one has just ended."""
        pending = self._tokenization.get(turn_id)
        if pending is not None and pending.submit.answer:
            self._tokenization.conclude(pending, reason)  # how much of its answer is kept is known after tokenization
        elif pending is not None:
            self._tokenization.cancel(turn_id)
            self._events.append(never_ran(turn_id, reason, waited_s=now - pending.at_s))
        elif self._scheduler.abort(turn_id, now=now):
            self._events += self._executor.end(turn_id, reason)

    def _end_expired(self, turn_id: str, *, now: float) -> None:
        """End a turn if one of its deadlines has passed: it may have begun, ended or been resubmitted since."""
        pending = self._tokenization.get(turn_id)
        timeout_reason = self._executor.timeout_reason(turn_id, now)
        if pending is not None and not pending.submit.answer and now >= pending.at_s + self._queue_timeout_s:
            timeout_reason = "queue_timeout"
        if timeout_reason == "time":
            self._end(turn_id, timeout_reason, now=now)
        elif timeout_reason == "queue_timeout":
            error = InferenceCenterError(
                ErrorCode.QUEUE_TIMEOUT, f"The turn waited {self._queue_timeout_s:g} s and got no slot."
            )
            if self._tokenization.cancel(turn_id) is not None:
                self._events.append(failed(turn_id, error))
            elif self._scheduler.abort(turn_id, now=now):
                self._events.append(self._executor.fail(turn_id, error))

    def _release(self, session_id: str) -> None:
        now = self._clock()
        for turn_id in self._tokenization.of_session(session_id):
            self._end(turn_id, "aborted", now=now)
        for turn_id in self._scheduler.release(session_id, now=now):
            self._events += self._executor.end(turn_id, "aborted")
        self._kv.forget_session(session_id)

    def _limit(self, limit: EngineLimits) -> None:
        self._scheduler.limit(limit, now=self._clock())
        self._throttle.change(limit.pause_ms / 1000)

    def _suspend(self, *, park_all: bool) -> None:
        """Stop all turns without events, write their KV to disk, and ignore further commands; see ``Suspend``."""
        self._suspended = True
        self._tokenization.clear()
        self._deadlines.clear()
        self._events.clear()
        self._executor.close()
        for park in self._scheduler.suspend(now=self._clock(), park_all=park_all):
            if not self._executor.park(park):  # RAM is full of pending writes
                self._kv.save(self._heartbeat.tick)
                self._executor.park(park)
        self._kv.save(self._heartbeat.tick)
        self._report()
        self._send(Suspended(self._kv.sessions_on_disk))

    def _on_log(self, level: str, text: str) -> None:
        self._send(LogLine(level, text, "engine"))
