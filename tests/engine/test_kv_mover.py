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
    """A mover with its backend and store."""

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
        """Return a time that advances by a second with each call."""
        self.now += 1
        return self.now

    def fill(self, **slots: list[int]) -> None:
        """Fill slots with tokens: ``fill(s0=[1, 2])``."""
        for name, tokens in slots.items():
            self.backend.decode([Chunk(int(name[1:]), 0, tokens, sample=False)])

    def run(self, *moves: KvMove) -> StepOutcome:
        """Execute the moves; the store stays consistent."""
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
    """Return an offload of a slot's ``tokens``."""
    return ParkSlot(slot, key, scope, len(tokens), tokens, True)


def test_offloaded_kv_can_be_restored_into_another_slot(bench: Bench) -> None:
    """The slot keeps its content, the other one gets it, and the time is measured."""
    bench.fill(s0=[1, 2, 3], s1=[9])
    moved = bench.run(park(0, 1, 2, 3), RestoreSlot(1, "s", 3, pack_tokens([1, 2, 3]), "t"), TruncateSlot(1, 2, "t"))
    assert (bench.held(0), bench.held(1)) == ([1, 2, 3], [1, 2])
    assert (moved.n_parked, moved.move_times) == (1, [MoveTime("park", 1.0), MoveTime("restore", 1.0)])
    assert moved.moves_s == 2.0
    assert bench.kv.usage.sessions == 1


def test_moves_are_reported_with_their_turn(bench: Bench) -> None:
    """Stages have start, end and size; offloading an idle session counts for no turn."""
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


def test_failed_offload_is_not_an_error(bench: Bench) -> None:
    """The slot is empty or cannot be saved; both keep their content."""
    bench.fill(s0=[1, 2])
    bench.backend.refuse = {"save"}
    assert bench.run(park(0, 1, 2), park(1)).n_parked == 0
    assert bench.held(0) == [1, 2]
    assert bench.kv.usage.sessions == 0


def test_missing_sequence_leaves_an_empty_slot(bench: Bench) -> None:
    """No tokens of the former owner stay, and the following truncation is skipped."""
    bench.fill(s0=[7, 7, 7])
    moved = bench.run(RestoreSlot(0, "s", 3, b"", "t"), TruncateSlot(0, 2, "t"))
    assert bench.held(0) == []
    assert moved.emptied == {"t"}


def test_sequence_that_cannot_be_restored_is_dropped(bench: Bench) -> None:
    """The turn prefills its tokens again, once."""
    bench.fill(s0=[1, 2], s1=[9])
    bench.backend.refuse = {"restore"}
    assert bench.run(park(0, 1, 2), RestoreSlot(1, "s", 2, pack_tokens([1, 2]), "t")).emptied == {"t"}
    assert bench.held(1) == []
    assert bench.kv.usage.sessions == 0
    assert bench.kv.find("ada", [1, 2]) is None


def test_failed_copy_empties_its_target(bench: Bench) -> None:
    """The source keeps its tokens."""
    bench.fill(s0=[1, 2, 3], s1=[9])
    assert bench.run(CopySlot(0, 1, 2, "t")).move_times == [MoveTime("copy", 1.0)]
    assert bench.held(1) == [1, 2]
    bench.backend.refuse = {"copy"}
    assert bench.run(CopySlot(0, 1, 3, "t")).emptied == {"t"}
    assert (bench.held(0), bench.held(1)) == ([1, 2, 3], [])


def test_emptied_slot_is_not_copied(bench: Bench) -> None:
    """Both turns prefill their tokens again; missing tokens are not truncated."""
    bench.fill(s0=[7, 7], s1=[9])
    moved = bench.run(RestoreSlot(0, "gone", 4, b"", "a"), CopySlot(0, 1, 3, "b"), TruncateSlot(0, 3, "a"))
    assert (bench.held(0), bench.held(1)) == ([], [])
    assert moved.emptied == {"a", "b"}


def test_refilled_slot_is_truncated(bench: Bench) -> None:
    """An earlier failure does not affect the slot's next owner."""
    bench.fill(s1=[1, 2, 3])
    moved = bench.run(RestoreSlot(0, "gone", 2, b"", "a"), CopySlot(1, 0, 3, "b"), TruncateSlot(0, 1, "b"))
    assert bench.held(0) == [1]
    assert moved.emptied == {"a"}


def test_emptied_slot_is_tracked_across_a_swap(bench: Bench) -> None:
    """The truncation of the slot that its turn moved to is skipped, the other one's is made."""
    bench.fill(s0=[7, 7], s2=[1, 2, 3])
    moved = bench.run(
        RestoreSlot(0, "gone", 4, b"", "a"), SwapSlots(0, 2, "a", "b"), TruncateSlot(2, 3, "a"), TruncateSlot(0, 2, "b")
    )
    assert (bench.held(0), bench.held(2)) == ([1, 2], [])
    assert moved.emptied == {"a"}


def test_idle_slot_that_cannot_be_truncated_is_reported(bench: Bench) -> None:
    """The report has its number after the swaps that follow."""
    bench.fill(s0=[1, 2], s3=[9])
    bench.backend.refuse = {"truncate"}
    moved = bench.run(TruncateSlot(0, 1, None), SwapSlots(3, 0, "t", None))
    assert moved.wiped == {3}
    assert bench.held(0) == [9]


@pytest.mark.parametrize("turn_id", ["t", None])
def test_truncation_to_zero_cannot_fail(bench: Bench, turn_id: str | None) -> None:
    """The slot is as planned, for every way in which the backend may do it."""
    bench.fill(s0=[1, 2])
    bench.backend.refuse = {"truncate"}
    assert bench.run(TruncateSlot(0, 0, turn_id)) == StepOutcome()


def test_failed_swap_empties_both_slots(bench: Bench) -> None:
    """The turn is lost, the idle slot reported, later moves in both are skipped, and neither is offloaded."""
    bench.fill(s0=[1, 2], s1=[3, 4])
    bench.backend.refuse = {"swap"}
    moved = bench.run(SwapSlots(0, 1, "t", None), TruncateSlot(1, 1, "t"), park(0, 3, 4))
    assert (moved.lost, moved.wiped, moved.n_parked) == ({"t"}, {0}, 0)
    assert (bench.held(0), bench.held(1)) == ([], [])
    assert bench.log == ["slots 0 and 1 could not be swapped: planned"]


def test_entries_of_the_plan_are_not_evicted(tmp_path: Path) -> None:
    """With room for one entry, the one the plan needs stays and the other is not offloaded."""
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
    """A slot emptied in one step may be truncated in the next, when it has tokens again."""
    bench.run(RestoreSlot(0, "gone", 2, b"", "a"))
    bench.fill(s0=[1, 2])
    assert bench.run(TruncateSlot(0, 1, "a")) == StepOutcome()
    assert bench.held(0) == [1]
