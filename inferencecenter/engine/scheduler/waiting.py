"""The turns that wait for a slot, the strongest claim first."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.request import LOWEST_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.engine.scheduler.fairness import Ledger
    from inferencecenter.engine.scheduler.request import Request

_SPARE_AGES: Final = 64
_MOST_RISING: Final = 64


@dataclass(slots=True, eq=False)
class _Entry:
    """A turn in the line, until it leaves or rises; ``ages_s`` is when it rises."""

    request: Request
    ticket: int
    ages_s: float
    gone: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.request.claimed, self.request.arrival)


@dataclass(slots=True)
class _Level:
    """The turns of one class: of each client a heap, and a heap of the clients by their first turns.

    Counters only grow, so what the heap of clients says of one is never too much: the one at its top is corrected and
    put back until it stands there rightly. ``keys`` are the entries that count; older ones of a client are passed over.
    """

    turns: dict[str, list[tuple[tuple[int, int], int, _Entry]]] = field(default_factory=dict)
    clients: list[tuple[tuple[int, int, int], str]] = field(default_factory=list)
    keys: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def first_of(self, client_id: str) -> _Entry | None:
        """Return a client's first turn."""
        turns = self.turns.get(client_id)
        while turns and turns[0][2].gone:
            heappop(turns)
        if not turns:
            self.turns.pop(client_id, None)
            return None
        return turns[0][2]

    def push(self, entry: _Entry, ledger: Ledger) -> None:
        """Add a turn."""
        client_id = entry.request.client_id
        heappush(self.turns.setdefault(client_id, []), (entry.key, entry.ticket, entry))
        key = (ledger.served(client_id), *entry.key)
        if client_id not in self.keys or key < self.keys[client_id]:
            self._put(client_id, key)

    def first(self, ledger: Ledger) -> _Entry | None:
        """Return the turn with the strongest claim; it stays."""
        while self.clients:
            key, client_id = self.clients[0]
            if self.keys.get(client_id) != key:
                heappop(self.clients)
                continue
            entry = self.first_of(client_id)
            if entry is None:
                heappop(self.clients)
                del self.keys[client_id]
                continue
            actual = (ledger.served(client_id), *entry.key)
            if actual == key:
                return entry
            heappop(self.clients)
            self._put(client_id, actual)
        return None

    def hide(self, entry: _Entry) -> None:
        """Take out the first turn of a client."""
        _, _, first = heappop(self.turns[entry.request.client_id])
        assert first is entry

    def _put(self, client_id: str, key: tuple[int, int, int]) -> None:
        self.keys[client_id] = key
        heappush(self.clients, (key, client_id))


class WaitingLine:
    """Turns in the order of their claims: class, what the client was served, what the turn was served, arrival.

    A turn rises a class each time it has waited ``ageing_s``. One that has waited so long in the highest class counts
    as never served: then only older turns of its client come before it, and of other clients those served less.

    Turns of classes that are barred stay here, with nobody behind them, and their waiting counts when they come back.

    Args:
        ledger: What clients were served.
        ageing_s: A waiting turn rises a class each time it has waited so long.
    """

    def __init__(self, ledger: Ledger, *, ageing_s: float) -> None:
        if ageing_s <= 0:
            raise ValueError(f"nobody rises a class every {ageing_s} s")
        self._ledger = ledger
        self._ageing_s = ageing_s
        self._levels = tuple(_Level() for _ in range(LOWEST_CLASS + 1))
        self._lowest_class = LOWEST_CLASS
        self._barred: dict[str, Request] = {}
        self._entries: dict[str, _Entry] = {}
        self._ages: list[tuple[float, int, _Entry]] = []
        self._skipped: list[_Entry] = []
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._entries) + len(self._barred)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._entries or turn_id in self._barred

    def __iter__(self) -> Iterator[Request]:
        return chain((entry.request for entry in self._entries.values()), self._barred.values())

    @property
    def barred(self) -> int:
        """How many wait for their class to be let in again."""
        return len(self._barred)

    def bar_below(self, lowest_class: int, *, now: float) -> None:
        """Keep turns that were submitted in a lower class out, and let the others come back."""
        self._lowest_class = lowest_class
        turns = tuple(self)
        for request in turns:
            self.discard(request)
        for request in turns:
            self.push(request, now=now)

    def push(self, request: Request, *, now: float) -> None:
        """Add a turn that waits since ``request.waits_since_s``."""
        if request.turn_id in self:
            raise ValueError(f"turn {request.turn_id} is here already")
        if request.base_class > self._lowest_class:
            self._barred[request.turn_id] = request
            return
        periods = request.periods(now, self._ageing_s)
        risen = periods > request.base_class
        request.rank = max(0, request.base_class - periods)
        request.claimed = 0 if risen else request.served
        entry = _Entry(request, next(self._tickets), request.rises_at(periods, self._ageing_s))
        self._entries[request.turn_id] = entry
        self._levels[request.rank].push(entry, self._ledger)
        if not risen:
            self._watch(entry)

    def discard(self, request: Request) -> bool:
        """Take a turn out; ``False`` when it is not here."""
        if self._barred.pop(request.turn_id, None) is not None:
            return True
        entry = self._entries.pop(request.turn_id, None)
        if entry is None:
            return False
        entry.gone = True
        return True

    def age(self, now: float) -> None:
        """Let those rise whose time has come, a few at once: of thousands the last ones some steps later."""
        risen = 0
        while risen < _MOST_RISING and self._ages and self._ages[0][0] <= now:
            _, _, entry = heappop(self._ages)
            if not entry.gone:
                self.discard(entry.request)
                self.push(entry.request, now=now)
                risen += 1

    def first(self) -> Request | None:
        """Return the turn with the strongest claim of those that are not skipped."""
        entry = self._first()
        return None if entry is None else entry.request

    def skip_first(self) -> None:
        """Let the others go before the first turn, until ``unskip``."""
        entry = self._first()
        if entry is not None:
            self._levels[entry.request.rank].hide(entry)
            self._skipped.append(entry)

    def unskip(self) -> None:
        """Put the skipped turns back to their places."""
        for entry in self._skipped:
            if not entry.gone:
                self._levels[entry.request.rank].push(entry, self._ledger)
        self._skipped.clear()

    def least_served(self, rank: int) -> int | None:
        """Return what that client was served that was served least of those waiting in ``rank`` or a higher class."""
        firsts = [entry for level in self._levels[: rank + 1] if (entry := level.first(self._ledger)) is not None]
        return min((self._ledger.served(entry.request.client_id) for entry in firsts), default=None)

    def _first(self) -> _Entry | None:
        firsts = (level.first(self._ledger) for level in self._levels)
        return next((entry for entry in firsts if entry is not None), None)

    def _watch(self, entry: _Entry) -> None:
        if len(self._ages) > 2 * len(self._entries) + _SPARE_AGES:
            # Most of those that leave never rise: drop them once they are the majority.
            self._ages = [item for item in self._ages if not item[2].gone]
            heapify(self._ages)
        heappush(self._ages, (entry.ages_s, entry.ticket, entry))
