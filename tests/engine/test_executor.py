"""Executing plans, with faults."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Chunk, DecodeError, DraftRequest, Sampled
from inferencecenter.engine.echo import EchoBackend, EchoSampler
from inferencecenter.engine.executor import Executor
from inferencecenter.engine.scheduler.plan import (
    Admission,
    CopySlot,
    DecodePass,
    DecodeRow,
    ParkSlot,
    RestoreSlot,
    StepOutcome,
    StepPlan,
    SwapSlots,
    TruncateSlot,
)
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Failed, Finished, Started, TokenDelta, TurnEvent, pack_tokens, unpack_tokens
from inferencecenter.protocol.params import Params, encode
from tests.engine.harness import output_of_turn, submit
from tests.engine.parked import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from inferencecenter.engine.sampling.constraint import Constraint

PROMPT = list(b"hello")
MANY = tuple("abcdefgh")
"""As many turns as are sampled on two threads."""


class FaultyEcho(EchoBackend):
    """An echo backend whose next operations can be made to fail, and that counts its samplers."""

    def __init__(self, *, slots: int = 8) -> None:
        super().__init__(EngineOptions(backend="echo", parent_pid=0, slots=slots, n_ctx=64))
        self.lose: tuple[int, ...] | None = None
        self.apart = False
        self.decoded: list[tuple[int, ...]] = []
        self.refuse_cut = False
        self.refuse_swap = False
        self.refuse_copy = False
        self.samplers: list[WatchedSampler] = []

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode, or lose the KV of some slots."""
        slots = tuple(chunk.slot for chunk in chunks)
        self.decoded.append(slots)
        if self.lose is not None and (not self.lose or set(self.lose) & set(slots)):
            raise DecodeError(self.lose, "planned")
        super().decode(chunks)

    def decodes_apart(self, chunks: Sequence[Chunk]) -> bool:
        """Return what the test wants."""
        return self.apart

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Truncate, or empty the slot."""
        if self.refuse_cut:
            super().truncate(slot, 0)
            return False
        return super().truncate(slot, n_tokens)

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Copy, or empty the target."""
        if self.refuse_copy:
            super().truncate(target, 0)
            return False
        return super().copy(source, target, n_tokens)

    def swap(self, a: int, b: int) -> None:
        """Swap, or lose both slots' KV."""
        if self.refuse_swap:
            super().truncate(a, 0)
            super().truncate(b, 0)
            raise DecodeError((a, b), "planned")
        super().swap(a, b)

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> WatchedSampler:
        """Return a sampler that the test can inspect."""
        self.samplers.append(WatchedSampler(self, params, prompt, answer))
        return self.samplers[-1]

    @property
    def open_samplers(self) -> int:
        """The number of open samplers; closing one twice raises."""
        return sum(not sampler.closed for sampler in self.samplers)


class WatchedSampler(EchoSampler):
    """Records where it sampled and whether it was closed; ``error`` is raised instead of a token."""

    def __init__(self, backend: FaultyEcho, params: Params, prompt: Sequence[int], answer: Sequence[int]) -> None:
        super().__init__(backend, params, prompt, answer)
        self.error: Exception | None = None
        self.closed = False
        self.threads: list[int] = []
        self.barrier: threading.Barrier | None = None
        self.fails_at = 0

    def sample(self, row: int) -> Sampled:
        """Sample, or raise."""
        self.threads.append(threading.get_ident())
        if self.barrier is not None:
            self.barrier.wait(timeout=60)
        if self.error is not None:
            raise self.error
        if len(self.threads) - 1 == self.fails_at > 0:
            raise RuntimeError("broken sampler")
        return super().sample(row)

    def close(self) -> None:
        """Close it."""
        super().close()
        self.closed = True


