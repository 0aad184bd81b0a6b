"""Giving slots to waiting turns: idle ones, and those of turns that used up their quantum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.policy import choose_slot
from inferencecenter.engine.scheduler.request import RequestChange

if TYPE_CHECKING:
    from inferencecenter.engine.scheduler.fairness import Exchanges
    from inferencecenter.engine.scheduler.parking import Match
    from inferencecenter.engine.scheduler.placement import Draft, Placement
    from inferencecenter.engine.scheduler.request import Request
    from inferencecenter.engine.scheduler.slots import Slot, SlotTable
    from inferencecenter.engine.scheduler.sources import Source, Sources
    from inferencecenter.engine.scheduler.turn_queue import TurnQueue

# Turns looked at in a step beside as many as there are slots: those that come first may have to wait for something.
_LOOKAHEAD_TURNS: Final = 16


class Dispatcher:
    """Finds the waiting turns that get a slot, the strongest claims first, and drafts their way into it.

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
        self._slots = slots
        self._running = running
        self._queue = queue
        self._sources = sources
        self._placement = placement

    def run(self, draft: Draft, exchanges: Exchanges, *, now: float) -> None:
        """Give away the slots that can be had; who loses one waits again."""
        line = self._queue.line
        for _ in range(len(self._slots) + _LOOKAHEAD_TURNS):
            request = line.first()
            if request is None or not self._has_slot(exchanges):
                break
            if not self._dispatch(draft, exchanges, request, now=now):
                line.skip_first()
        line.unskip()
        for request in draft.preempted:
            self._queue.wait_again(request, now=now)

    def _has_slot(self, exchanges: Exchanges) -> bool:
        return len(self._running) < len(self._slots) or any(map(exchanges.possible, self._running.values()))

    def _dispatch(self, draft: Draft, exchanges: Exchanges, request: Request, *, now: float) -> bool:
        """Take a turn out of the line, into a slot or to wait for something else; ``False`` when it stays."""
        choice = choose_slot(self._slots, request.session_id, waiting=self._queue.sessions)
        victims = [] if choice is not None else self._victims(exchanges, request)
        if choice is None and not victims:
            return False
        source = self._sources.best(request, unsettled=draft.unsettled, fetch=self._queue.fetches.worthwhile(request))
        if source.match is not None and not source.match.ready:
            return self._fetch(draft, request, source.match, now=now)
        if self._follow(draft, request, source):
            return True
        if choice is None:
            victims = [
                victim for victim in victims if exchanges.overtakes(request, victim, cached_tokens=source.n_tokens)
            ]
            if not victims:
                return False
            choice = self._preempt(draft, max(victims, key=exchanges.weakness), now=now)
        else:
            self._placement.evict(draft, choice[0], request)
        self._start(draft, request, *choice, source)
        return True

    def _victims(self, exchanges: Exchanges, request: Request) -> list[Request]:
        return [
            victim
            for victim in self._running.values()
            if exchanges.allowed(request, victim) and self._placement.can_park(victim.kv_tokens)
        ]

    def _fetch(self, draft: Draft, request: Request, match: Match, *, now: float) -> bool:
        fetches = self._queue.fetches
        if fetches.full:
            return False
        self._queue.line.discard(request)
        if fetches.hold(request, match, now=now):
            draft.fetches.append(match.key)
        draft.reasons.append(f"turn {request.turn_id} waits for {match.n_tokens} parked tokens from disk")
        return True

    def _follow(self, draft: Draft, request: Request, source: Source) -> bool:
        reader = self._queue.followers.follow(request, self._running.values(), cached_tokens=source.n_tokens)
        if reader is None:
            return False
        self._queue.line.discard(request)
        draft.reasons.append(f"turn {request.turn_id} waits for turn {reader}, which reads the same")
        return True

    def _preempt(self, draft: Draft, victim: Request, *, now: float) -> tuple[Slot, str]:
        assert victim.slot is not None
        slot = self._slots[victim.slot]
        self._placement.vacate(draft, slot, now=now)
        victim.change(RequestChange.PREEMPT)
        victim.slot = None
        victim.kv_tokens = 0
        victim.snapshot = False
        victim.preempted += 1
        victim.fetches = victim.follows = 0
        victim.waits_since_s = now
        del self._running[victim.turn_id]
        draft.preempted.append(victim)
        return slot, f"in the place of turn {victim.turn_id}"

    def _start(self, draft: Draft, request: Request, slot: Slot, why: str, source: Source) -> None:
        self._queue.start(request)
        self._running[request.turn_id] = request
        self._placement.put(draft, request, slot, source)
        draft.reasons.append(
            f"turn {request.turn_id} to slot {slot.index}: {why}, "
            f"{request.kv_tokens} of {len(request.tokens)} tokens in KV"
        )
