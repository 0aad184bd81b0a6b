"""Finds existing KV for a turn's prefix, assigns slots, preempts running turns, and plans the KV moves for it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.engine.scheduler.plan import (
    Admission,
    CopySlot,
    ParkSlot,
    RestoreSlot,
    SwapSlots,
    TruncateSlot,
)
from inferencecenter.engine.scheduler.state import RequestChange, RequestState, SlotUse, choose_slot, compaction
from inferencecenter.ipc.messages import LOWEST_CLASS, EngineLimits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from inferencecenter.engine.scheduler.plan import KvMove, PlanBuilder
    from inferencecenter.engine.scheduler.queue import TurnQueue
    from inferencecenter.engine.scheduler.state import EngineRequest, ServiceCounters, Slot, SlotTable

# Turns examined per step that get no slot: the first ones may have to wait for KV.
_LOOKAHEAD_TURNS: Final = 16


_FIRST_COMPARED_TOKENS: Final = 64
_PREFIX_KEY: Final = "prefix-"


def common_prefix_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix.

    Compares slices, in C, each twice as long as the one before, and bisects the first that differs: the cost is
    proportional to the common part, about a millisecond for 100k tokens and almost nothing where the first tokens
    differ.
    """
    equal, size, limit = 0, _FIRST_COMPARED_TOKENS, min(len(a), len(b))
    while equal < limit:
        end = min(equal + size, limit)
        if a[equal:end] != b[equal:end]:
            break
        equal, size = end, 2 * size
    limit = min(equal + size, limit)
    while equal < limit:
        middle = (equal + limit + 1) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            limit = middle - 1
    return equal


@dataclass(frozen=True, slots=True)
class Match:
    """A parked sequence of ``n_tokens`` (``tokens``, packed) that shares ``common_tokens`` with the wanted ones.

    ``ready``: in RAM, usable now; otherwise on disk, to be loaded first. ``load_failed``: loading was tried while RAM
    had no room. ``redundant``: a copy of a slot's content, evicted first.
    """

    key: str
    common_tokens: int
    n_tokens: int
    ready: bool
    tokens: bytes
    redundant: bool = False
    load_failed: bool = False


class ParkedKv(Protocol):
    """Lookup of parked sequences, as the scheduler needs it."""

    def find(self, scope: str, tokens: Sequence[int]) -> Match | None:
        """Return the best match among the entries of ``scope`` and of the public scope ``""``, or ``None``.

        The best has the longest common prefix; among equal ones the shortest entry, which need not be cut.
        """

    def fits(self, n_tokens: int) -> bool:
        """Return whether a sequence of ``n_tokens`` could be parked at all."""

    def has_room(self, key: str, scope: str, n_tokens: int) -> bool:
        """Return whether a redundant copy of ``n_tokens`` fits now in place of ``key``, evicting no other entry."""


def prefix_key(scope: str, tokens: Sequence[int]) -> str:
    """Return the key of a shared prefix's KV; equal for equal ``scope`` and ``tokens``."""
    digest = sha256(scope.encode() + b"\0" + array("i", tokens).tobytes())
    return _PREFIX_KEY + digest.hexdigest()


def is_prefix_key(key: str) -> bool:
    """Return whether a key is that of a shared prefix, not of a session."""
    return key.startswith(_PREFIX_KEY)


@dataclass(frozen=True, slots=True)
class KvSource:
    """The first ``n_tokens`` of a turn are in ``slot`` or parked as ``match``; with neither, there is no KV."""

    n_tokens: int = 0
    slot: Slot | None = None
    match: Match | None = None