class Bench:
    """An executor with two workers, its backend and its log."""

    def __init__(self, pool: ThreadPoolExecutor, path: Path) -> None:
        self.backend = FaultyEcho()
        self.kv = open_store(self.backend, path)
        self.log: list[str] = []
        self.now = 0.0
        self.interrupted = False
        self.progress = 0
        self.executor = Executor(
            self.backend,
            self.kv,
            pool=pool,
            workers=2,
            clock=self.clock,
            interrupted=lambda: self.interrupted,
            progressed=self._progressed,
            on_log=lambda level, text: self.log.append(text),
        )

    def _progressed(self) -> None:
        self.progress += 1

    def clock(self) -> float:
        """Return a time that advances by a second with each call."""
        self.now += 1
        return self.now

    def add(self, turn_id: str, **params: object) -> None:
        """Add a turn with the usual prompt."""
        self.go_on(turn_id, (), **params)

    def go_on(self, turn_id: str, answer: tuple[int, ...], **params: object) -> None:
        """Add a turn with the usual prompt and a partial answer, all of which was emitted."""
        encoded = encode(Params.model_validate(params))
        turn = submit(turn_id, "", params=encoded, answer=pack_tokens(answer), shown_chars=len(answer))
        self.executor.add(output_of_turn(turn, self.backend, prompt_tokens=len(PROMPT), n_ctx=64))

    def run(self, plan: StepPlan) -> tuple[StepOutcome, tuple[TurnEvent, ...]]:
        """Run a plan; return its outcome and the turns' events."""
        outcome = self.executor.run(plan)
        return outcome, tuple(outcome.events)

    def start(self, *turn_ids: str) -> tuple[StepOutcome, tuple[TurnEvent, ...]]:
        """Admit turns to the slots from 0 on, and prefill their prompts."""
        return self.run(
            StepPlan(
                admissions=tuple(admission(turn_id) for turn_id in turn_ids),
                passes=(prefill(*enumerate(turn_ids)),),
            )
        )

    def decode(self, *turns: tuple[int, str, int]) -> tuple[StepOutcome, tuple[TurnEvent, ...]]:
        """Decode one token for each (slot, turn, token)."""
        rows = tuple(
            DecodeRow(turn_id, Chunk(slot, len(self.backend.held(slot)), [token], sample=True))
            for slot, turn_id, token in turns
        )
        return self.run(StepPlan(passes=(DecodePass(rows, prefill=False),)))


def admission(turn_id: str, *, cached_tokens: int = 0) -> Admission:
    """Return the admission of a turn with the usual prompt."""
    return Admission(turn_id, tuple(PROMPT), cached_tokens)


