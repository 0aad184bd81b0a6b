"""What waiting turns are told about their places in the queue."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from inferencecenter.engine.scheduler.request import Request

HEAD_TURNS: Final = 64
"""So many turns at the head of the queue are told each change of their place at once."""

_RECOUNT_SHARE: Final = 8
_COUNTED_AT_ONCE: Final = 64


class Places:
    """The places of turns that were never started.

    In a long queue one start moves everybody, so not everybody is told of each: the head is, in the order of claims.
    Behind it a place is how many of the higher classes wait, and of the own class before it; a newcomer hears it, and
    all hear it again when an eighth of the queue has gone since, a few with each call.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}
        self._classes: Counter[int] = Counter()
        self._told: dict[str, int] = {}
        self._new: deque[tuple[Request, int]] = deque()
        self._started: list[str] = []
        self._recount: Iterator[tuple[Request, int]] = iter(())
        self._gone = 0
        self._dirty = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[Request]:
        """The turns that were never started."""
        return self._waiting.values()

    @property
    def dirty(self) -> bool:
        """Whether places may have changed since they were told."""
        return self._dirty

    def add(self, request: Request) -> None:
        """Let a turn queue."""
        self._waiting[request.turn_id] = request
        self._classes[request.base_class] += 1
        self._new.append((request, sum(self._classes[rank] for rank in range(request.base_class + 1))))
        self._dirty = True

    def remove(self, request: Request, *, started: bool) -> None:
        """Let a turn leave; one that was started is told so if it was told a place."""
        if self._waiting.pop(request.turn_id, None) is None:
            return
        self._classes[request.base_class] -= 1
        self._gone += 1
        self._dirty = True
        if self._told.pop(request.turn_id, None) is not None and started:
            self._started.append(request.turn_id)

    def moved(self) -> None:
        """Note that the order may have changed."""
        self._dirty = True

    def tell(self, head: Sequence[Request]) -> tuple[tuple[str, int], ...]:
        """Return the places that changed, 0 for who was started.

        ``head`` are the first turns in their order, all of them where there are no more than ``HEAD_TURNS``.
        """
        changes = [(turn_id, 0) for turn_id in self._started]
        self._started.clear()
        places = {request.turn_id: place for place, request in enumerate(head, start=1)}
        for request, place in (*self._newcomers(), *islice(self._recounted(), _COUNTED_AT_ONCE)):
            if request.turn_id in self._waiting:
                places.setdefault(request.turn_id, max(place, len(head) + 1))
        changes.extend(place for place in places.items() if self._told.get(place[0]) != place[1])
        self._told.update(places)
        self._dirty = bool(self._new)
        return tuple(changes)

    def _newcomers(self) -> Iterator[tuple[Request, int]]:
        for _ in range(min(len(self._new), _COUNTED_AT_ONCE)):
            yield self._new.popleft()

    def _recounted(self) -> Iterator[tuple[Request, int]]:
        if self._gone * _RECOUNT_SHARE >= len(self):
            self._gone = 0
            self._recount = self._count(tuple(self._waiting.values()))
        return self._recount

    def _count(self, requests: Iterable[Request]) -> Iterator[tuple[Request, int]]:
        before: Counter[int] = Counter()
        for request in requests:
            if request.turn_id in self._waiting:
                before[request.base_class] += 1
                yield request, before[request.base_class] + sum(self._classes[c] for c in range(request.base_class))
