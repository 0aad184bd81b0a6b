"""The cost of storing events before they are published.

Two daemons, of which only one stores sessions, get the same load in turn. First the echo backend runs short turns at no
cost, so that commits limit the turns a second. Then closed loops as in `throughput`: with the echo backend at a fixed
time for each decode, and with the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks import timeline
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required
from benchmarks.scenarios import throughput

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.daemon_process import DaemonSettings
    from benchmarks.results import Point, Result
    from benchmarks.stage import Bench, Measured
    from benchmarks.target import TargetSpec

_UNSTORED: Final = "without store"
_ECHO_DELAY_MS: Final = 10
_SHORT_PROMPT_TOKENS: Final = 16
_SHORT_ANSWER_TOKENS: Final = 4
_TURNS_EACH: Final = 16
"""Turns of a conversation before it is closed, so that opening one costs little and histories stay short."""


@dataclass(frozen=True, slots=True)
class Commits:
    """Short turns: their rate, their duration, and the front's CPU for each."""

    turns_s: float
    turn_ms: tuple[float, ...]
    front_ms_per_turn: float
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("turns", "/s", self.turns_s, "higher"),
            *percentile_metrics("turn", "ms", self.turn_ms),
            Metric("front CPU a turn", "ms", self.front_ms_per_turn, "lower"),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> Commits:
    """Return the figures of a closed loop of short turns without its warm-up."""
    clients = measured.answer.clients
    window = timeline.busy_window(clients, warm_up_turns=throughput.WARM_UP_TURNS)
    turns = [turn for turns in clients for turn in turns]
    ended = [turn for turn in turns if window.start_s < turn.ended_s <= window.end_s]
    assert measured.before is not None and measured.after is not None, "the scenario takes no --url"  # noqa: PT018
    front_s = measured.after.front.cpu_s - measured.before.front.cpu_s
    return Commits(
        turns_s=len(ended) / window.length_s,
        turn_ms=tuple((turn.ended_s - turn.started_s) * 1000 for turn in ended),
        front_ms_per_turn=front_s * 1000 / len(turns),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients: short turns, then closed loops on the echo backend and on the model."""
    options = bench.options
    clients, duration_s = required(options.clients), required(options.duration_s)
    settings = throughput.settings(bench)
    echo = replace(settings, backend="echo", model=None)
    short_tokens = _TURNS_EACH * (_SHORT_PROMPT_TOKENS + _SHORT_ANSWER_TOKENS)
    loop = partial(ClosedLoop, prompt_tokens=one_prompt_length(options), max_tokens=required(options.max_tokens))
    commits = partial(
        ClosedLoop, prompt_tokens=_SHORT_PROMPT_TOKENS, max_tokens=_SHORT_ANSWER_TOKENS, turns_each=_TURNS_EACH
    )
    loads = [
        _Load(replace(echo, n_ctx=max(settings.n_ctx, context_tokens(short_tokens))), commits, read),
        _Load(replace(echo, echo_delay_ms=_ECHO_DELAY_MS), loop, throughput.read),
    ]
    if settings.backend == "llama":
        loads.append(_Load(settings, loop, throughput.read))
    points: list[Point] = []
    for load in loads:
        unstored = {_UNSTORED: replace(load.settings, store=False)}
        async with bench.stage(load.settings, points=len(clients), beside=unstored) as stage:
            for n_clients in clients:
                await stage.measure(
                    *load.parameters,
                    Parameter("clients", n_clients),
                    job=partial(_stored, load.job, clients=n_clients, duration_s=duration_s),
                    answer=Turns,
                    read=load.read,
                )
            points += stage.points
    return Report(SCENARIO.name, stage.sides, tuple(points))


@dataclass(frozen=True, slots=True)
class _Load:
    """Measurements of daemons with these settings."""

    settings: DaemonSettings
    job: Callable[..., ClosedLoop]
    read: Callable[[Measured[Turns]], Result]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What distinguishes its points from those of the model."""
        if self.settings.backend == "llama":
            return ()
        return (Parameter("ms a decode of the echo backend", self.settings.echo_delay_ms),)


def _stored(job: Callable[..., ClosedLoop], *, target: TargetSpec, **fields: Any) -> ClosedLoop:
    """Return the job with stored conversations, if the daemon stores any."""
    return job(target=replace(target, stored=True), **fields)


SCENARIO = Scenario(
    name="store",
    summary="turns committed a second, and the cost of storing sessions",
    run=run,
    defaults=Options(clients=(8,), prompt_tokens=(64,), max_tokens=64, duration_s=10.0, repeat=5),
    takes=OWN | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
)
