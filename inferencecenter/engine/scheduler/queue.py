"""Waiting turns: for a slot, for parked KV from disk, for a prefix that another turn prefills."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.placement import common_prefix_tokens
from inferencecenter.engine.scheduler.state import RequestChange, RequestState
from inferencecenter.ipc.messages import LOWEST_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from inferencecenter.engine.scheduler.placement import Match, ParkedKv
    from inferencecenter.engine.scheduler.state import EngineRequest, ServiceCounters

_LEAST_CELLS: Final = 2
# A reader can lose its slot or its snapshot more often than a waiting turn should have to wait for it.
_MOST_FOLLOWS: Final = 2
_MOST_FOLLOWERS: Final = 64
_SPARE_AGES: Final = 64
_MOST_RISING: Final = 64
HEAD_TURNS: Final = 64
"""Turns at the head of the queue that are notified of each change of their position at once."""
_RECOUNT_SHARE: Final = 8
_COUNTED_AT_ONCE: Final = 64
# Loaded KV can be evicted from RAM before its turn gets a slot, and RAM can be full of pending writes; after this many
# loads the tokens are prefilled.
_MOST_FETCHES: Final = 2
# A disk that takes longer than this is treated as not responding.
_FETCH_TIMEOUT_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Entry:
    """A turn in the queue, until it leaves or rises a class at ``ages_s``."""

    request: EngineRequest
    ticket: int
    ages_s: float
    removed: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return (self.request.effective_service, self.request.arrival)


@dataclass(slots=True)
class _Level:
    """The turns of one class: a heap of turns per client, and a heap of clients by their first turn.

    Counters only grow, so a client's key in the heap is never too large: the top one is corrected and pushed back until
    it is exact. ``keys`` holds each client's valid heap entry; outdated ones are skipped.
    """

    turns: dict[str, list[tuple[tuple[int, int], int, _Entry]]] = field(default_factory=dict)
    clients: list[tuple[tuple[int, int, int], str]] = field(default_factory=list)
    keys: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def first_of(self, client_id: str) -> _Entry | None:
        turns = self.turns.get(client_id)
        while turns and turns[0][2].removed:
            heappop(turns)
        if not turns:
            self.turns.pop(client_id, None)
            return None
        return turns[0][2]

    def push(self, entry: _Entry, counters: ServiceCounters) -> None:
        client_id = entry.request.client_id
        heappush(self.turns.setdefault(client_id, []), (entry.key, entry.ticket, entry))
        key = (counters.served(client_id), *entry.key)
        if client_id not in self.keys or key < self.keys[client_id]:
            self._put(client_id, key)

    def first(self, counters: ServiceCounters) -> _Entry | None:
        """Return the turn with the strongest claim without removing it."""
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
            actual = (counters.served(client_id), *entry.key)
            if actual == key:
                return entry
            heappop(self.clients)
            self._put(client_id, actual)
        return None

    def hide(self, entry: _Entry) -> None:
        """Remove a client's first turn."""
        _, _, first = heappop(self.turns[entry.request.client_id])
        assert first is entry

    def _put(self, client_id: str, key: tuple[int, int, int]) -> None:
        self.keys[client_id] = key
        heappush(self.clients, (key, client_id))


