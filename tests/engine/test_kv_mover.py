"""Moving KV, with faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.backend import Chunk
from inferencecenter.engine.executor import KvMover
from inferencecenter.engine.scheduler.plan import (
    CopySlot,
    KvMove,
    ParkSlot,
    RestoreSlot,
    StepOutcome,
    SwapSlots,
    TruncateSlot,
)
from inferencecenter.ipc.messages import MoveTime, pack_tokens
from tests.engine.faulty_echo import FaultyEcho
from tests.engine.parked import open_store

if TYPE_CHECKING:
    from pathlib import Path


class Bench:
    """A mover and what it works on."""

    def __init__(self, path: Path) -> None:
        self.backend = FaultyEcho(slots=4, n_ctx=64)
        self.log: list[str] = []
        self.kv = open_store(self.backend, path)
        self.now = 0.0
        self.mover = KvMover(
            self.backend,
            self.kv,
            clock=self.clock,
            progressed=lambda: None,
            on_log=lambda level, text: self.log.append(text),
        )

    def clock(self) -> float:
        """Return a time that moves by a second each time it is read."""
        self.now += 1
        return self.now

    def fill(self, **slots: list[int]) -> None:
        """Let slots hold tokens: ``fill(s0=[1, 2])``."""
        for name, tokens in slots.items():
            self.backend.decode([Chunk(int(name[1:]), 0, tokens, sample=False)])

    def run(self, *moves: KvMove) -> StepOutcome:
        """Make the moves; the store stays in order."""
        moved = self.mover.run(moves)
        self.kv.check_integrity()
        return moved

    def held(self, slot: int) -> list[int]:
        """Return what a slot holds."""
        return list(self.backend.held(slot))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A fresh one."""
    return Bench(tmp_path)


def park(slot: int, *tokens: int, key: str = "s", scope: str = "ada") -> ParkSlot:
    """Return the parking of ``tokens`` that a slot holds."""
    return ParkSlot(slot, key, scope, len(tokens), tokens, True)


def test_offloaded_kv_can_be_restored_into_another_slot(bench: Bench) -> None:
    """The slot keeps its content, the other one gets it, and what that took is measured."""
    bench.fill(s0=[1, 2, 3], s1=[9])
    moved = bench.run(park(0, 1, 2, 3), RestoreSlot(1, "s", 3, pack_tokens([1, 2, 3]), "t"), TruncateSlot(1, 2, "t"))
    assert (bench.held(0), bench.held(1)) == ([1, 2, 3], [1, 2])
    assert (moved.n_parked, moved.move_times) == (1, [MoveTime("park", 1.0), MoveTime("restore", 1.0)])
    assert moved.moves_s == 2.0
    assert bench.kv.sessions == 1


def test_moves_are_reported_with_their_turn(bench: Bench) -> None:
    """Stages have start, end and size; parking an idle session counts for no turn."""
    bench.fill(s0=[1, 2, 3], s1=[9])
    moves = (
        replace(park(0, 1, 2, 3), turn_id="a"),
        RestoreSlot(1, "s", 3, pack_tokens([1, 2, 3]), "t"),
        park(1, 1, 2, 3),
    )
    stages = dict(bench.run(*moves).stages)
    assert {turn_id: (stage.name, stage.tokens) for turn_id, stage in stages.items()} == {
        "a": ("park", 3),
        "t": ("restore", 3),
    }
    assert stages["a"].began_s < stages["a"].ended_s < stages["t"].began_s < stages["t"].ended_s


def test_failed_offload_is_no_error(bench: Bench) -> None:
    """Neither an empty slot nor one that cannot be saved; both stay as they are."""
    bench.fill(s0=[1, 2])
    bench.backend.refuse = {"save"}
    assert bench.run(park(0, 1, 2), park(1)).n_parked == 0
    assert bench.held(0) == [1, 2]
    assert bench.kv.sessions == 0


def test_missing_sequence_leaves_an_empty_slot(bench: Bench) -> None:
    """Nothing of the slot's former tenant stays, and the cut that follows is left out."""
    bench.fill(s0=[7, 7, 7])
    moved = bench.run(RestoreSlot(0, "s", 3, b"", "t"), TruncateSlot(0, 2, "t"))
    assert bench.held(0) == []
    assert moved.emptied == {"t"}


def test_a_sequence_that_cannot_be_restored_is_dropped(bench: Bench) -> None:
    """The turn reads its tokens again, once."""
    bench.fill(s0=[1, 2], s1=[9])
    bench.backend.refuse = {"restore"}
    assert bench.run(park(0, 1, 2), RestoreSlot(1, "s", 2, pack_tokens([1, 2]), "t")).emptied == {"t"}
    assert bench.held(1) == []
    assert bench.kv.sessions == 0
    assert bench.kv.find("ada", [1, 2]) is None


