"""How many rows a decode of single tokens has: rows in idle slots are added, or turns decoded apart. Pure.

Kernels for quantized weights compute two, four or eight rows at once and the remainder one by one or in another pass
over the weights. Which counts of rows are fast depends on processor, type of the weights and size of the model: eight
rows may take two thirds of the time of seven, or an eighth more. So the time of each count is measured while turns
decode, and a decode gets the count that took least. The kernel for one row may be so much faster than the others that
two or three turns are decoded in less time one after the other. Invariant: added rows are never read, so what is
decoded depends on the number of rows by no more than rounding.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# The largest number of rows that a kernel computes at once.
_TILE_ROWS: Final = 4
# Fewer rows gain less than the measuring costs.
_FEWEST: Final = 3
# With more turns it was slower wherever measured: four rows take less than four times as long as one.
MOST_APART: Final = 3
# Of the time of one decode for all: saving less would not make up for sampling in several passes.
_GAIN_APART: Final = 0.97
# The least of so many times counts: another program may have delayed some of them.
_SAMPLES: Final = 3
# Contexts grow and shrink, so a measurement is repeated after so many decodes for each number of rows to choose from.
_REPEAT_AFTER: Final = 64
# llama.cpp computes attention over multiples of so many KV cells.
_CELLS: Final = 256


class RowCounts:
    """Learns how many rows a decode should have, from the times that decodes took."""

    def __init__(self) -> None:
        self._times_s: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._n_observed = 0

    def best(self, n_turns: int, *, most: int) -> int:
        """Return the number of rows for a decode of ``n_turns`` turns: the fastest from there to ``most``.

        1 stands for a decode of each turn, which up to ``MOST_APART`` turns may be faster. A number with too few or too
        old measurements comes first. The answer changes only with ``observe``.
        """
        counts = list(range(n_turns, most + 1))
        if 2 <= n_turns <= MOST_APART:
            counts.append(1)
        if len(counts) == 1:
            return n_turns
        if (unknown := next((count for count in counts if len(self._times(count)) < _SAMPLES), None)) is not None:
            return unknown
        oldest = min(counts, key=self._measured_at.__getitem__)
        if self._n_observed - self._measured_at[oldest] >= _REPEAT_AFTER * len(counts):
            return oldest
        return min(counts, key=lambda count: self._step_s(count, n_turns))

    def observe(self, n_rows: int, took_s: float) -> None:
        """Learn from a decode of single tokens, added rows included."""
        self._n_observed += 1
        self._times(n_rows).append(took_s)
        self._measured_at[n_rows] = self._n_observed

    def _step_s(self, count: int, n_turns: int) -> float:
        """Return the seconds for a token of each turn, increased if several decodes are needed."""
        least_s = min(self._times(count))
        return least_s if count >= n_turns else n_turns * least_s / _GAIN_APART

    def _times(self, count: int) -> deque[float]:
        return self._times_s.setdefault(count, deque(maxlen=_SAMPLES))


def padding_slots(slots: Sequence[int], lengths: Sequence[int], *, n_ctx: int) -> tuple[int, ...]:
    """Return the slots whose rows may be added to a decode of one token in each of ``slots``, in this order.

    They fill a tile of rows, as far as there are such slots: adjacent, because llama.cpp computes only consecutive ones
    together, not full, and with no more cells than the longest of ``slots``, which determines the cost of attention.
    ``lengths`` are those of all slots, in tokens, of which each holds ``n_ctx``.
    """
    if len(slots) < _FEWEST or slots[-1] - slots[0] >= len(slots):
        return ()
    most = min(n_ctx, _cells(max(lengths[slot] for slot in slots)))
    after = takewhile(lambda slot: lengths[slot] < most, range(slots[-1] + 1, len(lengths)))
    before = takewhile(lambda slot: lengths[slot] < most, range(slots[0] - 1, -1, -1))
    return tuple(islice(chain(after, before), -len(slots) % _TILE_ROWS))


def _cells(length: int) -> int:
    """Return the KV cells over which attention is computed for the token after ``length`` others."""
    return (length // _CELLS + 1) * _CELLS
