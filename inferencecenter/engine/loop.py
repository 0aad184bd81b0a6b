"""The engine's loop: read commands, plan a step, run it, send everything it produced in one frame.

Mechanism: one thread owns scheduler, executor and backend, so a step needs no locks; the reader thread and the workers
only put commands into the inbox. Commands are handled between steps; an urgent one (abort, release, suspend) also ends
a running step after its current pass. All events of a step leave in one ``StepOutput`` together with the gauges, so the
front applies a step as a whole. ``CommandLoop`` is that much; ``EngineLoop`` runs turns in it, and ``EmbeddingLoop`` of
``engine.embedding`` batches of texts.

While idle the loop of turns checkpoints slots, one at a time, and returns to the inbox between two of them. Invariant:
every turn that was submitted gets exactly one terminal event, unless the engine is suspended; until then it is either
in the tokenization stage or in both scheduler and executor, never in between when a step begins.
"""

from __future__ import annotations

import heapq
import math
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.executor import Executor, stats_of
from inferencecenter.engine.fair_workers import FairWorkers
from inferencecenter.engine.grammar_cache import GrammarCache
from inferencecenter.engine.images import ImageStore
from inferencecenter.engine.inbox import FrontDisconnected, ReceivedCommand, StepThrottle
from inferencecenter.engine.kv_cache.tiers import KvUsage
from inferencecenter.engine.output_processor import failed, never_ran
from inferencecenter.engine.scheduler.plan import RestoreSlot
from inferencecenter.engine.scheduler.scheduler import Scheduler
from inferencecenter.engine.tokenization import (
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
    ImageData,
    ImageNeeded,
    KvRamLimit,
    LogLine,
    QueuePosition,
    Ready,
    Reattach,
    ReleaseSession,
    RetainSessions,
    StepOutput,
    Submit,
    Suspend,
    Suspended,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inferencecenter.engine.backend import Backend, TextCodec
    from inferencecenter.engine.images import Projector
    from inferencecenter.engine.inbox import Command, Inbox, KvFetched
    from inferencecenter.engine.kv_cache.store import KvStore
    from inferencecenter.engine.scheduler.plan import StepOutcome, StepPlan
    from inferencecenter.engine.tokenization import PendingSubmission
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.heartbeat import Heartbeat
    from inferencecenter.ipc.images import ImageRef
    from inferencecenter.ipc.messages import FromEngine, StepStats, TurnEvent

QUIET_S: Final = 0.2
"""Quiet time before slots are checkpointed: a copy is worthless once a fast client sends its next turn."""
_RSS_INTERVAL_S: Final = 1.0
# Below this count, pruning deadlines of ended turns is not worth it.
_FEWEST: Final = 1024


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
# The longest wait for the tokens of a turn that has just arrived, and the longest in terms of the decode that it saves
# this turn: all turns that decode pay for it.
_TOKENIZATION_S = 0.002
_TOKENIZATION_SHARE = 0.04
# A shorter wait is mostly the time in which threads change.
_LEAST_TOKENIZATION_S: Final = 0.0005
# A step in which no scripted turn was due is repeated after this time at the latest, for the turns that arrive.
_MOST_WAIT_S: Final = 0.02


def wrong_kind(what: str) -> InferenceCenterError:
    """Return the error for a request that this kind of model cannot run."""
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, f"this model {what}", field="model")


class LoopGauges(NamedTuple):
    """State of the engine in every frame, in addition to events; see ``StepOutput``."""

    running: int
    waiting: int
    parked: KvUsage = KvUsage(0, 0, 0)


