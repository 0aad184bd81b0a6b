"""Sessions that start at once with the same system prompt.

It measures whether a server prefills a shared prefix once or for each session. All sessions of a repetition start with
the same words, followed by a few of their own; each repetition has other words, so that nothing is left of an earlier
one. `prompt tokens read` counts the prefilled tokens of all sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report, metrics_if_known, percentile_metrics
from benchmarks.scenario import COMPARABLE, WARM_UP, Scenario, context_tokens, required

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_OWN_TOKENS = 20


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Waiting times; ``all_answered_s`` runs from the first request until every session has text."""

    all_answered_s: float
    ttft_ms: tuple[float, ...]
    tokens_read: int | None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("until all have text", "s", self.all_answered_s, "lower"),
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            *metrics_if_known("prompt tokens read", "tokens", self.tokens_read),
        )


def read(measured: Measured[Turns]) -> SharedPrefix:
    """Return how long the sessions waited."""
    turns = [turn for (turn,) in measured.answer.clients]
    return SharedPrefix(
        all_answered_s=timeline.decode_window(turns).start_s - timeline.span(turns).start_s,
        ttft_ms=tuple(timeline.ttft_ms(turns)),
        tokens_read=timeline.tokens_read(turns),
    )


async def run(bench: Bench) -> Report:
    """Measure each length of the shared prompt with each number of sessions, each with a slot."""
    options = bench.options
    clients, lengths = required(options.clients), required(options.prompt_tokens)
    max_tokens = required(options.max_tokens)
    settings = bench.settings(slots=max(clients), n_ctx=context_tokens(max(lengths) + _OWN_TOKENS + max_tokens))
    async with bench.stage(settings, points=len(clients) * len(lengths)) as stage:
        for shared_tokens in lengths:
            turn = Round(shared_tokens + _OWN_TOKENS, max_tokens, opening_tokens=shared_tokens)
            for n_clients in clients:
                await stage.measure(
                    Parameter("shared tokens", shared_tokens),
                    Parameter("sessions", n_clients),
                    job=partial(Rounds, clients=n_clients, rounds=(turn,), continues=False, warm_up=WARM_UP),
                    answer=Turns,
                    read=read,
                )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="shared-prefix",
    summary="sessions at once that begin with the same system prompt",
    run=run,
    defaults=Options(clients=(8, 16), prompt_tokens=(500, 1000), max_tokens=16, repeat=5),
    takes=COMPARABLE | {"clients", "prompt_tokens", "max_tokens"},
)