def prefill(*turns: tuple[int, str]) -> DecodePass:
    """Return a pass that prefills the whole prompt of each (slot, turn)."""
    return DecodePass(
        tuple(DecodeRow(turn_id, Chunk(slot, 0, PROMPT, sample=True)) for slot, turn_id in turns), prefill=True
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two threads."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def bench(pool: ThreadPoolExecutor, tmp_path: Path) -> Bench:
    """A fresh executor."""
    return Bench(pool, tmp_path)


def test_prompt_is_prefilled_and_its_first_token_sampled(bench: Bench) -> None:
    """Started comes before the first delta; the outcome counts tokens and time."""
    bench.add("t")
    outcome, events = bench.start("t")
    assert [type(event) for event in events] == [Started, TokenDelta]
    assert outcome.decoded == {"t": 5}
    assert outcome.sampled == {"t": ord("h")}
    assert outcome.ended == set()
    assert outcome.prefill_tokens == 5
    assert outcome.prefill_s > 0
    assert outcome.decode_s == 0


def test_ended_turn_is_dropped_with_its_sampler(bench: Bench) -> None:
    """The outcome names it, its last event is Finished, and its sampler is closed."""
    bench.add("t", max_tokens=2)
    bench.start("t")
    outcome, events = bench.decode((0, "t", ord("h")))
    assert isinstance(events[-1], Finished)
    assert outcome.ended == {"t"}
    assert outcome.lost == set()
    assert outcome.decode_s > 0
    assert (len(bench.executor), bench.backend.open_samplers) == (0, 0)


def test_rows_are_sampled_on_several_threads(bench: Bench) -> None:
    """Rows wait in pairs for each other while sampling, which works only if two are sampled concurrently."""
    for turn_id in MANY:
        bench.add(turn_id)
    bench.start(*MANY)
    barrier = threading.Barrier(2)
    for sampler in bench.backend.samplers:
        sampler.barrier = barrier
    outcome, events = bench.decode(*((slot, turn_id, ord("h")) for slot, turn_id in enumerate(MANY)))
    assert outcome.sampled == dict.fromkeys(MANY, ord("e"))
    assert [event.turn_id for event in events] == list(MANY)


def test_few_rows_are_sampled_in_place(bench: Bench) -> None:
    """One row less uses no worker thread."""
    for turn_id in MANY[1:]:
        bench.add(turn_id)
    bench.start(*MANY[1:])
    assert [sampler.threads for sampler in bench.backend.samplers] == [[threading.get_ident()]] * len(MANY[1:])


def test_sampling_does_not_wait_for_busy_workers(bench: Bench, pool: ThreadPoolExecutor) -> None:
    """With all workers tokenizing, the caller samples every row itself."""
    for turn_id in MANY:
        bench.add(turn_id)
    busy = threading.Event()
    waiting = [pool.submit(busy.wait, 60) for _ in range(2)]
    outcome, _ = bench.start(*MANY)
    assert not any(each.done() for each in waiting)
    busy.set()
    assert outcome.sampled.keys() == set(MANY)


def test_slots_are_cut_and_exchanged_before_decoding(bench: Bench) -> None:
    """Truncations come first, then swaps, then chunks in the slots after them."""
    bench.backend.decode([Chunk(0, 0, [*PROMPT, 9], sample=False), Chunk(2, 0, [7], sample=False)])
    bench.add("t")
    rows = (DecodeRow("t", Chunk(2, 3, PROMPT[3:], sample=True)),)
    _, events = bench.run(
        StepPlan(
            moves=(TruncateSlot(0, 3, "t"), SwapSlots(0, 2, "t", None)),
            admissions=(admission("t", cached_tokens=3),),
            passes=(DecodePass(rows, prefill=True),),
        )
    )
    assert isinstance(events[0], Started)
    assert events[0].cached_tokens == 3
    assert (bench.backend.held(0), bench.backend.held(2)) == ((7,), tuple(PROMPT))


def test_emptied_slot_is_reported(bench: Bench) -> None:
    """The turn starts with nothing cached and skips the step, whose chunks assumed the lost prefix."""
    bench.backend.decode([Chunk(0, 0, [*PROMPT, 9], sample=False)])
    bench.backend.refuse_cut = True
    bench.add("t")
    rows = (DecodeRow("t", Chunk(0, 3, PROMPT[3:], sample=True)),)
    outcome, events = bench.run(
        StepPlan(
            moves=(TruncateSlot(0, 3, "t"),),
            admissions=(admission("t", cached_tokens=3),),
            passes=(DecodePass(rows, prefill=True),),
        )
    )
    assert outcome.emptied == {"t"}
    assert outcome.decoded == {}
    (started,) = events
    assert isinstance(started, Started)
    assert started.cached_tokens == 0


def test_intended_clear_is_not_a_loss(bench: Bench) -> None:
    """A slot truncated to nothing is empty, however the backend did it."""
    bench.backend.decode([Chunk(0, 0, [1], sample=False)])
    bench.backend.refuse_cut = True
    bench.add("t")
    outcome, _ = bench.run(
        StepPlan(
            moves=(TruncateSlot(0, 0, "t"),),
            admissions=(admission("t"),),
            passes=(prefill((0, "t")),),
        )
    )
    assert outcome.emptied == set()
    assert outcome.decoded == {"t": 5}


@pytest.mark.parametrize("running", [True, False])
def test_failed_swap_loses_both_slots(bench: Bench, running: bool) -> None:
    """The turn fails, running or just admitted, and the idle session's slot is reported empty."""
    bench.add("t")
    if running:
        bench.start("t")
    bench.backend.decode([Chunk(2, 0, [7], sample=False)])
    bench.backend.refuse_swap = True
    outcome, events = bench.run(
        StepPlan(
            moves=(SwapSlots(0, 2, "t", None),),
            admissions=() if running else (admission("t"),),
            passes=(DecodePass((DecodeRow("t", Chunk(2, 5, [104], sample=True)),), prefill=not running),),
        )
    )
    assert [type(event) for event in events] == [Failed]
    assert outcome.wiped == {0}  # the idle session had moved there
    assert outcome.lost == outcome.ended == {"t"}
    assert (len(bench.executor), bench.backend.open_samplers) == (0, 0)


def test_failed_swap_of_two_running_turns_ends_both(bench: Bench) -> None:
    """Neither can continue, and no idle session was affected."""
    bench.add("a")
    bench.add("b")
    bench.start("a", "b")
    bench.backend.refuse_swap = True
    outcome, events = bench.run(StepPlan(moves=(SwapSlots(0, 1, "a", "b"),)))
    assert [type(event) for event in events] == [Failed, Failed]
    assert outcome.wiped == set()
    assert outcome.lost == outcome.ended == {"a", "b"}


def test_interrupted_step_ends_after_the_current_pass(bench: Bench) -> None:
    """What was not decoded is not reported, so it is planned again."""
    bench.add("a")
    bench.add("b")
    bench.interrupted = True
    passes = (prefill((0, "a")), prefill((1, "b")))
    outcome, _ = bench.run(StepPlan(admissions=(admission("a"), admission("b")), passes=passes))
    assert outcome.interrupted
    assert outcome.decoded == {"a": len(PROMPT)}
    assert bench.backend.held(1) == ()


def test_sampler_build_error_fails_only_its_turn(bench: Bench) -> None:
    """The turn fails with the sampler's own error and is not decoded; its neighbor runs."""
    bench.backend.sampler = EchoBackend.sampler.__get__(bench.backend)  # type: ignore[method-assign]
    bench.add("bad", logit_bias={"1": 1.0})
    bench.add("good")
    outcome, events = bench.start("bad", "good")
    assert isinstance(events[0], Failed)
    assert (events[0].turn_id, events[0].code, events[0].field) == ("bad", "invalid_request", "params.logit_bias")
    assert outcome.ended == {"bad"}
    assert outcome.decoded == {"good": 5}
    assert bench.backend.held(0) == ()


def test_decode_error_fails_the_turns_with_lost_kv(bench: Bench) -> None:
    """Their slots are emptied and their samplers closed; the others did not move and continue with the next step."""
    for turn_id in ("a", "b"):
        bench.add(turn_id)
    bench.start("a", "b")
    bench.backend.lose = (0,)
    outcome, events = bench.decode((0, "a", ord("h")), (1, "b", ord("h")))
    (failure,) = events
    assert isinstance(failure, Failed)
    assert (failure.turn_id, failure.code) == ("a", "internal")
    assert outcome.ended == {"a"}
    assert outcome.lost == {"a"}
    assert outcome.decoded == {}
    assert (bench.backend.held(0), bench.backend.open_samplers) == ((), 1)
    assert bench.log == ["decode failed: planned"]
    bench.backend.lose = None
    outcome, _ = bench.decode((1, "b", ord("h")))
    assert outcome.sampled == {"b": ord("e")}


def test_turns_decoded_apart_are_sampled_from_their_own_decode(bench: Bench) -> None:
    """Each is sampled before the next decode, which replaces the logits; the step has the tokens and events of all."""
    for turn_id in ("a", "b"):
        bench.add(turn_id)
    bench.start("a", "b")
    bench.backend.apart = True
    bench.backend.decoded.clear()
    outcome, events = bench.decode((0, "a", ord("h")), (1, "b", ord("h")))
    assert bench.backend.decoded == [(0,), (1,)]
    assert outcome.decoded == {"a": 1, "b": 1}
    assert outcome.sampled == {"a": ord("e"), "b": ord("e")}
    assert [event.turn_id for event in events] == ["a", "b"]
    assert outcome.decode_s > 0


def test_failed_decode_leaves_turns_decoded_apart_running(bench: Bench) -> None:
    """Only the turn whose KV is lost fails; the other gets its token in the same step."""
    for turn_id in ("a", "b"):
        bench.add(turn_id)
    bench.start("a", "b")
    bench.backend.apart, bench.backend.lose = True, (0,)
    outcome, _ = bench.decode((0, "a", ord("h")), (1, "b", ord("h")))
    assert outcome.ended == outcome.lost == {"a"}
    assert outcome.sampled == {"b": ord("e")}


def test_decode_error_without_slots_fails_the_batch(bench: Bench) -> None:
    """Otherwise the same batch would be retried forever."""
    bench.add("t")
    bench.backend.lose = ()
    outcome, _ = bench.start("t")
    assert outcome.lost == {"t"}


def test_later_passes_of_a_failed_turn_are_skipped(bench: Bench) -> None:
    """After a failed chunk, neither the failed nor the stalled turn's next chunk is decoded."""
    for turn_id in ("a", "b"):
        bench.add(turn_id)
    bench.backend.lose = (0,)
    cells = tuple(
        DecodePass(
            tuple(
                DecodeRow(turn_id, Chunk(slot, start, PROMPT[start:end], sample=end == 5))
                for slot, turn_id in enumerate(("a", "b"))
            ),
            prefill=True,
        )
        for start, end in ((0, 3), (3, 5))
    )
    outcome, _ = bench.run(StepPlan(admissions=(admission("a"), admission("b")), passes=cells))
    assert outcome.decoded == {}
    assert outcome.ended == {"a"}
    assert len(bench.log) == 1


def test_sampling_exception_fails_only_its_turn(bench: Bench) -> None:
    """The turn fails with internal, the log has the reason, and the KV stays valid."""
    for turn_id in ("a", "b"):
        bench.add(turn_id)
    bench.start("a", "b")
    bench.backend.samplers[0].error = RuntimeError("broken sampler")
    outcome, events = bench.decode((0, "a", ord("h")), (1, "b", ord("h")))
    assert [type(event) for event in events] == [Failed, TokenDelta]
    assert outcome.ended == {"a"}
    assert outcome.lost == set()
    assert outcome.sampled == {"b": ord("e")}
    assert bench.log == ["sampling failed: RuntimeError('broken sampler')"]


def test_error_of_a_turn_keeps_its_code(bench: Bench) -> None:
    """Errors of a turn's own pattern or grammar reach the client unchanged."""
    bench.add("t")
    bench.start("t")
    bench.backend.samplers[0].error = InferenceCenterError(
        ErrorCode.INVALID_REQUEST, "Slow.", field="params.stop_regex"
    )
    outcome, events = bench.decode((0, "t", ord("h")))
    (failure,) = events
    assert isinstance(failure, Failed)
    assert (failure.code, failure.field) == ("invalid_request", "params.stop_regex")
    assert outcome.ended == {"t"}
    assert bench.log == []


def test_ending_a_turn_between_steps_closes_its_sampler(bench: Bench) -> None:
    """An aborted turn's last event is Finished, whether it ran or waited."""
    for turn_id in ("runs", "waits"):
        bench.add(turn_id)
    bench.start("runs")
    for turn_id in ("runs", "waits"):
        (end,) = bench.executor.end(turn_id, "aborted")
        assert isinstance(end, Finished)
        assert end.reason == "aborted"
    assert (len(bench.executor), bench.backend.open_samplers) == (0, 0)


def test_overdue_turn_is_reported(bench: Bench) -> None:
    """It may run or wait."""
    bench.add("slow", max_time_ms=2000)
    bench.add("patient")
    assert bench.executor.timeout_reason("slow", 1.9) is None
    assert bench.executor.timeout_reason("slow", 2.0) == "time"


def test_closing_frees_every_sampler(bench: Bench) -> None:
    """No native object outlives the executor."""
    bench.add("t")
    bench.start("t")
    bench.executor.close()
    assert bench.backend.open_samplers == 0


def test_preempted_turn_resumes(bench: Bench) -> None:
    """Offloaded from its slot and restored into another one, without an admission: its sampler and text are kept."""
    bench.add("t", max_tokens=3)
    bench.start("t")
    tokens = tuple(PROMPT)
    bench.add("other", max_tokens=1)
    outcome, _ = bench.run(
        StepPlan(
            moves=(ParkSlot(0, "s", "ada", len(tokens), tokens, True), TruncateSlot(0, 0, "other")),
            preemptions=("t",),
            admissions=(admission("other"),),
            passes=(prefill((0, "other")),),
        )
    )
    assert outcome.n_parked == 1
    assert outcome.ended == {"other"}
    assert outcome.moves_s > 0
    outcome, _ = bench.run(
        StepPlan(
            moves=(RestoreSlot(2, "s", len(tokens), pack_tokens(tokens), "t"),),
            passes=(DecodePass((DecodeRow("t", Chunk(2, len(tokens), [ord("h")], sample=True)),), prefill=False),),
        )
    )
    assert (outcome.sampled, outcome.n_parked) == ({"t": ord("e")}, 0)
    outcome, events = bench.decode((2, "t", ord("e")))
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.generated_tokens, end.preempted) == (3, 1)
    assert (len(bench.executor), bench.backend.open_samplers) == (0, 0)