class KvSourceFinder:
    """Finds the longest prefix of a turn's tokens that need not be prefilled.

    Considers only KV of the turn's client, and public prefixes, which the store finds in their own scope.

    Args:
        slots: Content of the slots.
        parked: The store of parked KV.
        can_truncate: Whether a sequence can be cut at any position. Otherwise one that must be cut is unusable.
        grid_tokens: A source must save this many tokens more than another to be worth a move.
    """

    def __init__(self, slots: SlotTable, parked: ParkedKv, *, can_truncate: bool, grid_tokens: int) -> None:
        self._slots = slots
        self._parked = parked
        self._can_truncate = can_truncate
        self._grid_tokens = grid_tokens

    def best(
        self, request: EngineRequest, *, unsettled: Collection[Slot], replaced: Collection[str], fetch: bool
    ) -> KvSource:
        """Return the source of a turn's KV.

        A gain of less than a grid cell is not worth a move, except for a preempted turn, which resumes at its exact
        position. The last token is always decoded: its logits are what sampling starts from.

        Args:
            request: The turn.
            unsettled: Slots whose content is uncertain until the plan has run.
            replaced: Keys whose entries the plan overwrites.
            fetch: Whether a sequence may come from disk.
        """
        limit = request.reusable_tokens
        best, gain = self._own(request, limit)
        parked = self._find(request, limit, replaced)
        needed = 1 if request.started and best.n_tokens == 0 else self._grid_tokens
        ready = parked.match is None or parked.match.ready
        if ready and parked.n_tokens >= gain + needed:
            best, gain, needed = parked, parked.n_tokens, self._grid_tokens
        for slot in self._slots:
            if slot.client_id == request.client_id and slot.session_id != request.session_id and slot not in unsettled:
                n_tokens = self._shared(slot, request, limit, least=gain + needed)
                if n_tokens:
                    best, gain, needed = KvSource(n_tokens, slot=slot), n_tokens, self._grid_tokens
        if not ready and fetch and parked.n_tokens >= gain + needed:
            best = parked
        return best

    def is_parked(self, scope: str, tokens: Sequence[int], *, redundant: bool = False) -> bool:
        """Return whether exactly these tokens are parked; a redundant copy counts if ``redundant``."""
        match = self._parked.find(scope, tokens)
        if match is None or (match.redundant and not redundant):
            return False
        return match.common_tokens == match.n_tokens == len(tokens)

    def _own(self, request: EngineRequest, limit: int) -> tuple[KvSource, int]:
        """Return the session's slot as a source, and the tokens it counts for."""
        slot = self._slots.of_session(request.session_id)
        if slot is None or slot.client_id != request.client_id:
            return KvSource(), 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        # A cut that the backend may refuse counts half, so that a certain source is preferred to it.
        certain = self._can_truncate or n_tokens == len(slot.tokens)
        return KvSource(n_tokens, slot=slot), n_tokens if certain else n_tokens // 2

    def _find(self, request: EngineRequest, limit: int, replaced: Collection[str]) -> KvSource:
        match = self._parked.find(request.client_id, request.tokens)
        if match is not None and match.key in replaced:
            return KvSource()
        source = self._usable(match, limit)
        if source.match is None and not self._can_truncate and request.prefix_tokens:
            # The longest match would have to be cut; the snapshot of the system prompt would not.
            prefix = request.tokens[: request.prefix_tokens]
            source = self._usable(self._parked.find(request.client_id, prefix), limit)
        return source

    def _usable(self, match: Match | None, limit: int) -> KvSource:
        if match is None:
            return KvSource()
        n_tokens = min(match.common_tokens, limit)
        return KvSource(n_tokens, match=match) if self._can_truncate or n_tokens == match.n_tokens else KvSource()

    def _shared(self, slot: Slot, request: EngineRequest, limit: int, *, least: int) -> int:
        """Return the tokens another session's slot saves, 0 if fewer than ``least``."""
        if least > limit or slot.tokens[least - 1 : least] != request.tokens[least - 1 : least]:
            return 0
        n_tokens = min(common_prefix_tokens(slot.tokens, request.tokens), limit)
        return n_tokens if n_tokens >= least and (self._can_truncate or n_tokens == len(slot.tokens)) else 0