class CommandLoop(ABC):
    """Handles commands and runs steps in turn until the front disconnects; what a step computes is the subclass's.

    Args:
        codec: The vocabulary, for lookups.
        options: How long requests may wait, and the number of worker threads.
        inbox: Commands from the reader thread and results from the workers.
        heartbeat: Counts progress; a loop that blocks, or iterates without moving anything, makes none.
        send: Sends a frame to the front; may block.
        clock: Monotonic seconds.
        projector: The projector of a model that takes images.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it works on
        self,
        codec: TextCodec,
        options: EngineOptions,
        *,
        inbox: Inbox,
        heartbeat: Heartbeat,
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
        projector: Projector | None = None,
    ) -> None:
        self._codec = codec
        self._queue_timeout_s = options.queue_timeout_s or math.inf
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._send = send
        self._clock = clock
        self._pool = ThreadPoolExecutor(options.worker_threads, thread_name_prefix="worker")
        self._workers = FairWorkers(self._pool, most=options.worker_threads)
        self._tokenizer = TokenizerService(
            codec, workers=self._workers, send=send, on_log=self._on_log, projector=projector
        )
        self._throttle = StepThrottle(inbox, clock=clock)
        self._deadlines = Deadlines(self._is_active)
        self._memory = RssReader(clock)
        self._events: list[TurnEvent] = []
        self._work: StepStats | None = None
        self._reported = LoopGauges(0, 0)
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
                now = self._clock()
                for turn_id in self._deadlines.passed(now):
                    self._end_expired(turn_id, now=now)
                self._step(now)
                self._report()
        finally:
            self._close()

    @abstractmethod
    def _wait(self) -> None:
        """Wait for a command, and handle it, if there is nothing to compute."""

    @abstractmethod
    def _step(self, now: float) -> None:
        """Run a step and add its events."""

    @abstractmethod
    def _is_active(self, turn_id: str) -> bool:
        """Return whether a request has not ended."""

    @abstractmethod
    def _end_expired(self, turn_id: str, *, now: float) -> None:
        """End a request if one of its deadlines has passed: it may have begun, ended or been resubmitted since."""

    @abstractmethod
    def _gauges(self) -> LoopGauges:
        """Return the gauges as they are now."""

    @abstractmethod
    def _submit(self, received: ReceivedCommand, request: Submit | Embed) -> None:
        """Take in a request."""

    @abstractmethod
    def _abort(self, turn_id: str) -> None:
        """End a request; an unknown one has just ended."""

    @abstractmethod
    def _limit(self, limits: EngineLimits) -> None:
        """Apply limits to the next steps."""

    @abstractmethod
    def _drop_all(self, *, park_all: bool) -> int:
        """Drop all requests without events for ``Suspend``; return how many sessions are on disk."""

    @abstractmethod
    def _drop_turns(self) -> None:
        """Drop all requests for ``Reattach``; KV stays where it is."""

    @abstractmethod
    def _manage_kv(self, command: ReleaseSession | RetainSessions | KvRamLimit) -> None:
        """Release or limit KV, where there is any."""

    @abstractmethod
    def _take_result(self, result: PreparationResult | TextsTokenized | KvFetched | ImageData) -> None:
        """Handle the result of a worker, or what the front was asked for."""

    def _close(self) -> None:
        """Stop the workers."""
        self._workers.close()
        self._pool.shutdown(cancel_futures=True)

    def _take_commands(self) -> bool:
        """Handle received commands, waiting for one when idle; ``False`` at the end."""
        self._wait()
        while not self._closed and (command := self._throttle.command()) is not None:
            self._handle(command)
            self._report()
        for command in self._inbox.drain():
            self._handle(command)
        return not self._closed

    def _handle(self, command: Command) -> None:
        self._heartbeat.tick()
        if isinstance(command, FrontDisconnected):
            self._closed = True
        elif not self._suspended:
            if isinstance(command, ReceivedCommand):
                self._handle_received(command)
            else:
                self._take_result(command)

    def _handle_received(self, received: ReceivedCommand) -> None:
        match received.command:
            case Submit() | Embed() as request:
                self._submit(received, request)
            case AbortTurn(turn_id=turn_id):
                self._abort(turn_id)
            case ReleaseSession() | RetainSessions() | KvRamLimit() as command:
                self._manage_kv(command)
            case TokenizeRequest() | DetokenizeRequest() as lookup:
                self._tokenizer.submit(lookup)
            case CancelLookup(lookup_id=lookup_id):
                self._tokenizer.cancel(lookup_id)
            case ImageData() as data:
                self._take_result(data)
            case EngineLimits() as limits:
                self._limit(limits)
                self._throttle.change(limits.pause_ms / 1000)
            case Suspend(park_all=park_all):
                self._suspend(park_all=park_all)
            case Reattach():
                self._reattach()

    def _suspend(self, *, park_all: bool) -> None:
        """Stop all requests without events, and ignore further commands; see ``Suspend``."""
        self._suspended = True
        self._events.clear()
        self._deadlines.clear()
        on_disk = self._drop_all(park_all=park_all)
        self._report()
        self._send(Suspended(on_disk))

    def _reattach(self) -> None:
        """Drop all requests without events, and continue for another connection; see ``Reattach``."""
        self._tokenizer.clear()
        self._deadlines.clear()
        self._drop_turns()
        self._events.clear()
        self._report()
        self._send(Ready(self._codec.model))

    def _refuse(self, turn_id: str, what: str) -> None:
        """Fail a request that this kind of model cannot run."""
        self._events.append(failed(turn_id, wrong_kind(what)))

    def _report(self) -> None:
        """Send all events since the last report in one frame, if there are any."""
        gauges = self._gauges()
        if self._events or self._work is not None or gauges != self._reported:
            self._send(
                StepOutput(
                    events=tuple(self._events),
                    running=gauges.running,
                    waiting=gauges.waiting,
                    rss_bytes=self._memory.read(),
                    parked_sessions=gauges.parked.sessions,
                    parked_bytes=gauges.parked.total_bytes,
                    parked_ram_bytes=gauges.parked.ram_bytes,
                    work=self._work,
                )
            )
            self._events, self._work, self._reported = [], None, gauges

    def _on_log(self, level: str, text: str) -> None:
        self._send(LogLine(level, text, "engine"))


class EngineLoop(CommandLoop):
    """Runs turns on a backend until the front disconnects.

    Args:
        backend: The loop's thread is the only caller, except for vocabulary lookups.
        options: How steps are planned, how long turns may wait, and the number of worker threads.
        kv: The store of parked sequences; completed loads are announced in the inbox.
        inbox, heartbeat, send, clock: See ``CommandLoop``.
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
        super().__init__(
            backend, options, inbox=inbox, heartbeat=heartbeat, send=send, clock=clock, projector=backend.projector
        )
        self._backend = backend
        self._kv = kv
        self._quiet_s = quiet_s
        self._images = None if backend.projector is None else ImageStore(backend.projector, fetch=self._fetch_image)
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
            images=self._images,
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
            images=self._images,
        )
        self._grammars = GrammarCache(backend)
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
        # Turns whose submission was handled since the last step.
        self._arrived: list[str] = []
        # Seconds that the last decode took.
        self._decode_s = 0.0

    def _close(self) -> None:
        self._tokenization.close()
        self._grammars.close()
        super()._close()
        self._executor.close()

    def _take_commands(self) -> bool:
        """Handle received commands, waiting for one when idle; ``False`` at the end."""
        return super()._take_commands() and self._await_tokenization()

    def _wait(self) -> None:
        """Wait for a command if there is nothing to compute; checkpoint slots once it has been quiet for a while."""
        idle = not self._scheduler.has_work
        quiet = idle and not (self._tokenization or self._suspended or self._throttle.is_set)
        if idle:
            self._scheduler.check_integrity()
            self._kv.check_integrity()
            if not self._tokenization:
                self._deadlines.clear()
        elif not self._scheduler.blocked:
            return
        checkpoints = self._scheduler.checkpoints
        quiet_s = self._quiet_s if checkpoints.pending else None
        timeout_s = quiet_s if quiet else self._sleep_s(idle=idle)
        if (command := self._inbox.get(timeout_s=timeout_s)) is not None:
            self._handle(command)
        elif quiet:
            while self._inbox.empty and (park := checkpoints.next()) is not None:
                self._executor.park(park)
        elif not idle:
            self._heartbeat.tick()  # giving up a disk that does not respond is progress, not a hang

    def _await_tokenization(self) -> bool:
        """Wait briefly for the tokens of turns that have just arrived, if one of them could get a slot in this step.

        Otherwise such a turn would be tokenized during a decode of the others, and prefilled only after it. Short
        decodes are not worth a wait. ``False`` at the end.
        """
        arrived, self._arrived = self._arrived, []
        wait_s = min(_TOKENIZATION_S, _TOKENIZATION_SHARE * self._decode_s)
        if wait_s < _LEAST_TOKENIZATION_S:
            return not self._closed
        until_s = self._clock() + wait_s
        while 0 < self._scheduler.running < self._backend.model.slots and not self._closed:
            left_s = until_s - self._clock()
            if left_s <= 0 or not any(map(self._tokenization.get, arrived)):
                break
            if (command := self._inbox.get(timeout_s=left_s)) is None:
                break
            self._handle(command)
        return not self._closed

    def _sleep_s(self, *, idle: bool) -> float | None:
        """Return the seconds until the next deadline; ``None`` for no deadline."""
        wait_s = self._deadlines.wait_s(self._clock())
        if idle:
            return wait_s
        # The scheduler times out a disk that does not respond.
        return _BLOCKED_S if wait_s is None else min(wait_s, _BLOCKED_S)

    def _step(self, now: float) -> None:
        for key in self._scheduler.stale_fetches():
            self._kv.cancel_fetch(key)
        if self._scheduler.has_work:
            plan = self._scheduler.step(now)
            restored = {move.key for move in plan.moves if isinstance(move, RestoreSlot)}
            for key in plan.fetches:
                self._kv.fetch(key, keep=restored)
            outcome = self._run(plan)
            self._decode_s = outcome.decode_s or self._decode_s
            ended_s = self._clock()
            progress = self._scheduler.completed(outcome, now=ended_s)
            self._work = stats_of(plan, outcome, step_s=ended_s - now)
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

    def _gauges(self) -> LoopGauges:
        waiting = self._scheduler.waiting + len(self._tokenization)
        return LoopGauges(self._scheduler.running, waiting, self._kv.usage)

    def _take_result(self, result: PreparationResult | TextsTokenized | KvFetched | ImageData) -> None:
        # A completed load woke the loop; the next plan finds it in the store.
        if isinstance(result, ImageData):
            self._take_image(result)
        elif isinstance(result, GrammarReady | TokenizedTurn | TokenizationFailed):
            self._tokenization.take(result)

    def _manage_kv(self, command: ReleaseSession | RetainSessions | KvRamLimit) -> None:
        match command:
            case ReleaseSession(session_id=session_id):
                self._release(session_id)
            case RetainSessions(session_ids=session_ids):
                self._kv.keep(session_ids)
            case KvRamLimit(ram_bytes=ram_bytes):
                self._kv.limit_ram(ram_bytes)
                self._scheduler.checkpoints.rescan()

    def _fetch_image(self, image: ImageRef) -> None:
        self._send(ImageNeeded(image.digest))

    def _take_image(self, data: ImageData) -> None:
        if self._images is None:
            return
        if data.pixels is not None:
            self._images.put(data.digest, data.pixels)
            return
        self._images.drop(data.digest)
        error = InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "An image of this conversation is no longer stored.",
            hint="Send it again.",
            field="images",
        )
        for turn_id in self._scheduler.turns_with(data.digest):
            if self._scheduler.abort(turn_id, now=self._clock()):
                self._events.append(self._executor.fail(turn_id, error))

    def _submit(self, received: ReceivedCommand, request: Submit | Embed) -> None:
        if isinstance(request, Embed):
            self._refuse(request.turn_id, "generates text and makes no embeddings")
            return
        self._tokenization.add(request, at_s=received.at_s, size_bytes=received.size_bytes)
        self._arrived.append(request.turn_id)
        if not request.answer:
            self._deadlines.add(request.turn_id, (received.at_s + self._queue_timeout_s,))

    def _abort(self, turn_id: str) -> None:
        self._end(turn_id, "aborted", now=self._clock())

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

    def _limit(self, limits: EngineLimits) -> None:
        self._scheduler.limit(limits, now=self._clock())

    def _drop_turns(self) -> None:
        self._tokenization.clear()
        self._executor.close()
        self._arrived.clear()
        self._scheduler.end_all(now=self._clock())
        if self._images is not None:
            self._images.forget_requests()

    def _drop_all(self, *, park_all: bool) -> int:
        """Drop all turns, and write their KV to disk."""
        self._tokenization.clear()
        self._executor.close()
        for park in self._scheduler.suspend(now=self._clock(), park_all=park_all):
            if not self._executor.park(park):  # RAM is full of pending writes
                self._kv.save(self._heartbeat.tick)
                self._executor.park(park)
        self._kv.save(self._heartbeat.tick)
        return self._kv.sessions_on_disk
