"""Turns that wait until their parked KV is back from disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.scheduler.request import RequestChange

if TYPE_CHECKING:
    from inferencecenter.engine.scheduler.parking import Match, ParkedKv
    from inferencecenter.engine.scheduler.request import Request

# What came from disk can be pushed out of RAM again before its turn gets a slot, and RAM can be full of what goes to
# disk; after that the tokens are read.
_MOST_FETCHES: Final = 2
# A disk that takes longer than this does not answer.
_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Fetching:
    request: Request
    key: str
    since_s: float


class Fetches:
    """Who waits for which parked sequence.

    Args:
        parked: Says what is ready.
        most: How many turns may wait at once; so many sequences at least should fit the RAM.
    """

    def __init__(self, parked: ParkedKv, *, most: int) -> None:
        self._parked = parked
        self._most = most
        self._fetchings: dict[str, _Fetching] = {}
        self._unwanted: set[str] = set()

    def __len__(self) -> int:
        return len(self._fetchings)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Those who wait, the first one first."""
        return tuple(fetching.request for fetching in self._fetchings.values())

    @property
    def full(self) -> bool:
        """Whether nobody else may wait now."""
        return len(self) >= self._most

    def worthwhile(self, request: Request) -> bool:
        """Tell whether a turn may wait for the disk; one that did so in vain reads its tokens instead."""
        return request.fetches < _MOST_FETCHES

    def hold(self, request: Request, match: Match, *, now: float) -> bool:
        """Let a turn wait; ``False`` when the fetch is on its way already."""
        is_new = all(fetching.key != match.key for fetching in self._fetchings.values())
        request.change(RequestChange.FETCH)
        request.fetches += 1
        self._unwanted.discard(match.key)
        self._fetchings[request.turn_id] = _Fetching(request, match.key, now)
        return is_new

    def discard(self, request: Request) -> bool:
        """Forget a turn; ``False`` when it does not wait here."""
        return self._forget(request)

    def take_unwanted(self) -> tuple[str, ...]:
        """Return the sequences that turns waited for and none does any more, each once."""
        unwanted, self._unwanted = tuple(self._unwanted), set()
        return unwanted

    def release(self, now: float) -> list[Request]:
        """Return those who need not wait any more, and forget them."""
        over = [fetching.request for fetching in self._fetchings.values() if self._over(fetching, now)]
        for request in over:
            self._forget(request)
            request.change(RequestChange.FETCHED)
        return over

    def _forget(self, request: Request) -> bool:
        fetching = self._fetchings.pop(request.turn_id, None)
        if fetching is None:
            return False
        if all(other.key != fetching.key for other in self._fetchings.values()):
            self._unwanted.add(fetching.key)
        return True

    def _over(self, fetching: _Fetching, now: float) -> bool:
        if now - fetching.since_s >= _PATIENCE_S:
            fetching.request.fetches = _MOST_FETCHES
            return True
        match = self._parked.find(fetching.request.client_id, fetching.request.tokens)
        return match is None or match.ready or match.in_vain or match.key != fetching.key