class SlotPlacement:
    """Applies the assignment of a slot to the slot table and plans the moves for it.

    Args:
        slots: Content of the slots.
        sources: Finds reusable KV.
        parked: The store of parked KV.
        can_truncate: Whether a sequence can be cut at any position.
        grid_tokens: Prompts are cut at multiples of this position; shorter sequences are not parked.
    """

    def __init__(
        self, slots: SlotTable, sources: KvSourceFinder, parked: ParkedKv, *, can_truncate: bool, grid_tokens: int
    ) -> None:
        self._slots = slots
        self._sources = sources
        self._parked = parked
        self._can_truncate = can_truncate
        self._grid_tokens = grid_tokens

    def can_park(self, n_tokens: int) -> bool:
        """Return whether a sequence of this length could be parked at all."""
        return self._parked.fits(n_tokens)

    def cut_tokens(self, request: EngineRequest) -> int:
        """Return where a prompt is cut so that its system prompt can be snapshotted; 0 for nowhere.

        The rule is static and does not depend on whether the snapshot exists, so an answer never depends on what other
        turns left in the cache.
        """
        shared = request.public or not self._can_truncate
        return request.prefix_tokens if shared and request.prefix_tokens >= self._grid_tokens else 0

    def evict(self, builder: PlanBuilder, slot: Slot, request: EngineRequest) -> None:
        """Park an idle session's KV before another session gets its slot.

        KV that is parked already, too long, or too short to be worth it is dropped.
        """
        if slot.session_id not in (None, request.session_id) and self._worth_parking(slot):
            self._park(builder, slot)

    def suspension(self, *, park_all: bool) -> tuple[ParkSlot, ...]:
        """Return the moves that park all slots, or only durable ones; the most recently used slot comes last."""
        slots = sorted(self._slots, key=lambda slot: slot.used_s)
        return tuple(
            _park(slot, slot.session_id, slot.client_id, slot.durable)
            for slot in slots
            if slot.session_id is not None and (park_all or slot.durable) and self._worth_parking(slot)
        )

    def vacate(self, builder: PlanBuilder, slot: Slot, request: EngineRequest, *, now: float) -> None:
        """Park the KV of a preempted turn and free its slot."""
        if slot.tokens:
            self._park(builder, slot, turn_id=request.turn_id)
        self._slots.free(slot, now=now)

    def put(self, builder: PlanBuilder, request: EngineRequest, slot: Slot, source: KvSource) -> None:
        """Assign an idle slot to a turn and plan the moves that load its source; the slot's other content is lost."""
        held = len(slot.tokens)
        in_place = source.slot is slot
        self._slots.assign(slot, request, keep_tokens=source.n_tokens if in_place else 0)
        if source.n_tokens and not in_place:
            builder.moves.extend(_moves(request, slot, source))
            slot.tokens += request.tokens[: source.n_tokens]
        elif source.n_tokens < held:
            builder.moves.append(TruncateSlot(slot.index, source.n_tokens, request.turn_id))
        builder.unsettled.add(slot)
        self._begin(builder, request, slot)

    def snapshot(self, builder: PlanBuilder, request: EngineRequest) -> None:
        """Park the system prompt once the turn's slot holds exactly that, unless the store has it by now."""
        if not request.snapshot or request.kv_tokens < request.cut_tokens:
            return
        request.snapshot = False
        if request.kv_tokens == request.cut_tokens and self._lacks_snapshot(request):
            assert request.slot is not None
            slot, scope = self._slots[request.slot], _prefix_scope(request)
            builder.moves.append(_park(slot, prefix_key(scope, slot.tokens), scope, slot.durable))
            builder.reasons.append(f"the system prompt of turn {request.turn_id} parked: {len(slot.tokens)} tokens")

    def _worth_parking(self, slot: Slot) -> bool:
        n_tokens = len(slot.tokens)
        if n_tokens < self._grid_tokens or not self._parked.fits(n_tokens):
            return False
        return not self._sources.is_parked(slot.client_id, slot.tokens)

    def _park(self, builder: PlanBuilder, slot: Slot, *, turn_id: str | None = None) -> None:
        assert slot.session_id is not None
        builder.moves.append(_park(slot, slot.session_id, slot.client_id, slot.durable, turn_id=turn_id))
        builder.replaced.add(slot.session_id)

    def _begin(self, builder: PlanBuilder, request: EngineRequest, slot: Slot) -> None:
        n_tokens = len(slot.tokens)
        generates = request.generated_tokens > 0 and n_tokens == len(request.tokens) - 1
        request.change(RequestChange.RESUME if generates else RequestChange.ADMIT)
        request.slot = slot.index
        request.kv_tokens = n_tokens
        request.used = 0
        request.due = builder.read_tokens + request.pending_tokens
        request.read_tokens = max(request.read_tokens, min(n_tokens, request.prompt_tokens))
        request.cut_tokens = self.cut_tokens(request)
        request.snapshot = n_tokens < request.cut_tokens and self._lacks_snapshot(request)
        if not request.started:
            request.started = True
            request.cached_tokens = n_tokens
            builder.admissions.append(Admission(request.turn_id, tuple(request.tokens), n_tokens))

    def _lacks_snapshot(self, request: EngineRequest) -> bool:
        prefix = request.tokens[: request.cut_tokens]
        return self._parked.fits(len(prefix)) and not self._sources.is_parked(_prefix_scope(request), prefix)


