"""What ``benchmarks.cluster.frames`` measures; it imports nothing of the extra ``cluster``."""

from __future__ import annotations

from typing import Final

import msgspec

MODULE: Final = "benchmarks.cluster.frames"
TOKENS_PER_FRAME: Final = 8


class FrameTimes(msgspec.Struct, frozen=True):
    """Microseconds that frames took from engine to front, and CPU microseconds of the front for each."""

    p50_us: float
    p99_us: float
    cpu_us: float


class FrameComparison(msgspec.Struct, frozen=True):
    """One repetition with both engines."""

    hosted: FrameTimes
    local: FrameTimes
