"""The fair queue of clients."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.fair_queue import FairQueue


@given(st.lists(st.sampled_from("abc"), max_size=30), st.data())
def test_clients_alternate(submitted: list[str], data: st.DataObject) -> None:
    """Items of a client stay in order, and between two of them every other waiting client has one."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    items = [(client, number) for number, client in enumerate(submitted)]
    for item in items:
        queue.add(item[0], item)
    dropped = [item for item in items if data.draw(st.booleans())]
    for item in dropped:
        queue.withdraw(item[0], item)
        queue.withdraw(item[0], item)
    queued = [item for item in items if item not in dropped]
    assert len(queue) == len(queued)
    assert sorted(queue) == sorted(queued)
    taken = []
    while (first_item := queue.take()) is not None:
        taken.append(first_item)
    assert len(queue) == 0
    for client in "abc":
        assert [item for item in taken if item[0] == client] == [item for item in queued if item[0] == client]
    rounds = {client: [n for n, item in enumerate(taken) if item[0] == client] for client in "abc"}
    for client, places in rounds.items():
        for first, second in pairwise(places):
            for other, others in rounds.items():
                if other != client and others and others[-1] > second:
                    assert sum(first < place < second for place in others) == 1


def test_blocked_client_is_skipped() -> None:
    """It keeps its turn, and its items keep their order."""
    queue: FairQueue[int] = FairQueue()
    for client, item in (("a", 1), ("a", 2), ("b", 3)):
        queue.add(client, item)
    assert queue.take(lambda item: item != 1) == 3
    assert queue.take(lambda item: item != 1) is None
    assert [queue.take(), queue.take(), queue.take()] == [1, 2, None]