def compact(builder: PlanBuilder, slots: SlotTable, running: Mapping[str, EngineRequest]) -> None:
    """Swap slots so that busy slots are consecutive."""
    for a, b in compaction(tuple(_use(slot, running) for slot in slots)):
        builder.moves.append(SwapSlots(a, b, slots[a].turn_id, slots[b].turn_id))
        builder.reasons.append(f"slots {a} and {b} swapped: busy slots stay consecutive")
        slots.swap(a, b)
        for slot in (slots[a], slots[b]):
            if slot.turn_id is not None:
                running[slot.turn_id].slot = slot.index


def _use(slot: Slot, running: Mapping[str, EngineRequest]) -> SlotUse:
    if slot.turn_id is None:
        return SlotUse.IDLE
    return SlotUse.PREFILL if running[slot.turn_id].state is RequestState.PREFILL else SlotUse.DECODE


def _moves(request: EngineRequest, slot: Slot, source: KvSource) -> list[KvMove]:
    if source.match is None:
        assert source.slot is not None
        return [CopySlot(source.slot.index, slot.index, source.n_tokens, request.turn_id)]
    match = source.match
    moves: list[KvMove] = [RestoreSlot(slot.index, match.key, match.n_tokens, match.tokens, request.turn_id)]
    if source.n_tokens < match.n_tokens:
        moves.append(TruncateSlot(slot.index, source.n_tokens, request.turn_id))
    return moves


def _park(slot: Slot, key: str, scope: str, durable: bool, *, turn_id: str | None = None) -> ParkSlot:
    return ParkSlot(slot.index, key, scope, len(slot.tokens), tuple(slot.tokens), durable, turn_id)


def _prefix_scope(request: EngineRequest) -> str:
    return "" if request.public else request.client_id


