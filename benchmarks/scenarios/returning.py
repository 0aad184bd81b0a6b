"""Returning users: many more conversations than slots, each with a long history.

It measures the waiting time in a conversation whose slot others have used since. One turn runs at a time, round-robin
over all sessions, so that each finds its slot taken if the server evicts the least recently used slot. A server that
has evicted a history prefills it again: see `tokens read a later turn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, metrics_if_known, percentile_metrics
from benchmarks.scenario import (
    COMPARABLE,
    WARM_UP,
    Scenario,
    context_tokens,
    one_prompt_length,
    required,
)

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured, Stage

_QUESTION_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Returning:
    """Waiting times of the turns that start a conversation, and of those that continue one."""

    first_ttft_ms: tuple[float, ...]
    later_ttft_ms: tuple[float, ...]
    read_each_later_tokens: float | None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            *percentile_metrics("TTFT first turn", "ms", self.first_ttft_ms),
            *percentile_metrics("TTFT later turns", "ms", self.later_ttft_ms),
            *metrics_if_known("tokens read a later turn", "tokens", self.read_each_later_tokens),
        )


def read(measured: Measured[Turns]) -> Returning:
    """Return the waiting times of first and of later turns."""
    first = [turns[0] for turns in measured.answer.clients]
    later = [turn for turns in measured.answer.clients for turn in turns[1:]]
    tokens_read = timeline.tokens_read(later)
    return Returning(
        first_ttft_ms=tuple(timeline.ttft_ms(first)),
        later_ttft_ms=tuple(timeline.ttft_ms(later)),
        read_each_later_tokens=None if tokens_read is None else tokens_read / len(later),
    )


async def run(bench: Bench) -> Report:
    """Measure the sessions, one turn at a time, round after round in the same order."""
    options = bench.options
    sessions, count, max_tokens = required(options.sessions), required(options.count), required(options.max_tokens)
    if count < 2:
        raise refused("count", "a client returns only with two turns or more")
    prompt_tokens = one_prompt_length(options)
    n_tokens = prompt_tokens + (count - 1) * _QUESTION_TOKENS + count * max_tokens
    first, again = (Round(tokens, max_tokens, at_once=1) for tokens in (prompt_tokens, _QUESTION_TOKENS))
    settings = bench.settings(slots=required(options.slots), n_ctx=context_tokens(n_tokens))
    async with bench.stage(settings, points=1) as stage:
        _check_slots(stage, sessions)
        await stage.measure(
            Parameter("sessions", sessions),
            job=partial(
                Rounds,
                clients=sessions,
                rounds=(first, *[again] * (count - 1)),
                continues=True,
                warm_up=WARM_UP,
            ),
            answer=Turns,
            read=read,
        )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


def _check_slots(stage: Stage, sessions: int) -> None:
    for facts in (side.facts for side in stage.sides):
        if facts.slots is not None and facts.slots >= sessions:
            raise refused(
                "sessions", f"{sessions} sessions do not lose their slots of the {facts.slots} at {facts.name}"
            )


SCENARIO = Scenario(
    name="returning",
    summary="sessions that continue after others have used their slots",
    run=run,
    defaults=Options(sessions=12, count=3, slots=4, prompt_tokens=(500,), max_tokens=16, repeat=5),
    takes=COMPARABLE | {"sessions", "count", "prompt_tokens", "max_tokens"},
)
