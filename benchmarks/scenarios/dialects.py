"""The same turns on the same daemon, through OpenAI's APIs and through our own protocol.

It measures the cost of the compatible APIs. Closed loops run as in `throughput`, first with the echo backend at a fixed
time for each decode, where the front has the most work, then with the model. All sides chat: each turn is a
conversation of its own that goes through the template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks import protocols
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report
from benchmarks.scenario import OWN, Scenario, one_prompt_length, required
from benchmarks.scenarios import throughput

if TYPE_CHECKING:
    from benchmarks.daemon_process import DaemonSettings
    from benchmarks.results import Point
    from benchmarks.stage import Bench, Measured

_PROTOCOLS: Final = {
    "HTTP": protocols.chat_completions,
    "WebSocket": protocols.websocket,
    "Responses": protocols.responses,
}
_ECHO_DELAY_MS: Final = 10


@dataclass(frozen=True, slots=True)
class ApiCost:
    """What a closed loop gave, and what each of its tokens cost the front."""

    loop: throughput.Throughput
    front_us_per_token: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (*self.loop.metrics(), Metric("front CPU a token", "µs", self.front_us_per_token, "lower"))


def read(measured: Measured[Turns]) -> ApiCost:
    """Return the figures of a closed loop: rates of the busy window, and the front's CPU of the whole run."""
    assert measured.before is not None and measured.after is not None, "the daemon is our own"  # noqa: PT018
    tokens = sum(turn.tokens for turns in measured.answer.clients for turn in turns)
    front_s = measured.after.front.cpu_s - measured.before.front.cpu_s
    return ApiCost(throughput.read(measured), front_s / tokens * 1e6)


async def run(bench: Bench) -> Report:
    """Measure each number of clients: on the echo backend, then on the model."""
    options = bench.options
    settings = throughput.settings(bench)
    loads = [replace(settings, backend="echo", model=None, echo_delay_ms=_ECHO_DELAY_MS)]
    if settings.backend == "llama":
        loads.append(settings)
    points: list[Point] = []
    for load in loads:
        async with bench.stage(load, points=len(required(options.clients)), protocols=_PROTOCOLS) as stage:
            for n_clients in required(options.clients):
                await stage.measure(
                    *_parameters(load),
                    Parameter("clients", n_clients),
                    job=partial(
                        ClosedLoop,
                        clients=n_clients,
                        prompt_tokens=one_prompt_length(options),
                        max_tokens=required(options.max_tokens),
                        duration_s=required(options.duration_s),
                    ),
                    answer=Turns,
                    read=read,
                )
            points += stage.points
    return Report(SCENARIO.name, stage.sides, tuple(points))


def _parameters(settings: DaemonSettings) -> tuple[Parameter, ...]:
    """Return what distinguishes the points of the echo backend from those of the model."""
    if settings.backend == "llama":
        return ()
    return (Parameter("ms a decode of the echo backend", settings.echo_delay_ms),)


SCENARIO = Scenario(
    name="dialects",
    summary="OpenAI's HTTP and Responses against our own protocol: tokens a second, CPU of the front",
    run=run,
    defaults=Options(clients=(8,), prompt_tokens=(64,), max_tokens=64, duration_s=10.0, repeat=5),
    takes=OWN | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
)
