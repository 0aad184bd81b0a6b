"""Long contexts: clients with a given number of context tokens, first prefill, then decode.

It measures the cost of length: prefill, decoding with attention over it, and memory. Each client prefills its context
in a turn that generates one token; when all have done so, each continues its conversation with a short turn, and the
decode rate is that of the time in which all of them decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import COMPARABLE, Scenario, context_tokens, required

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_QUESTION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Context:
    """Rates of prefill and decoding, and memory afterwards if it is known."""

    prefill_tok_s: float
    decode_tok_s: float | None
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    engine_rss_bytes: int | None
    vram_bytes: int | None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition; those that are unknown are left out."""
        maybe = (
            ("decode only", "tok/s", self.decode_tok_s, 1),
            ("RSS engine", "MB", self.engine_rss_bytes, 10**6),
            ("VRAM in use", "MB", self.vram_bytes, 10**6),
        )
        known = {
            name: Metric(name, unit, value / scale, "higher" if unit == "tok/s" else None)
            for name, unit, value, scale in maybe
            if value is not None
        }
        decode = known.pop("decode only", None)
        return (
            Metric("prefill", "tok/s", self.prefill_tok_s, "higher"),
            *(() if decode is None else (decode,)),
            *percentile_metrics("TTFT reading", "ms", self.ttft_ms),
            *percentile_metrics("ITL", "ms", self.itl_ms),
            *known.values(),
        )


def read(measured: Measured[Turns]) -> Context:
    """Return rates and memory of two rounds, one of prefill and one of decoding."""
    reading = [first for first, _ in measured.answer.clients]
    decoding = [second for _, second in measured.answer.clients]
    window = timeline.decode_window(decoding)
    return Context(
        prefill_tok_s=timeline.prefill_tok_s(reading),
        decode_tok_s=timeline.tokens_in(decoding, window) / window.length_s if window.length_s > 0 else None,
        ttft_ms=tuple(timeline.ttft_ms(reading)),
        itl_ms=tuple(timeline.itl_ms(decoding)),
        engine_rss_bytes=measured.after.engine.rss_bytes if measured.after else None,
        vram_bytes=measured.vram_bytes,
    )


async def run(bench: Bench) -> Report:
    """Measure each length with each number of clients, the shortest contexts first: touched memory stays."""
    options = bench.options
    clients, lengths = required(options.clients), sorted(required(options.prompt_tokens))
    max_tokens = required(options.max_tokens)
    n_ctx = context_tokens(lengths[-1] + _QUESTION_TOKENS + max_tokens)
    async with bench.stage(
        bench.settings(slots=max(clients), n_ctx=n_ctx), points=len(clients) * len(lengths)
    ) as stage:
        for prompt_tokens in lengths:
            rounds = (Round(prompt_tokens, 1), Round(_QUESTION_TOKENS, max_tokens))
            for n_clients in clients:
                await stage.measure(
                    Parameter("tokens of context", prompt_tokens),
                    Parameter("clients", n_clients),
                    job=partial(Rounds, clients=n_clients, rounds=rounds, continues=True),
                    answer=Turns,
                    read=read,
                )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="context",
    summary="prefill and decode rates and memory with long contexts",
    run=run,
    defaults=Options(clients=(1, 4, 8), prompt_tokens=(512, 4096, 16384), max_tokens=64, repeat=1),
    takes=COMPARABLE | {"clients", "prompt_tokens", "max_tokens"},
)
