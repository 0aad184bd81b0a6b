"""Executes a plan on a backend: moves KV, decodes, samples the rows, and reports the outcome."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import DecodeError
from inferencecenter.engine.output_processor import failure_of
from inferencecenter.engine.scheduler.placement import is_prefix_key
from inferencecenter.engine.scheduler.plan import CopySlot, ParkSlot, RestoreSlot, StepOutcome, SwapSlots, TruncateSlot
from inferencecenter.ipc.messages import MoveTime, StepStats, TokenDelta, TokenSources, TraceStage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from inferencecenter.engine.backend import Backend, TurnSampler
    from inferencecenter.engine.images import ImageStore
    from inferencecenter.engine.kv_cache.store import KvStore
    from inferencecenter.engine.output_processor import OutputProcessor, TimeoutReason
    from inferencecenter.engine.scheduler.plan import Admission, DecodePass, DecodeRow, KvMove, RowEncoding, StepPlan
    from inferencecenter.ipc.messages import TurnEvent


class KvMover:
    """Executes moves on a backend. A failed move leaves its slot empty, and later moves take that into account.

    Args:
        backend: Holds the slots.
        kv: The store of parked sequences.
        clock: Monotonic seconds.
        progressed: Called after each move.
        on_log: Called with level and text.
    """

    def __init__(
        self,
        backend: Backend,
        kv: KvStore,
        *,
        clock: Callable[[], float],
        progressed: Callable[[], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._kv = kv
        self._clock = clock
        self._progressed = progressed
        self._on_log = on_log
        # Slots that are empty although the plan relies on their content.
        self._empty: set[int] = set()
        # Keys of parked sequences that parking must not evict.
        self._wanted: set[str] = set()

    def run(self, moves: Collection[KvMove]) -> StepOutcome:
        """Make the moves in order and return the outcome so far."""
        outcome = StepOutcome()
        if not moves:
            return outcome
        self._empty.clear()
        self._wanted = {move.key for move in moves if isinstance(move, RestoreSlot)}
        for move in moves:
            match move:
                case TruncateSlot():
                    self._truncate(move, outcome)
                case SwapSlots():
                    self._swap(move, outcome)
                case ParkSlot() | RestoreSlot() | CopySlot():
                    began_s = self._clock()
                    kind = self._transfer(move, outcome)
                    ended_s = self._clock()
                    outcome.move_times.append(MoveTime(kind, ended_s - began_s))
                    if move.turn_id is not None:
                        outcome.stages.append((move.turn_id, TraceStage(kind, began_s, ended_s, move.n_tokens)))
            self._progressed()
        return outcome

    def _transfer(self, move: ParkSlot | RestoreSlot | CopySlot, outcome: StepOutcome) -> str:
        """Make a timed move and return its kind."""
        match move:
            case ParkSlot():
                outcome.n_parked += self._park(move)
                return "park"
            case RestoreSlot(slot=slot):
                self._filled(slot, move.turn_id, outcome, filled=self._restore(move))
                return "restore"
            case CopySlot(target=slot):
                self._filled(slot, move.turn_id, outcome, filled=self._copy(move))
                return "copy"

    def _truncate(self, truncation: TruncateSlot, outcome: StepOutcome) -> None:
        slot = truncation.slot
        if slot in self._empty:
            return
        if self._backend.truncate(slot, truncation.n_tokens) or not truncation.n_tokens:
            return
        self._empty.add(slot)
        if truncation.turn_id is None:
            outcome.wiped.add(slot)
        else:
            outcome.emptied.add(truncation.turn_id)

    def _swap(self, swap: SwapSlots, outcome: StepOutcome) -> None:
        for slots in (self._empty, outcome.wiped):
            _exchange(slots, swap.a, swap.b)
        try:
            self._backend.swap(swap.a, swap.b)
        except DecodeError as error:
            self._on_log("error", f"slots {swap.a} and {swap.b} could not be swapped: {error}")
            for turn_id, slot in ((swap.turn_a, swap.b), (swap.turn_b, swap.a)):
                self._backend.truncate(slot, 0)
                self._empty.add(slot)
                if turn_id is None:
                    outcome.wiped.add(slot)
                else:
                    outcome.lost.add(turn_id)

    def _park(self, park: ParkSlot) -> bool:
        # An empty slot has no bytes, so there is nothing to park.
        size_bytes = self._backend.state_bytes(park.slot)
        return size_bytes > 0 and self._kv.park(
            park.key,
            scope=park.scope,
            tokens=park.tokens,
            size_bytes=size_bytes,
            write=lambda buffer: self._backend.save(park.slot, buffer),
            durable=park.durable,
            keep=self._wanted,
            redundant=park.redundant,
        )

    def _restore(self, restore: RestoreSlot) -> bool:
        return self._kv.load(
            restore.key,
            restore.tokens,
            lambda data: self._backend.restore(restore.slot, data, restore.n_tokens),
        )

    def _copy(self, copy: CopySlot) -> bool:
        return copy.source not in self._empty and self._backend.copy(copy.source, copy.target, copy.n_tokens)

    def _filled(self, slot: int, turn_id: str, outcome: StepOutcome, *, filled: bool) -> None:
        if filled:
            self._empty.discard(slot)
            return
        # The previous content may still be there: a missing file is not even tried.
        self._backend.truncate(slot, 0)
        self._empty.add(slot)
        outcome.emptied.add(turn_id)


def _exchange(slots: set[int], a: int, b: int) -> None:
    if (a in slots) != (b in slots):
        slots ^= {a, b}


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Result of sampling one row.

    ``accepted`` are the accepted draft tokens, ``token`` the one sampled after them; ``None`` if sampling failed.
    """

    row: DecodeRow
    accepted: tuple[int, ...]
    token: int | None
    events: list[TurnEvent]


