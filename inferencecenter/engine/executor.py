"""Executes a plan on a backend: moves KV, decodes, samples the rows, and reports the outcome."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import DecodeError
from inferencecenter.engine.kv_mover import KvMover
from inferencecenter.engine.scheduler.plan import StepOutcome
from inferencecenter.ipc.messages import TokenDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from inferencecenter.engine.backend import Backend, TurnSampler
    from inferencecenter.engine.kv_cache.store import KvStore
    from inferencecenter.engine.output_processor import OutputProcessor, TimeoutReason
    from inferencecenter.engine.scheduler.plan import Admission, DecodePass, DecodeRow, ParkSlot, StepPlan
    from inferencecenter.ipc.messages import MoveTime, TurnEvent


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What a row's turn made of its logits.

    ``accepted`` are the drafts that were right, ``token`` what was sampled behind them; ``None`` when that failed.
    """

    row: DecodeRow
    accepted: tuple[int, ...]
    token: int | None
    events: tuple[TurnEvent, ...]


class RowSampler:
    """Samples the rows of the last decode, on several threads.

    Args:
        outputs: The turns' outputs by id, which take the tokens in.
        samplers: The turns' samplers by id.
        pool: Threads that sample beside the caller's; other work may wait in it.
        workers: How many rows are sampled at once at most.
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
        """Sample all rows of the last decode, the caller's thread and the pool's taking the next one in turn."""
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

        others = [self._pool.submit(work) for _ in range(min(self._workers, len(rows)) - 1)]
        work()
        for other in others:
            # One that has not begun sits behind a long tokenization, and all rows are taken: do not wait for it.
            if not other.cancel():
                other.result()
        return [samples[row.turn_id] for row in rows]

    def _sample(self, row: DecodeRow, first: int) -> SampledRow:
        """Sample what follows the row's token, of which the logits are the ``first``, and what follows its drafts."""
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
        except InferenceCenterError as error:
            events.append(output.fail(error, now=self._clock()))
        except Exception as error:  # noqa: BLE001 - a border: one turn's sampler or stop pattern must not end the others
            self._on_log("error", f"sampling failed: {error!r}")
            failure = InferenceCenterError(ErrorCode.INTERNAL, "The next token could not be sampled.")
            events.append(output.fail(failure, now=self._clock()))
        return SampledRow(row, tuple(accepted), token, _coalesced(events))


def _coalesced(events: Sequence[TurnEvent]) -> tuple[TurnEvent, ...]:
    """Return the events of one turn with what is told in succession told at once."""
    told: list[TurnEvent] = []
    for event in events:
        last = told[-1] if told else None
        if isinstance(event, TokenDelta) and isinstance(last, TokenDelta):
            told[-1] = TokenDelta(
                event.turn_id, last.tokens + event.tokens, last.text + event.text, last.logprobs + event.logprobs
            )
        else:
            told.append(event)
    return tuple(told)


@dataclass(slots=True)
class _Results:
    """What the step has come to so far."""

    events: list[TurnEvent] = field(default_factory=list)
    decoded: dict[str, int] = field(default_factory=dict)
    sampled: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafted: int = 0
    emptied: set[str] = field(default_factory=set)
    wiped: set[int] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    moves_s: float = 0.0
    move_times: tuple[MoveTime, ...] = ()
    n_parked: int = 0

    def goes_on(self, turn_id: str) -> bool:
        """Tell whether the turn's chunks still follow on what its slot holds."""
        return turn_id not in self.emptied | self.ended | self.stalled

    def outcome(self) -> StepOutcome:
        return StepOutcome(
            decoded=self.decoded,
            sampled=self.sampled,
            accepted=self.accepted,
            drafted=self.drafted,
            emptied=frozenset(self.emptied),
            wiped=frozenset(self.wiped),
            ended=frozenset(self.ended),
            lost=frozenset(self.lost),
            prefill_tokens=self.prefill_tokens,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            moves_s=self.moves_s,
            move_times=self.move_times,
            n_parked=self.n_parked,
        )


