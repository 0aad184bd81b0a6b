"""What waits to be written, by client, and what of it the next transaction takes.

A transaction takes from each client that has something waiting in turn, a bounded share at a time and bounded in all.
So the text that one client is about to be shown is behind one transaction at most, however much another client has
waiting. Usually all that waits fits into one. Within a client all keeps its order; between clients there is none.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.store.parts import parts_of, weight_of
from inferencecenter.sessions.store.writer import Batch, Tell

if TYPE_CHECKING:
    from collections.abc import Collection

    from inferencecenter.sessions.store.recorder import Entry

BATCH_BYTES: Final = 512 * 1024
"""About what a transaction writes at most, some milliseconds; one entry that is larger is in one all the same."""
SHARE_BYTES: Final = 128 * 1024
"""About what a client gives to it before the others have given as much."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    entry: Entry
    durable: bool


@dataclass(slots=True)
class _Lane:
    """What one client has waiting; ``parts`` are what is left of an entry that has begun to be written."""

    items: deque[_Waiting | Tell] = field(default_factory=deque)
    parts: deque[Entry] = field(default_factory=deque)
    durable: bool = False


class Lanes:
    """The queues of all clients."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._n_pending: Counter[str] = Counter()
        self._unswept: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._lanes or self._unswept)

    def write(self, client_id: str, entry: Entry, *, durable: bool) -> None:
        """Have an entry written after all others of the client."""
        self._add(client_id, _Waiting(entry, durable))

    def tell(self, client_id: str, tell: Tell) -> None:
        """Have ``tell`` called after all that the client has waiting is written."""
        self._add(client_id, tell)

    def n_pending(self, client_id: str) -> int:
        """Return how much of a client waits or is being written or deleted: entries, and calls."""
        return self._n_pending.get(client_id, 0) + (client_id in self._unswept)

    def take(self) -> Batch:
        """Return what the next transaction takes; nothing of clients of which something has yet to be deleted."""
        batch = Batch()
        left = BATCH_BYTES
        while left > 0 and (ready := [client_id for client_id in self._lanes if client_id not in self._unswept]):
            for client_id in ready:
                left -= self._give(client_id, batch, min(SHARE_BYTES, left))
                if left <= 0:
                    break
        return batch

    def take_all(self) -> Batch:
        """Return everything that waits."""
        batch = Batch()
        for client_id in tuple(self._lanes):
            while client_id in self._lanes:
                self._give(client_id, batch, BATCH_BYTES)
        return batch

    def hold(self, batch: Batch, unswept: Collection[str]) -> None:
        """Have a batch that is written not tell those clients of which something has yet to be deleted.

        What would be told comes first of what waits then.
        """
        self._unswept = frozenset(unswept)
        for client_id, tell in reversed(batch.tells):
            if client_id in self._unswept:
                self._lanes.setdefault(client_id, _Lane()).items.appendleft(tell)
                batch.counts[client_id] -= 1
        batch.tells = [each for each in batch.tells if each[0] not in self._unswept]

    def done(self, batch: Batch) -> None:
        """Take note that a batch was written and told."""
        for client_id, count in batch.counts.items():
            self._n_pending[client_id] -= count
            if not self._n_pending[client_id]:
                del self._n_pending[client_id]

    def _add(self, client_id: str, item: _Waiting | Tell) -> None:
        self._lanes.setdefault(client_id, _Lane()).items.append(item)
        self._n_pending[client_id] += 1

    def _give(self, client_id: str, batch: Batch, share: int) -> int:
        """Move from a client's queue to a batch until its share is used up, and return what that weighs.

        A client that has more waiting is the last of the line then.
        """
        lane = self._lanes.pop(client_id)
        weight = 0
        while lane.items or lane.parts:
            if not lane.parts:
                item = lane.items[0]
                if isinstance(item, _Waiting):
                    if weight >= share:
                        break
                    lane.parts.extend(parts_of(item.entry))
                    lane.durable = item.durable
                else:
                    # All that this call waits for is in this transaction, or in one before.
                    batch.tells.append((client_id, item))
                    batch.counts[client_id] += 1
                lane.items.popleft()
                continue
            if weight >= share:
                break
            part = lane.parts.popleft()
            batch.entries.append(part)
            batch.durable |= lane.durable
            batch.counts[client_id] += not lane.parts
            weight += weight_of(part)
        if lane.items or lane.parts:
            self._lanes[client_id] = lane
        return weight
