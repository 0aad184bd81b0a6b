"""What waiting turns are told about their places in the queue."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferencecenter.engine.scheduler.request import Request

HEAD_TURNS: Final = 64
"""So many turns at the head of the queue are told each change at once."""

_RECOUNT_SHARE: Final = 8


class Places:
    """The places of turns that were never started.

    In a long queue one start moves everybody, so it is not counted through each time: the head is told each change at
    once, the others when an eighth of the queue has gone since the last count. A newcomer behind the head is told how
    many of its class and the higher ones are there.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}
        self._classes: Counter[int] = Counter()
        self._told: dict[str, int] = {}
        self._new: list[Request] = []
        self._started: list[str] = []
        self._gone = 0
        self._dirty = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[Request]:
        """The turns that were never started, in the order in which they were added."""
        return self._waiting.values()

    @property
    def dirty(self) -> bool:
        """Whether places may have changed since they were told."""
        return self._dirty

    @property
    def counted_through(self) -> bool:
        """Whether all places are to be told, not only those of the head."""
        return len(self) <= HEAD_TURNS or self._gone * _RECOUNT_SHARE >= len(self)

    def add(self, request: Request) -> None:
        """Let a turn queue."""
        self._waiting[request.turn_id] = request
        self._classes[request.base_class] += 1
        self._new.append(request)
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

    def tell(self, order: Sequence[Request]) -> tuple[tuple[str, int], ...]:
        """Return the places that changed: those of ``order``, which begins at the head, and 0 for who was started."""
        changes = [(turn_id, 0) for turn_id in self._started]
        places = [(request.turn_id, place) for place, request in enumerate(order, start=1)]
        known = {turn_id for turn_id, _ in places}
        places += [
            (request.turn_id, sum(self._classes[rank] for rank in range(request.base_class + 1)))
            for request in self._new
            if request.turn_id in self._waiting and request.turn_id not in known
        ]
        changes.extend(place for place in places if self._told.get(place[0]) != place[1])
        self._told.update(places)
        if len(order) == len(self):
            self._gone = 0
        self._started, self._new, self._dirty = [], [], False
        return tuple(changes)
