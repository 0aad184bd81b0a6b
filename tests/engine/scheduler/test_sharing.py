"""The sources of KV: slots, copies, offloaded entries, snapshots of system prompts, and shared prefill."""

from __future__ import annotations

import pytest

from inferencecenter.engine.scheduler.placement import prefix_key
from inferencecenter.engine.scheduler.plan import CopySlot, ParkSlot, RestoreSlot, StepPlan, TruncateSlot
from inferencecenter.engine.scheduler.state import RequestState
from tests.engine.scheduler.harness import GRID_TOKENS, Entry, FakeStore, Faults, SchedulerHarness, restore

SYSTEM = list(range(500, 514))


def park(world: SchedulerHarness, key: str, tokens: list[int], *, scope: str = "c", ready: bool = True) -> None:
    """Put an entry into the store."""
    world.store.entries[key] = Entry(scope, [(token, scope) for token in tokens], durable=True, ready=ready)


def moves_of(plan: StepPlan, turn_id: str) -> list[object]:
    """Return a plan's moves for a turn."""
    return [move for move in plan.moves if getattr(move, "turn_id", None) == turn_id]


def used_slots(*prompts: list[int], slots: int = 2, client: str = "c", can_truncate: bool = True) -> SchedulerHarness:
    """Return a harness whose idle sessions ``s0``, ``s1`` … hold these prompts."""
    world = SchedulerHarness(slots=slots, answer_tokens=1, can_truncate=can_truncate)
    for prompt in prompts:
        world.add(prompt, client=client)
        world.run_to_end()
    return world


def test_offloaded_session_is_restored() -> None:
    """It is restored into any free slot, and only new tokens are prefilled."""
    world = SchedulerHarness()
    park(world, "s", list(range(20)))
    world.add(list(range(24)), turn="t", session="s")
    plan = world.step()
    assert moves_of(plan, "t") == [restore(0, "s", range(20), "t")]
    assert plan.admissions[0].cached_tokens == 20
    assert plan.reasons[0] == "turn t to slot 0: empty, 20 of 24 tokens in KV"


def test_restored_kv_is_truncated_to_the_common_prefix() -> None:
    """An edited question keeps the tokens before it."""
    world = SchedulerHarness()
    park(world, "s", list(range(20)))
    world.add([*range(12), 99, 98], turn="t", session="s")
    assert moves_of(world.step(), "t") == [restore(0, "s", range(20), "t"), TruncateSlot(0, 12, "t")]


def test_last_token_is_never_restored() -> None:
    """A fully offloaded prompt decodes its last token for the logits of the answer."""
    world = SchedulerHarness()
    park(world, "s", list(range(20)))
    world.add(list(range(20)), turn="t", session="s")
    plan = world.step()
    assert moves_of(plan, "t")[-1] == TruncateSlot(0, 19, "t")
    assert plan.passes[0].rows[0].chunk.tokens == [19]


def test_fork_copies_its_siblings_kv() -> None:
    """A new session of the same client copies the common prefix from the other's slot, busy or idle."""
    world = SchedulerHarness(answer_tokens=40)
    world.add(list(range(16)), session="parent")
    world.run(6)
    world.add([*range(14), 99], turn="fork")
    plan = world.step()
    assert moves_of(plan, "fork") == [CopySlot(0, 1, 14, "fork")]
    assert plan.admissions[0].cached_tokens == 14


def test_fork_takes_over_an_idle_source_slot() -> None:
    """If the source's slot is the one to be replaced, its session is offloaded and nothing is copied."""
    world = used_slots(list(range(16)), slots=1)
    world.add([*range(12), 99], turn="fork")
    plan = world.step()
    assert plan.moves == (ParkSlot(0, "s0", "c", 16, tuple(range(16)), durable=True), TruncateSlot(0, 12, "fork"))
    assert world.store.entries.keys() == {"s0"}


def test_another_clients_slot_is_never_copied() -> None:
    """The same prompt of another client is prefilled from its first token."""
    world = used_slots(list(range(16)))
    world.add(list(range(16)), turn="t", client="other")
    plan = world.step()
    assert moves_of(plan, "t") == []
    assert plan.admissions[0].cached_tokens == 0


