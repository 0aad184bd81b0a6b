"""Many open sessions, of which only some are active.

It measures the cost of the idle ones: each holds a slot with its history, and the active slots are scattered among
them, which llama.cpp decodes slower than adjacent ones when the KV cache is partitioned. The active sessions of a round
are drawn by a seed, the same for all repetitions and peers. Only the time in which all of a round decode is counted.
llama-server requests name each session's own slot, without which a client cannot know that its history is kept.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, metrics_if_known, percentile_metrics
from benchmarks.scenario import COMPARABLE, WARM_UP, Scenario, context_tokens, required

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.stage import Bench, Measured, Stage

_QUESTION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sparse:
    """Rate and delays of the active sessions; no rate if they never all decoded at the same time."""

    decode_tok_s: float | None
    itl_ms: tuple[float, ...]
    read_each_tokens: float | None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            *metrics_if_known("decode only", "tok/s", self.decode_tok_s, "higher"),
            *percentile_metrics("ITL", "ms", self.itl_ms),
            *metrics_if_known("tokens read a turn", "tokens", self.read_each_tokens),
        )


def read(measured: Measured[Turns], *, rounds: Sequence[Round]) -> Sparse:
    """Return the figures of the active sessions; the first round prefills the histories and is not counted."""
    _, *measured_rounds = measured.answer.by_round(rounds)
    every_turn = [turn for turns in measured_rounds for turn in turns]
    busy = [(turns, window) for turns in measured_rounds if (window := timeline.decode_window(turns)).length_s > 0]
    busy_s = sum(window.length_s for _, window in busy)
    tokens_read = timeline.tokens_read(every_turn)
    return Sparse(
        decode_tok_s=sum(timeline.tokens_in(turns, window) for turns, window in busy) / busy_s if busy else None,
        itl_ms=tuple(timeline.itl_ms(every_turn)),
        read_each_tokens=None if tokens_read is None else tokens_read / len(every_turn),
    )


def drawn(sessions: int, active: int, *, rounds: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the active sessions of each round, drawn at random, in ascending order."""
    chance = random.Random(seed)  # noqa: S311 - the same draw for the same seed
    return tuple(tuple(sorted(chance.sample(range(sessions), active))) for _ in range(rounds))


async def run(bench: Bench) -> Report:
    """Measure each length of history with each number of active sessions."""
    options = bench.options
    sessions, active, lengths = required(options.sessions), required(options.clients), required(options.prompt_tokens)
    count, max_tokens = required(options.count), required(options.max_tokens)
    if max(active) > sessions:
        raise refused("clients", f"{max(active)} of {sessions} sessions cannot be active")
    n_ctx = context_tokens(max(lengths) + 1 + count * (_QUESTION_TOKENS + max_tokens))
    settings = bench.settings(slots=sessions, n_ctx=n_ctx)
    async with bench.stage(settings, points=len(lengths) * len(active)) as stage:
        _check_slots(stage, sessions)
        for prompt_tokens in lengths:
            for n_active in active:
                active_sessions = drawn(sessions, n_active, rounds=count, seed=n_active)
                rounds = (
                    Round(prompt_tokens, 1),
                    *(Round(_QUESTION_TOKENS, max_tokens, clients=each) for each in active_sessions),
                )
                await stage.measure(
                    Parameter("tokens of history", prompt_tokens),
                    Parameter(f"active of {sessions} sessions", n_active),
                    job=partial(Rounds, clients=sessions, rounds=rounds, continues=True, pinned=True, warm_up=WARM_UP),
                    answer=Turns,
                    read=partial(read, rounds=rounds),
                )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


def _check_slots(stage: Stage, sessions: int) -> None:
    for facts in (side.facts for side in stage.sides):
        if facts.slots is not None and facts.slots < sessions:
            raise refused("sessions", f"{sessions} sessions have no slot each of the {facts.slots} at {facts.name}")


SCENARIO = Scenario(
    name="sparse",
    summary="many open sessions of which a part is active at a time",
    run=run,
    defaults=Options(sessions=16, clients=(8,), count=6, prompt_tokens=(100, 500), max_tokens=64, repeat=5),
    takes=COMPARABLE | {"sessions", "clients", "count", "prompt_tokens", "max_tokens"},
)