_ROWS_PER_THREAD: Final = 4


class RowSampler:
    """Samples the rows of the last decode, on several threads if there are many.

    Most of a row's work holds the GIL: with two threads four rows took longer than with one, at 1.7 times its CPU time.

    Args:
        outputs: The turns' outputs by id.
        samplers: The turns' samplers by id.
        pool: Threads that sample beside the caller's; they may be busy with other work.
        workers: Most rows sampled at once.
        clock: Monotonic seconds.
        on_log: Called with level and text, from any thread.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it works on
        self,
        outputs: Mapping[str, OutputProcessor],
        samplers: Mapping[str, TurnSampler],
        *,
        pool: ThreadPoolExecutor,
        workers: int,
        clock: Callable[[], float],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._outputs = outputs
        self._samplers = samplers
        self._pool = pool
        self._workers = workers
        self._clock = clock
        self._on_log = on_log

    def run(self, rows: Sequence[DecodeRow]) -> list[SampledRow]:
        """Sample all rows of the last decode; the caller's thread and others of the pool share one queue."""
        firsts = accumulate((row.chunk.n_sampled for row in rows), initial=0)
        left = deque(zip(firsts, rows, strict=False))
        samples: dict[str, SampledRow] = {}

        def work() -> None:
            while left:
                try:
                    first, row = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                samples[row.turn_id] = self._sample(row, first)

        n_threads = min(self._workers, len(rows) // _ROWS_PER_THREAD)
        others = [self._pool.submit(work) for _ in range(n_threads - 1)]
        work()
        for other in others:
            # A job that has not started is queued behind a long tokenization, and no rows are left: do not wait for it.
            if not other.cancel():
                other.result()
        return [samples[row.turn_id] for row in rows]

    def _sample(self, row: DecodeRow, first: int) -> SampledRow:
        """Sample the token after the row's last one, whose logits are number ``first``, and those after its drafts."""
        output, drafts = self._outputs[row.turn_id], row.chunk.drafts
        expected = (*row.chunk.tokens[len(row.chunk.tokens) - drafts :], None)
        accepted: list[int] = []
        events: list[TurnEvent] = []
        token = None
        try:
            for draft in expected:
                sampled = self._samplers[row.turn_id].sample(first + len(accepted))
                events += output.push(sampled, now=self._clock())
                if sampled.token != draft or output.ended:
                    token = sampled.token
                    break
                accepted.append(sampled.token)
        except Exception as error:  # noqa: BLE001 - a border: one turn's sampler or stop pattern must not end the others
            failure = failure_of(error, "sampling", "The next token could not be sampled.", on_log=self._on_log)
            events.append(output.fail(failure, now=self._clock()))
        return SampledRow(row, tuple(accepted), token, _coalesced(events) if drafts else events)


def _coalesced(events: list[TurnEvent]) -> list[TurnEvent]:
    """Merge consecutive token events of one turn."""
    merged: list[TurnEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TokenDelta) and isinstance(last, TokenDelta):
            merged[-1] = TokenDelta(
                event.turn_id, last.tokens + event.tokens, last.text + event.text, last.logprobs + event.logprobs
            )
        else:
            merged.append(event)
    return merged


class Executor:
    """Owns the outputs and samplers of all turns, and ends each of them exactly once.

    A preempted turn keeps both: when it resumes it is not admitted again.

    Args:
        backend: The backend that decodes.
        kv: The store of parked sequences.
        pool: Threads that sample beside the caller's; they may be busy with other work.
        workers: Most rows sampled at once.
        clock: Monotonic seconds.
        interrupted: Whether to stop the step early, because a turn must end.
        progressed: Called after each move and each pass.
        on_log: Called with level and text, from any thread.
        images: Embeddings of images; ``None`` for a model that does not see.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it works on
        self,
        backend: Backend,
        kv: KvStore,
        *,
        pool: ThreadPoolExecutor,
        workers: int,
        clock: Callable[[], float],
        interrupted: Callable[[], bool],
        progressed: Callable[[], None],
        on_log: Callable[[str, str], None],
        images: ImageStore | None = None,
    ) -> None:
        self._backend = backend
        self._images = images
        self._mover = KvMover(backend, kv, clock=clock, progressed=progressed, on_log=on_log)
        self._clock = clock
        self._interrupted = interrupted
        self._progressed = progressed
        self._on_log = on_log
        self._outputs: dict[str, OutputProcessor] = {}
        # Traced turns that were preempted and have not resumed.
        self._preempted: set[str] = set()
        self._samplers: dict[str, TurnSampler] = {}
        self._sampling = RowSampler(
            self._outputs, self._samplers, pool=pool, workers=workers, clock=clock, on_log=on_log
        )

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._outputs

    def add(self, output: OutputProcessor) -> None:
        """Add the output of a turn that waits for admission."""
        self._outputs[output.turn_id] = output

    def timeout_reason(self, turn_id: str, now: float) -> TimeoutReason | None:
        """Return which limit of a turn has passed; ``None`` also for an unknown turn."""
        output = self._outputs.get(turn_id)
        return None if output is None else output.timeout_reason(now)

    def end(self, turn_id: str, reason: str) -> tuple[TurnEvent, ...]:
        """End a turn between two steps and return its last events."""
        events = self._outputs[turn_id].end(reason, now=self._clock())
        self._drop(turn_id)
        return events

    def fail(self, turn_id: str, error: InferenceCenterError) -> TurnEvent:
        """End a turn between two steps with an error and return its last event."""
        failure = self._outputs[turn_id].fail(error, now=self._clock())
        self._drop(turn_id)
        return failure

    def run(self, plan: StepPlan) -> StepOutcome:
        for turn_id in plan.preemptions:
            self._preempt(turn_id)
        outcome = self._mover.run(plan.moves)
        for turn_id, stage in outcome.stages:
            self._outputs[turn_id].record_move(stage)
        for turn_id in sorted(outcome.lost):
            self._lose(turn_id, outcome)
        if self._preempted:
            self._resume(plan)
        for admission in plan.admissions:
            self._admit(admission, outcome)
        if plan.encoding is not None:
            self._encode(plan.encoding, outcome)
        for number, each in enumerate(plan.passes):
            if number and self._interrupted():
                outcome.interrupted = True
                break
            self._run_pass(each, outcome)
            self._progressed()
        for turn_id in outcome.ended:
            self._drop(turn_id)
        return outcome

    def park(self, park: ParkSlot) -> bool:
        """Park a slot between two steps; ``False`` when that failed."""
        return self._mover.run((park,)).n_parked > 0

    def close(self) -> None:
        """Free all turns' samplers without events."""
        for turn_id in tuple(self._outputs):
            self._drop(turn_id)

    def _preempt(self, turn_id: str) -> None:
        output = self._outputs[turn_id]
        output.preempt(now=self._clock())
        if output.traced:
            self._preempted.add(turn_id)

    def _resume(self, plan: StepPlan) -> None:
        """Record which preempted turns resume with this plan."""
        now = self._clock()
        for each in plan.passes:
            for row in each.rows:
                if row.turn_id in self._preempted:
                    self._preempted.discard(row.turn_id)
                    self._outputs[row.turn_id].resume(now=now, kv_tokens=row.chunk.start, reads=each.prefill)

    def _admit(self, admission: Admission, outcome: StepOutcome) -> None:
        turn_id = admission.turn_id
        if turn_id in outcome.ended:
            return
        output = self._outputs[turn_id]
        begins_at = len(admission.prompt) - output.n_answered
        prompt, answer = admission.prompt[:begins_at], admission.prompt[begins_at:]
        try:
            self._samplers[turn_id] = self._backend.sampler(output.params, prompt, answer, output.constraint)
        except Exception as error:  # noqa: BLE001 - a border: what one turn asks for must not end the others
            message = "The turn's sampler could not be built."
            failure = failure_of(error, "building a sampler", message, on_log=self._on_log)
            outcome.events.append(output.fail(failure, now=self._clock()))
            outcome.ended.add(turn_id)
            return
        cached_tokens = 0 if turn_id in outcome.emptied else admission.cached_tokens
        outcome.events.append(output.start(prompt, cached_tokens=cached_tokens, now=self._clock()))

    def _encode(self, encoding: RowEncoding, outcome: StepOutcome) -> None:
        assert self._images is not None, "a turn has an image"
        turn_id = encoding.turn_id
        if turn_id in outcome.ended:
            return
        began_s = self._clock()
        try:
            self._images.encode(encoding.span)
        except Exception as error:  # noqa: BLE001 - a border: one turn's image must not end the others
            failure = failure_of(error, "encoding an image", "The image could not be encoded.", on_log=self._on_log)
            outcome.events.append(self._outputs[turn_id].fail(failure, now=self._clock()))
            outcome.ended.add(turn_id)
        outcome.encode_s = self._clock() - began_s
        self._progressed()

    def _with_embeddings(self, rows: list[DecodeRow], outcome: StepOutcome) -> list[DecodeRow]:
        """Add the embeddings of an image's rows; a turn whose image was evicted since it was planned waits."""
        found: list[DecodeRow] = []
        for row in rows:
            span, images = row.span, self._images
            if span is None or images is None:
                found.append(row)
            elif (embeddings := images.rows(span)) is None:
                outcome.stalled.add(row.turn_id)
            else:
                chunk = replace(row.chunk, embeddings=embeddings, positions=images.positions(span))
                found.append(replace(row, chunk=chunk))
        return found

    def _run_pass(self, each: DecodePass, outcome: StepOutcome) -> None:
        # Chunks of these turns no longer continue the content of their slots.
        skipped = outcome.ended | outcome.emptied | outcome.stalled
        rows = self._due([row for row in each.rows if row.turn_id not in skipped], outcome)
        if each.rows[0].span is not None:
            rows = self._with_embeddings(rows, outcome)
        if not rows:
            return
        began_s = self._clock()
        rows = self._with_drafts(rows, outcome)
        apart = self._backend.decodes_apart([row.chunk for row in rows])
        # Sampling reads the logits of the last decode.
        groups = [[row] for row in rows] if apart else [rows]
        if not all([self._decode(group, outcome) for group in groups]):
            return
        took_s = self._clock() - began_s
        if each.prefill:
            outcome.prefill_tokens += sum(len(row.chunk.tokens) for row in rows)
            outcome.prefill_s += took_s
        else:
            outcome.decode_s += took_s

    def _decode(self, rows: list[DecodeRow], outcome: StepOutcome) -> bool:
        """Decode and sample rows; ``False`` if that failed."""
        try:
            self._backend.decode([row.chunk for row in rows])
        except DecodeError as error:
            self._decode_failed(rows, error, outcome)
            return False
        for row in rows:
            outcome.decoded[row.turn_id] = outcome.decoded.get(row.turn_id, 0) + len(row.chunk.tokens)
        for sample in self._sampling.run([row for row in rows if row.chunk.sample]):
            self._take(sample, outcome)
        return True

    def _due(self, rows: list[DecodeRow], outcome: StepOutcome) -> list[DecodeRow]:
        """Return the rows whose token may be sampled now; the others are unchanged and retry with the next step."""
        waits = {row.turn_id: self._samplers[row.turn_id].wait_s for row in rows if row.chunk.sample}
        waiting = {turn_id: wait_s for turn_id, wait_s in waits.items() if wait_s > 0}
        if not waiting:
            return rows
        outcome.stalled |= waiting.keys()
        outcome.wait_s = min(waiting.values())
        return [row for row in rows if row.turn_id not in waiting]

    def _with_drafts(self, rows: list[DecodeRow], outcome: StepOutcome) -> list[DecodeRow]:
        """Add the drafts requested from the draft model."""
        requests = [row.draft for row in rows if row.draft is not None]
        model = self._backend.draft_model
        if not requests or model is None:
            return rows
        began_s = self._clock()
        drafts = dict(zip((request.slot for request in requests), model.draft(requests), strict=True))
        outcome.draft_s += self._clock() - began_s
        self._progressed()
        return [row.with_drafts(drafts[row.chunk.slot]) if row.draft else row for row in rows]

    def _take(self, sample: SampledRow, outcome: StepOutcome) -> None:
        turn_id, drafts = sample.row.turn_id, sample.row.chunk.drafts
        outcome.events += sample.events
        if sample.token is not None:
            outcome.sampled[turn_id] = sample.token
        if self._outputs[turn_id].ended:
            outcome.ended.add(turn_id)
        if drafts:
            outcome.drafted += drafts
            outcome.accepted[turn_id] = sample.accepted
            self._cut(sample.row, drafts - len(sample.accepted), outcome)

    def _cut(self, row: DecodeRow, n_tokens: int, outcome: StepOutcome) -> None:
        """Remove a row's rejected drafts from the KV."""
        if not n_tokens:
            return
        turn_id, chunk = row.turn_id, row.chunk
        outcome.decoded[turn_id] -= n_tokens
        if self._backend.truncate(chunk.slot, chunk.start + len(chunk.tokens) - n_tokens):
            return
        self._on_log("error", f"slot {chunk.slot} could not be truncated and is empty now")
        del outcome.decoded[turn_id]
        (outcome.lost if turn_id in outcome.ended else outcome.emptied).add(turn_id)

    def _decode_failed(self, rows: Sequence[DecodeRow], error: DecodeError, outcome: StepOutcome) -> None:
        """Fail the turns whose KV is lost; the others are unchanged and retry with the next step."""
        self._on_log("error", f"decode failed: {error}")
        # An error that names no slot of the batch would recur forever.
        lost = {row.chunk.slot for row in rows} & set(error.slots) or {row.chunk.slot for row in rows}
        for row in rows:
            if row.chunk.slot not in lost:
                outcome.stalled.add(row.turn_id)
                continue
            self._backend.truncate(row.chunk.slot, 0)
            self._lose(row.turn_id, outcome)

    def _lose(self, turn_id: str, outcome: StepOutcome) -> None:
        """Fail a turn whose KV is invalid."""
        failure = InferenceCenterError(ErrorCode.INTERNAL, "The KV cache of this turn was lost.")
        outcome.events.append(self._outputs[turn_id].fail(failure, now=self._clock()))
        outcome.ended.add(turn_id)
        outcome.lost.add(turn_id)

    def _drop(self, turn_id: str) -> None:
        del self._outputs[turn_id]
        self._preempted.discard(turn_id)
        sampler = self._samplers.pop(turn_id, None)
        if sampler is not None:
            sampler.close()


def stats_of(plan: StepPlan, outcome: StepOutcome, *, step_s: float) -> StepStats | None:
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
        encode_s=outcome.encode_s,
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
            return "neighbour"  # codespell:ignore neighbour
        case RestoreSlot(key=key):
            return "prefix" if is_prefix_key(key) else "parked"