def test_another_clients_offloaded_kv_is_never_restored() -> None:
    """Public KV is shared by all clients."""
    world = SchedulerHarness(slots=2)
    park(world, "s", list(range(16)))
    park(world, "prefix-x", list(range(8)), scope="")
    world.add(list(range(16)), turn="t", client="other")
    plan = world.step()
    assert moves_of(plan, "t") == [restore(0, "prefix-x", range(8), "t")]


@pytest.mark.parametrize(("parked_tokens", "restored"), [(15, False), (16, True)])
def test_less_than_a_chunk_is_not_moved(parked_tokens: int, restored: bool) -> None:
    """The own slot is used unless offloaded KV saves at least a chunk more."""
    world = used_slots([*range(12), 99, 98])
    park(world, "s0", list(range(parked_tokens)))
    world.add([*range(20)], turn="t", session="s0")
    moves = moves_of(world.step(), "t")
    assert moves == ([restore(0, "s0", range(16), "t")] if restored else [TruncateSlot(0, 12, "t")])


def test_order_of_kv_sources() -> None:
    """Of about equally good sources the cheapest is used."""
    world = used_slots(list(range(16)))
    park(world, "old", list(range(16)))
    world.add([*range(16), 99], turn="t")
    assert moves_of(world.step(), "t") == [restore(1, "old", range(16), "t")]
    world = used_slots(list(range(16)))
    park(world, "old", list(range(17)), ready=False)
    world.add([*range(17), 99], turn="t")
    assert moves_of(world.step(), "t") == [CopySlot(0, 1, 16, "t")]


def test_failed_restore_is_recomputed() -> None:
    """The turn is prefilled from the first token, starting in the step after the failure."""
    world = SchedulerHarness()
    park(world, "s", list(range(20)))
    turn = world.add(list(range(22)), session="s")
    world.step(Faults(restore=True))
    assert (turn.kv_tokens, turn.cached_tokens, turn.state) == (0, 0, RequestState.PREFILL)
    world.run_to_end()


def test_turn_without_kv_is_prefilled_again() -> None:
    """It was about to decode; now its prompt and partial answer are prefilled, and it continues."""
    world = SchedulerHarness(slots=1, quantum_tokens=2, answer_tokens=10)
    first = world.add([1, 2, 3], turn="a")
    world.run(4)
    world.add([4, 5, 6], answer_tokens=1)
    world.run(1)
    assert first.preempted == 1
    plan = world.step(Faults(restore=True))
    assert moves_of(plan, "a")
    assert (first.state, first.kv_tokens) == (RequestState.PREFILL, 0)
    world.run_to_end()
    assert first.generated_tokens == 10


def test_replaced_slot_is_offloaded_once() -> None:
    """An idle session is not offloaded if its tokens already are, or are too few to matter."""
    world = used_slots(list(range(16)), slots=1)
    park(world, "s0", list(range(16)))
    world.add([99, 98, 97])
    assert not any(isinstance(move, ParkSlot) for move in world.step().moves)
    world.run_to_end()
    world.add([77, 76])
    assert world.step().moves[0] == TruncateSlot(0, 0, "t2")


def test_replaced_kv_is_not_restored() -> None:
    """An older entry of the replaced session matched, but its newer KV is offloaded under the same key first."""
    world = used_slots([*range(12), 77, 78, 79, 80], slots=1)
    park(world, "s0", list(range(16)))
    turn = world.add([*range(16), 99], turn="t")
    plan = world.step()
    assert [type(move) for move in plan.moves] == [ParkSlot, TruncateSlot]
    assert turn.cached_tokens == 12
    assert world.store.entries["s0"].tokens == [*range(12), 77, 78, 79, 80]


def test_disk_fetch_overlaps_with_other_turns() -> None:
    """The turn waits without a slot, its key is requested once, and the fetched KV is restored."""
    world = SchedulerHarness(slots=2)
    park(world, "s", list(range(20)), ready=False)
    turn = world.add(list(range(24)), turn="t", session="s")
    other = world.add([1, 2, 3])
    plan = world.step()
    assert plan.fetches == ("s",)
    assert (turn.state, other.slot) == (RequestState.RESTORING, 0)
    assert world.step().fetches == ()
    assert world.scheduler.waiting == 1
    world.finish_fetches()
    assert moves_of(world.step(), "t") == [restore(1, "s", range(20), "t")]


