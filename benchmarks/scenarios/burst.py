"""All clients at once, one turn each.

It measures the TTFT when all requests arrive at the same moment, and the rate of decoding alone: the generation rate
counts only the time in which every client's turn decodes, so it can be compared with llama-batched-bench. Slots match
the clients as in ``throughput``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, metrics_if_known, percentile_metrics
from benchmarks.scenario import COMPARABLE, WARM_UP, Scenario, matched, one_prompt_length, required

if TYPE_CHECKING:
    from benchmarks.results import Report
    from benchmarks.stage import Bench, Measured, Stage


@dataclass(frozen=True, slots=True)
class Burst:
    """TTFT of the clients, and their common rates."""

    total_tok_s: float
    decode_tok_s: float | None
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    cpu: tuple[Metric, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition; without the decode rate if the turns never decoded all at once."""
        return (
            Metric("from first to last", "tok/s", self.total_tok_s, "higher"),
            *metrics_if_known("decode only", "tok/s", self.decode_tok_s, "higher"),
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            *percentile_metrics("ITL", "ms", self.itl_ms),
            *self.cpu,
        )


def read(measured: Measured[Turns]) -> Burst:
    """Return the figures of the clients' turns."""
    turns = [turn for (turn,) in measured.answer.clients]
    window = timeline.decode_window(turns)
    return Burst(
        total_tok_s=sum(turn.tokens for turn in turns) / timeline.span(turns).length_s,
        decode_tok_s=timeline.tokens_in(turns, window) / window.length_s if window.length_s > 0 else None,
        ttft_ms=tuple(timeline.ttft_ms(turns)),
        itl_ms=tuple(timeline.itl_ms(turns)),
        cpu=measured.cpu_metrics(),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients."""
    prompt_tokens, max_tokens = one_prompt_length(bench.options), required(bench.options.max_tokens)

    async def measure(stage: Stage, options: Options) -> None:
        for n_clients in required(options.clients):
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(
                    Rounds,
                    clients=n_clients,
                    rounds=(Round(prompt_tokens, max_tokens),),
                    continues=False,
                    warm_up=WARM_UP,
                ),
                answer=Turns,
                read=read,
            )

    return await matched(SCENARIO.name, bench, turn_tokens=prompt_tokens + max_tokens, measure=measure)


SCENARIO = Scenario(
    name="burst",
    summary="all clients at once, one turn each",
    run=run,
    defaults=Options(clients=(1, 4, 8, 16, 32), prompt_tokens=(64,), max_tokens=64, repeat=5),
    takes=COMPARABLE | {"clients", "prompt_tokens", "max_tokens"},
    plots=True,
)
