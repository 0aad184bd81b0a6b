"""Putting turns into slots: what is parked, restored, copied and cut for that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.parking import prefix_key
from inferencecenter.engine.scheduler.plan import Admission, Copy, Park, Plan, Restore, Swap, Truncation
from inferencecenter.engine.scheduler.policy import Use, compaction
from inferencecenter.engine.scheduler.request import RequestChange, RequestState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.engine.scheduler.parking import ParkedKv
    from inferencecenter.engine.scheduler.plan import Move, Pass
    from inferencecenter.engine.scheduler.request import Request
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable
    from inferencecenter.engine.scheduler.sources import Source, Sources


@dataclass(slots=True)
class Draft:
    """A plan in the making, before which ``read_tokens`` of prompts were read in all.

    What the ``unsettled`` slots hold depends on moves that may fail, and what was found under the ``replaced`` keys is
    parked no more when the plan gets there. The ``preempted`` turns go back to the line when
    the slots are given away, not before: none takes part in the exchange that it lost.
    """

    read_tokens: int
    moves: list[Move]
    fetches: list[str] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    unsettled: set[Slot] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def plan(self, passes: list[Pass]) -> Plan:
        """Return the plan with its passes."""
        return Plan(
            moves=tuple(self.moves),
            fetches=tuple(self.fetches),
            preemptions=tuple(request.turn_id for request in self.preempted),
            admissions=tuple(self.admissions),
            passes=tuple(passes),
            reasons=tuple(self.reasons),
        )


class Placement:
    """Books what a turn's way into a slot does to the slots, and drafts the moves.

    Args:
        slots: What the slots hold.
        sources: Where KV is found.
        parked: What can be parked.
        can_rewind: Whether a sequence can be cut anywhere.
        grid_tokens: Prompts are cut at multiples of this position; less than that is not parked for later.
    """

    def __init__(
        self, slots: SlotTable, sources: Sources, parked: ParkedKv, *, can_rewind: bool, grid_tokens: int
    ) -> None:
        self._slots = slots
        self._sources = sources
        self._parked = parked
        self._can_rewind = can_rewind
        self._grid_tokens = grid_tokens

    def can_park(self, n_tokens: int) -> bool:
        """Tell whether a sequence so long could be parked at all."""
        return self._parked.fits(n_tokens)

    def cut_tokens(self, request: Request) -> int:
        """Return where a prompt is cut so that a snapshot of its system prompt can be taken; 0 for nowhere.

        A static rule, whether or not the snapshot is there: an answer never depends on what others left behind.
        """
        shared = request.public or not self._can_rewind
        return request.prefix_tokens if shared and request.prefix_tokens >= self._grid_tokens else 0

    def evict(self, draft: Draft, slot: Slot, request: Request) -> None:
        """Park an idle session's KV before another's turn gets its slot.

        Not if it is parked already, too long, or too short to be worth it.
        """
        if slot.session_id not in (None, request.session_id) and self._worth_parking(slot):
            self._park(draft, slot)

    def suspension(self, *, park_all: bool) -> tuple[Park, ...]:
        """Return how to park what the slots hold, or of that what a disk may hold; what was used last at the end."""
        slots = sorted(self._slots, key=lambda slot: slot.used_s)
        return tuple(
            _park(slot, slot.session_id, slot.client_id, slot.durable)
            for slot in slots
            if slot.session_id is not None and (park_all or slot.durable) and self._worth_parking(slot)
        )

    def vacate(self, draft: Draft, slot: Slot, request: Request, *, now: float) -> None:
        """Park the KV of a turn that is preempted and free its slot."""
        if slot.tokens:
            self._park(draft, slot, turn_id=request.turn_id)
        self._slots.free(slot, now=now)

    def put(self, draft: Draft, request: Request, slot: Slot, source: Source) -> None:
        """Let a turn run in an idle slot, on top of its source; what else the slot holds is lost."""
        held = len(slot.tokens)
        in_place = source.slot is slot
        self._slots.assign(slot, request, keep_tokens=source.n_tokens if in_place else 0)
        if source.n_tokens and not in_place:
            draft.moves.extend(_moves(request, slot, source))
            slot.tokens += request.tokens[: source.n_tokens]
        elif source.n_tokens < held:
            draft.moves.append(Truncation(slot.index, source.n_tokens, request.turn_id))
        draft.unsettled.add(slot)
        self._begin(draft, request, slot)

    def snapshot(self, draft: Draft, request: Request) -> None:
        """Park what a turn's slot holds when that is just the system prompt, unless the store has it by now."""
        if not request.snapshot or request.kv_tokens < request.cut_tokens:
            return
        request.snapshot = False
        if request.kv_tokens == request.cut_tokens and self._lacks_snapshot(request):
            assert request.slot is not None
            slot, scope = self._slots[request.slot], _prefix_scope(request)
            draft.moves.append(_park(slot, prefix_key(scope, slot.tokens), scope, slot.durable))
            draft.reasons.append(f"the system prompt of turn {request.turn_id} parked: {len(slot.tokens)} tokens")

    def _worth_parking(self, slot: Slot) -> bool:
        n_tokens = len(slot.tokens)
        if n_tokens < self._grid_tokens or not self._parked.fits(n_tokens):
            return False
        return not self._sources.is_parked(slot.client_id, slot.tokens)

    def _park(self, draft: Draft, slot: Slot, *, turn_id: str | None = None) -> None:
        assert slot.session_id is not None
        draft.moves.append(_park(slot, slot.session_id, slot.client_id, slot.durable, turn_id=turn_id))
        draft.replaced.add(slot.session_id)

    def _begin(self, draft: Draft, request: Request, slot: Slot) -> None:
        n_tokens = len(slot.tokens)
        generates = request.generated_tokens > 0 and n_tokens == len(request.tokens) - 1
        request.change(RequestChange.RESUME if generates else RequestChange.ADMIT)
        request.slot = slot.index
        request.kv_tokens = n_tokens
        request.used = 0
        request.due = draft.read_tokens + request.pending_tokens
        request.read_tokens = max(request.read_tokens, min(n_tokens, request.prompt_tokens))
        request.cut_tokens = self.cut_tokens(request)
        request.snapshot = n_tokens < request.cut_tokens and self._lacks_snapshot(request)
        if not request.started:
            request.started = True
            request.cached_tokens = n_tokens
            draft.admissions.append(Admission(request.turn_id, tuple(request.tokens), n_tokens))

    def _lacks_snapshot(self, request: Request) -> bool:
        prefix = request.tokens[: request.cut_tokens]
        return self._parked.fits(len(prefix)) and not self._sources.is_parked(_prefix_scope(request), prefix)