class CheckpointPlanner:
    """Finds slots whose content exists nowhere else and plans checkpoints of them.

    Each state of a slot is saved at most once, also when the save fails or the copy is dropped later.

    Args:
        slots: Content of the slots.
        sources: Finds reusable KV.
        parked: The store of parked KV.
        grid_tokens: Shorter sequences are not saved: prefilling them again is as fast.
    """

    def __init__(self, slots: SlotTable, sources: KvSourceFinder, parked: ParkedKv, *, grid_tokens: int) -> None:
        self._slots = slots
        self._sources = sources
        self._parked = parked
        self._grid_tokens = grid_tokens

    @property
    def pending(self) -> bool:
        """Whether a slot may hold something to save for which there is room now."""
        return any(self._candidates())

    def next(self) -> ParkSlot | None:
        """Return the move that saves the most recently used unsaved slot; ``None`` when all are saved."""
        for slot in sorted(self._candidates(), key=lambda slot: slot.used_s, reverse=True):
            slot.saved = True
            if not self._sources.is_parked(slot.client_id, slot.tokens, redundant=True):
                assert slot.session_id is not None
                tokens = tuple(slot.tokens)
                return ParkSlot(
                    slot.index, slot.session_id, slot.client_id, len(tokens), tokens, durable=True, redundant=True
                )
        return None

    def rescan(self) -> None:
        """Examine all slots again, because copies may have been dropped."""
        for slot in self._slots:
            slot.saved = False

    def _candidates(self) -> Iterable[Slot]:
        return (slot for slot in self._slots if not (slot.busy or slot.saved) and self._is_worth_it(slot))

    def _is_worth_it(self, slot: Slot) -> bool:
        if slot.session_id is None or not slot.durable or len(slot.tokens) < self._grid_tokens:
            return False
        return self._parked.has_room(slot.session_id, slot.client_id, len(slot.tokens))


class PreemptionPolicy:
    """Decides which running turn loses its slot to a waiting one.

    A turn that has used its quantum yields to any claim that is at least equal: class, then its client's service, then
    its own. After a quarter of the quantum a decoding turn yields to an equal claim of a turn that counts as never
    served, which shortens the time to first token, and to a turn whose client is more than a quantum behind, so that
    new turns do not starve it. Every turn yields to a higher class. A turn that rose a class by waiting keeps that
    class for one quantum.

    A turn in prefill yields only to a turn with less to prefill: prompts that take turns would all be late.

    Args:
        counters: Service per client.
        quantum_units: The quantum of this step in service units.
    """

    def __init__(self, counters: ServiceCounters, quantum_units: int) -> None:
        self._counters = counters
        self._quantum_units = quantum_units

    def possible(self, running: EngineRequest) -> bool:
        """Return whether a turn can lose its slot to any other turn."""
        return 4 * running.used >= self._quantum_units

    def spent(self, running: EngineRequest) -> bool:
        """Return whether a turn has used its quantum."""
        return running.used >= self._quantum_units

    def allowed(self, waiting: EngineRequest, running: EngineRequest) -> bool:
        """Return whether the claims allow a waiting turn to preempt a running one."""
        if not self.possible(running):
            return False
        priority = self._effective_priority(running)
        if waiting.effective_priority != priority:
            return waiting.effective_priority < priority
        claim, other = (self._counters.served(waiting.client_id), waiting.effective_service), self._claim(running)
        if claim > other:
            return False
        if self.spent(running):
            return True
        soon = waiting.effective_service == 0 or claim[0] + self._quantum_units < other[0]
        return soon and running.state is RequestState.DECODE

    def overtakes(self, waiting: EngineRequest, running: EngineRequest, *, cached_tokens: int) -> bool:
        """Return whether a waiting turn with ``cached_tokens`` in KV may interrupt a prefill, given ``allowed``."""
        if running.state is not RequestState.PREFILL or waiting.effective_priority < self._effective_priority(running):
            return True
        return len(waiting.tokens) - cached_tokens < running.pending_tokens

    def weakness(self, running: EngineRequest) -> tuple[int, int, int, int]:
        """Return a sort key; the weakest claim among running turns has the largest key."""
        return (self._effective_priority(running), *self._claim(running), running.arrival)

    def _effective_priority(self, running: EngineRequest) -> int:
        return running.base_class if self.spent(running) else running.effective_priority

    def _claim(self, running: EngineRequest) -> tuple[int, int]:
        return (self._counters.served(running.client_id), running.served)


class _Verdict(Enum):
    """Result of examining one waiting turn; ``EXHAUSTED``: no turn behind it can be placed either."""

    PLACED = auto()
    HELD = auto()
    STAYS = auto()
    EXHAUSTED = auto()