def test_loop_sleeps_while_all_turns_wait_for_disk() -> None:
    """There is work, but nothing to plan until the fetch ends."""
    world = SchedulerHarness(slots=1)
    assert not world.scheduler.blocked
    park(world, "s", list(range(20)), ready=False)
    world.add(list(range(24)), session="s")
    assert not world.scheduler.blocked
    world.step()
    assert world.scheduler.blocked
    assert world.scheduler.has_work
    assert world.step() == StepPlan()
    world.add([1, 2, 3])
    assert not world.scheduler.blocked
    world.finish_fetches()
    world.run_to_end()


def test_fetch_is_shared() -> None:
    """Two turns with a common offloaded prefix request it once, and both continue."""
    world = SchedulerHarness(slots=2)
    park(world, "prefix-p", SYSTEM, ready=False)
    turns = [world.add([*SYSTEM, n], prefix_tokens=len(SYSTEM)) for n in range(2)]
    assert world.step().fetches == ("prefix-p",)
    assert [turn.state for turn in turns] == [RequestState.RESTORING] * 2
    world.finish_fetches()
    assert sum(isinstance(move, RestoreSlot) for move in world.step().moves) == 2


def test_unneeded_entries_are_not_fetched() -> None:
    """A fetch is cancelled once, when the last turn that waits for it is aborted; not if another turn needs it."""
    world = SchedulerHarness(slots=2)
    park(world, "prefix-p", SYSTEM, ready=False)
    for n in range(2):
        world.add([*SYSTEM, n], prefix_tokens=len(SYSTEM), turn=f"t{n}")
    world.step()
    world.abort("t0")
    assert world.scheduler.stale_fetches() == ()
    world.abort("t1")
    assert world.scheduler.stale_fetches() == ("prefix-p",)
    assert world.scheduler.stale_fetches() == ()
    world.add([*SYSTEM, 2], prefix_tokens=len(SYSTEM), turn="t2")
    assert world.step().fetches == ("prefix-p",)
    world.abort("t2")
    world.add([*SYSTEM, 3], prefix_tokens=len(SYSTEM), turn="t3")
    assert world.step().fetches == ("prefix-p",)
    assert world.scheduler.stale_fetches() == ()
    world.finish_fetches()
    world.run_to_end()


@pytest.mark.parametrize("vanishes", [True, False])
def test_failed_fetch_is_recomputed(vanishes: bool) -> None:
    """If the entry is gone, or the disk does not respond, the tokens are prefilled."""
    world = SchedulerHarness(slots=1)
    park(world, "s", list(range(20)), ready=False)
    turn = world.add(list(range(24)), session="s")
    world.step()
    if vanishes:
        world.store.entries.clear()
    assert 0 < world.run(20, until=lambda: turn.slot is not None) <= (1 if vanishes else 11)
    assert turn.cached_tokens == 0
    world.run_to_end()


def test_repeatedly_evicted_kv_is_recomputed() -> None:
    """A turn waits for the disk at most twice."""
    world = SchedulerHarness(slots=1)
    park(world, "s", list(range(20)), ready=False)
    turn = world.add(list(range(24)), session="s")
    fetches = 0
    while not turn.started:
        plan = world.step()
        fetches += len(plan.fetches)
        world.finish_fetches()
        world.scheduler._queue.advance(world.now)
        world.store.entries["s"].ready = False
        assert world.now < 9
    assert fetches == 2
    assert turn.cached_tokens == 0


@pytest.mark.parametrize("finds_room", [True, False])
def test_fetch_without_room_is_repeated(finds_room: bool) -> None:
    """It is repeated once there may be room; a second failure prefills the tokens. No timer is involved."""
    world = SchedulerHarness(slots=1)
    park(world, "s", list(range(20)), ready=False)
    turn = world.add(list(range(24)), session="s")
    assert world.step().fetches == ("s",)
    world.store.entries["s"].load_failed = True
    assert world.step().fetches == ("s",)
    world.store.entries["s"].load_failed = not finds_room
    if finds_room:
        assert world.step().fetches == ()
        world.finish_fetches()
    world.step()
    assert turn.cached_tokens == (20 if finds_room else 0)
    world.run_to_end()