def test_a_copy_and_its_failure(bench: Bench) -> None:
    """A failed one empties its target and leaves its source."""
    bench.fill(s0=[1, 2, 3], s1=[9])
    assert bench.run(CopySlot(0, 1, 2, "t")).move_times == [MoveTime("copy", 1.0)]
    assert bench.held(1) == [1, 2]
    bench.backend.refuse = {"copy"}
    assert bench.run(CopySlot(0, 1, 3, "t")).emptied == {"t"}
    assert (bench.held(0), bench.held(1)) == ([1, 2, 3], [])


def test_nothing_is_copied_from_a_slot_that_was_emptied(bench: Bench) -> None:
    """Both turns read their tokens again; nothing that is not there is cut."""
    bench.fill(s0=[7, 7], s1=[9])
    moved = bench.run(RestoreSlot(0, "gone", 4, b"", "a"), CopySlot(0, 1, 3, "b"), TruncateSlot(0, 3, "a"))
    assert (bench.held(0), bench.held(1)) == ([], [])
    assert moved.emptied == {"a", "b"}


def test_a_slot_that_is_filled_after_it_was_emptied_is_cut(bench: Bench) -> None:
    """What failed before does not matter to the next tenant."""
    bench.fill(s1=[1, 2, 3])
    moved = bench.run(RestoreSlot(0, "gone", 2, b"", "a"), CopySlot(1, 0, 3, "b"), TruncateSlot(0, 1, "b"))
    assert bench.held(0) == [1]
    assert moved.emptied == {"a"}


def test_an_emptied_slot_is_known_after_an_exchange(bench: Bench) -> None:
    """The cut of the slot that its turn moved to is left out, the other one's is made."""
    bench.fill(s0=[7, 7], s2=[1, 2, 3])
    moved = bench.run(
        RestoreSlot(0, "gone", 4, b"", "a"), SwapSlots(0, 2, "a", "b"), TruncateSlot(2, 3, "a"), TruncateSlot(0, 2, "b")
    )
    assert (bench.held(0), bench.held(2)) == ([1, 2], [])
    assert moved.emptied == {"a"}


def test_an_idle_slot_that_cannot_be_cut_is_wiped(bench: Bench) -> None:
    """It is told by its number after the exchanges that follow."""
    bench.fill(s0=[1, 2], s3=[9])
    bench.backend.refuse = {"truncate"}
    moved = bench.run(TruncateSlot(0, 1, None), SwapSlots(3, 0, "t", None))
    assert moved.wiped == {3}
    assert bench.held(0) == [9]


@pytest.mark.parametrize("turn_id", ["t", None])
def test_a_cut_to_nothing_cannot_fail(bench: Bench, turn_id: str | None) -> None:
    """However the backend did it, the slot is as planned."""
    bench.fill(s0=[1, 2])
    bench.backend.refuse = {"truncate"}
    assert bench.run(TruncateSlot(0, 0, turn_id)) == StepOutcome()


def test_an_exchange_that_fails_empties_both_slots(bench: Bench) -> None:
    """The turn is lost, the idle session's slot wiped, what follows in them left out, and nothing of them is parked."""
    bench.fill(s0=[1, 2], s1=[3, 4])
    bench.backend.refuse = {"swap"}
    moved = bench.run(SwapSlots(0, 1, "t", None), TruncateSlot(1, 1, "t"), park(0, 3, 4))
    assert (moved.lost, moved.wiped, moved.n_parked) == ({"t"}, {0}, 0)
    assert (bench.held(0), bench.held(1)) == ([], [])
    assert bench.log == ["slots 0 and 1 could not be swapped: planned"]


def test_entries_of_the_plan_are_not_evicted(tmp_path: Path) -> None:
    """With room for one sequence, the one that is needed stays and the other is not parked."""
    bench = Bench(tmp_path)
    bench.kv = open_store(bench.backend, tmp_path / "small", ram_bytes=8192)
    bench.mover = KvMover(
        bench.backend, bench.kv, clock=bench.clock, progressed=lambda: None, on_log=lambda level, text: None
    )
    bench.fill(s0=[1, 2], s1=[8, 9])
    assert bench.run(park(0, 1, 2, key="old")).n_parked == 1
    moved = bench.run(park(1, 8, 9, key="new"), RestoreSlot(1, "old", 2, pack_tokens([1, 2]), "t"))
    assert (moved.n_parked, moved.emptied) == (0, set())
    assert bench.held(1) == [1, 2]


def test_each_plan_starts_clean(bench: Bench) -> None:
    """A slot emptied in one step may be cut in the next, when something is in it again."""
    bench.run(RestoreSlot(0, "gone", 2, b"", "a"))
    bench.fill(s0=[1, 2])
    assert bench.run(TruncateSlot(0, 1, "a")) == StepOutcome()
    assert bench.held(0) == [1]