@pytest.mark.parametrize("move", [RestoreSlot(0, "gone", 5, b"", "t"), CopySlot(1, 0, 5, "t")])
def test_turn_with_missing_kv_skips_the_step(bench: Bench, move: RestoreSlot | CopySlot) -> None:
    """Nothing is cached or decoded on top of it, and the outcome reports its slot as empty."""
    bench.backend.decode([Chunk(0, 0, [9, 9], sample=False), Chunk(1, 0, [*PROMPT, 9], sample=False)])
    bench.backend.refuse_copy = True
    bench.add("t")
    outcome, (started,) = bench.run(
        StepPlan(
            moves=(move, TruncateSlot(0, 4, "t")),
            admissions=(admission("t", cached_tokens=4),),
            passes=(DecodePass((DecodeRow("t", Chunk(0, 4, PROMPT[4:], sample=True)),), prefill=True),),
        )
    )
    assert outcome.emptied == {"t"}
    assert outcome.decoded == {}
    assert isinstance(started, Started)
    assert started.cached_tokens == 0
    assert bench.backend.held(0) == ()


def test_answer_continues_after_a_context_shift(bench: Bench) -> None:
    """The sampler knows the earlier answer, which is prefilled with the prompt but not counted as part of it."""
    bench.go_on("t", tuple(b"he"), max_tokens=4)
    tokens = [*PROMPT, *b"he"]
    outcome, events = bench.run(
        StepPlan(
            admissions=(Admission("t", tuple(tokens), 0),),
            passes=(DecodePass((DecodeRow("t", Chunk(0, 0, tokens, sample=True)),), prefill=True),),
        )
    )
    started, delta = events
    assert isinstance(started, Started)
    assert unpack_tokens(started.tokens) == PROMPT
    assert isinstance(delta, TokenDelta)
    assert delta.text == "l"
    assert outcome.decoded == {"t": 7}


