"""What ``benchmarks.cluster.frames`` measures; it imports nothing of the extra ``cluster``."""

from __future__ import annotations

from typing import Final

import msgspec

MODULE: Final = "benchmarks.cluster.frames"
TOKENS_PER_FRAME: Final = 8
COPY_MIB_PER_S: Final = (256, 32)
"""Limits of model file copies beside which frames are received; the first is the default of the daemon."""


class FrameTimes(msgspec.Struct, frozen=True):
    """Microseconds that frames took from engine to front, and CPU microseconds of the front for each."""

    p50_us: float
    p99_us: float
    cpu_us: float


class FrameComparison(msgspec.Struct, frozen=True):
    """One repetition with both engines, and with the hosted one beside a copy at each of ``COPY_MIB_PER_S``."""

    hosted: FrameTimes
    local: FrameTimes
    beside_copies: tuple[FrameTimes, ...]
    copied_mib_per_s: tuple[float, ...]
    """What was copied meanwhile."""