def test_concurrent_fetches_are_limited() -> None:
    """The limit is the number of slots, because fetched entries need RAM until they are used."""
    world = SchedulerHarness(slots=2)
    for n in range(5):
        park(world, f"s{n}", [100 * n + i for i in range(20)], ready=False)
        world.add([100 * n + i for i in range(22)], session=f"s{n}")
    assert len(world.step().fetches) == 2
    assert world.scheduler.blocked
    assert world.step().fetches == ()
    world.abort("t0")
    assert not world.scheduler.blocked
    assert len(world.step().fetches) == 1
    world.finish_fetches()
    world.run_to_end()


@pytest.mark.parametrize("end", ["abort", "release"])
def test_turn_waiting_for_disk_can_end(end: str) -> None:
    """It leaves nothing behind."""
    world = SchedulerHarness(slots=1)
    park(world, "s", list(range(20)), ready=False)
    world.add(list(range(24)), turn="t", session="s")
    world.step()
    if end == "abort":
        world.abort("t")
    else:
        world.release("s")
    assert not world.scheduler.has_work
    world.scheduler.check_integrity()


def test_shared_prefix_is_prefilled_once() -> None:
    """Of four turns with one long system prompt one prefills it, and the others copy it."""
    world = SchedulerHarness(slots=4)
    turns = [world.add([*SYSTEM, 1000 + n, n], prefix_tokens=len(SYSTEM)) for n in range(4)]
    read = 0
    while any(turn.generated_tokens == 0 for turn in turns):
        plan = world.step()
        read += sum(len(row.chunk.tokens) for each in plan.passes if each.prefill for row in each.rows)
    assert read == len(SYSTEM) + 4 * 2
    assert [turn.cached_tokens for turn in turns] == [0, 14, 14, 14]


def test_prefix_waiters_do_not_block_other_turns() -> None:
    """A turn with another prompt starts meanwhile."""
    world = SchedulerHarness(slots=4)
    reader, follower = (world.add([*SYSTEM, n]) for n in range(2))
    other = world.add([1, 2])
    plan = world.step()
    assert (reader.slot is None, follower.slot, other.slot is None) == (False, None, False)
    assert "turn t1 waits for turn t0, which prefills the same prefix" in plan.reasons


def test_short_prefixes_are_not_waited_for() -> None:
    """Each turn prefills a short common prefix itself."""
    world = SchedulerHarness(slots=2)
    turns = [world.add([*SYSTEM[: 2 * GRID_TOKENS - 1], 10 * n, *range(20)]) for n in range(1, 3)]
    world.step()
    assert all(turn.slot is not None for turn in turns)


def test_prefix_waiter_prefills_when_its_leader_ends() -> None:
    """It waits only while the leader runs."""
    world = SchedulerHarness(slots=2)
    world.add([*SYSTEM, 1], turn="reader")
    follower = world.add([*SYSTEM, 2])
    world.step()
    world.abort("reader")
    world.step()
    assert follower.slot is not None
    assert follower.cached_tokens == GRID_TOKENS


def test_prefix_waiter_can_be_aborted() -> None:
    """A turn that waits for a leader is aborted like any other."""
    world = SchedulerHarness(slots=2)
    world.add([*SYSTEM, 1])
    world.add([*SYSTEM, 2], turn="follower")
    world.step()
    world.abort("follower")
    world.scheduler.check_integrity()
    world.run_to_end()


def test_higher_class_does_not_wait_for_a_lower_prefill() -> None:
    """A batch prompt may be prefilled late."""
    world = SchedulerHarness(slots=2)
    world.add([*SYSTEM, 1], priority=2)
    urgent = world.add([*SYSTEM, 2], priority=0)
    world.step()
    assert urgent.slot is not None


def test_public_system_prompt_is_shared_between_clients() -> None:
    """One turn prefills it and offloads a snapshot; the other waits and starts from that."""
    world = SchedulerHarness(slots=2)
    reader = world.add([*SYSTEM, 1, 2], client="a", prefix_tokens=len(SYSTEM), public=True)
    follower = world.add([*SYSTEM, 3, 4], turn="f", client="b", prefix_tokens=len(SYSTEM), public=True)
    plans = [world.step() for _ in range(5)]
    key = prefix_key("", SYSTEM)
    assert [len(row.chunk.tokens) for plan in plans[:4] for row in plan.passes[0].rows] == [4, 4, 4, 2]
    assert plans[4].moves[0] == ParkSlot(0, key, "", len(SYSTEM), tuple(SYSTEM), durable=True)
    assert reader.kv_tokens > len(SYSTEM)
    assert follower.slot is None
    assert moves_of(world.step(), "f") == [restore(1, key, SYSTEM, "f")]
    world.run_to_end()


