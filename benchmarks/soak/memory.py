"""How the memory of processes grows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of one process at a moment, in seconds of any clock that only rises."""

    at_s: float
    pid: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The trend in MiB a minute, and the peak above the first sample, in MiB."""

    mib_per_min: float
    most_mib: float


def growth(samples: Sequence[Sample], *, warm_up_s: float) -> Growth | None:
    """Return the growth of memory after the warm-up of each process; ``None`` if there are not two samples of it.

    Of several processes, one after the other, the worst of each number counts.
    """
    found = []
    for _, group in groupby(samples, key=lambda sample: sample.pid):
        life = list(group)
        warm = [sample for sample in life if sample.at_s >= life[0].at_s + warm_up_s]
        if len(warm) > 1:
            most = max(sample.rss_bytes for sample in warm) - warm[0].rss_bytes
            found.append(Growth(_slope(warm) * 60 / _MIB, most / _MIB))
    if not found:
        return None
    return Growth(max(each.mib_per_min for each in found), max(each.most_mib for each in found))


def _slope(samples: Sequence[Sample]) -> float:
    """Return the slope of the line through the samples with the least squares, in bytes a second."""
    middle_s = sum(sample.at_s for sample in samples) / len(samples)
    spread = sum((sample.at_s - middle_s) ** 2 for sample in samples)
    rise = sum((sample.at_s - middle_s) * sample.rss_bytes for sample in samples)
    return rise / spread if spread else 0.0
