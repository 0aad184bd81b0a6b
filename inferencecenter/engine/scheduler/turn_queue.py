"""Everybody who waits: for a slot, for the disk, for another's reading, or for their session's turn before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.engine.scheduler.places import HEAD_TURNS, Places
from inferencecenter.engine.scheduler.waiting import WaitingLine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferencecenter.engine.scheduler.fairness import Ledger
    from inferencecenter.engine.scheduler.fetching import Fetches
    from inferencecenter.engine.scheduler.following import Followers
    from inferencecenter.engine.scheduler.request import Request


class TurnQueue:
    """The turns by session, and where those are that wait.

    A session's turns run one after the other in the order in which they came: the first one is in the line, with the
    followers, at the fetches, or has a slot, and the others wait behind it.

    Args:
        ledger: What clients were served.
        fetches: Who waits for the disk.
        followers: Who waits for another's reading.
        ageing_s: A waiting turn rises a class each time it has waited so long.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        fetches: Fetches,
        followers: Followers,
        ageing_s: float,
    ) -> None:
        self._ledger = ledger
        self._sessions: dict[str, dict[str, Request]] = {}
        self.line = WaitingLine(ledger, ageing_s=ageing_s)
        self.fetches = fetches
        self.followers = followers
        self.places = Places()

    @property
    def sessions(self) -> Mapping[str, Mapping[str, Request]]:
        """Each session's turns by their ids, the first one first, running ones included."""
        return self._sessions

    def add(self, request: Request, running: Iterable[Request]) -> None:
        """Let a new turn wait, behind its session's other turns if it has any."""
        least = self.line.least_served(request.base_class)
        floor = self._ledger.most(other.client_id for other in running) if least is None else least
        self._ledger.raise_to(request.client_id, floor)
        self._ledger.enter(request.client_id)
        self.places.add(request)
        turns = self._sessions.setdefault(request.session_id, {})
        turns[request.turn_id] = request
        if len(turns) == 1:
            self.line.push(request, now=request.waits_since_s)

    def start(self, request: Request) -> None:
        """Take a turn out of the line that gets a slot."""
        self.line.discard(request)
        self.places.remove(request, started=True)

    def wait_again(self, request: Request, *, now: float) -> None:
        """Put a turn back into the line that lost its slot, or has nothing else to wait for any more."""
        self.line.push(request, now=now)
        self.places.moved()

    def end(self, request: Request, *, now: float) -> None:
        """Forget a turn wherever it is, and let its session's next one come."""
        turns = self._sessions[request.session_id]
        is_first = next(iter(turns)) == request.turn_id
        del turns[request.turn_id]
        # A turn is in one of these at most, and one that has a slot or waits behind another is in none.
        for holder in (self.line, self.followers, self.fetches):
            holder.discard(request)
        self.places.remove(request, started=False)
        self._ledger.leave(request.client_id)
        if not turns:
            del self._sessions[request.session_id]
        elif is_first:
            following = next(iter(turns.values()))
            following.waits_since_s = now
            self.line.push(following, now=now)

    def advance(self, now: float) -> None:
        """Let waiting turns rise, and those come back to the line that have nothing else to wait for any more."""
        self.line.age(now)
        for request in (*self.fetches.release(now), *self.followers.release()):
            self.wait_again(request, now=now)

    def positions(self) -> tuple[tuple[str, int], ...]:
        """Return the places of turns that were never started, as far as they changed; 0 for one that was started."""
        if not self.places.dirty:
            return ()
        return self.places.tell(self._ranked() if len(self.places) <= HEAD_TURNS else self._head())

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Raise ``AssertionError`` when a turn is in no place, or in two."""
        self._ledger.check_integrity(requests.values())
        turns = [turn_id for session in self._sessions.values() for turn_id in session]
        assert sorted(turns) == sorted(requests), "a session has other turns than there are"
        firsts = [next(iter(session.values())) for session in self._sessions.values()]
        held = [*self.line, *self.followers.requests, *self.fetches.requests]
        waiting = [request for request in firsts if request.slot is None]
        assert sorted(request.turn_id for request in held) == sorted(request.turn_id for request in waiting)
        unstarted = {request.turn_id for request in requests.values() if not request.started}
        assert unstarted == {request.turn_id for request in self.places.waiting}, "places of other turns than wait"

    def _ranked(self) -> list[Request]:
        """Return all that were never started, the strongest claim first."""
        return sorted(self.places.waiting, key=self._order)

    def _order(self, request: Request) -> tuple[bool, bool, int, int, int]:
        in_line = request.turn_id in self.line
        behind = next(iter(self._sessions[request.session_id])) != request.turn_id
        return (behind, in_line, request.rank, self._ledger.served(request.client_id), request.arrival)

    def _head(self) -> list[Request]:
        """Return the first that were never started."""
        head = [request for request in (*self.fetches.requests, *self.followers.requests) if not request.started]
        head.sort(key=self._order)
        for _ in range(HEAD_TURNS):
            request = self.line.first()
            if request is None or len(head) >= HEAD_TURNS:
                break
            if not request.started:
                head.append(request)
            self.line.skip_first()
        self.line.unskip()
        return head
