"""How many examples the fuzzers try: a fixed number, the same each time, or FUZZ_TIMES as many, others each time."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

_TIMES: Final = int(os.environ.get("FUZZ_TIMES", "0"))


def examples(number: int) -> settings:
    """Return settings for so many examples; without FUZZ_TIMES a run fails only where the run before it would have."""
    return settings(
        max_examples=number * max(1, _TIMES),
        derandomize=not _TIMES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