def test_turn_can_be_failed_between_two_steps(bench: Bench) -> None:
    """Its error is its last event."""
    bench.add("t")
    failure = bench.executor.fail("t", InferenceCenterError(ErrorCode.QUEUE_TIMEOUT))
    assert isinstance(failure, Failed)
    assert failure.code == "queue_timeout"
    assert len(bench.executor) == 0
    assert bench.executor.timeout_reason("t", 1e9) is None


@pytest.mark.parametrize("error", [ValueError("no such thing"), UnicodeError(), MemoryError()])
def test_unexpected_sampler_build_error_fails_only_its_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """For any exception, the other turn of the step is answered, and the log has the exception."""
    made = bench.backend.sampler

    def sampler(
        params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> WatchedSampler:
        if params.top_k == 7:
            raise error
        return made(params, prompt, answer)

    monkeypatch.setattr(bench.backend, "sampler", sampler)
    bench.add("bad", top_k=7)
    bench.add("good")
    outcome, events = bench.start("good", "bad")
    failure = next(event for event in events if isinstance(event, Failed))
    assert (failure.turn_id, failure.code) == ("bad", "internal")
    assert outcome.ended == {"bad"}
    assert outcome.sampled == {"good": ord("h")}
    assert bench.log == [f"building a sampler failed: {error!r}"]


def test_moves_and_passes_are_progress(bench: Bench) -> None:
    """Each counts when it is done."""
    bench.add("t")
    bench.start("t")
    assert bench.progress == 1
    bench.decode((0, "t", ord("h")))
    assert bench.progress == 2
    bench.run(StepPlan(moves=(TruncateSlot(1, 0, None), TruncateSlot(2, 0, None))))
    assert bench.progress == 4


def drafted(turn_id: str, slot: int, start: int, text: bytes) -> DecodeRow:
    """Return a decode row with a token and its drafts."""
    return DecodeRow(turn_id, Chunk(slot, start, list(text), sample=True, drafts=len(text) - 1))


def decode_drafts(bench: Bench, *rows: DecodeRow) -> tuple[StepOutcome, tuple[TurnEvent, ...]]:
    """Decode rows of turns whose answer is hello."""
    return bench.run(StepPlan(passes=(DecodePass(rows, prefill=False),)))


@pytest.mark.parametrize(
    ("text", "accepted", "token"),
    [(b"h", b"", b"e"), (b"hx", b"", b"e"), (b"hel", b"el", b"l"), (b"helxo", b"el", b"l"), (b"hexlo", b"e", b"l")],
)
def test_drafts_are_accepted_up_to_the_first_mismatch(bench: Bench, text: bytes, accepted: bytes, token: bytes) -> None:
    """The rest is removed from the KV, and all accepted text is emitted at once."""
    bench.add("t")
    bench.start("t")
    outcome, (delta,) = decode_drafts(bench, drafted("t", 0, 5, text))
    assert outcome.sampled == {"t": token[0]}
    assert bytes(outcome.accepted.get("t", ())) == accepted
    assert (outcome.drafted, outcome.decoded) == (len(text) - 1, {"t": 1 + len(accepted)})
    assert bench.backend.held(0) == (*PROMPT, *text[:1], *accepted)
    assert isinstance(delta, TokenDelta)
    assert (unpack_tokens(delta.tokens), delta.text) == ([*accepted, *token], (accepted + token).decode())


def test_rows_with_and_without_drafts_are_sampled_together(bench: Bench) -> None:
    """Each turn reads its own logits."""
    for turn_id in ("a", "b", "c"):
        bench.add(turn_id, n_probs=1)
    bench.start("a", "b", "c")
    rows = (drafted("a", 0, 5, b"hel"), drafted("b", 1, 5, b"h"), drafted("c", 2, 5, b"hxx"))
    outcome, events = decode_drafts(bench, *rows)
    assert outcome.sampled == {"a": ord("l"), "b": ord("e"), "c": ord("e")}
    assert outcome.accepted == {"a": tuple(b"el"), "c": ()}
    assert outcome.drafted == 4
    for event, n_tokens in zip(events, (3, 1, 1), strict=True):
        assert isinstance(event, TokenDelta)
        assert [logprobs.sampled.token_id for logprobs in event.logprobs] == unpack_tokens(event.tokens)
        assert len(event.logprobs) == n_tokens


class Table:
    """A draft model with given drafts by slot; ``drafting`` is called whenever it drafts."""

    cost = 0.1

    def __init__(self, drafts: dict[int, bytes], *, drafting: Callable[[], object] = lambda: None) -> None:
        self.drafts = drafts
        self.drafting = drafting
        self.requests: list[DraftRequest] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the given drafts."""
        self.drafting()
        self.requests += requests
        return [list(self.drafts[request.slot]) for request in requests]


def test_drafts_of_the_model_are_verified_like_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode has the drafts of all turns; a turn without drafts gets its token, and no draft is counted for it."""
    table = Table({0: b"el", 2: b"", 3: b"ex"})
    monkeypatch.setattr(FaultyEcho, "draft_model", table)
    for turn_id in ("a", "b", "c", "d"):
        bench.add(turn_id)
    bench.start("a", "b", "c", "d")
    tokens = [*PROMPT, ord("h")]
    plain = {name: drafted(name, slot, 5, b"h") for slot, name in enumerate("abcd")}
    rows = [replace(row, draft=DraftRequest(row.chunk.slot, tokens, 2, "c")) for row in plain.values()]
    outcome, _ = decode_drafts(bench, rows[0], plain["b"], rows[2], rows[3])
    assert [request.slot for request in table.requests] == [0, 2, 3]
    assert outcome.accepted == {"a": tuple(b"el"), "d": tuple(b"e")}
    assert outcome.drafted == 4
    assert outcome.decoded == {"a": 3, "b": 1, "c": 1, "d": 2}
    assert [bench.backend.held(slot) for slot in range(4)] == [(*PROMPT, *text) for text in (b"hel", b"h", b"h", b"he")]


def test_draft_and_decode_times_are_reported_separately(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's clock advances by a second with each reading."""
    looks: list[float] = []
    monkeypatch.setattr(FaultyEcho, "draft_model", Table({0: b"el"}, drafting=lambda: looks.append(bench.clock())))
    bench.add("t")
    bench.start("t")
    row = replace(drafted("t", 0, 5, b"h"), draft=DraftRequest(0, [*PROMPT, ord("h")], 2, "c"))
    outcome, _ = decode_drafts(bench, row)
    assert len(looks) == 1
    assert outcome.draft_s == 2
    assert outcome.decode_s > outcome.draft_s


@pytest.mark.parametrize(
    ("params", "reason", "shown", "held"),
    [
        ({"max_tokens": 3}, "length", "el", b"he"),
        ({"stop": ["ll"]}, "stop", "e", b"hel"),
        ({}, "stop", "ello", b"hello"),
        ({"max_time_ms": 8000}, "time", "ell", b"hel"),
    ],
)
def test_answer_ends_within_accepted_drafts(
    bench: Bench, params: dict[str, object], reason: str, shown: str, held: bytes
) -> None:
    """It ends at the token at which it would end without them, with the same KV and counts."""
    bench.add("t", **params)
    bench.start("t")
    outcome, (delta, end) = decode_drafts(bench, drafted("t", 0, 5, b"hello" + bytes([0])))
    assert isinstance(delta, TokenDelta)
    assert isinstance(end, Finished)
    assert (end.reason, delta.text) == (reason, shown)
    assert end.generated_tokens == 1 + len(unpack_tokens(delta.tokens))
    assert bench.backend.held(0) == (*PROMPT, *held)
    assert outcome.decoded == {"t": len(held)}
    assert outcome.ended == {"t"}
    assert outcome.lost == set()


def test_sampling_exception_within_drafts_keeps_accepted_tokens(bench: Bench) -> None:
    """The turn fails; its KV holds the tokens before the one that could not be sampled."""
    bench.add("t")
    bench.start("t")
    sampler = bench.backend.samplers[0]
    sampler.fails_at = 3
    outcome, events = decode_drafts(bench, drafted("t", 0, 5, b"hello"))
    delta, failure = events
    assert isinstance(delta, TokenDelta)
    assert isinstance(failure, Failed)
    assert delta.text == "el"
    assert outcome.sampled == {}
    assert outcome.accepted == {"t": tuple(b"el")}
    assert outcome.decoded == {"t": 3}
    assert bench.backend.held(0) == (*PROMPT, *b"hel")


@pytest.mark.parametrize(("max_tokens", "ends"), [(50, False), (2, True)])
def test_drafts_that_cannot_be_cut_off_empty_the_slot(bench: Bench, max_tokens: int, ends: bool) -> None:
    """Emitted text stays; a turn that continues is prefilled again."""
    bench.add("t", max_tokens=max_tokens)
    bench.start("t")
    bench.backend.refuse_cut = True
    outcome, _ = decode_drafts(bench, drafted("t", 0, 5, b"hxx"))
    assert outcome.sampled == {"t": ord("e")}
    assert outcome.decoded == {}
    assert bench.backend.held(0) == ()
    assert (outcome.lost, outcome.emptied) == (({"t"}, set()) if ends else (set(), {"t"}))
    assert bench.log == ["slot 0 could not be truncated and is empty now"]


def test_turn_whose_token_is_not_due_waits_while_others_decode(bench: Bench) -> None:
    """It is unchanged, and decodes when its sampler waits no longer; the outcome has the shortest wait."""
    bench.add("a")
    bench.add("b")
    bench.add("c")
    bench.start("a", "b", "c")
    for sampler, wait_s in zip(bench.backend.samplers, (0.0, 3.0, 2.0), strict=True):
        sampler.wait_s = wait_s
    outcome, _ = bench.decode((0, "a", ord("h")), (1, "b", ord("h")), (2, "c", ord("h")))
    assert (outcome.decoded, outcome.sampled) == ({"a": 1}, {"a": ord("e")})
    assert (outcome.stalled, outcome.wait_s) == ({"b", "c"}, 2.0)
    bench.backend.samplers[1].wait_s = 0.0
    outcome, _ = bench.decode((1, "b", ord("h")))
    assert (outcome.sampled, outcome.wait_s) == ({"b": ord("e")}, 0.0)
