"""Continuous batching: who is admitted to which slot, and what the next step decodes."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.plan import Admission, Pass, Plan, Reading, Swap, Truncation
from inferencecenter.engine.scheduler.policy import (
    PrefillBudget,
    Use,
    choose_slot,
    compaction,
    decode_pass,
    prefill_passes,
)
from inferencecenter.engine.scheduler.prefix import common_prefix_tokens
from inferencecenter.engine.scheduler.request import Request, RequestChange, RequestState
from inferencecenter.engine.scheduler.slots import SlotTable
from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.engine.scheduler.parking import ParkedKv
    from inferencecenter.engine.scheduler.plan import Move, Outcome
    from inferencecenter.engine.scheduler.slots import Slot


class Scheduler:
    """Decides each step from what waits, what runs and what the slots hold.

    ``step`` books its plan as if it were carried out; ``completed`` books what then really happened. Nothing may be
    added, aborted or released between the two.

    Args:
        slots: Number of KV streams.
        n_ctx: Tokens that fit one stream.
        grid_tokens: Prompts are cut at multiples of this position.
        pass_tokens: Most tokens that the backend decodes without cutting them again.
        target_step_s: How long a step that reads prompts should take.
        parked: Where KV is found that is in no slot.
        can_rewind: Whether a sequence can be cut anywhere.
        quantum_tokens: What a turn is served before another that waits gets its slot; 0 to learn it.
        ageing_s: A waiting turn rises a class each time it has waited so long.
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
        can_rewind: bool,
        quantum_tokens: int,
        ageing_s: float,
    ) -> None:
        self._slots = SlotTable(slots)
        self._n_ctx = n_ctx
        self._grid_tokens = grid_tokens
        self._pass_tokens = pass_tokens
        self._budget = PrefillBudget(target_step_s=target_step_s, floor_tokens=grid_tokens)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: dict[str, Request] = {}
        self._parked = parked
        self._can_rewind = can_rewind
        self._quantum_tokens = quantum_tokens
        self._ageing_s = ageing_s
        self._positions: dict[str, int] = {}
        self._released: list[Truncation] = []
        self._read_tokens = 0

    def __repr__(self) -> str:
        return f"Scheduler(waiting={self.waiting}, running={self.running}, {self._slots!r})"

    @property
    def running(self) -> int:
        """How many turns hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many turns wait for a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would plan anything."""
        return bool(self._requests or self._released)

    @property
    def slots(self) -> SlotTable:
        """What each slot holds; to be read only."""
        return self._slots

    def add(self, request: Request) -> None:
        """Let a turn queue for a slot.

        Raises:
            InferenceCenterError: ``prompt_too_long``, or ``invalid_request`` for a prompt of no tokens.
        """
        if request.turn_id in self._requests:
            raise ValueError(f"turn {request.turn_id} is here already")
        if request.prompt_tokens == 0:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, "The prompt has no tokens.", hint="Send some text.", field="prompt"
            )
        if request.prompt_tokens >= self._n_ctx:
            raise InferenceCenterError(
                ErrorCode.PROMPT_TOO_LONG,
                f"The prompt has {request.prompt_tokens} tokens; the context holds {self._n_ctx}, answer included.",
                hint="Shorten the prompt, start a new session, or serve the model with a larger n_ctx.",
            )
        self._requests[request.turn_id] = request
        insort(self._waiting, request, key=lambda waiting: waiting.order)

    def abort(self, turn_id: str, *, now: float) -> bool:
        """End a turn; what it decoded stays in KV. ``False`` when there is no such turn."""
        request = self._requests.get(turn_id)
        if request is None:
            return False
        self._end(request, now=now)
        return True

    def release(self, session_id: str, *, now: float) -> tuple[str, ...]:
        """End a session's turns, let the next plan drop its KV, and return the ids of those turns."""
        ended = tuple(request.turn_id for request in self._requests.values() if request.session_id == session_id)
        for turn_id in ended:
            self.abort(turn_id, now=now)
        slot = self._slots.of_session(session_id)
        if slot is not None:
            self._slots.forget(slot)
            self._released.append(Truncation(slot.index, 0, None))
        return ended

    def step(self, now: float) -> Plan:
        """Return what to do next; an empty plan when there is nothing."""
        truncations, self._released = self._released, []
        admissions, reasons = self._admit(truncations)
        swaps = self._compact()
        passes: list[Pass] = []
        decoding = [request for request in self._running.values() if request.state is RequestState.DECODE]
        reading = [request for request in self._running.values() if request.state is RequestState.PREFILL]
        if decoding:
            passes.append(decode_pass(decoding))
        if reading:
            budget_tokens = self._budget.tokens(decoding=bool(decoding))
            prefill = prefill_passes(
                reading,
                grid_tokens=self._grid_tokens,
                budget_tokens=budget_tokens,
                pass_tokens=self._pass_tokens,
            )
            passes.extend(prefill)
            reasons.append(f"{len(reading)} prompts share {budget_tokens} tokens")
        reasons.extend(f"slots {swap.a} and {swap.b} exchanged: what runs together stays together" for swap in swaps)
        moves: tuple[Move, ...] = (*truncations, *swaps)
        return Plan(moves=moves, admissions=tuple(admissions), passes=tuple(passes), reasons=tuple(reasons))

    def completed(self, outcome: Outcome, *, now: float) -> tuple[Reading, ...]:
        """Book what became of the last plan and return the prompts that were read on and are not finished."""
        for turn_id in outcome.emptied:
            request = self._requests[turn_id]
            request.kv_tokens = request.cached_tokens = 0
            self._slot(request).tokens.clear()
        for index in outcome.wiped:
            self._slots.forget(self._slots[index])
        for turn_id, count in outcome.decoded.items():
            request = self._requests[turn_id]
            end = request.kv_tokens + count
            self._slot(request).tokens += request.tokens[request.kv_tokens : end]
            request.kv_tokens = end
        for turn_id, token in outcome.sampled.items():
            request = self._requests[turn_id]
            request.tokens.append(token)
            if request.state is RequestState.PREFILL:
                request.change(RequestChange.PROMPT_READ)
        for turn_id in outcome.lost:
            self._slot(self._requests[turn_id]).tokens.clear()
        for turn_id in outcome.ended:
            self._end(self._requests[turn_id], now=now)
        self._read_tokens += outcome.prefill_tokens
        self._budget.observe(
            prefill_tokens=outcome.prefill_tokens, prefill_s=outcome.prefill_s, decode_s=outcome.decode_s
        )
        return tuple(
            Reading(turn_id, reader.kv_tokens, reader.prompt_tokens)
            for turn_id in outcome.decoded
            if (reader := self._running.get(turn_id)) is not None and reader.state is RequestState.PREFILL
        )

    def positions(self) -> tuple[tuple[str, int], ...]:
        """Return the places in the queue that changed since the last call; 0 for a turn that waited and now runs."""
        places = {request.turn_id: place for place, request in enumerate(self._waiting, start=1)}
        changes = [(turn_id, 0) for turn_id in self._positions if turn_id not in places and turn_id in self._running]
        changes.extend(place for place in places.items() if self._positions.get(place[0]) != place[1])
        self._positions = places
        return tuple(changes)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when requests and slots contradict each other."""
        self._slots.check_integrity(n_ctx=self._n_ctx)
        assert len(self._requests) == len(self._waiting) + len(self._running), f"a turn is lost: {self!r}"
        assert {slot.turn_id for slot in self._slots if slot.busy} == self._running.keys(), f"strange tenant: {self!r}"
        for request in self._running.values():
            held = self._slot(request).tokens
            assert held == request.tokens[: request.kv_tokens], f"other tokens in KV of {request.turn_id}: {self!r}"

    def _admit(self, truncations: list[Truncation]) -> tuple[list[Admission], list[str]]:
        admissions: list[Admission] = []
        reasons: list[str] = []
        sessions = {request.session_id for request in self._waiting}
        for request in tuple(self._waiting):
            if len(self._running) == len(self._slots):
                break
            choice = choose_slot(self._slots, request.session_id, waiting=sessions)
            if choice is None:
                continue
            slot, why = choice
            truncation = self._start(request, slot)
            if truncation is not None:
                truncations.append(truncation)
            admissions.append(Admission(request.turn_id, tuple(request.tokens), request.cached_tokens))
            reasons.append(
                f"turn {request.turn_id} to slot {slot.index}: {why}, "
                f"{request.cached_tokens} of {request.prompt_tokens} tokens in KV"
            )
        return admissions, reasons

    def _start(self, request: Request, slot: Slot) -> Truncation | None:
        held = len(slot.tokens)
        keep = 0
        if slot.session_id == request.session_id:
            # The last token is always decoded: its logits are what the answer starts from.
            keep = min(common_prefix_tokens(slot.tokens, request.tokens), request.prompt_tokens - 1)
        self._slots.assign(slot, session_id=request.session_id, turn_id=request.turn_id, keep_tokens=keep)
        request.change(RequestChange.ADMIT)
        request.slot = slot.index
        request.kv_tokens = request.cached_tokens = keep
        request.due = self._read_tokens + request.prompt_tokens - keep
        self._waiting.remove(request)
        self._running[request.turn_id] = request
        return Truncation(slot.index, keep, request.turn_id) if keep < held else None

    def _compact(self) -> tuple[Swap, ...]:
        swaps: list[Swap] = []
        for a, b in compaction([self._use(slot) for slot in self._slots]):
            swaps.append(Swap(a, b, self._slots[a].turn_id, self._slots[b].turn_id))
            self._slots.swap(a, b)
            for slot in (self._slots[a], self._slots[b]):
                if slot.turn_id is not None:
                    self._running[slot.turn_id].slot = slot.index
        return tuple(swaps)

    def _use(self, slot: Slot) -> Use:
        if slot.turn_id is None:
            return Use.IDLE
        return Use.READING if self._running[slot.turn_id].state is RequestState.PREFILL else Use.GENERATING

    def _end(self, request: Request, *, now: float) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._slots.free(self._slot(request), now=now)
            del self._running[request.turn_id]
        request.change(RequestChange.END)
        request.slot = None
        del self._requests[request.turn_id]

    def _slot(self, request: Request) -> Slot:
        assert request.slot is not None
        return self._slots[request.slot]
