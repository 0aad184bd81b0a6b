"""Closed loop: N clients, each starting its next turn when the last one ends.

It measures the throughput of a busy server, and the delays of its streams. Tokens and delays count in the time in which
all clients have a turn running that is not their first: the first ones come all at once and have different lengths, so
that later turns start at different times, as those of users do.

Each number of clients has servers of its own with as many slots, unless ``--slots`` gives a number or ``--url`` a
daemon: a server with more slots than clients may scatter them, which ``sparse`` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, percentile_metrics
from benchmarks.scenario import COMPARABLE, Scenario, context_tokens, matched, one_prompt_length, required

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.daemon_process import DaemonSettings
    from benchmarks.results import Report, Result
    from benchmarks.stage import Bench, Measured, Stage

WARM_UP_TURNS = 1


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens a second of all clients together, and the delays of those ``turns`` that began meanwhile."""

    tok_s: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    turns: int
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("generation", "tok/s", self.tok_s, "higher"),
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            *percentile_metrics("ITL", "ms", self.itl_ms),
            Metric("turns", "", self.turns),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> Throughput:
    """Return the figures of a closed loop without its warm-up."""
    clients = measured.answer.clients
    window = timeline.busy_window(clients, warm_up_turns=WARM_UP_TURNS)
    every_turn = [turn for turns in clients for turn in turns]
    begun = [turn for turn in every_turn if window.start_s <= turn.started_s < window.end_s]
    return Throughput(
        tok_s=timeline.tokens_in(every_turn, window) / window.length_s,
        ttft_ms=tuple(timeline.ttft_ms(begun)),
        itl_ms=tuple(timeline.itl_inside_ms(every_turn, window)),
        turns=len(begun),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients."""
    return await matched(
        SCENARIO.name,
        bench,
        turn_tokens=turn_tokens(bench.options),
        measure=lambda stage, options: closed_loops(stage, options, read=read),
    )


def settings(bench: Bench) -> DaemonSettings:
    """Return our daemon's settings for closed loops: a slot for each of the most clients, and room for their turns."""
    options = bench.options
    return bench.settings(slots=max(required(options.clients)), n_ctx=context_tokens(turn_tokens(options)))


def turn_tokens(options: Options) -> int:
    """Return the tokens of a turn, prompt and answer together."""
    return one_prompt_length(options) + required(options.max_tokens)


async def closed_loops(stage: Stage, options: Options, *, read: Callable[[Measured[Turns]], Result]) -> None:
    """Measure a closed loop of each number of clients; ``read`` turns one into the scenario's result."""
    for n_clients in required(options.clients):
        await stage.measure(
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


SCENARIO = Scenario(
    name="throughput",
    summary="N clients, each starting its next turn when the last one ends",
    run=run,
    defaults=Options(clients=(1, 4, 8, 16, 32), prompt_tokens=(64,), max_tokens=64, duration_s=30.0, repeat=5),
    takes=COMPARABLE | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
    plots=True,
)
