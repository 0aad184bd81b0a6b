"""A noisy neighbor repeats operations that are cheap to request and expensive to answer, while others stream.

The result is the effect on the others. Each action has two intervals of the requested time, one right after the other:
the neighbors run turns in both, and in the second one a client of another account repeats the action at its rate. So
each action is compared with the quiet interval just before it. Every action has a new account, since sessions left by
one action would count towards the limits of the next. The load generator runs the neighbors, this process the action,
so neither waits for the other.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks import timeline
from benchmarks.abuse.actions import ACTIONS, Action
from benchmarks.abuse.attacker import Attacker
from benchmarks.jobs import ClosedLoop, Turns
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Point, Report
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required
from benchmarks.stats import percentile

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from benchmarks.daemon_process import RunningDaemon
    from benchmarks.stage import Bench
    from benchmarks.target import TurnTrace

_SPARE_SLOTS: Final = 1
"""Slots beside one for each neighbor, for the turns of the noisy one."""
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays of the neighbors' turns in one interval."""

    itl_p99_ms: float
    itl_worst_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Abuse:
    """One action: the neighbors' delays without and with it, its answers, and the growth of memory."""

    action: str
    quiet: Delays
    noisy: Delays
    outcomes: Counter[str]
    growth_bytes: int

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        quiet, noisy = self.quiet, self.noisy
        return (
            Metric(f"{self.action}: ITL p99, with / without", "", noisy.itl_p99_ms / quiet.itl_p99_ms, "lower"),
            Metric(f"{self.action}: TTFT p50, with / without", "", noisy.ttft_p50_ms / quiet.ttft_p50_ms, "lower"),
            Metric(f"{self.action}: TTFT p99, with / without", "", noisy.ttft_p99_ms / quiet.ttft_p99_ms, "lower"),
            Metric(f"{self.action}: ITL p99, without", "ms", quiet.itl_p99_ms, "lower"),
            Metric(f"{self.action}: ITL worst, without", "ms", quiet.itl_worst_ms, "lower"),
            Metric(f"{self.action}: ITL worst, with", "ms", noisy.itl_worst_ms, "lower"),
            Metric(f"{self.action}: RSS growth, both processes", "MiB", self.growth_bytes / _MIB, "lower"),
            *(Metric(f"{self.action}: answered {name}", "", count) for name, count in sorted(self.outcomes.items())),
        )


def read(clients: Sequence[Sequence[TurnTrace]]) -> Delays:
    """Return the delays of the turns that followed each client's warm-up."""
    turns = [turn for turns in clients for turn in turns[1:]]
    itl_ms, ttft_ms = timeline.itl_ms(turns), timeline.ttft_ms(turns)
    return Delays(
        itl_p99_ms=percentile(itl_ms, 99),
        itl_worst_ms=max(itl_ms),
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p99_ms=percentile(ttft_ms, 99),
    )


async def run(bench: Bench) -> Report:
    """Measure each number of neighbors with every action."""
    clients = required(bench.options.clients)
    turn_tokens = one_prompt_length(bench.options) + required(bench.options.max_tokens)
    settings = bench.settings(slots=max(clients) + _SPARE_SLOTS, n_ctx=context_tokens(turn_tokens))
    points = []
    async with bench.stage(settings, points=len(clients) * len(ACTIONS)) as stage:
        for n_clients in clients:
            repetitions = []
            for repetition in range(bench.repeat):
                metrics: list[Metric] = []
                for number, action in enumerate(ACTIONS):
                    token = await stage.daemon.new_token(f"noisy-{n_clients}-{repetition}-{number}")
                    with bench.run(f"{n_clients} neighbors: {action.name}"):
                        found = await _one(bench, stage.daemon, action, n_clients=n_clients, token=token)
                    metrics += found.metrics()
                repetitions.append(tuple(metrics))
            count = Parameter("neighbours", n_clients)  # codespell:ignore neighbours
            points.append(Point((count,), (tuple(repetitions),)))
        return Report(SCENARIO.name, stage.sides, tuple(points))


async def _one(bench: Bench, daemon: RunningDaemon, action: Action, *, n_clients: int, token: str) -> Abuse:
    quiet = await _stream(bench, daemon, n_clients)
    before_bytes = _rss_bytes(daemon)
    async with Attacker(replace(daemon.spec, token=token)) as attacker:
        prepared = await action.prepare(attacker)
        attacker.outcomes.clear()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(repeat(action, attacker, prepared, until=over))
            try:
                noisy = await _stream(bench, daemon, n_clients)
            finally:
                over.set()
        return Abuse(action.name, quiet, noisy, attacker.outcomes, _rss_bytes(daemon) - before_bytes)


async def repeat(action: Action, attacker: Attacker, prepared: str, *, until: asyncio.Event) -> None:
    """Repeat an action at its rate, one after the other; one that takes longer is followed by the next at once.

    Raises:
        InferenceCenterError: The daemon cannot be reached.
    """
    while not until.is_set():
        began_s = time.monotonic()
        await action.once(attacker, prepared)
        await asyncio.sleep(max(0.0, 1 / action.rate_per_s - (time.monotonic() - began_s)))


async def _stream(bench: Bench, daemon: RunningDaemon, n_clients: int) -> Delays:
    options = bench.options
    job = ClosedLoop(
        target=daemon.spec,
        clients=n_clients,
        prompt_tokens=one_prompt_length(options),
        max_tokens=required(options.max_tokens),
        duration_s=required(options.duration_s),
        first_seed=bench.next_seed(),
    )
    return read((await bench.generator.do(job, Turns)).clients)


def _rss_bytes(daemon: RunningDaemon) -> int:
    usage = daemon.usage()
    return usage.front.rss_bytes + usage.engine.rss_bytes


SCENARIO = Scenario(
    name="abuse",
    summary="a noisy neighbor repeats operations that are expensive to answer: delays of the others",
    run=run,
    defaults=Options(clients=(4,), prompt_tokens=(64,), max_tokens=128, duration_s=10.0, repeat=1),
    takes=OWN | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
)