class WaitQueue:
    """Turns in the order of their claims: class, the client's service, the turn's own service, arrival.

    A turn rises a class each time it has waited ``ageing_s``. In the highest class it then counts as never served: only
    older turns of its client and turns of clients with less service precede it.

    Turns of barred classes are set aside; their waiting time counts when they are readmitted.

    Args:
        counters: Service per client.
        ageing_s: Waiting time after which a turn rises a class.
    """

    def __init__(self, counters: ServiceCounters, *, ageing_s: float) -> None:
        if ageing_s <= 0:
            raise ValueError(f"ageing_s must be positive, not {ageing_s}")
        self._counters = counters
        self._ageing_s = ageing_s
        self._levels = tuple(_Level() for _ in range(LOWEST_CLASS + 1))
        self._lowest_class = LOWEST_CLASS
        self._barred: dict[str, EngineRequest] = {}
        self._entries: dict[str, _Entry] = {}
        self._ages: list[tuple[float, int, _Entry]] = []
        self._skipped: list[_Entry] = []
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._entries) + len(self._barred)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._entries or turn_id in self._barred

    def __iter__(self) -> Iterator[EngineRequest]:
        return chain((entry.request for entry in self._entries.values()), self._barred.values())

    @property
    def barred(self) -> int:
        """Number of turns whose class is barred."""
        return len(self._barred)

    def bar_below(self, lowest_class: int, *, now: float) -> None:
        """Bar turns submitted in a lower class and readmit the others."""
        self._lowest_class = lowest_class
        turns = tuple(self)
        for request in turns:
            self.discard(request)
        for request in turns:
            self.push(request, now=now)

    def push(self, request: EngineRequest, *, now: float) -> None:
        """Add a turn that has waited since ``request.waits_since_s``."""
        if request.turn_id in self:
            raise ValueError(f"turn {request.turn_id} is queued already")
        if request.base_class > self._lowest_class:
            self._barred[request.turn_id] = request
            return
        periods = request.periods(now, self._ageing_s)
        risen = periods > request.base_class
        request.effective_priority = max(0, request.base_class - periods)
        request.effective_service = 0 if risen else request.served
        entry = _Entry(request, next(self._tickets), request.rises_at(periods, self._ageing_s))
        self._entries[request.turn_id] = entry
        self._levels[request.effective_priority].push(entry, self._counters)
        if not risen:
            self._watch(entry)

    def discard(self, request: EngineRequest) -> bool:
        """Remove a turn; ``False`` when it is not here."""
        if self._barred.pop(request.turn_id, None) is not None:
            return True
        entry = self._entries.pop(request.turn_id, None)
        if entry is None:
            return False
        entry.removed = True
        return True

    def age(self, now: float) -> None:
        """Raise the turns whose time has come, a bounded number per call."""
        risen = 0
        while risen < _MOST_RISING and self._ages and self._ages[0][0] <= now:
            _, _, entry = heappop(self._ages)
            if not entry.removed:
                self.discard(entry.request)
                self.push(entry.request, now=now)
                risen += 1

    def first(self) -> EngineRequest | None:
        """Return the turn with the strongest claim among those not skipped."""
        entry = self._first()
        return None if entry is None else entry.request

    def skip_first(self) -> None:
        """Skip the first turn until ``unskip``."""
        entry = self._first()
        if entry is not None:
            self._levels[entry.request.effective_priority].hide(entry)
            self._skipped.append(entry)

    def unskip(self) -> None:
        """Restore the skipped turns to their positions."""
        for entry in self._skipped:
            if not entry.removed:
                self._levels[entry.request.effective_priority].push(entry, self._counters)
        self._skipped.clear()

    def least_served(self, rank: int) -> int | None:
        """Return the lowest client counter among turns waiting in class ``rank`` or a higher one."""
        firsts = [entry for level in self._levels[: rank + 1] if (entry := level.first(self._counters)) is not None]
        return min((self._counters.served(entry.request.client_id) for entry in firsts), default=None)

    def _first(self) -> _Entry | None:
        if not self._entries:
            return None
        firsts = (level.first(self._counters) for level in self._levels)
        return next((entry for entry in firsts if entry is not None), None)

    def _watch(self, entry: _Entry) -> None:
        if len(self._ages) > 2 * len(self._entries) + _SPARE_AGES:
            # Most turns that leave never rise: drop their entries once they are the majority.
            self._ages = [item for item in self._ages if not item[2].removed]
            heapify(self._ages)
        heappush(self._ages, (entry.ages_s, entry.ticket, entry))


