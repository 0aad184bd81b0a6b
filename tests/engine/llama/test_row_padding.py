"""How many rows a decode has: which slots may lend one, which number is the fastest here, and when turns go apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.llama.row_padding import RowCounts, padding_slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Milliseconds by rows: of kernels that compute two and four rows at once, and of a model so small that rows are all.
TILES = {3: 17.0, 4: 11.7, 5: 18.8, 6: 14.2, 7: 20.7, 8: 17.0}
LINEAR = {3: 2.4, 4: 3.1, 5: 3.6, 6: 3.9, 7: 4.1, 8: 4.5}


@pytest.mark.parametrize(
    ("slots", "lengths", "padding"),
    [
        (range(1), [5] * 8, ()),
        (range(2), [5] * 8, ()),
        (range(3), [5] * 8, (3,)),
        (range(4), [5] * 8, ()),
        (range(5), [5] * 8, (5, 6, 7)),
        (range(5), [5] * 6, (5,)),
        (range(7), [5] * 7 + [0], (7,)),
        (range(8), [5] * 9, ()),
        (range(1, 8), [0] + [5] * 7, (0,)),
        (range(2, 8), [5] * 9, (8, 1)),
        (range(7), [5] * 7, ()),
        (range(7), [5] * 7 + [255], (7,)),
        (range(7), [5] * 7 + [256], ()),
        (range(7), [5] * 6 + [256] + [300], (7,)),
        (range(7), [399] * 7 + [400], ()),
        (range(1, 8), [5] * 8 + [256], (0,)),
        ([0, 1, 2, 3, 5], [5] * 8, ()),
    ],
)
def test_padding_fills_a_tile_with_adjacent_slots(
    slots: Sequence[int], lengths: list[int], padding: tuple[int, ...]
) -> None:
    """Free adjacent slots are added up to the next tile: such that need no more cells, and have room for a token."""
    assert padding_slots(slots, lengths, n_ctx=400) == padding


@pytest.mark.parametrize(
    ("times_ms", "n_turns", "n_rows"),
    [
        (TILES, 3, 4),
        (TILES, 4, 4),
        (TILES, 5, 6),
        (TILES, 6, 6),
        (TILES, 7, 8),
        (LINEAR, 3, 3),
        (LINEAR, 5, 5),
        (LINEAR, 6, 6),
        (LINEAR, 7, 7),
    ],
)
def test_decode_gets_the_fastest_number_of_rows(times_ms: Mapping[int, float], n_turns: int, n_rows: int) -> None:
    """The fastest number of rows is used once each number was measured."""
    assert _decodes(RowCounts(), times_ms, n_turns, count=20)[-1] == n_rows


def test_every_number_of_rows_is_measured_first() -> None:
    """Each number of rows is used three times, and then the fastest one."""
    assert _decodes(RowCounts(), TILES, 5, count=14) == [5, 5, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 6, 6]


def test_one_delayed_decode_does_not_decide() -> None:
    """Another program took the processor for a while."""
    counts = RowCounts()
    for n_rows in (7, 7, 8, 8):
        counts.observe(n_rows, TILES[n_rows])
    counts.observe(7, TILES[7])
    counts.observe(8, 900.0)
    assert counts.best(7, most=8) == 8


def test_measurements_are_repeated() -> None:
    """With longer contexts another number may be the fastest."""
    counts = RowCounts()
    assert _decodes(counts, TILES, 7, count=10)[-1] == 8
    assert _decodes(counts, LINEAR, 7, count=1000)[-1] == 7


def test_rows_without_slots_are_not_waited_for() -> None:
    """Five turns and one idle slot: five or six rows, although eight may be faster."""
    counts = RowCounts()
    for n_rows, time_ms in TILES.items():
        if n_rows < 7:
            for _ in range(3):
                counts.observe(n_rows, time_ms)
    assert counts.best(5, most=6) == 6
    assert counts.best(5, most=5) == 5


@pytest.mark.parametrize(
    ("times_ms", "n_turns", "most", "n_rows"),
    [
        ({1: 9.0, 2: 20.0}, 2, 2, 1),
        ({1: 9.0, 2: 18.2}, 2, 2, 2),
        ({1: 9.0, 2: 12.0}, 2, 2, 2),
        ({1: 4.7, 3: 17.0, 4: 11.7}, 3, 3, 1),
        ({1: 4.7, 3: 17.0, 4: 11.7}, 3, 4, 4),
        ({1: 1.0, 4: 11.7}, 4, 4, 4),
        ({1: 9.0}, 1, 1, 1),
    ],
)
def test_turns_are_decoded_apart_where_that_is_faster(
    times_ms: Mapping[int, float], n_turns: int, most: int, n_rows: int
) -> None:
    """It must save three percent, compared with the best number of rows; from four turns on it is not tried."""
    counts = RowCounts()
    for rows, time_ms in times_ms.items():
        for _ in range(3):
            counts.observe(rows, time_ms)
    assert counts.best(n_turns, most=most) == n_rows


def test_decodes_apart_are_measured_after_those_together() -> None:
    """Two turns decode three times together, then apart, until a row of its own was measured three times."""
    assert _decodes_of_two(RowCounts(), {1: 9.0, 2: 12.0}, count=7) == [2, 2, 2, 1, 1, 2, 2]


def test_decodes_apart_and_together_are_measured_again() -> None:
    """What took longer may be faster with longer contexts, or was delayed by another program."""
    counts = RowCounts()
    assert _decodes_of_two(counts, {1: 9.0, 2: 20.0}, count=10)[-1] == 1
    assert _decodes_of_two(counts, {1: 20.0, 2: 20.0}, count=1000)[-1] == 2
    assert _decodes_of_two(counts, {1: 9.0, 2: 20.0}, count=1000)[-1] == 1


def test_few_decodes_are_spent_on_measuring() -> None:
    """At most one of 64, however many numbers of rows there are."""
    used = _decodes(RowCounts(), TILES, 5, count=12 + 64 * 32)
    assert 0 < sum(n_rows != 6 for n_rows in used[12:]) <= 32


def test_asking_again_changes_nothing() -> None:
    """A step asks whether its turns go apart, and then for the padding."""
    counts = RowCounts()
    for _ in range(300):
        n_rows = counts.best(3, most=4)
        assert counts.best(3, most=4) == n_rows
        counts.observe(n_rows, 1.0 + n_rows)


def _decodes_of_two(counts: RowCounts, times_ms: Mapping[int, float], *, count: int) -> list[int]:
    """Return the numbers of rows for two turns, so many times in a row."""
    used = []
    for _ in range(count):
        used.append(counts.best(2, most=2))
        for n_rows in (1, 1) if used[-1] == 1 else (2,):
            counts.observe(n_rows, times_ms[n_rows])
    return used


def _decodes(counts: RowCounts, times_ms: Mapping[int, float], n_turns: int, *, count: int) -> list[int]:
    """Return the numbers of rows of so many decodes in a row."""
    used = []
    for _ in range(count):
        used.append(counts.best(n_turns, most=n_turns + -n_turns % 4))
        counts.observe(used[-1], times_ms.get(used[-1], 100.0))
    return used
