"""Example counts of the fuzzers: fixed and deterministic, or FUZZ_TIMES as many and random."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

_TIMES: Final = int(os.environ.get("FUZZ_TIMES", "0"))


def examples(number: int) -> settings:
    """Return settings for so many examples; without FUZZ_TIMES runs are deterministic."""
    return settings(
        max_examples=number * max(1, _TIMES),
        derandomize=not _TIMES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
