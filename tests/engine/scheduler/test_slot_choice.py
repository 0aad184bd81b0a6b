"""The choice of a slot, and the swaps that keep busy ones consecutive."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.scheduler.state import SlotTable, SlotUse, choose_slot, compaction
from tests.engine.scheduler.harness import new_request


def table_of(*slots: str) -> SlotTable:
    """Return a table; ``a*`` is session a running, ``b`` session b idle, ``-`` empty; used in this order."""
    table = SlotTable(len(slots))
    for slot, text in zip(table, slots, strict=True):
        if text != "-":
            table.assign(slot, new_request(slot.index, session=text.rstrip("*")), keep_tokens=0)
            slot.tokens.append(1)
            if not text.endswith("*"):
                table.free(slot, now=float(slot.index))
    return table


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        (("-", "a", "-"), (1, "holds its session")),
        (("b", "c", "-"), (2, "empty")),
        (("-", "-", "b*", "-"), (1, "empty")),
        (("b*", "c", "d"), (1, "least recently used")),
        (("b*", "waits", "d"), (2, "least recently used")),
        (("b*", "waits", "c*"), (1, "least recently used")),
        (("b*", "c*"), None),
        (("a*", "-"), None),
    ],
)
def test_slot_selection(slots: tuple[str, ...], chosen: tuple[int, str] | None) -> None:
    """The session's own slot comes first, then an empty one beside busy slots, then the one that is idle longest."""
    choice = choose_slot(table_of(*slots), "a", waiting={"a", "waits"})
    assert (choice and (choice[0].index, choice[1])) == chosen


def runs_of(uses: list[SlotUse], *wanted: SlotUse) -> int:
    """Return the number of runs of slots with these uses."""
    return sum(1 for is_wanted, _ in groupby(uses, key=lambda use: use in wanted) if is_wanted)


@given(st.lists(st.sampled_from(SlotUse), min_size=1, max_size=10))
def test_swaps_make_busy_and_decoding_slots_consecutive(uses: list[SlotUse]) -> None:
    """Both are one run after a preemption, idle slots move no more than needed, and the pairs are ordered."""
    after = uses.copy()
    to_idle = 0
    for a, b in compaction(tuple(uses)):
        assert after[a] > after[b]
        to_idle += after[b] is SlotUse.IDLE
        after[a], after[b] = after[b], after[a]
    assert sorted(after) == sorted(uses)
    assert runs_of(after, SlotUse.PREFILL, SlotUse.DECODE) <= 1
    assert runs_of(after, SlotUse.DECODE) <= 1
    busy = [use > SlotUse.IDLE for use in uses]
    width = sum(busy)
    assert to_idle == min(width - sum(busy[start : start + width]) for start in range(len(busy) - width + 1))


@pytest.mark.parametrize(
    ("uses", "preemption"),
    [
        ("g-g--", ((2, 1),)),
        ("-gg", ()),
        ("grg", ((2, 1),)),
        ("rgg", ()),
        ("ggrgg", ((4, 2),)),
        ("rgrg", ((3, 0),)),
        ("g-rg", ((3, 1),)),
        ("grg-g", ((4, 3), (3, 1))),
    ],
)
def test_swap_cases(uses: str, preemption: tuple[tuple[int, int], ...]) -> None:
    """The lowest of equal runs is filled; slots in prefill go to the edges of those that decode."""
    assert (
        compaction(tuple({"-": SlotUse.IDLE, "r": SlotUse.PREFILL, "g": SlotUse.DECODE}[use] for use in uses))
        == preemption
    )
