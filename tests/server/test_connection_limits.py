"""Eviction among sockets that have not authenticated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.server.connection_limits import UnauthenticatedSockets

MOST, MOST_PER_ADDRESS = 6, 3
COMING = st.tuples(st.just("come"), st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]))
GOING = st.tuples(st.just("go"), st.integers(0, 30))


@given(st.lists(COMING | GOING, max_size=60))
def test_oldest_connection_is_evicted(steps: list[tuple[str, str | int]]) -> None:
    """Limits hold after each step, a new connection is always admitted, and none is evicted below the limit."""
    sockets: UnauthenticatedSockets[int] = UnauthenticatedSockets(most=MOST, most_per_address=MOST_PER_ADDRESS)
    there: dict[int, str] = {}
    for number, (what, where) in enumerate(steps):
        if what == "go":
            sockets.discard(int(where))
            there.pop(int(where), None)
            continue
        home = "v6" if str(where).startswith("2001") else str(where)
        own = [each for each, from_where in there.items() if from_where == home]
        due = own[0] if len(own) == MOST_PER_ADDRESS else min(there) if len(there) == MOST else None
        assert sockets.admit(number, address=str(where)) == due
        if due is not None:
            del there[due]
        there[number] = home
        assert len(sockets) == len(there) <= MOST


def test_one_address_evicts_only_its_own() -> None:
    """Thousands of one address leave the sockets of others alone."""
    sockets: UnauthenticatedSockets[int] = UnauthenticatedSockets(most=MOST, most_per_address=MOST_PER_ADDRESS)
    sockets.admit(-1, address="192.0.2.1")
    evicted = [sockets.admit(number, address=f"2001:db8::{number:x}") for number in range(1000)]
    assert -1 not in evicted
    assert len(sockets) == 1 + MOST_PER_ADDRESS