class Dispatcher:
    """Assigns slots to waiting turns, strongest claim first.

    No turn starves. A turn of class ``c`` that has waited ``(c + 1) * ageing_s`` is in the highest class and counts as
    never served. From then on only older turns of its client precede it, each for one quantum, and turns of clients
    with less service until these have caught up. A slot becomes available when its turn has used its quantum and is not
    prefilling a prompt with less left to read; or, where it cannot be parked, when it ends.

    Where ``limits`` leave slots idle, a turn that must make room is rested: it waits, and its KV stays in its slot.

    Args:
        slots: Content of the slots.
        running: Turns that hold a slot, by id.
        queue: Waiting turns.
        sources: Finds reusable KV.
        placement: Applies the assignments.
    """

    def __init__(
        self,
        slots: SlotTable,
        running: dict[str, EngineRequest],
        queue: TurnQueue,
        *,
        sources: KvSourceFinder,
        placement: SlotPlacement,
    ) -> None:
        self.limits = EngineLimits(active_slots=len(slots))
        self._slots = slots
        self._running = running
        self._queue = queue
        self._sources = sources
        self._placement = placement

    def run(self, builder: PlanBuilder, preemption: PreemptionPolicy, *, now: float) -> None:
        """Assign the available slots and requeue the turns that were preempted."""
        self._rest_excess(builder, preemption, now=now)
        wait_queue = self._queue.wait_queue
        exhausted = [request for request in self._running.values() if preemption.possible(request)]
        looked_at = 0
        while looked_at < _LOOKAHEAD_TURNS and (request := wait_queue.first()) is not None:
            verdict = self._dispatch(builder, preemption, request, exhausted, now=now)
            if verdict is _Verdict.EXHAUSTED:
                break
            looked_at += verdict is not _Verdict.PLACED
            if verdict is _Verdict.STAYS:
                wait_queue.skip_first()
        wait_queue.unskip()
        for request in builder.preempted:
            self._queue.requeue(request, now=now)

    def _dispatch(
        self,
        builder: PlanBuilder,
        preemption: PreemptionPolicy,
        request: EngineRequest,
        exhausted: list[EngineRequest],
        *,
        now: float,
    ) -> _Verdict:
        """Take a turn from the wait queue into a slot, or let it wait for KV, if possible.

        ``exhausted`` are the turns that may be preempted.
        """
        choice = choose_slot(self._slots, request.session_id, waiting=self._queue.sessions)
        room = choice is not None and len(self._running) < self.limits.active_slots
        victims = [] if room else self._victims(preemption, request, exhausted)
        if not (room or victims):
            # Claims behind it are weaker, and none of them can be newer than one that was never served.
            return _Verdict.STAYS if request.effective_service else _Verdict.EXHAUSTED
        source = self._source(builder, request)
        if source.match is not None and not source.match.ready:
            return self._fetch(builder, request, source.match, now=now)
        if self._follow(builder, request, source):
            return _Verdict.HELD
        if not room:
            cached_tokens = source.n_tokens
            victims = [
                victim for victim in victims if preemption.overtakes(request, victim, cached_tokens=cached_tokens)
            ]
            if not victims:
                return _Verdict.STAYS
            victim = max(victims, key=preemption.weakness)
            exhausted.remove(victim)
            if choice is None:
                self._replace(builder, victim, request, source, now=now)
                return _Verdict.PLACED
            self._rest(builder, victim, now=now)
        assert choice is not None, "there is room in no slot"
        source = self._kept(builder, request, choice[0], source)
        self._placement.evict(builder, choice[0], request)
        self._start(builder, request, *choice, source)
        return _Verdict.PLACED

    def _source(self, builder: PlanBuilder, request: EngineRequest, *, replaced: Collection[str] = ()) -> KvSource:
        return self._sources.best(
            request,
            unsettled=builder.unsettled,
            replaced={*builder.replaced, *replaced},
            fetch=self._queue.kv_loads.worthwhile(request),
        )

    def _kept(self, builder: PlanBuilder, request: EngineRequest, slot: Slot, source: KvSource) -> KvSource:
        """Return another source if this one is an older state of the session that will be parked from this slot."""
        match = source.match
        if match is None or match.key != slot.session_id or match.key == request.session_id:
            return source
        return self._source(builder, request, replaced=(match.key,))

    def _victims(
        self, preemption: PreemptionPolicy, request: EngineRequest, exhausted: Iterable[EngineRequest]
    ) -> list[EngineRequest]:
        return [
            victim
            for victim in exhausted
            if preemption.allowed(request, victim) and self._placement.can_park(victim.kv_tokens)
        ]

    def _fetch(self, builder: PlanBuilder, request: EngineRequest, match: Match, *, now: float) -> _Verdict:
        fetches = self._queue.kv_loads
        if fetches.full:
            return _Verdict.STAYS
        self._queue.wait_queue.discard(request)
        if fetches.wait_for(request, match, now=now):
            builder.fetches.append(match.key)
        builder.reasons.append(f"turn {request.turn_id} waits for {match.n_tokens} parked tokens from disk")
        return _Verdict.HELD

    def _follow(self, builder: PlanBuilder, request: EngineRequest, source: KvSource) -> bool:
        reader = self._queue.prefix_waiters.follow(request, self._running.values(), cached_tokens=source.n_tokens)
        if reader is None:
            return False
        self._queue.wait_queue.discard(request)
        builder.reasons.append(f"turn {request.turn_id} waits for turn {reader}, which prefills the same prefix")
        return True

    def _replace(
        self, builder: PlanBuilder, victim: EngineRequest, request: EngineRequest, source: KvSource, *, now: float
    ) -> None:
        assert victim.slot is not None
        slot = self._slots[victim.slot]
        source = self._kept(builder, request, slot, source)
        self._placement.vacate(builder, slot, victim, now=now)
        self._preempt(builder, victim, now=now)
        self._start(builder, request, slot, f"preempts turn {victim.turn_id}", source)

    def _rest_excess(self, builder: PlanBuilder, preemption: PreemptionPolicy, *, now: float) -> None:
        """Rest turns that have used their quantum and are excluded by the limits or exceed the active slots."""
        limits = self.limits
        if len(self._running) <= limits.active_slots and limits.lowest_class >= LOWEST_CLASS:
            return
        spent = sorted(filter(preemption.spent, self._running.values()), key=preemption.weakness, reverse=True)
        for victim in spent:
            if victim.base_class > limits.lowest_class or len(self._running) > limits.active_slots:
                self._rest(builder, victim, now=now)

    def _rest(self, builder: PlanBuilder, victim: EngineRequest, *, now: float) -> None:
        assert victim.slot is not None
        self._slots.free(self._slots[victim.slot], now=now)
        self._preempt(builder, victim, now=now)
        builder.reasons.append(f"turn {victim.turn_id} rests: the limit is {self.limits.active_slots} active slots")

    def _preempt(self, builder: PlanBuilder, victim: EngineRequest, *, now: float) -> None:
        victim.change(RequestChange.PREEMPT)
        victim.slot = None
        victim.kv_tokens = 0
        victim.snapshot = False
        victim.preempted += 1
        victim.fetches = victim.follows = 0
        victim.waits_since_s = now
        del self._running[victim.turn_id]
        builder.preempted.append(victim)

    def _start(self, builder: PlanBuilder, request: EngineRequest, slot: Slot, why: str, source: KvSource) -> None:
        self._queue.start(request)
        self._running[request.turn_id] = request
        self._placement.put(builder, request, slot, source)
        builder.reasons.append(
            f"turn {request.turn_id} to slot {slot.index}: {why}, "
            f"{request.kv_tokens} of {len(request.tokens)} tokens in KV"
        )
