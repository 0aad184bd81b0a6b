"""A long prompt arrives while other turns run.

It measures the ITL of the running streams from the newcomer's request until its first text, compared with before, and
the newcomer's TTFT. A pause counts with its whole length when any part of it lies in that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import timeline
from benchmarks.jobs import Arrival, Turns, TurnSize
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Report, percentile_metrics
from benchmarks.scenario import COMPARABLE, WARM_UP, Scenario, context_tokens, one_prompt_length, required
from benchmarks.timeline import Window

if TYPE_CHECKING:
    from benchmarks.stage import Bench, Measured

_STREAM_PROMPT_TOKENS = 64
_PIECES_BEFORE = 32
_NEWCOMER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Interference:
    """The streams' delays before and while a newcomer's prompt is read, and its own."""

    before_ms: tuple[float, ...]
    meanwhile_ms: tuple[float, ...]
    newcomer_ttft_ms: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("TTFT newcomer", "ms", self.newcomer_ttft_ms, "lower"),
            *percentile_metrics("ITL meanwhile", "ms", self.meanwhile_ms),
            *percentile_metrics("ITL before", "ms", self.before_ms),
        )


def read(measured: Measured[Turns]) -> Interference:
    """Return the delays of the streams and of the newcomer.

    Raises:
        InferenceCenterError: ``invalid_request`` when a stream ended before the newcomer's first text: how long it
            would have paused is not known then.
    """
    *streams, newcomer = [turn for (turn,) in measured.answer.clients]
    streaming = timeline.decode_window(streams)
    (ttft_ms,) = timeline.ttft_ms([newcomer])
    reading = Window(newcomer.started_s, newcomer.started_s + ttft_ms / 1000)
    if streaming.end_s <= reading.end_s:
        raise refused(
            "max_tokens", "a stream ended before the newcomer's first text", hint="Let the streams be longer."
        )
    return Interference(
        before_ms=tuple(timeline.itl_inside_ms(streams, Window(streaming.start_s, reading.start_s))),
        meanwhile_ms=tuple(timeline.itl_touching_ms(streams, reading)),
        newcomer_ttft_ms=ttft_ms,
    )


async def run(bench: Bench) -> Report:
    """Measure each number of running streams, with one slot more than the most of them."""
    options = bench.options
    clients, prompt_tokens = required(options.clients), one_prompt_length(options)
    stream = TurnSize(_STREAM_PROMPT_TOKENS, required(options.max_tokens))
    newcomer = TurnSize(prompt_tokens, _NEWCOMER_TOKENS)
    longest_tokens = max(turn.prompt_tokens + turn.max_tokens for turn in (stream, newcomer))
    settings = bench.settings(slots=max(clients) + 1, n_ctx=context_tokens(longest_tokens))
    async with bench.stage(settings, points=len(clients)) as stage:
        for n_streams in clients:
            await stage.measure(
                Parameter("running streams", n_streams),
                job=partial(
                    Arrival,
                    streams=n_streams,
                    stream=stream,
                    newcomer=newcomer,
                    after_tokens=_PIECES_BEFORE,
                    warm_up=WARM_UP,
                ),
                answer=Turns,
                read=read,
            )
        return Report(SCENARIO.name, stage.sides, tuple(stage.points))


SCENARIO = Scenario(
    name="interference",
    summary="a long prompt arrives while streams run: their pauses, its time to first token",
    run=run,
    defaults=Options(clients=(4,), prompt_tokens=(1500,), max_tokens=256, repeat=5),
    takes=COMPARABLE | {"clients", "prompt_tokens", "max_tokens"},
)
