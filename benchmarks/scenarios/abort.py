"""Latency from the client's abort until the server has stopped, during decode and during the prefill of a long prompt.

It measures how long a slot stays occupied by an abandoned answer. An abort waits for the current step of the model, so
the duration of a step is shown beside it: the median gap between two pieces of text during decode, and the time from
the request to the first progress event during prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.jobs import Aborted, Aborts
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import COMPARABLE, Scenario, context_tokens, one_prompt_length, required
from benchmarks.stats import percentile

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_DECODING_PROMPT_TOKENS = 64
_PIECES_BEFORE = 8


@dataclass(frozen=True, slots=True)
class Abort:
    """Milliseconds from each abort to the end of its turn, and the middle step; or chunk, when nothing was decoded."""

    abort_ms: tuple[float, ...]
    step_ms: float | None
    chunk_ms: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        step = (
            Metric("first chunk", "ms", self.chunk_ms) if self.step_ms is None else Metric("step", "ms", self.step_ms)
        )
        return (*percentile_metrics("abort", "ms", self.abort_ms), step)


def read(measured: Measured[Aborted]) -> Abort:
    """Return how long the aborts of one repetition took."""
    traces = measured.answer.traces
    steps_ms = [
        (later - earlier) * 1000
        for trace in traces
        for earlier, later in pairwise(at_s for at_s in trace.token_times_s if at_s <= trace.aborted_s)
    ]
    return Abort(
        abort_ms=tuple((trace.ended_s - trace.aborted_s) * 1000 for trace in traces),
        step_ms=percentile(steps_ms, 50) if steps_ms else None,
        chunk_ms=percentile([(trace.aborted_s - trace.started_s) * 1000 for trace in traces], 50),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients, decoding and reading; all of a point's clients abort in the same way."""
    options = bench.options
    clients, count, max_tokens = required(options.clients), required(options.count), required(options.max_tokens)
    long_prompt_tokens = one_prompt_length(options)
    settings = bench.settings(slots=max(clients), n_ctx=context_tokens(long_prompt_tokens + max_tokens))
    phases = ((_DECODING_PROMPT_TOKENS, _PIECES_BEFORE), (long_prompt_tokens, None))
    async with bench.stage(settings, points=len(clients) * len(phases)) as stage:
        for prompt_tokens, after_tokens in phases:
            for n_clients in clients:
                await stage.measure(
                    Parameter("pieces before the abort", after_tokens or 0),
                    Parameter("prompt tokens", prompt_tokens),
                    Parameter("clients", n_clients),
                    job=partial(
                        Aborts,
                        clients=n_clients,
                        count=count,
                        prompt_tokens=prompt_tokens,
                        max_tokens=max_tokens,
                        after_tokens=after_tokens,
                    ),
                    answer=Aborted,
                    read=read,
                )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="abort",
    summary="from the abort to the end of the turn, during decode and during the prefill of a long prompt",
    run=run,
    defaults=Options(clients=(1, 8), count=20, prompt_tokens=(4096,), max_tokens=256, repeat=3),
    takes=COMPARABLE | {"clients", "count", "prompt_tokens", "max_tokens"},
)
