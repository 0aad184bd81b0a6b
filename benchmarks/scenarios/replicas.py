"""A model with one, two and three engines on one machine.

It measures how the throughput grows, and whether sessions find their KV when they return. The echo backend makes a step
take as long on each engine however many there are, as GPUs of their own would; with the llama backend the engines share
the machine. All daemons run from the beginning, and take turns within each repetition.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks import timeline
from benchmarks.daemon_process import OURS, start_daemon
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.options import Options, refused
from benchmarks.results import Metric, Parameter, Point, Report, metrics_if_known, percentile_metrics
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required
from benchmarks.stage import started

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.daemon_process import DaemonSettings, RunningDaemon
    from benchmarks.stage import Bench

REPLICAS: Final = (1, 2, 3)
_ECHO_DELAY_MS: Final = 10


@dataclass(frozen=True, slots=True)
class Replicated:
    """The returning turns of all clients; ``alone_tok_s`` is the rate of one replica in the same repetition."""

    tok_s: float
    ttft_ms: tuple[float, ...]
    found_kv: float | None
    alone_tok_s: float | None = None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        growth = None if self.alone_tok_s is None else self.tok_s / self.alone_tok_s
        return (
            Metric("throughput", "tok/s", self.tok_s, "higher"),
            *metrics_if_known("relative to one replica", "times", growth, "higher"),
            *metrics_if_known("returning turns that find their KV", "", self.found_kv, "higher"),
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
        )


def read(answer: Turns, rounds: Sequence[Round]) -> Replicated:
    """Return the figures of all rounds but the first, which begins the conversations.

    A turn has found its KV if more than half of its prompt was cached: its history is longer than its question.
    """
    _, *later = answer.by_round(rounds)
    turns = [turn for each in later for turn in each]
    known = [turn for turn in turns if turn.cached_tokens is not None]
    found = sum(2 * (turn.cached_tokens or 0) > turn.prompt_tokens for turn in known)
    return Replicated(
        tok_s=sum(turn.tokens for turn in turns) / sum(timeline.span(each).length_s for each in later),
        ttft_ms=tuple(timeline.ttft_ms(turns)),
        found_kv=found / len(known) if known else None,
    )


async def run(bench: Bench) -> Report:
    """Measure each number of clients per replica with each number of replicas."""
    options = bench.options
    clients, count, max_tokens = required(options.clients), required(options.count), required(options.max_tokens)
    if count < 2:
        raise refused("count", "a client returns only with two turns or more")
    prompt_tokens = one_prompt_length(options)
    settings = replace(
        bench.settings(slots=required(options.slots), n_ctx=context_tokens(count * (prompt_tokens + max_tokens))),
        echo_delay_ms=_ECHO_DELAY_MS,
    )
    bench.progress.expect(len(clients) * len(REPLICAS) * bench.repeat)
    points: list[Point] = []
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(_start(settings, number)) for number in REPLICAS]
        servers = [await started(daemon) for daemon in daemons]
        for per_replica in clients:
            found: list[list[tuple[Metric, ...]]] = [[] for _ in REPLICAS]
            for _ in range(bench.repeat):
                results: list[Replicated] = []
                for number, daemon in zip(REPLICAS, daemons, strict=True):
                    rounds = (Round(prompt_tokens, max_tokens),) * count
                    job = Rounds(
                        target=daemon.spec,
                        clients=per_replica * number,
                        rounds=rounds,
                        continues=True,
                        first_seed=bench.next_seed(),
                    )
                    with bench.run(f"{number} replicas, {per_replica} clients each"):
                        results.append(read(await bench.generator.do(job, Turns), rounds))
                for kept, result in zip(found, results, strict=True):
                    kept.append(replace(result, alone_tok_s=results[0].tok_s).metrics())
            points += [
                Point(
                    (Parameter("clients per replica", per_replica), Parameter("replicas", number)),
                    (tuple(kept),),
                    sides=(server.side,),
                )
                for number, server, kept in zip(REPLICAS, servers, found, strict=True)
            ]
        return Report(SCENARIO.name, (servers[0].side,), tuple(points))


def _start(settings: DaemonSettings, replicas: int) -> AbstractAsyncContextManager[RunningDaemon]:
    return start_daemon(replace(settings, replicas=replicas), name=OURS)


SCENARIO = Scenario(
    name="replicas",
    summary="one, two and three engines of a model: throughput, and returning to KV",
    run=run,
    defaults=Options(backend="echo", clients=(2, 3), count=4, slots=2, prompt_tokens=(64,), max_tokens=64, repeat=5),
    takes=OWN | {"clients", "count", "prompt_tokens", "max_tokens"},
)
