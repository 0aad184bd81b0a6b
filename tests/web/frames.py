"""Script time per frame of a tab, from Chromium's trace."""

from __future__ import annotations

import bisect
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_FRAME: Final = "FireAnimationFrame"
_SCRIPTS: Final = frozenset({_FRAME, "EvaluateScript", "EventDispatch", "FunctionCall", "RunMicrotasks", "TimerFire"})
CATEGORIES: Final = ["devtools.timeline"]


def script_ms(trace: bytes) -> list[float]:
    """Return the CPU milliseconds of script between animation frames of the busiest tab, in ascending order."""
    events = json.loads(trace)["traceEvents"]
    threads = Counter(_thread(event) for event in events if event["name"] == _FRAME)
    ((thread, _),) = threads.most_common(1)
    own = sorted(
        (each for each in events if _thread(each) == thread and each["ph"] == "X"), key=lambda each: each["ts"]
    )
    starts = [event["ts"] for event in own if event["name"] == _FRAME]
    spent: Counter[int] = Counter()
    for event in _outermost(event for event in own if event["name"] in _SCRIPTS):
        spent[bisect.bisect(starts, event["ts"])] += event.get("tdur", event["dur"])
    return sorted(spent[frame] / 1000 for frame in range(len(starts) + 1))


def _outermost(events: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Drop nested events; all are in the order of their start."""
    end = 0
    for event in events:
        if event["ts"] >= end:
            end = event["ts"] + event["dur"]
            yield event


def _thread(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]
