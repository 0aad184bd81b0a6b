"""Idle slots are saved once, as spare copies, and are offloaded as usual when the slot is needed."""

from __future__ import annotations

import pytest

from inferencecenter.engine.scheduler.plan import ParkSlot
from tests.engine.scheduler.harness import GRID_TOKENS, Entry, FakeStore, Faults, SchedulerHarness


def idle(*prompts: list[int], durable: bool = True, store: FakeStore | None = None) -> SchedulerHarness:
    """Return a harness whose idle sessions ``s0``, ``s1`` … hold these prompts; the store is empty."""
    world = SchedulerHarness(slots=max(2, len(prompts)), answer_tokens=1, store=store)
    for prompt in prompts:
        world.add(prompt, durable=durable)
        world.run_to_end()
    return world


def saved(world: SchedulerHarness) -> list[str]:
    """Save all idle slots, and return their sessions."""
    keys: list[str] = []
    while (park := world.save()) is not None:
        keys.append(park.key)
    return keys


def parks(world: SchedulerHarness) -> list[ParkSlot]:
    """Run to the end, and return the offloaded entries."""
    found: list[ParkSlot] = []
    while world.scheduler.has_work:
        found += [move for move in world.step().moves if isinstance(move, ParkSlot)]
    return found


def test_each_slot_is_saved_once_the_last_used_first() -> None:
    """It is not saved again before the session's next turn; the slots keep their KV."""
    world = idle([1] * 8, [2] * 9)
    assert world.scheduler.checkpoints.pending
    assert saved(world) == ["s1", "s0"]
    assert {key: (entry.tokens, entry.redundant) for key, entry in world.store.entries.items()} == {
        "s0": ([1] * 8, True),
        "s1": ([2] * 9, True),
    }
    assert [len(slot.tokens) for slot in world.scheduler.slots] == [8, 9]
    assert not world.scheduler.checkpoints.pending
    world.add([1] * 12, session="s0")
    plan = world.step()
    assert not plan.moves
    assert plan.admissions[0].cached_tokens == 8
    world.run_to_end()
    assert saved(world) == ["s0"]
    assert world.store.entries["s0"].tokens == [1] * 12


@pytest.mark.parametrize(
    ("prompt", "durable", "store"),
    [
        pytest.param([1] * (GRID_TOKENS - 1), True, FakeStore(), id="too short to be worth it"),
        pytest.param([1] * 8, False, FakeStore(), id="not to be stored"),
        pytest.param([1] * 8, True, FakeStore(room_tokens=7), id="no room"),
        pytest.param([1] * 8, True, FakeStore(limit_tokens=0, room_tokens=0), id="nothing is parked"),
    ],
)
def test_idle_slots_that_are_not_saved(prompt: list[int], durable: bool, store: FakeStore) -> None:
    """They do not wake the loop."""
    world = idle(prompt, durable=durable, store=store)
    assert not world.scheduler.checkpoints.pending
    assert saved(world) == []


def test_save_is_retried_when_there_is_room() -> None:
    """It needs no other turn of the session."""
    world = idle([1] * 8, store=FakeStore(room_tokens=0))
    assert saved(world) == []
    world.store.room_tokens = 8
    assert saved(world) == ["s0"]


def test_offloaded_kv_is_not_offloaded_again() -> None:
    """Neither the session's own key nor that of an equal session of the client gets a second copy."""
    world = idle([1] * 8, [1] * 8)
    world.store.entries["s0"] = Entry("c", [(1, "c")] * 8, durable=True, ready=False)
    assert world.scheduler.checkpoints.pending
    assert saved(world) == []


def test_failed_save_is_not_retried() -> None:
    """An engine with a full disk would never be idle."""
    world = idle([1] * 8)
    assert world.save(fails=True) is not None
    assert saved(world) == []
    assert world.store.entries == {}


def test_evicted_copies_are_saved_again_on_request() -> None:
    """Existing copies are not."""
    world = idle([1] * 8, [2] * 8)
    saved(world)
    del world.store.entries["s0"]
    assert saved(world) == []
    world.scheduler.checkpoints.rescan()
    assert saved(world) == ["s0"]


def test_taken_slot_promotes_its_copy() -> None:
    """The copy becomes a permanent entry under the same key; nothing else is written for it."""
    world = idle([1] * 8, [2] * 8)
    saved(world)
    world.add([3] * 8)
    assert [(park.key, park.redundant) for park in parks(world)] == [("s0", False)]
    assert not world.store.entries["s0"].redundant
    world.add([1] * 12, session="s0")
    assert [park.key for park in parks(world)] == ["s1"]
    assert world.requests["t3"].cached_tokens == 8


def test_stop_promotes_saved_copies() -> None:
    """A spare copy, which is evicted first, would not be enough to resume from."""
    world = idle([1] * 8, [2] * 8)
    saved(world)
    assert [(park.key, park.redundant) for park in world.scheduler.suspend(now=world.now, park_all=False)] == [
        ("s0", False),
        ("s1", False),
    ]


def test_fork_reuses_the_copy_or_the_slot() -> None:
    """Either has the whole shared prefix."""
    world = idle([1] * 8)
    saved(world)
    fork = world.add([*[1] * 8, 2, 2, 2, 2], session="fork")
    world.run_to_end()
    assert fork.cached_tokens == 8
    last = world.add([*[1] * 8, 3, 3, 3, 3], session="other")
    world.step(Faults(restore=True))
    world.run_to_end()
    assert last.cached_tokens in (0, 8)
