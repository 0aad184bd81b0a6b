"""Continuous batching: which turns hold a slot, and what the next step decodes.

Mechanism: before every step the scheduler releases, preempts and assigns slots, then plans either one decode pass for
all generating turns or the passes of one prefill budget; it alternates the two, so that a new turn is prefilled after
at most one decode step and a long prompt stalls decoding for at most one budget. Planning is pure and optimistic:
``step`` updates slots and requests as if the plan had run, and ``completed`` corrects them by the outcome. Invariant
between steps (``check_integrity``): each running turn owns exactly one slot, that slot holds exactly the first
``kv_tokens`` of the turn's tokens, and every other turn is in exactly one place of the queue.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, prompt_too_long
from inferencecenter.engine.scheduler.placement import (
    CheckpointPlanner,
    Dispatcher,
    KvSourceFinder,
    PreemptionPolicy,
    SlotPlacement,
    compact,
)
from inferencecenter.engine.scheduler.plan import (
    CopySlot,
    ParkSlot,
    PlanBuilder,
    RestoreSlot,
    RowEncoding,
    TruncateSlot,
    decode_pass,
    prefill_order,
    prefill_passes,
    until_first_token,
)
from inferencecenter.engine.scheduler.queue import KvLoads, PrefixWaiters, TurnQueue
from inferencecenter.engine.scheduler.speculation import DraftPlanner
from inferencecenter.engine.scheduler.state import (
    DECODE_UNITS,
    EngineRequest,
    RequestChange,
    RequestState,
    ServiceCounters,
    SlotTable,
    charge_decode,
    charge_prefill,
)
from inferencecenter.ipc.messages import PrefillProgress

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from inferencecenter.engine.images import ImageSpan
    from inferencecenter.engine.scheduler.placement import ParkedKv
    from inferencecenter.engine.scheduler.plan import DecodePass, StepOutcome, StepPlan
    from inferencecenter.engine.scheduler.state import Slot
    from inferencecenter.ipc.messages import EngineLimits


# Weight of the newest step in the averages: they follow a change within a few steps and absorb one outlier.
_BUDGET_EWMA_WEIGHT = 0.3
_PREFILL_SHARE = 6.0
_LONGEST_S = 1.0
# A turn that came with the waiting ones pauses once, so for longer.
_BURST_SHARE = 12.0
_LONGEST_BURST_S = 4.0
_FIRST_TOKENS: Final = 32
_LEAST_TOKENS: Final = 16
_MOST_TOKENS: Final = 512
_PARKING_SHARE: Final = 0.03
# Preempting a turn takes one save and one restore.
_MOVES_PER_PREEMPTION: Final = 2
# Weight of the newest step: moves are few, and the first ones into fresh memory take ten times as long as later ones.
_QUANTUM_EWMA_WEIGHT: Final = 0.2


def _ewma(old: float, new: float, *, weight: float) -> float:
    """Return the exponentially weighted moving average; ``new`` itself when ``old`` is 0."""
    return old + weight * (new - old) if old else new


class PrefillBudget:
    """How many prompt tokens a step may prefill.

    As many as keep a step at about ``target_step_s`` or, where decoding is slow, ``_PREFILL_SHARE`` times the decode
    time: a turn waiting for its first token keeps the batch small for all. Where more turns wait for it than decode,
    that time grows with their ratio, up to ``_LONGEST_S``: in a burst every decode step for the few that are ahead
    delays the many, and full batches decode sooner. A turn that came with the waiting ones pauses for up to twice that
    time, at most ``_LONGEST_BURST_S``, if all of them can be prefilled in it. Learned from recent prefill and decode
    times, separately for one prompt and for several, since a pass of several is faster per token. ``floor_tokens`` is
    the minimum, and the value until there is a measurement.
    """

    def __init__(self, *, target_step_s: float, floor_tokens: int) -> None:
        self._target_step_s = target_step_s
        self._floor_tokens = floor_tokens
        self._tokens_per_s = {True: 0.0, False: 0.0}
        self._decode_s = 0.0

    def tokens(self, *, n_prefilling: int, n_decoding: int) -> int:
        """Return the budget of a step that prefills ``n_prefilling`` prompts while ``n_decoding`` turns decode."""
        decode_s = self._decode_s if n_decoding else 0.0
        prefill_s = max(self._target_step_s - decode_s, _PREFILL_SHARE * decode_s)
        if n_decoding:
            prefill_s = max(prefill_s, min(_LONGEST_S, _PREFILL_SHARE * decode_s * n_prefilling / n_decoding))
        return max(self._floor_tokens, int(self._rate(n_prefilling) * prefill_s))

    def covers(self, n_tokens: int, *, n_prefilling: int, n_decoding: int, paused_s: float) -> bool:
        """Return whether the prompts of a burst, ``n_tokens`` together, may be prefilled before the next decode.

        The first of the turns that decode got its token ``paused_s`` ago.
        """
        prefill_s = _BURST_SHARE * self._decode_s * n_prefilling / n_decoding
        return n_tokens <= self._rate(n_prefilling) * min(_LONGEST_BURST_S - paused_s, prefill_s)

    def observe(self, *, prefill_tokens: int, prefill_s: float, decode_s: float, alone: bool) -> None:
        """Learn from a step; zero stands for a part it did not have, ``alone`` for a single prompt."""
        if prefill_tokens and prefill_s > 0:
            self._tokens_per_s[alone] = _ewma(
                self._tokens_per_s[alone], prefill_tokens / prefill_s, weight=_BUDGET_EWMA_WEIGHT
            )
        if decode_s > 0:
            self._decode_s = _ewma(self._decode_s, decode_s, weight=_BUDGET_EWMA_WEIGHT)

    def _rate(self, n_prefilling: int) -> float:
        """Return the tokens a second at which so many prompts are prefilled."""
        return self._tokens_per_s[True] if n_prefilling == 1 else max(self._tokens_per_s.values())


class Quantum:
    """How many tokens a turn generates before a waiting turn may preempt it.

    The configured value, or as many that preemption takes less than 3 % of the time: with ``s`` decoding slots each
    step generates ``s`` tokens in ``d`` seconds, and in the ``q`` steps of a quantum each slot changes hands once at
    ``e`` seconds. ``s·e <= 0.03·q·d`` holds from ``q = e / (0.03·d/s)`` on: what counts is the time per token, ``d/s``.

    Args:
        tokens: The quantum; 0 to learn it.
    """

    def __init__(self, tokens: int) -> None:
        self._given_tokens = tokens
        self._move_s = 0.0
        self._token_s = 0.0

    @property
    def tokens(self) -> int:
        """The quantum of the next step."""
        if self._given_tokens:
            return self._given_tokens
        if not (self._move_s and self._token_s):
            return _FIRST_TOKENS
        needed = ceil(_MOVES_PER_PREEMPTION * self._move_s / (_PARKING_SHARE * self._token_s))
        return min(max(needed, _LEAST_TOKENS), _MOST_TOKENS)

    def observe(self, *, moves: int, moves_s: float, generated_tokens: int, decode_s: float) -> None:
        """Learn from a step; zero stands for a part it did not have."""
        if moves and moves_s > 0:
            self._move_s = _ewma(self._move_s, moves_s / moves, weight=_QUANTUM_EWMA_WEIGHT)
        if generated_tokens and decode_s > 0:
            self._token_s = _ewma(self._token_s, decode_s / generated_tokens, weight=_QUANTUM_EWMA_WEIGHT)


class RowSource(Protocol):
    """Which rows of images have embeddings, as the scheduler needs it."""

    def is_ready(self, span: ImageSpan) -> bool:
        """Return whether a run has embeddings."""

    def can_encode(self, span: ImageSpan) -> bool:
        """Return whether the pixels of a run are there."""

    def request(self, span: ImageSpan) -> None:
        """Request the pixels of a run, unless they have been."""


class Scheduler:
    """Plans each step from the waiting turns, the running turns and the content of the slots.

    ``step`` applies its plan optimistically; ``completed`` applies the actual outcome. Between the two, nothing may be
    added, aborted or released.

    Args:
        slots: Number of KV streams.
        n_ctx: Tokens that fit one stream.
        grid_tokens: Prompts are cut at multiples of this position.
        pass_tokens: Most tokens that the backend decodes without splitting the pass.
        target_step_s: Target duration of a step that prefills.
        parked: Lookup of KV that is in no slot.
        can_truncate: Whether a sequence can be cut at any position.
        quantum_tokens: Tokens a turn generates before a waiting one may preempt it; 0 to learn it.
        ageing_s: Waiting time after which a turn rises a class.
        draft_tokens: Most tokens that a turn drafts in a step; needs ``can_truncate``.
        lookup: Whether turns draft from their own text.
        draft_cost: Cost of a decode of the draft model, in units of one of the model; ``None`` without a draft model.
        images: Which rows of images exist; ``None`` for a model that does not see.
    """

    def __init__(  # noqa: PLR0913 - keyword-only, and each a different thing
        self,
        *,
        slots: int,
        n_ctx: int,
        grid_tokens: int,
        pass_tokens: int,
        target_step_s: float,
        parked: ParkedKv,
        can_truncate: bool,
        quantum_tokens: int,
        ageing_s: float,
        draft_tokens: int = 0,
        lookup: bool = True,
        draft_cost: float | None = None,
        images: RowSource | None = None,
    ) -> None:
        self._n_ctx = n_ctx
        self._grid_tokens = grid_tokens
        self._pass_tokens = pass_tokens
        self._drafting = DraftPlanner(
            draft_tokens=draft_tokens, n_ctx=n_ctx, pass_tokens=pass_tokens, lookup=lookup, draft_cost=draft_cost
        )
        self._images = images
        self._ageing_s = ageing_s
        self._budget = PrefillBudget(target_step_s=target_step_s, floor_tokens=grid_tokens)
        self._quantum = Quantum(quantum_tokens)
        self._slots = SlotTable(slots)
        self._counters = ServiceCounters()
        self._requests: dict[str, EngineRequest] = {}
        self._running: dict[str, EngineRequest] = {}
        self._queue = TurnQueue(
            self._counters,
            fetches=KvLoads(parked, most=slots),
            followers=PrefixWaiters(can_truncate=can_truncate, grid_tokens=grid_tokens),
            ageing_s=ageing_s,
        )
        sources = KvSourceFinder(self._slots, parked, can_truncate=can_truncate, grid_tokens=grid_tokens)
        self._placement = SlotPlacement(
            self._slots, sources, parked, can_truncate=can_truncate, grid_tokens=grid_tokens
        )
        self.checkpoints = CheckpointPlanner(self._slots, sources, parked, grid_tokens=grid_tokens)
        self._dispatcher = Dispatcher(
            self._slots, self._running, self._queue, sources=sources, placement=self._placement
        )
        self._released: list[TruncateSlot] = []
        self._read_tokens = 0
        self._moves = 0
        self._generates = False
        # Prompt tokens of the last budget, whether its step ends at a first token, and what is left for the next step.
        self._budget_tokens = 0
        self._ends_early = False
        self._left_tokens = 0
        self._planned_nothing = False

    def __repr__(self) -> str:
        return f"Scheduler(waiting={self.waiting}, running={self.running}, {self._slots!r})"

    @property
    def running(self) -> int:
        """Number of turns that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of turns that wait, for a slot or for KV."""
        return len(self._requests) - len(self._running)

    @property
    def quantum_tokens(self) -> int:
        """The current quantum in tokens."""
        return self._quantum.tokens

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan, now or after a fetch."""
        return bool(self._requests or self._released)

    @property
    def blocked(self) -> bool:
        """Whether ``step`` would plan nothing until a fetch ends, pixels arrive or limits are lifted.

        Valid between steps. A caller that sleeps on it must wake at the end of every fetch and also periodically: a
        turn stops waiting for a disk that does not respond.
        """
        waits_for_pixels = [request for request in self._running.values() if self._waits_for_pixels(request)]
        waits_for_others = self._queue.kv_loads or self._queue.wait_queue.barred or waits_for_pixels
        works = len(waits_for_pixels) < len(self._running)
        if works or self._released or self._queue.prefix_waiters or not waits_for_others:
            return False
        return self._planned_nothing or not self._queue.wait_queue

    @property
    def slots(self) -> SlotTable:
        """Content of the slots; read-only."""
        return self._slots

    def add(self, request: EngineRequest) -> None:
        """Queue a turn for a slot.

        Raises:
            InferenceCenterError: ``prompt_too_long``, or ``invalid_request`` for a prompt of no tokens.
        """
        if request.turn_id in self._requests:
            raise ValueError(f"turn {request.turn_id} was added already")
        if not request.client_id:
            raise ValueError("a turn needs a client id: without one it would share the KV of all clients")
        if request.prompt_tokens == 0:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, "The prompt has no tokens.", hint="Send some text.", field="prompt"
            )
        if request.prompt_tokens >= self._n_ctx:
            raise prompt_too_long(f"{request.prompt_tokens} tokens", n_ctx=self._n_ctx)
        self._planned_nothing = False
        self._requests[request.turn_id] = request
        self._queue.add(request, self._running.values())

    def limit(self, limits: EngineLimits, *, now: float) -> None:
        """Set the limits of the next plans; running turns finish at least their quantum."""
        self._planned_nothing = False
        self._dispatcher.limits = limits
        self._queue.wait_queue.bar_below(limits.lowest_class, now=now)

    def abort(self, turn_id: str, *, now: float) -> bool:
        """End a turn; its decoded tokens stay in KV. ``False`` when there is no such turn."""
        request = self._requests.get(turn_id)
        if request is None:
            return False
        self._end(request, now=now)
        return True

    def release(self, session_id: str, *, now: float) -> tuple[str, ...]:
        """End a session's turns, drop its KV with the next plan, and return the ids of those turns."""
        ended = tuple(self._queue.sessions.get(session_id, ()))
        for turn_id in reversed(ended):
            self.abort(turn_id, now=now)
        slot = self._slots.of_session(session_id)
        if slot is not None:
            self._slots.forget(slot)
            self._released.append(TruncateSlot(slot.index, 0, None))
        return ended

    def suspend(self, *, now: float, park_all: bool) -> tuple[ParkSlot, ...]:
        """End all turns and return the moves that park all slots, or only durable ones; the last used comes last.

        Valid between steps.
        """
        self.end_all(now=now)
        return self._placement.suspension(park_all=park_all)

    def end_all(self, *, now: float) -> None:
        """End all turns between two steps; their decoded tokens stay in KV."""
        for request in reversed(tuple(self._requests.values())):
            self._end(request, now=now)

    def stale_fetches(self) -> tuple[str, ...]:
        """Return the parked sequences to stop loading, because no turn waits for them any more."""
        return self._queue.kv_loads.take_stale()

    def turns_with(self, digest: str) -> tuple[str, ...]:
        """Return the turns whose prompt has an image with this digest."""
        return tuple(
            turn_id
            for turn_id, request in self._requests.items()
            if any(span.image.digest == digest for span in request.spans)
        )

    def positions(self) -> tuple[tuple[str, int], ...]:
        """Return the queue positions that changed since the last call; 0 for a turn that waited and now runs.

        Only turns that never had a slot have a position. See ``PositionTracker`` for what is published of a long queue.
        """
        return self._queue.positions()

    def step(self, now: float) -> StepPlan:
        """Return the plan of the next step; an empty plan when there is nothing to do."""
        builder = PlanBuilder(self._read_tokens, [*self._released])
        self._released = []
        # Turns waiting for a snapshot are requeued one step after it was planned, when it exists.
        self._queue.advance(now)
        for request in self._running.values():
            self._placement.snapshot(builder, request)
        preemption = PreemptionPolicy(self._counters, self._quantum.tokens * DECODE_UNITS)
        self._dispatcher.run(builder, preemption, now=now)
        self._moves = sum(isinstance(move, ParkSlot | RestoreSlot | CopySlot) for move in builder.moves)
        compact(builder, self._slots, self._running)
        plan = builder.plan(self._passes(builder, now=now))
        self._planned_nothing = plan.empty and not plan.preemptions
        return plan

    def completed(self, outcome: StepOutcome, *, now: float) -> tuple[PrefillProgress, ...]:
        """Apply the outcome of the last plan and return the progress of unfinished prompts."""
        for turn_id, tokens in outcome.accepted.items():
            self._requests[turn_id].tokens += tokens
        for turn_id, count in outcome.decoded.items():
            request = self._requests[turn_id]
            end = request.kv_tokens + count
            self._slot(request).tokens += request.tokens[request.kv_tokens : end]
            request.kv_tokens = end
            charge_prefill(self._counters, request)
        for turn_id, token in outcome.sampled.items():
            request = self._requests[turn_id]
            request.tokens.append(token)
            n_accepted = len(outcome.accepted.get(turn_id, ()))
            charge_decode(self._counters, request, 1 + n_accepted)
            if request.drafter is not None and turn_id in outcome.accepted:
                request.drafter.observe(n_accepted, n_tokens=len(request.tokens))
            if request.state is RequestState.PREFILL:
                request.change(RequestChange.PROMPT_READ)
                request.first_token_s = min(request.first_token_s, now)
        self._book_losses(outcome)
        for turn_id in outcome.lost:
            self._slot(self._requests[turn_id]).tokens.clear()
        for turn_id in outcome.ended:
            self._end(self._requests[turn_id], now=now)
        self._observe(outcome)
        readers = (self._running.get(turn_id) for turn_id in outcome.decoded)
        return tuple(
            PrefillProgress(reader.turn_id, reader.kv_tokens, reader.prompt_tokens)
            for reader in readers
            if reader is not None and reader.state is RequestState.PREFILL and reader.generated_tokens == 0
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when requests, slots and counters contradict each other."""
        self._slots.check_integrity(n_ctx=self._n_ctx)
        self._queue.check_integrity(self._requests)
        assert self._running.keys() <= self._requests.keys(), f"an unknown turn runs: {self!r}"
        assert {slot.turn_id for slot in self._slots if slot.busy} == self._running.keys(), (
            f"slots hold other turns than those running: {self!r}"
        )
        for request in self._running.values():
            slot = self._slot(request)
            assert slot.session_id == request.session_id, f"slot {slot.index} is another session's: {self!r}"
            held = slot.tokens
            assert held == request.tokens[: request.kv_tokens], f"other tokens in KV of {request.turn_id}: {self!r}"
            assert 0 <= request.used <= request.served, f"{request.turn_id} used more than it was served: {self!r}"

    def _passes(self, builder: PlanBuilder, *, now: float) -> list[DecodePass]:
        """Return one decode pass or the passes of one prefill budget, alternating.

        A turn that arrives while others decode is prefilled after at most one decode step, its first token joins the
        next pass, and generated tokens are published before prompts are prefilled. In a burst the first turns that have
        a token do not decode before the others have one. A step that prefills ends where prompts are complete, so that
        their first tokens are published. What such a step, or an interrupted one, has left of its budget is used first.
        """
        self._ends_early = False
        decoding = [request for request in self._running.values() if request.state is RequestState.DECODE]
        reading = [request for request in self._running.values() if request.state is RequestState.PREFILL]
        burst = self._is_burst(decoding, reading, now=now)
        if decoding and not (reading and (self._generates or burst or self._left_tokens)):
            self._generates = True
            return [decode_pass(decoding, self._drafting.drafts(decoding))]
        self._generates = False
        builder.encoding = self._next_encoding(reading)
        ready = [request for request in reading if request.kv_tokens < request.step_end]
        if builder.encoding is not None or not ready:
            return []
        return self._read(builder, ready, n_decoding=len(decoding), burst=burst, now=now)

    def _is_burst(self, decoding: Collection[EngineRequest], reading: Collection[EngineRequest], *, now: float) -> bool:
        """Return whether the turns that decode have just overtaken the others, which may all be prefilled now.

        A turn that had a token before one of these prompts arrived is not paused for longer than usual.
        """
        if not (decoding and reading) or self._dispatcher.limits.prefill_share < 1:
            return False
        arrived_s = max(request.submitted_s for request in reading)
        first_token_s = min(request.first_token_s for request in decoding)
        return first_token_s >= arrived_s and self._budget.covers(
            sum(request.pending_tokens for request in reading),
            n_prefilling=len(reading),
            n_decoding=len(decoding),
            paused_s=now - first_token_s,
        )

    def _next_encoding(self, reading: Iterable[EngineRequest]) -> RowEncoding | None:
        """Limit each prompt to the rows that have embeddings, and request the pixels of the next rows.

        Returns the rows to encode if they belong to the prompt that comes first.
        """
        if self._images is None:
            return None
        encoding, decided = None, False
        for request in sorted(reading, key=prefill_order):
            span = self._missing_rows(request)
            request.row_limit = None if span is None else span.start
            has_pixels = span is not None and self._images.can_encode(span)
            if span is not None and not has_pixels:
                self._images.request(span)
            waits = request.row_limit == request.kv_tokens
            if span is not None and waits and has_pixels and not decided:
                encoding = RowEncoding(request.turn_id, span)
            decided = decided or has_pixels or not waits
        return encoding

    def _missing_rows(self, request: EngineRequest) -> ImageSpan | None:
        """Return a prompt's next rows without embeddings."""
        assert self._images is not None
        left = (span for span in request.spans if span.start >= request.kv_tokens)
        return next((span for span in left if not self._images.is_ready(span)), None)

    def _waits_for_pixels(self, request: EngineRequest) -> bool:
        """Return whether a running turn is at rows whose pixels have been requested and are not there."""
        if self._images is None or request.row_limit != request.kv_tokens:
            return False
        span = request.span_at(request.kv_tokens)
        return span is not None and not (self._images.is_ready(span) or self._images.can_encode(span))

    def _read(
        self, builder: PlanBuilder, reading: list[EngineRequest], *, n_decoding: int, burst: bool, now: float
    ) -> list[DecodePass]:
        for request in reading:
            # A turn that holds a slot but is not prefilled ages as if it still waited for one.
            risen = request.base_class - request.periods(now, self._ageing_s)
            request.effective_priority = min(request.effective_priority, max(0, risen))
        budget_tokens = self._left_tokens
        if not budget_tokens or burst:
            budget_tokens = self._budget.tokens(n_prefilling=len(reading), n_decoding=n_decoding)
            if burst:
                budget_tokens = max(budget_tokens, sum(request.pending_tokens for request in reading))
            budget_tokens = max(self._grid_tokens, int(budget_tokens * self._dispatcher.limits.prefill_share))
        self._budget_tokens = budget_tokens
        builder.reasons.append(f"{len(reading)} prompts share {budget_tokens} tokens")
        passes = prefill_passes(
            reading, grid_tokens=self._grid_tokens, budget_tokens=budget_tokens, pass_tokens=self._pass_tokens
        )
        until = until_first_token(passes, least_tokens=self._grid_tokens)
        self._ends_early = len(until) < len(passes)
        return until

    def _book_losses(self, outcome: StepOutcome) -> None:
        for turn_id in outcome.emptied:
            request = self._requests[turn_id]
            request.kv_tokens = 0
            if request.preempted == 0:
                request.cached_tokens = 0
            if request.state is RequestState.DECODE:
                request.change(RequestChange.KV_LOST)
            self._slot(request).tokens.clear()
        for index in outcome.wiped:
            self._slots.forget(self._slots[index])

    def _observe(self, outcome: StepOutcome) -> None:
        self._read_tokens += outcome.prefill_tokens
        continues = outcome.interrupted or self._ends_early
        self._left_tokens = max(0, self._budget_tokens - outcome.prefill_tokens) if continues else 0
        self._budget.observe(
            prefill_tokens=outcome.prefill_tokens,
            prefill_s=outcome.prefill_s,
            decode_s=outcome.decode_s,
            alone=len(outcome.decoded) == 1,
        )
        if self._generates:
            self._drafting.observe(
                n_turns=len(outcome.decoded),
                n_drafts=outcome.drafted,
                decode_s=outcome.decode_s,
                draft_s=outcome.draft_s,
            )
        self._quantum.observe(
            moves=self._moves,
            moves_s=outcome.moves_s,
            generated_tokens=sum(outcome.decoded.values()) if self._generates else 0,
            decode_s=outcome.decode_s,
        )

    def _end(self, request: EngineRequest, *, now: float) -> None:
        self._planned_nothing = False
        if request.slot is not None:
            self._slots.free(self._slot(request), now=now)
            del self._running[request.turn_id]
            request.slot = None
        self._queue.end(request, now=now)
        request.change(RequestChange.END)
        del self._requests[request.turn_id]

    def _slot(self, request: EngineRequest) -> Slot:
        assert request.slot is not None
        return self._slots[request.slot]
