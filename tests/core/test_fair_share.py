"""A capacity shared by clients."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.core.fair_queue import FairShare

CAPACITY = 100
STEPS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.booleans()), max_size=60)


@given(STEPS)
def test_only_a_client_above_its_share_of_a_full_capacity_is_refused(steps: list[tuple[str, int, bool]]) -> None:
    """The total equals what was admitted and not released."""
    share = FairShare(CAPACITY)
    held: dict[str, list[int]] = {}
    for client, amount, leaves in steps:
        own = held.get(client, [])
        if leaves and own:
            share.remove(client, own.pop())
            held = {each: amounts for each, amounts in held.items() if amounts}
        total = sum(map(sum, held.values()))
        assert share.total == total
        n_clients = len({*held, client})
        is_full, is_large = total + amount > CAPACITY, sum(held.get(client, ())) + amount > CAPACITY // n_clients
        assert share.fits(client, amount) == (not (client in held and is_full and is_large))
        if share.fits(client, amount):
            share.add(client, amount)
            held.setdefault(client, []).append(amount)


def test_large_item_does_not_block_other_clients() -> None:
    """One client alone may use the whole capacity."""
    share = FairShare(CAPACITY)
    for _ in range(10):
        assert share.fits("greedy", 10)
        share.add("greedy", 10)
    assert not share.fits("greedy", 1)
    assert share.fits("modest", 50)
    share.add("modest", 50)
    assert not share.fits("modest", 1)
    share.remove("greedy", 100)
    assert share.fits("modest", 50)
