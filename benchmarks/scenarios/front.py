"""What the daemon's own process costs for each engine, each session and each token.

The same clients run closed loops on one engine, on four and more, each daemon after the other: on more engines, a step
of each brings fewer tokens at once. Then engines are behind hosts, as on other machines. Echo engines make a step of
50 ms, so that the front is busy for a small part of the time, and its CPU time is not that of a saturated process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.daemon_process import start_daemon
from benchmarks.jobs import ClosedLoop, Hold, Holding, Release, Turns
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Point, Report
from benchmarks.scenario import Scenario, one_prompt_length, required
from benchmarks.scenarios import throughput
from benchmarks.stage import started

if TYPE_CHECKING:
    from benchmarks.daemon_process import DaemonSettings, DaemonUsage
    from benchmarks.results import Side
    from benchmarks.stage import Bench

LOCAL: Final = (1, 4, 16, 64)
HOSTED: Final = (1, 4, 16)
_FIRST_SESSIONS: Final = 100
_SESSIONS: Final = 800
"""With the first ones fewer than a daemon has by default (``sessions.max_sessions``)."""
_ECHO_DELAY_MS: Final = 50
_SETTLING_S: Final = 2.0
"""By then the engines are idle; a shorter measurement waits less."""


@dataclass(frozen=True, slots=True)
class FrontCost:
    """The front's work for idle engines and for tokens, and its memory."""

    idle_ms_s: float
    us_per_token: float
    tok_s: float
    rss_bytes: int

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("front CPU, no turns", "ms/s", self.idle_ms_s, "lower"),
            Metric("front CPU a token", "µs", self.us_per_token, "lower"),
            Metric("generation", "tok/s", self.tok_s),
            Metric("front RSS", "MB", self.rss_bytes / 10**6),
        )


def read(answer: Turns, *, quiet: DaemonUsage, before: DaemonUsage, after: DaemonUsage, duration_s: float) -> FrontCost:
    """Return the costs of a closed loop, and of ``duration_s`` without turns before it."""
    turns = [turn for turns in answer.clients for turn in turns]
    tokens = sum(turn.tokens for turn in turns)
    return FrontCost(
        idle_ms_s=(before.front.cpu_s - quiet.front.cpu_s) * 1000 / duration_s,
        us_per_token=(after.front.cpu_s - before.front.cpu_s) * 1e6 / tokens,
        tok_s=tokens / (max(turn.ended_s for turn in turns) - min(turn.started_s for turn in turns)),
        rss_bytes=before.front.rss_bytes,
    )


async def run(bench: Bench) -> Report:
    """Measure one daemon after the other."""
    given = required(bench.options.clients)
    if len(given) != 1:
        raise refused("clients", "this scenario takes one number")
    clients = given[0]
    counts = [(number, False) for number in LOCAL if number <= clients]
    counts += [(number, True) for number in HOSTED if number <= clients]
    bench.progress.expect(len(counts) * bench.repeat + 1)
    points: list[Point] = [await _sessions(bench)]
    for number, hosted in counts:
        base = replace(throughput.settings(bench), slots=-(-clients // number), echo_delay_ms=_ECHO_DELAY_MS)
        settings = replace(base, hosted=number) if hosted else replace(base, replicas=number)
        points.append(await _measured(bench, settings, Parameter(f"{'hosted' if hosted else 'local'} engines", number)))
    return Report(SCENARIO.name, (_side_of(points[0]),), tuple(points))


async def _sessions(bench: Bench) -> Point:
    """Open sessions of one connection on a fresh daemon; what is allocated only once is allocated by the first ones."""
    async with start_daemon(replace(throughput.settings(bench), slots=1)) as daemon:
        side = (await started(daemon)).side
        token = await daemon.new_token("sessions", max_sessions=_FIRST_SESSIONS + _SESSIONS)
        target = replace(daemon.spec, token=token)
        with bench.run(f"{_SESSIONS} open sessions"):
            await bench.generator.do(Hold(target=target, connections=1, sessions_each=_FIRST_SESSIONS), Holding)
            before = daemon.usage().front
            await bench.generator.do(Hold(target=target, connections=1, sessions_each=_SESSIONS), Holding)
            after = daemon.usage().front
            await bench.generator.do(Release(), Holding)
    metrics = (
        Metric("front RSS a session", "KB", (after.rss_bytes - before.rss_bytes) / _SESSIONS / 1000, "lower"),
        Metric("front CPU to open a session", "ms", (after.cpu_s - before.cpu_s) / _SESSIONS * 1000, "lower"),
    )
    return Point((Parameter("open sessions", _SESSIONS),), ((metrics,),), sides=(side,))


async def _measured(bench: Bench, settings: DaemonSettings, parameter: Parameter) -> Point:
    options = bench.options
    clients, duration_s = required(options.clients)[0], required(options.duration_s)
    found = []
    async with start_daemon(settings) as daemon:
        side = (await started(daemon)).side
        await asyncio.sleep(min(_SETTLING_S, duration_s))
        for repetition in range(bench.repeat):
            with bench.run(f"{parameter.value} {parameter.name} ({repetition + 1} of {bench.repeat})"):
                quiet = daemon.usage()
                await asyncio.sleep(duration_s)
                before = daemon.usage()
                loop = ClosedLoop(
                    target=daemon.spec,
                    clients=clients,
                    prompt_tokens=one_prompt_length(options),
                    max_tokens=required(options.max_tokens),
                    duration_s=duration_s,
                    first_seed=bench.next_seed(),
                )
                answer = await bench.generator.do(loop, Turns)
                costs = read(answer, quiet=quiet, before=before, after=daemon.usage(), duration_s=duration_s)
                found.append(costs.metrics())
    return Point((parameter,), (tuple(found),), sides=(side,))


def _side_of(point: Point) -> Side:
    assert point.sides is not None, "each daemon has one"
    return point.sides[0]


SCENARIO = Scenario(
    name="front",
    summary="the daemon's own CPU and memory for each engine, session and token",
    run=run,
    defaults=Options(
        backend="echo",
        clients=(64,),
        prompt_tokens=(64,),
        max_tokens=64,
        duration_s=5.0,
        repeat=3,
    ),
    takes=frozenset({"clients", "prompt_tokens", "max_tokens", "duration_s", "repeat"}),
)
