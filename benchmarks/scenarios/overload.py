"""More users than slots, all at once.

It measures the time to first token when more turns than slots arrive at once, the throughput lost by sharing slots, the
pauses of streams while others hold their slot (the worst ITL), and the fairness among equal users. A server that queues
the later turns until the first end has no pauses, but its users are apart by the tokens of a whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import COMPARABLE, WARM_UP, Scenario, context_tokens, one_prompt_length, required

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured


@dataclass(frozen=True, slots=True)
class Overload:
    """TTFT, pauses, and the common rate; ``apart_tokens`` is the largest difference between two unfinished users."""

    total_tok_s: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    apart_tokens: float
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("from first to last", "tok/s", self.total_tok_s, "higher"),
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            *percentile_metrics("ITL", "ms", self.itl_ms),
            Metric("users apart", "tokens", self.apart_tokens, "lower"),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> Overload:
    """Return the figures of the users' turns."""
    turns = [turn for (turn,) in measured.answer.clients]
    return Overload(
        total_tok_s=sum(turn.tokens for turn in turns) / timeline.span(turns).length_s,
        ttft_ms=tuple(timeline.ttft_ms(turns)),
        itl_ms=tuple(timeline.itl_ms(turns)),
        apart_tokens=timeline.spread_tokens(turns),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients on the same slots."""
    options = bench.options
    clients, turn = required(options.clients), Round(one_prompt_length(options), required(options.max_tokens))
    settings = bench.settings(slots=required(options.slots), n_ctx=context_tokens(turn.prompt_tokens + turn.max_tokens))
    async with bench.stage(settings, points=len(clients)) as stage:
        for n_clients in clients:
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(Rounds, clients=n_clients, rounds=(turn,), continues=False, warm_up=WARM_UP),
                answer=Turns,
                read=read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="overload",
    summary="more users at once than slots",
    run=run,
    defaults=Options(clients=(32,), slots=8, prompt_tokens=(16,), max_tokens=128, repeat=5),
    takes=COMPARABLE | {"clients", "prompt_tokens", "max_tokens"},
)