def compact(draft: Draft, slots: SlotTable, running: Mapping[str, Request]) -> None:
    """Exchange slots so that what runs together lies together."""
    for a, b in compaction([_use(slot, running) for slot in slots]):
        draft.moves.append(Swap(a, b, slots[a].turn_id, slots[b].turn_id))
        draft.reasons.append(f"slots {a} and {b} exchanged: what runs together stays together")
        slots.swap(a, b)
        for slot in (slots[a], slots[b]):
            if slot.turn_id is not None:
                running[slot.turn_id].slot = slot.index


def _use(slot: Slot, running: Mapping[str, Request]) -> Use:
    if slot.turn_id is None:
        return Use.IDLE
    return Use.READING if running[slot.turn_id].state is RequestState.PREFILL else Use.GENERATING


def _moves(request: Request, slot: Slot, source: Source) -> list[Move]:
    if source.match is None:
        assert source.slot is not None
        return [Copy(source.slot.index, slot.index, source.n_tokens, request.turn_id)]
    match = source.match
    moves: list[Move] = [Restore(slot.index, match.key, match.n_tokens, match.tokens, request.turn_id)]
    if source.n_tokens < match.n_tokens:
        moves.append(Truncation(slot.index, source.n_tokens, request.turn_id))
    return moves


def _park(slot: Slot, key: str, scope: str, durable: bool, *, turn_id: str | None = None) -> Park:
    return Park(slot.index, key, scope, len(slot.tokens), tuple(slot.tokens), durable, turn_id)


def _prefix_scope(request: Request) -> str:
    return "" if request.public else request.client_id
