"""A daemon with open sessions and no turns.

It measures CPU time and memory of an idle daemon. Each session has a connection of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.jobs import Hold, Holding, Release
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Point, Report
from benchmarks.scenario import OWN, Scenario, required

if TYPE_CHECKING:
    from benchmarks.daemon_process import DaemonUsage
    from benchmarks.stage import Bench

_SLOTS = 8
_SETTLING_S = 2.0
"""By then the sessions are open and idle; a shorter measurement waits less."""


@dataclass(frozen=True, slots=True)
class Idle:
    """CPU seconds a minute, and memory."""

    front_s_per_minute: float
    engine_s_per_minute: float
    front_rss_bytes: int
    engine_rss_bytes: int

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        both = self.front_s_per_minute + self.engine_s_per_minute
        return (
            Metric("CPU", "s/min", both, "lower"),
            Metric("CPU front", "s/min", self.front_s_per_minute, "lower"),
            Metric("CPU engine", "s/min", self.engine_s_per_minute, "lower"),
            Metric("RSS front", "MB", self.front_rss_bytes / 10**6),
            Metric("RSS engine", "MB", self.engine_rss_bytes / 10**6),
        )


def read(before: DaemonUsage, after: DaemonUsage, *, duration_s: float) -> Idle:
    """Return the daemon's usage in ``duration_s`` seconds, scaled to a minute."""
    return Idle(
        front_s_per_minute=(after.front.cpu_s - before.front.cpu_s) * 60 / duration_s,
        engine_s_per_minute=(after.engine.cpu_s - before.engine.cpu_s) * 60 / duration_s,
        front_rss_bytes=after.front.rss_bytes,
        engine_rss_bytes=after.engine.rss_bytes,
    )


async def run(bench: Bench) -> Report:
    """Open the sessions, then read the daemon's CPU time before and after each idle interval."""
    sessions, duration_s = required(bench.options.sessions), required(bench.options.duration_s)
    async with bench.stage(bench.settings(slots=_SLOTS, n_ctx=0), points=1) as stage:
        daemon = stage.daemon
        await bench.generator.do(Hold(target=daemon.spec, connections=sessions, sessions_each=1), Holding)
        await asyncio.sleep(min(_SETTLING_S, duration_s))
        found = []
        for repetition in range(bench.repeat):
            with bench.run(f"{duration_s:.0f} s of silence ({repetition + 1} of {bench.repeat})"):
                before = daemon.usage()
                await asyncio.sleep(duration_s)
                found.append(read(before, daemon.usage(), duration_s=duration_s).metrics())
        await bench.generator.do(Release(), Holding)
        point = Point((Parameter("sessions", sessions),), (tuple(found),))
        return Report(SCENARIO.name, stage.sides, (point,))


SCENARIO = Scenario(
    name="idle",
    summary="CPU seconds a minute with open sessions and no turns",
    run=run,
    defaults=Options(sessions=100, duration_s=60.0, repeat=1),
    takes=OWN | {"sessions", "duration_s"},
)
