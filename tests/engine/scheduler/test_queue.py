"""The order of waiting turns, and their published positions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.queue import HEAD_TURNS, WaitQueue
from inferencecenter.engine.scheduler.state import EngineRequest, ServiceCounters
from tests.engine.scheduler.harness import SchedulerHarness


def new_request(
    number: int, *, client: str = "c", priority: int = 1, since_s: float = 0.0, served: int = 0
) -> EngineRequest:
    """Return a turn that waits."""
    return EngineRequest(
        turn_id=f"t{number}",
        session_id=f"s{number}",
        client_id=client,
        priority=priority,
        arrival=number,
        submitted_s=since_s,
        tokens=[1],
        served=served,
    )


def drain(line: WaitQueue) -> list[str]:
    """Remove all turns in queue order."""
    order = []
    while (request := line.first()) is not None:
        order.append(request.turn_id)
        assert line.discard(request)
    assert len(line) == 0
    return order


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 3), st.floats(0, 50), st.booleans()),
        max_size=20,
    ),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 5)),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 5)),
)
def test_queue_order(
    turns: list[tuple[str, int, int, float, bool]], served: dict[str, int], served_since: dict[str, int]
) -> None:
    """It is by class, one higher for each period waited, then the client's counter, own service and arrival."""
    now, ageing_s = 50.0, 10.0
    counters = ServiceCounters()
    for client, units in served.items():
        counters.raise_to(client, units)
    line = WaitQueue(counters, ageing_s=ageing_s)
    requests = []
    for number, (client, priority, own, since_s, leaves) in enumerate(turns):
        request = new_request(number, client=client, priority=priority, since_s=since_s, served=own)
        line.push(request, now=since_s)
        if leaves:
            assert line.discard(request)
            assert not line.discard(request)
        else:
            requests.append(request)
    for client, units in served_since.items():
        counters.raise_to(client, counters.served(client) + units)
    line.age(now)
    # Some are skipped first, and keep their place.
    for _ in range(3):
        line.skip_first()
    line.unskip()

    def claim(request: EngineRequest) -> tuple[int, int, int, int]:
        periods = int((now - request.waits_since_s) / ageing_s)
        own = 0 if periods > request.priority else request.served
        return (max(0, request.priority - periods), counters.served(request.client_id), own, request.arrival)

    assert len(line) == len(requests)
    assert drain(line) == [request.turn_id for request in sorted(requests, key=claim)]


def test_skipped_turns_are_overtaken_and_can_leave() -> None:
    """A skipped turn keeps its place afterwards, or is removed."""
    line = WaitQueue(ServiceCounters(), ageing_s=10.0)
    requests = [new_request(number) for number in range(3)]
    for request in requests:
        line.push(request, now=0.0)
    line.skip_first()
    line.skip_first()
    first = line.first()
    assert first is requests[2]
    line.discard(requests[0])
    line.unskip()
    assert drain(line) == ["t1", "t2"]


def test_removed_turns_leave_no_entries() -> None:
    """The entries for ageing do not grow with removed turns."""
    line = WaitQueue(ServiceCounters(), ageing_s=1e6)
    for number in range(1000):
        request = new_request(number)
        line.push(request, now=0.0)
        line.discard(request)
    assert len(line._ages) <= 66


@pytest.mark.parametrize("ageing_s", [0.0, -1.0])
def test_ageing_period_must_be_positive(ageing_s: float) -> None:
    """A class cannot be raised at once."""
    with pytest.raises(ValueError, match="ageing_s"):
        WaitQueue(ServiceCounters(), ageing_s=ageing_s)


def test_duplicate_queue_entry_is_refused() -> None:
    """A turn has one place in the queue."""
    line = WaitQueue(ServiceCounters(), ageing_s=1.0)
    request = new_request(1)
    line.push(request, now=0.0)
    with pytest.raises(ValueError, match="queued already"):
        line.push(request, now=0.0)


def test_preempted_turn_gets_no_position() -> None:
    """It has started: positions are published only for turns that never had a slot."""
    world = SchedulerHarness(slots=1, quantum_tokens=2, answer_tokens=30)
    first = world.add([1, 2])
    world.run(5)
    world.scheduler.positions()
    world.add([11, 12])
    world.add([21, 22])
    told: Counter[str] = Counter()
    for _ in range(20):
        world.step()
        told.update(turn_id for turn_id, _ in world.scheduler.positions())
    assert first.preempted
    assert told == {"t2": 2}


def test_positions_count_turns_waiting_for_kv() -> None:
    """A turn that waits for a shared prefill precedes those that wait for a slot."""
    world = SchedulerHarness(slots=2)
    world.add([*range(20), 1])
    world.add([*range(20), 2], turn="follower")
    world.add([77, 78], turn="second")
    world.add([87, 88], turn="third")
    world.step()
    assert world.scheduler.positions() == (("follower", 1), ("third", 2))


def test_position_updates_are_rate_limited() -> None:
    """The first in the queue gets every change; later ones when an eighth of the queue has left."""
    world = SchedulerHarness(slots=1, quantum_tokens=100, answer_tokens=1)
    told: Counter[str] = Counter()
    places: dict[str, int] = {}
    for number in range(400):
        world.add([number, number + 1], client=f"c{number}")
    for _ in range(8):
        changes = world.scheduler.positions()
        assert len(changes) <= HEAD_TURNS + 2 * 64 + 1
        places.update(changes)
    assert places == {f"t{number}": number + 1 for number in range(400)}
    for _ in range(200):
        world.step()
        changes = world.scheduler.positions()
        told.update(turn_id for turn_id, _ in changes)
        places.update(changes)
        assert len(changes) <= HEAD_TURNS + 2 * 64 + 1
    assert [places[f"t{number}"] for number in range(200, 200 + HEAD_TURNS)] == list(range(1, HEAD_TURNS + 1))
    # Far back a published position is off by at most an eighth.
    assert abs(places["t399"] - 200) <= 200 // 8 + 8
    assert told["t399"] <= 10


def test_turns_of_a_session_run_in_order() -> None:
    """Their class does not matter, because each builds on the one before."""
    world = SchedulerHarness(slots=3, answer_tokens=1)
    for number, priority in enumerate((2, 0, 1, 0)):
        world.add([number, 1], session="s", priority=priority)
    started: list[str] = []
    while world.scheduler.has_work:
        started += [admission.turn_id for admission in world.step().admissions]
    assert started == ["t0", "t1", "t2", "t3"]


def test_release_ends_thousands_of_turns() -> None:
    """Each ends once, and quickly."""
    world = SchedulerHarness(slots=1)
    for number in range(2000):
        world.add([number, 1], session="s")
    world.step()
    assert world.scheduler.release("s", now=world.now) == tuple(f"t{number}" for number in range(2000))
    world.scheduler.check_integrity()


def test_counters_are_dropped_with_the_last_turn() -> None:
    """Counters compare present clients only."""
    counters = ServiceCounters()
    request = new_request(1, client="a")
    counters.enter("a")
    counters.charge(request, 10)
    counters.raise_to("a", 5)
    assert (counters.served("a"), counters.most(["a", "b"]), len(counters)) == (10, 10, 1)
    counters.leave("a")
    assert (counters.served("a"), len(counters)) == (0, 0)