class Executor:
    """Owns the outputs and samplers of all turns, and ends each of them exactly once.

    A turn that is preempted keeps both: when it comes back it is not admitted again.

    Args:
        backend: What decodes.
        kv: Where sequences are parked.
        pool: Threads that sample beside the caller's; other work may wait in it.
        workers: How many rows are sampled at once at most.
        clock: Monotonic seconds.
        interrupted: Whether what is left of a step can wait, because a turn is to end.
        progressed: Called after each move and each pass.
        on_log: Called with level and text, from any thread.
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
    ) -> None:
        self._backend = backend
        self._mover = KvMover(backend, kv, clock=clock, progressed=progressed, on_log=on_log)
        self._clock = clock
        self._interrupted = interrupted
        self._progressed = progressed
        self._on_log = on_log
        self._outputs: dict[str, OutputProcessor] = {}
        # Traced turns that were preempted and have not come back.
        self._away: set[str] = set()
        self._samplers: dict[str, TurnSampler] = {}
        self._sampling = RowSampler(
            self._outputs, self._samplers, pool=pool, workers=workers, clock=clock, on_log=on_log
        )

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._outputs

    def add(self, output: OutputProcessor) -> None:
        """Take charge of a turn that now waits for its admission."""
        self._outputs[output.turn_id] = output

    def timeout_reason(self, turn_id: str, now: float) -> TimeoutReason | None:
        """Return which of its times has run out on a turn; ``None`` also when there is no such turn any more."""
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

    def run(self, plan: StepPlan) -> tuple[StepOutcome, tuple[TurnEvent, ...]]:
        """Do what the plan says and return what came of it, with the turns' events in order."""
        results = _Results()
        for turn_id in plan.preemptions:
            self._preempt(turn_id)
        self._move(plan, results)
        if self._away:
            self._resume(plan)
        for admission in plan.admissions:
            self._admit(admission, results)
        for number, each in enumerate(plan.passes):
            if number and self._interrupted():
                break
            self._run_pass(each, results)
            self._progressed()
        for turn_id in results.ended:
            self._drop(turn_id)
        return results.outcome(), tuple(results.events)

    def park(self, park: ParkSlot) -> bool:
        """Park what a slot holds, between two steps; ``False`` when it could not be."""
        return self._mover.run((park,)).n_parked > 0

    def close(self) -> None:
        """Free the samplers of all turns, whose end nobody will hear of."""
        for turn_id in tuple(self._outputs):
            self._drop(turn_id)

    def _preempt(self, turn_id: str) -> None:
        output = self._outputs[turn_id]
        output.preempt(now=self._clock())
        if output.traced:
            self._away.add(turn_id)

    def _resume(self, plan: StepPlan) -> None:
        """Note which of the turns that are away go on with this plan."""
        now = self._clock()
        for each in plan.passes:
            for row in each.rows:
                if row.turn_id in self._away:
                    self._away.discard(row.turn_id)
                    self._outputs[row.turn_id].resume(now=now, kv_tokens=row.chunk.start, reads=each.prefill)

    def _move(self, plan: StepPlan, results: _Results) -> None:
        moved = self._mover.run(plan.moves)
        results.emptied, results.wiped = moved.emptied, moved.wiped
        results.moves_s, results.move_times, results.n_parked = moved.took_s, tuple(moved.times), moved.n_parked
        for turn_id, stage in moved.stages:
            self._outputs[turn_id].moved(stage)
        for turn_id in sorted(moved.lost):
            self._lose(turn_id, results)

    def _admit(self, admission: Admission, results: _Results) -> None:
        turn_id = admission.turn_id
        if turn_id in results.ended:
            return
        output = self._outputs[turn_id]
        begins_at = len(admission.prompt) - output.n_answered
        prompt, answer = admission.prompt[:begins_at], admission.prompt[begins_at:]
        try:
            self._samplers[turn_id] = self._backend.sampler(output.params, prompt, answer, output.constraint)
        except InferenceCenterError as error:
            results.events.append(output.fail(error, now=self._clock()))
            results.ended.add(turn_id)
            return
        except Exception as error:  # noqa: BLE001 - a border: what one turn asks for must not end the others
            self._on_log("error", f"a sampler could not be made: {error!r}")
            failure = InferenceCenterError(ErrorCode.INTERNAL, "The turn's sampler could not be made.")
            results.events.append(output.fail(failure, now=self._clock()))
            results.ended.add(turn_id)
            return
        cached_tokens = 0 if turn_id in results.emptied else admission.cached_tokens
        results.events.append(output.start(prompt, cached_tokens=cached_tokens, now=self._clock()))

    def _run_pass(self, each: DecodePass, results: _Results) -> None:
        rows = [row for row in each.rows if results.goes_on(row.turn_id)]
        if not rows:
            return
        began_s = self._clock()
        try:
            self._backend.decode([row.chunk for row in rows])
        except DecodeError as error:
            self._decode_failed(rows, error, results)
            return
        for row in rows:
            results.decoded[row.turn_id] = results.decoded.get(row.turn_id, 0) + len(row.chunk.tokens)
        for sample in self._sampling.run([row for row in rows if row.chunk.sample]):
            self._take(sample, results)
        took_s = self._clock() - began_s
        if each.prefill:
            results.prefill_tokens += sum(len(row.chunk.tokens) for row in rows)
            results.prefill_s += took_s
        else:
            results.decode_s += took_s

    def _take(self, sample: SampledRow, results: _Results) -> None:
        turn_id, drafts = sample.row.turn_id, sample.row.chunk.drafts
        results.events += sample.events
        if sample.token is not None:
            results.sampled[turn_id] = sample.token
        if self._outputs[turn_id].ended:
            results.ended.add(turn_id)
        if drafts:
            results.drafted += drafts
            results.accepted[turn_id] = sample.accepted
            self._cut(sample.row, drafts - len(sample.accepted), results)

    def _cut(self, row: DecodeRow, n_tokens: int, results: _Results) -> None:
        """Take the last drafts of a row, of which nothing came, out of the KV again."""
        if not n_tokens:
            return
        turn_id, chunk = row.turn_id, row.chunk
        results.decoded[turn_id] -= n_tokens
        if self._backend.truncate(chunk.slot, chunk.start + len(chunk.tokens) - n_tokens):
            return
        self._on_log("error", f"slot {chunk.slot} could not be cut and is empty now")
        del results.decoded[turn_id]
        (results.lost if turn_id in results.ended else results.emptied).add(turn_id)

    def _decode_failed(self, rows: Sequence[DecodeRow], error: DecodeError, results: _Results) -> None:
        """Fail the turns whose KV is lost; the others did not move and try again with the next step."""
        self._on_log("error", f"decode failed: {error}")
        # An error that names none of the batch would be met again for ever.
        lost = {row.chunk.slot for row in rows} & set(error.slots) or {row.chunk.slot for row in rows}
        for row in rows:
            if row.chunk.slot not in lost:
                results.stalled.add(row.turn_id)
                continue
            self._backend.truncate(row.chunk.slot, 0)
            self._lose(row.turn_id, results)

    def _lose(self, turn_id: str, results: _Results) -> None:
        """Fail a turn whose KV cannot be trusted any more."""
        failure = InferenceCenterError(ErrorCode.INTERNAL, "The model's memory of this turn was lost.")
        results.events.append(self._outputs[turn_id].fail(failure, now=self._clock()))
        results.ended.add(turn_id)
        results.lost.add(turn_id)

    def _drop(self, turn_id: str) -> None:
        del self._outputs[turn_id]
        self._away.discard(turn_id)
        sampler = self._samplers.pop(turn_id, None)
        if sampler is not None:
            sampler.close()
