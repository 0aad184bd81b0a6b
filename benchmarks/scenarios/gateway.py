"""The front alone: the echo backend generates tokens at no cost, so the rest is the work between it and a client.

It measures the cost of a frame in the process shared by all clients, and the cost of an idle connection. The front's
CPU includes all its work for a turn: request, session, acknowledgment and end, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Hold, Holding, Release, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Point, Report
from benchmarks.scenario import Scenario, required
from benchmarks.scenarios.throughput import WARM_UP_TURNS, closed_loops, settings

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured, Stage

_FIRST_CONNECTIONS = 100
"""Opened before memory is read, so that what is allocated only once does not count."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The cost of frames."""

    frames_s: float
    tokens_per_frame: float
    front_us_per_frame: float
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("token frames", "/s", self.frames_s, "higher"),
            Metric("tokens a frame", "", self.tokens_per_frame),
            Metric("front CPU a frame", "µs", self.front_us_per_frame, "lower"),
            *self.cpu,
        )


@dataclass(frozen=True, slots=True)
class IdleConnections:
    """The cost of idle connections."""

    rss_per_connection_bytes: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (Metric("front RSS a connection", "KB", self.rss_per_connection_bytes / 1000, "lower"),)


def read(measured: Measured[Turns]) -> Gateway:
    """Return the cost of a closed loop's frames: the rate of the busy window, and the CPU of the whole run."""
    assert measured.before is not None and measured.after is not None, "the daemon is our own"  # noqa: PT018
    clients = measured.answer.clients
    window = timeline.busy_window(clients, warm_up_turns=WARM_UP_TURNS)
    turns = [turn for turns in clients for turn in turns]
    frames = sum(len(turn.token_times_s) for turn in turns)
    front_s = measured.after.front.cpu_s - measured.before.front.cpu_s
    return Gateway(
        frames_s=timeline.pieces_in(turns, window) / window.length_s,
        tokens_per_frame=sum(turn.tokens for turn in turns) / frames,
        front_us_per_frame=front_s / frames * 1e6,
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure idle connections first, while the front's memory is fresh, then the frames of each number of clients."""
    options = bench.options
    async with bench.stage(settings(bench), points=len(required(options.clients))) as stage:
        stage.points.append(await _idle_connections(bench, stage, required(options.connections)))
        await closed_loops(stage, options, read=read)
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


async def _idle_connections(bench: Bench, stage: Stage, connections: int) -> Point:
    bench.progress.expect(1)
    daemon, generator = stage.daemon, bench.generator
    first = min(_FIRST_CONNECTIONS, connections)
    with bench.run(f"{connections} idle connections"):
        await generator.do(Hold(target=daemon.spec, connections=first, sessions_each=0), Holding)
        before = daemon.usage().front.rss_bytes
        await generator.do(Hold(target=daemon.spec, connections=connections, sessions_each=0), Holding)
        grown_bytes = daemon.usage().front.rss_bytes - before
        await generator.do(Release(), Holding)
    result = IdleConnections(grown_bytes / connections)
    return Point((Parameter("idle connections", connections),), ((result.metrics(),),))


SCENARIO = Scenario(
    name="gateway",
    summary="echo backend: frames a second, CPU of the front, memory of an idle connection",
    run=run,
    defaults=Options(
        backend="echo",
        clients=(32,),
        prompt_tokens=(64,),
        max_tokens=256,
        duration_s=10.0,
        connections=5000,
        repeat=3,
    ),
    takes=frozenset({"clients", "prompt_tokens", "max_tokens", "duration_s", "connections", "repeat"}),
)