class PositionTracker:
    """Queue positions of turns that were never started.

    In a long queue one start moves every position, so not every change is published. The first ``HEAD_TURNS`` turns, in
    the order of their claims, get each change. Behind them a position is the number of waiting turns of higher classes
    plus those of the same class in front; it is published on arrival and again when an eighth of the queue has left, a
    bounded number per call.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, EngineRequest] = {}
        self._classes: Counter[int] = Counter()
        self._published: dict[str, int] = {}
        self._new: deque[tuple[EngineRequest, int]] = deque()
        self._started: list[str] = []
        self._recount: Iterator[tuple[EngineRequest, int]] = iter(())
        self._n_removed = 0
        self._dirty = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[EngineRequest]:
        """The turns that were never started."""
        return self._waiting.values()

    @property
    def dirty(self) -> bool:
        """Whether positions may have changed since they were published."""
        return self._dirty

    def add(self, request: EngineRequest) -> None:
        """Add a turn."""
        self._waiting[request.turn_id] = request
        self._classes[request.base_class] += 1
        self._new.append((request, sum(self._classes[rank] for rank in range(request.base_class + 1))))
        self._dirty = True

    def remove(self, request: EngineRequest, *, started: bool) -> None:
        """Remove a turn; one that was started gets position 0 if it had a position."""
        if self._waiting.pop(request.turn_id, None) is None:
            return
        self._classes[request.base_class] -= 1
        self._n_removed += 1
        self._dirty = True
        if self._published.pop(request.turn_id, None) is not None and started:
            self._started.append(request.turn_id)

    def mark_dirty(self) -> None:
        """Record that the order may have changed."""
        self._dirty = True

    def changed_positions(self, head: Sequence[EngineRequest]) -> tuple[tuple[str, int], ...]:
        """Return the positions that changed, 0 for a turn that was started.

        ``head`` are the first turns in order, all of them if there are at most ``HEAD_TURNS``.
        """
        changes = [(turn_id, 0) for turn_id in self._started]
        self._started.clear()
        places = {request.turn_id: place for place, request in enumerate(head, start=1)}
        for request, place in (*self._newcomers(), *islice(self._recounted(), _COUNTED_AT_ONCE)):
            if request.turn_id in self._waiting:
                places.setdefault(request.turn_id, max(place, len(head) + 1))
        changes.extend(place for place in places.items() if self._published.get(place[0]) != place[1])
        self._published.update(places)
        self._dirty = bool(self._new)
        return tuple(changes)

    def _newcomers(self) -> Iterator[tuple[EngineRequest, int]]:
        for _ in range(min(len(self._new), _COUNTED_AT_ONCE)):
            yield self._new.popleft()

    def _recounted(self) -> Iterator[tuple[EngineRequest, int]]:
        if self._n_removed * _RECOUNT_SHARE >= len(self):
            self._n_removed = 0
            self._recount = self._count(tuple(self._waiting.values()))
        return self._recount

    def _count(self, requests: Iterable[EngineRequest]) -> Iterator[tuple[EngineRequest, int]]:
        before: Counter[int] = Counter()
        for request in requests:
            if request.turn_id in self._waiting:
                before[request.base_class] += 1
                yield request, before[request.base_class] + sum(self._classes[c] for c in range(request.base_class))


@dataclass(frozen=True, slots=True)
class _Fetching:
    request: EngineRequest
    key: str
    since_s: float


class KvLoads:
    """Turns that wait for a parked sequence to be loaded from disk.

    Args:
        parked: Lookup of what is ready.
        most: How many turns may wait at once; RAM should hold at least as many sequences.
    """

    def __init__(self, parked: ParkedKv, *, most: int) -> None:
        self._parked = parked
        self._most = most
        self._fetchings: dict[str, _Fetching] = {}
        self._stale: set[str] = set()

    def __len__(self) -> int:
        return len(self._fetchings)

    @property
    def requests(self) -> tuple[EngineRequest, ...]:
        """The waiting turns, oldest first."""
        return tuple(fetching.request for fetching in self._fetchings.values())

    @property
    def full(self) -> bool:
        """Whether no other turn may wait now."""
        return len(self) >= self._most

    def worthwhile(self, request: EngineRequest) -> bool:
        """Return whether a turn may wait for the disk; after failed loads it prefills its tokens instead."""
        return request.fetches < _MOST_FETCHES

    def wait_for(self, request: EngineRequest, match: Match, *, now: float) -> bool:
        """Let a turn wait; ``False`` when the load is already in progress."""
        is_new = all(fetching.key != match.key for fetching in self._fetchings.values())
        request.change(RequestChange.FETCH)
        request.fetches += 1
        self._stale.discard(match.key)
        self._fetchings[request.turn_id] = _Fetching(request, match.key, now)
        return is_new

    def discard(self, request: EngineRequest) -> bool:
        """Remove a turn; ``False`` when it does not wait here."""
        return self._forget(request)

    def take_stale(self) -> tuple[str, ...]:
        """Return the sequences no turn waits for any more, each once."""
        stale, self._stale = tuple(self._stale), set()
        return stale

    def release(self, now: float) -> list[EngineRequest]:
        """Remove and return the turns with nothing left to wait for."""
        over = [fetching.request for fetching in self._fetchings.values() if self._over(fetching, now)]
        for request in over:
            self._forget(request)
            request.change(RequestChange.FETCHED)
        return over

    def _forget(self, request: EngineRequest) -> bool:
        fetching = self._fetchings.pop(request.turn_id, None)
        if fetching is None:
            return False
        if all(other.key != fetching.key for other in self._fetchings.values()):
            self._stale.add(fetching.key)
        return True

    def _over(self, fetching: _Fetching, now: float) -> bool:
        if now - fetching.since_s >= _FETCH_TIMEOUT_S:
            fetching.request.fetches = _MOST_FETCHES
            return True
        match = self._parked.find(fetching.request.client_id, fetching.request.tokens)
        return match is None or match.ready or match.load_failed or match.key != fetching.key


@dataclass(frozen=True, slots=True)
class _Following:
    """``request`` waits until ``reader`` has prefilled ``n_tokens`` or, with ``by_snapshot``, parked them."""

    request: EngineRequest
    reader: EngineRequest
    n_tokens: int
    by_snapshot: bool

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        reader = self.reader
        if self.by_snapshot:
            return not reader.snapshot or reader.slot is None
        return reader.state is not RequestState.PREFILL or reader.kv_tokens >= self.n_tokens


class PrefixWaiters:
    """Turns that wait for another turn to prefill a prefix they share.

    Within a client any common prefix is shared, by copying it out of the reader's slot. Across clients only a public
    prefix is, as the snapshot that the reader leaves of it; the same holds for models whose sequences cannot be cut.

    Args:
        can_truncate: Whether a sequence can be cut at any position.
        grid_tokens: Waiting must save at least two cells of the grid.
    """

    def __init__(self, *, can_truncate: bool, grid_tokens: int) -> None:
        self._can_truncate = can_truncate
        self._least_tokens = _LEAST_CELLS * grid_tokens
        self._followings: dict[str, _Following] = {}

    def __len__(self) -> int:
        return len(self._followings)

    @property
    def requests(self) -> tuple[EngineRequest, ...]:
        """The waiting turns, oldest first."""
        return tuple(following.request for following in self._followings.values())

    def follow(self, request: EngineRequest, running: Iterable[EngineRequest], *, cached_tokens: int) -> str | None:
        """Let a turn wait for a reader that saves it enough; return the reader's turn id, or ``None``."""
        if request.follows >= _MOST_FOLLOWS or len(self) >= _MOST_FOLLOWERS:
            return None
        followings = [
            following
            for reader in running
            if reader.effective_priority <= request.effective_priority
            and (following := self._following(request, reader, least=cached_tokens + self._least_tokens)) is not None
        ]
        best = max(followings, key=lambda following: (following.n_tokens, following.reader.kv_tokens), default=None)
        if best is None:
            return None
        request.follows += 1
        self._followings[request.turn_id] = best
        return best.reader.turn_id

    def discard(self, request: EngineRequest) -> bool:
        """Remove a turn; ``False`` when it does not wait here."""
        return self._followings.pop(request.turn_id, None) is not None

    def release(self) -> list[EngineRequest]:
        """Remove and return the turns with nothing left to wait for."""
        over = [following.request for following in self._followings.values() if following.over]
        for request in over:
            del self._followings[request.turn_id]
        return over

    def _following(self, request: EngineRequest, reader: EngineRequest, *, least: int) -> _Following | None:
        """Return what waiting for a reader would give, ``None`` if it saves less than ``least`` tokens."""
        own = request.client_id == reader.client_id
        if reader.state is RequestState.PREFILL and own and self._can_truncate:
            n_tokens = _common(request.tokens[:-1], reader.tokens, least)
            by_snapshot = False
        elif reader.snapshot and (own or (request.public and reader.public)):
            shared = (
                request.tokens[:-1] if own else request.tokens[: min(request.prefix_tokens, request.prompt_tokens - 1)]
            )
            n_tokens = _common(shared, reader.tokens[: reader.cut_tokens], least)
            by_snapshot = True
            if n_tokens < reader.cut_tokens and not self._can_truncate:
                return None
        else:
            return None
        if n_tokens < least or reader.kv_tokens >= n_tokens:
            return None
        return _Following(request, reader, n_tokens, by_snapshot=by_snapshot)


