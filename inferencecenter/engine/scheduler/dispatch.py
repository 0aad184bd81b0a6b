"""Giving slots to waiting turns: idle ones, and those of turns that used up their quantum."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.limits import Limits
from inferencecenter.engine.scheduler.policy import choose_slot
from inferencecenter.engine.scheduler.request import LOWEST_CLASS, RequestChange

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from inferencecenter.engine.scheduler.fairness import Exchanges
    from inferencecenter.engine.scheduler.parking import Match
    from inferencecenter.engine.scheduler.placement import Draft, Placement
    from inferencecenter.engine.scheduler.request import Request
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable
    from inferencecenter.engine.scheduler.sources import Source, Sources
    from inferencecenter.engine.scheduler.turn_queue import TurnQueue

# Turns looked at in a step that do not get a slot: the first ones may have to wait for something.
_LOOKAHEAD_TURNS: Final = 16


class _Verdict(Enum):
    """What became of a turn that was looked at; ``HOPELESS``: of those behind it nothing else can."""

    PLACED = auto()
    HELD = auto()
    STAYS = auto()
    HOPELESS = auto()


class Dispatcher:
    """Finds the waiting turns that get a slot, the strongest claims first, and drafts their way into it.

    Nobody waits for ever. A turn of class ``c`` that has waited ``(c + 1) * ageing_s`` is of the highest class and
    counts as never served. From then on only older turns of its client come before it, each for one quantum, and of
    other clients those that were served less, until they have caught up. A slot can be had when its turn has used up
    its quantum and does not read a prompt of which less is left; or, where it cannot be parked, when it ends.

    Where ``limits`` leave slots idle, a turn that is to make room rests: it waits, and its KV stays in its slot.

    Args:
        slots: What the slots hold.
        running: The turns that hold a slot, by id.
        queue: Who waits.
        sources: Where KV is found.
        placement: Books the moves.
    """

    def __init__(
        self,
        slots: SlotTable,
        running: dict[str, Request],
        queue: TurnQueue,
        *,
        sources: Sources,
        placement: Placement,
    ) -> None:
        self.limits = Limits(active_slots=len(slots))
        self._slots = slots
        self._running = running
        self._queue = queue
        self._sources = sources
        self._placement = placement

    def run(self, draft: Draft, exchanges: Exchanges, *, now: float) -> None:
        """Give away the slots that can be had; who loses one waits again."""
        self._rest_excess(draft, exchanges, now=now)
        line = self._queue.line
        exhausted = [request for request in self._running.values() if exchanges.possible(request)]
        looked_at = 0
        while looked_at < _LOOKAHEAD_TURNS and (request := line.first()) is not None:
            verdict = self._dispatch(draft, exchanges, request, exhausted, now=now)
            if verdict is _Verdict.HOPELESS:
                break
            looked_at += verdict is not _Verdict.PLACED
            if verdict is _Verdict.STAYS:
                line.skip_first()
        line.unskip()
        for request in draft.preempted:
            self._queue.wait_again(request, now=now)

    def _dispatch(
        self, draft: Draft, exchanges: Exchanges, request: Request, exhausted: list[Request], *, now: float
    ) -> _Verdict:
        """Take a turn out of the line, into a slot or to wait for something else, if that is possible.

        ``exhausted`` are those who may lose their slots.
        """
        choice = choose_slot(self._slots, request.session_id, waiting=self._queue.sessions)
        room = choice is not None and len(self._running) < self.limits.active_slots
        victims = [] if room else self._victims(exchanges, request, exhausted)
        if not (room or victims):
            # The claims behind it are weaker, and none of them can be newer than one that was never served.
            return _Verdict.STAYS if request.claimed else _Verdict.HOPELESS
        source = self._source(draft, request)
        if source.match is not None and not source.match.ready:
            return self._fetch(draft, request, source.match, now=now)
        if self._follow(draft, request, source):
            return _Verdict.HELD
        if not room:
            cached_tokens = source.n_tokens
            victims = [
                victim for victim in victims if exchanges.overtakes(request, victim, cached_tokens=cached_tokens)
            ]
            if not victims:
                return _Verdict.STAYS
            victim = max(victims, key=exchanges.weakness)
            exhausted.remove(victim)
            if choice is None:
                self._replace(draft, victim, request, source, now=now)
                return _Verdict.PLACED
            self._rest(draft, victim, now=now)
        assert choice is not None, "there is room in no slot"
        source = self._kept(draft, request, choice[0], source)
        self._placement.evict(draft, choice[0], request)
        self._start(draft, request, *choice, source)
        return _Verdict.PLACED

    def _source(self, draft: Draft, request: Request, *, replaced: Collection[str] = ()) -> Source:
        return self._sources.best(
            request,
            unsettled=draft.unsettled,
            replaced={*draft.replaced, *replaced},
            fetch=self._queue.fetches.worthwhile(request),
        )

    def _kept(self, draft: Draft, request: Request, slot: Slot, source: Source) -> Source:
        """Return the source, or another if it is an older state of the session that is to be parked from this slot."""
        match = source.match
        if match is None or match.key != slot.session_id or match.key == request.session_id:
            return source
        return self._source(draft, request, replaced=(match.key,))

    def _victims(self, exchanges: Exchanges, request: Request, exhausted: Iterable[Request]) -> list[Request]:
        return [
            victim
            for victim in exhausted
            if exchanges.allowed(request, victim) and self._placement.can_park(victim.kv_tokens)
        ]

    def _fetch(self, draft: Draft, request: Request, match: Match, *, now: float) -> _Verdict:
        fetches = self._queue.fetches
        if fetches.full:
            return _Verdict.STAYS
        self._queue.line.discard(request)
        if fetches.hold(request, match, now=now):
            draft.fetches.append(match.key)
        draft.reasons.append(f"turn {request.turn_id} waits for {match.n_tokens} parked tokens from disk")
        return _Verdict.HELD

    def _follow(self, draft: Draft, request: Request, source: Source) -> bool:
        reader = self._queue.followers.follow(request, self._running.values(), cached_tokens=source.n_tokens)
        if reader is None:
            return False
        self._queue.line.discard(request)
        draft.reasons.append(f"turn {request.turn_id} waits for turn {reader}, which reads the same")
        return True

    def _replace(self, draft: Draft, victim: Request, request: Request, source: Source, *, now: float) -> None:
        assert victim.slot is not None
        slot = self._slots[victim.slot]
        source = self._kept(draft, request, slot, source)
        self._placement.vacate(draft, slot, victim, now=now)
        self._preempt(draft, victim, now=now)
        self._start(draft, request, slot, f"in the place of turn {victim.turn_id}", source)

    def _rest_excess(self, draft: Draft, exchanges: Exchanges, *, now: float) -> None:
        """Let those rest that have used up their quantum and are not to run, or are too many."""
        limits = self.limits
        if len(self._running) <= limits.active_slots and limits.lowest_class >= LOWEST_CLASS:
            return
        spent = sorted(filter(exchanges.spent, self._running.values()), key=exchanges.weakness, reverse=True)
        for victim in spent:
            if limits.bars(victim) or len(self._running) > limits.active_slots:
                self._rest(draft, victim, now=now)

    def _rest(self, draft: Draft, victim: Request, *, now: float) -> None:
        assert victim.slot is not None
        self._slots.free(self._slots[victim.slot], now=now)
        self._preempt(draft, victim, now=now)
        draft.reasons.append(f"turn {victim.turn_id} rests: {self.limits.active_slots} slots may be used")

    def _preempt(self, draft: Draft, victim: Request, *, now: float) -> None:
        victim.change(RequestChange.PREEMPT)
        victim.slot = None
        victim.kv_tokens = 0
        victim.snapshot = False
        victim.preempted += 1
        victim.fetches = victim.follows = 0
        victim.waits_since_s = now
        del self._running[victim.turn_id]
        draft.preempted.append(victim)

    def _start(self, draft: Draft, request: Request, slot: Slot, why: str, source: Source) -> None:
        self._queue.start(request)
        self._running[request.turn_id] = request
        self._placement.put(draft, request, slot, source)
        draft.reasons.append(
            f"turn {request.turn_id} to slot {slot.index}: {why}, "
            f"{request.kv_tokens} of {len(request.tokens)} tokens in KV"
        )
