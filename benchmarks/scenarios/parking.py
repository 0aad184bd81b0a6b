"""The cost of time-sharing: long histories and more turns than slots, against the same turns group by group.

It measures the throughput lost to parking and restoring KV when turns share the slots. All histories are prefilled
first. Then each conversation continues four times: as many turns at once as there are slots and the next when these
have ended, twice all at once, and in groups again; so both orders decode on histories of the same mean length, and
drift of the machine cancels. Both include the prefill of the same questions. In groups a turn keeps its slot until it
ends. `turns apart` shows whether turns were time-shared: then it is about a quantum, and otherwise the length of an
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, metrics_if_known
from benchmarks.scenario import (
    OWN,
    WARM_UP,
    Scenario,
    context_tokens,
    one_prompt_length,
    required,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.stage import Bench, Measured
    from benchmarks.target import TurnTrace

_QUESTION_TOKENS = 16
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Parking:
    """Both rates, and how far apart the turns got that shared the slots."""

    shared_tok_s: float
    grouped_tok_s: float
    apart_tokens: float
    shared_read_tokens: int | None
    grouped_read_tokens: int | None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("all at once", "tok/s", self.shared_tok_s, "higher"),
            Metric("in groups", "tok/s", self.grouped_tok_s, "higher"),
            Metric("all at once / in groups", "", self.shared_tok_s / self.grouped_tok_s, "higher"),
            Metric("turns apart, all at once", "tokens", self.apart_tokens, "lower"),
            *metrics_if_known("tokens read, all at once", "tokens", self.shared_read_tokens),
            *metrics_if_known("tokens read, in groups", "tokens", self.grouped_read_tokens),
        )


def read(measured: Measured[Turns]) -> Parking:
    """Return the rates of the rounds after the prefill of the histories: in groups, at once twice, in groups."""
    _, before, *shared, after = zip(*measured.answer.clients, strict=True)
    grouped = (before, after)
    return Parking(
        shared_tok_s=_rate(shared),
        grouped_tok_s=_rate(grouped),
        apart_tokens=max(timeline.spread_tokens(turns) for turns in shared),
        shared_read_tokens=timeline.tokens_read(turn for turns in shared for turn in turns),
        grouped_read_tokens=timeline.tokens_read(turn for turns in grouped for turn in turns),
    )


def _rate(rounds: Sequence[Sequence[TurnTrace]]) -> float:
    """Return the tokens a second of rounds, each from its first request to its last end."""
    tokens = sum(turn.tokens for turns in rounds for turn in turns)
    return tokens / sum(timeline.span(turns).length_s for turns in rounds)


async def run(bench: Bench) -> Report:
    """Measure each number of conversations on the same slots."""
    options = bench.options
    clients, prompt_tokens = required(options.clients), one_prompt_length(options)
    max_tokens, slots = required(options.max_tokens), required(options.slots)
    for n_clients in clients:
        if n_clients <= slots or n_clients % slots:
            raise refused("clients", f"{n_clients} turns are no whole number of groups of {slots}, two or more")
    n_ctx = context_tokens(prompt_tokens + 1 + _ROUNDS * (_QUESTION_TOKENS + max_tokens))
    grouped, shared = (Round(_QUESTION_TOKENS, max_tokens, at_once=at_once) for at_once in (slots, None))
    rounds = (Round(prompt_tokens, 1, at_once=slots), grouped, shared, shared, grouped)
    async with bench.stage(bench.settings(slots=slots, n_ctx=n_ctx), points=len(clients)) as stage:
        for n_clients in clients:
            await stage.measure(
                Parameter("clients", n_clients),
                job=partial(Rounds, clients=n_clients, rounds=rounds, continues=True, warm_up=WARM_UP),
                answer=Turns,
                read=read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="parking",
    summary="throughput of turns that share slots, against the same turns group by group",
    run=run,
    defaults=Options(clients=(8,), slots=4, prompt_tokens=(1500,), max_tokens=256, repeat=5),
    takes=OWN | {"clients", "prompt_tokens", "max_tokens"},
)