def test_private_system_prompt_is_not_shared_between_clients() -> None:
    """Two clients with equal prompts prefill them separately, without waiting."""
    world = SchedulerHarness(slots=2)
    turns = [world.add([*SYSTEM, 1], client=client, prefix_tokens=len(SYSTEM)) for client in ("a", "b")]
    world.step()
    assert all(turn.slot is not None for turn in turns)
    world.run_to_end()
    assert not world.store.entries


def test_snapshot_is_offloaded_once() -> None:
    """The next turn finds it and offloads none."""
    world = SchedulerHarness(slots=1)
    for n in range(3):
        world.add([*SYSTEM, n], client=f"c{n}", prefix_tokens=len(SYSTEM), public=True)
        world.run_to_end()
    assert [key for key in world.store.entries if key.startswith("prefix-")] == [prefix_key("", SYSTEM)]


def test_model_without_truncation_starts_from_a_snapshot() -> None:
    """Its sequences cannot be cut, so another session's KV is useless, but a snapshot is not."""
    world = SchedulerHarness(slots=2, can_truncate=False)
    world.add([*SYSTEM, 1, 2], prefix_tokens=len(SYSTEM))
    world.run_to_end()
    assert prefix_key("c", SYSTEM) in world.store.entries
    world.add([*SYSTEM, 3, 4], turn="t", prefix_tokens=len(SYSTEM))
    assert moves_of(world.step(), "t") == [restore(1, prefix_key("c", SYSTEM), SYSTEM, "t")]


def test_model_without_truncation_finds_a_snapshot_behind_a_longer_match() -> None:
    """An offloaded session with a longer match would have to be cut."""
    world = SchedulerHarness(slots=2, can_truncate=False)
    park(world, "s", [*SYSTEM, 7, 8, 9])
    park(world, "prefix-p", SYSTEM)
    world.add([*SYSTEM, 7, 5], turn="t", prefix_tokens=len(SYSTEM))
    assert moves_of(world.step(), "t") == [restore(0, "prefix-p", SYSTEM, "t")]


def test_model_without_truncation_prefers_a_snapshot_to_an_uncertain_cut() -> None:
    """It prefers the cut if that keeps many more tokens than the snapshot."""
    for kept, source in ((4, RestoreSlot), (40, TruncateSlot)):
        world = SchedulerHarness(slots=1, can_truncate=False, answer_tokens=1)
        held = [*SYSTEM, *range(kept)]
        world.add(held, session="s", prefix_tokens=len(SYSTEM))
        world.run_to_end()
        world.add([*held[:-1], 77, 78], turn="t", session="s", prefix_tokens=len(SYSTEM))
        assert isinstance(moves_of(world.step(), "t")[0], source)


def test_chunk_boundaries_do_not_depend_on_offloaded_kv() -> None:
    """A public prompt is cut where its prefix ends, whether or not it needs a snapshot."""
    cells = []
    for is_parked in (False, True):
        world = SchedulerHarness(slots=1, store=FakeStore(limit_tokens=0 if is_parked else 64), answer_tokens=1)
        world.add([*SYSTEM, *range(8)], prefix_tokens=len(SYSTEM), public=True)
        chunks = []
        while world.scheduler.has_work:
            chunks += [row.chunk for each in world.step().passes for row in each.rows]
        cells.append([chunk.start for chunk in chunks])
    assert cells[0] == cells[1] == [0, 4, 8, 12, 14, 20]


def test_prefix_keys_differ_by_scope_and_tokens() -> None:
    """Equal prefixes have equal keys; another client or another token gives another key."""
    keys = {prefix_key(scope, tokens) for scope in ("", "a") for tokens in ([1, 2], [1, 3], [12])}
    assert len(keys) == 6
    assert all(key.startswith("prefix-") and len(key) == 7 + 64 for key in keys)
    assert prefix_key("a", (1, 2)) == prefix_key("a", [1, 2])


def test_turn_without_a_client_is_refused() -> None:
    """Its KV would be shared with all clients."""
    with pytest.raises(ValueError, match="needs a client id"):
        SchedulerHarness().add([1, 2], client="")