def _common(a: list[int], b: list[int], least: int) -> int:
    """Return the length of the common prefix, 0 when it is less than ``least``."""
    return common_prefix_tokens(a, b) if a[least - 1 : least] == b[least - 1 : least] else 0


class TurnQueue:
    """All turns by session, and where the waiting ones are.

    A session's turns run one after the other in order of arrival: its first turn is in ``wait_queue``,
    ``prefix_waiters`` or ``kv_loads``, or holds a slot, and the others wait behind it.

    Args:
        counters: Service per client.
        fetches: Turns waiting for the disk.
        followers: Turns waiting for another turn's prefill.
        ageing_s: Waiting time after which a turn rises a class.
    """

    def __init__(
        self,
        counters: ServiceCounters,
        *,
        fetches: KvLoads,
        followers: PrefixWaiters,
        ageing_s: float,
    ) -> None:
        self._counters = counters
        self._sessions: dict[str, dict[str, EngineRequest]] = {}
        self.wait_queue = WaitQueue(counters, ageing_s=ageing_s)
        self.kv_loads = fetches
        self.prefix_waiters = followers
        self.position_tracker = PositionTracker()

    @property
    def sessions(self) -> Mapping[str, Mapping[str, EngineRequest]]:
        """Each session's turns by id, in order, running ones included."""
        return self._sessions

    def add(self, request: EngineRequest, running: Iterable[EngineRequest]) -> None:
        """Queue a new turn, behind its session's other turns if it has any."""
        least = self.wait_queue.least_served(request.base_class)
        floor = self._counters.most(other.client_id for other in running) if least is None else least
        self._counters.raise_to(request.client_id, floor)
        self._counters.enter(request.client_id)
        self.position_tracker.add(request)
        turns = self._sessions.setdefault(request.session_id, {})
        turns[request.turn_id] = request
        if len(turns) == 1:
            self.wait_queue.push(request, now=request.waits_since_s)

    def start(self, request: EngineRequest) -> None:
        """Take a turn that gets a slot out of the queue."""
        self.wait_queue.discard(request)
        self.position_tracker.remove(request, started=True)

    def requeue(self, request: EngineRequest, *, now: float) -> None:
        """Requeue a turn that lost its slot or has nothing else left to wait for."""
        self.wait_queue.push(request, now=now)
        self.position_tracker.mark_dirty()

    def end(self, request: EngineRequest, *, now: float) -> None:
        """Remove a turn wherever it is, and queue its session's next turn."""
        turns = self._sessions[request.session_id]
        is_first = next(iter(turns)) == request.turn_id
        del turns[request.turn_id]
        # A turn is in at most one of these; one that has a slot or waits behind another is in none.
        for holder in (self.wait_queue, self.prefix_waiters, self.kv_loads):
            holder.discard(request)
        self.position_tracker.remove(request, started=False)
        self._counters.leave(request.client_id)
        if not turns:
            del self._sessions[request.session_id]
        elif is_first:
            following = next(iter(turns.values()))
            following.waits_since_s = now
            self.wait_queue.push(following, now=now)

    def advance(self, now: float) -> None:
        """Age waiting turns and requeue those with nothing else left to wait for."""
        self.wait_queue.age(now)
        for request in (*self.kv_loads.release(now), *self.prefix_waiters.release()):
            self.requeue(request, now=now)

    def positions(self) -> tuple[tuple[str, int], ...]:
        """Return the changed positions of turns that were never started; 0 for a turn that was started."""
        if not self.position_tracker.dirty:
            return ()
        return self.position_tracker.changed_positions(
            self._ranked() if len(self.position_tracker) <= HEAD_TURNS else self._head()
        )

    def check_integrity(self, requests: Mapping[str, EngineRequest]) -> None:
        """Raise ``AssertionError`` when a turn is in no place, or in two."""
        self._counters.check_integrity(requests.values())
        turns = [turn_id for session in self._sessions.values() for turn_id in session]
        assert sorted(turns) == sorted(requests), "sessions and requests hold different turns"
        firsts = [next(iter(session.values())) for session in self._sessions.values()]
        held = [*self.wait_queue, *self.prefix_waiters.requests, *self.kv_loads.requests]
        waiting = [request for request in firsts if request.slot is None]
        assert sorted(request.turn_id for request in held) == sorted(request.turn_id for request in waiting)
        unstarted = {request.turn_id for request in requests.values() if not request.started}
        assert unstarted == {request.turn_id for request in self.position_tracker.waiting}, (
            "positions of turns that do not wait"
        )

    def _ranked(self) -> list[EngineRequest]:
        return sorted(self.position_tracker.waiting, key=self._order)

    def _order(self, request: EngineRequest) -> tuple[bool, bool, int, int, int]:
        in_line = request.turn_id in self.wait_queue
        behind = next(iter(self._sessions[request.session_id])) != request.turn_id
        return (behind, in_line, request.effective_priority, self._counters.served(request.client_id), request.arrival)

    def _head(self) -> list[EngineRequest]:
        head = [request for request in (*self.kv_loads.requests, *self.prefix_waiters.requests) if not request.started]
        head.sort(key=self._order)
        for _ in range(HEAD_TURNS):
            request = self.wait_queue.first()
            if request is None or len(head) >= HEAD_TURNS:
                break
            if not request.started:
                head.append(request)
            self.wait_queue.skip_first()
        self.wait_queue.unskip()
        return head
