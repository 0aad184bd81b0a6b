"""Minutes of mixed load, with one engine killed in the middle.

It measures what a few seconds do not show: growth of memory, slower answers, turns that end twice or never, and texts
that differ from the session's. Clients send turns, abort them, lose their connection during an answer and resume it,
read slowly, fork, rewind and open new sessions, as drawn by a seed. There are more of them than slots.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.concurrency import one_failure
from benchmarks.options import Options
from benchmarks.results import Metric, Parameter, Point, Report, metrics_if_known
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required
from benchmarks.soak.actions import Bounds, actions
from benchmarks.soak.client import SoakClient
from benchmarks.soak.memory import Growth, Sample, growth
from benchmarks.soak.tally import EXPECTED, Tally, thirds
from benchmarks.stats import percentile
from benchmarks.turns import learn_words

if TYPE_CHECKING:
    from benchmarks.daemon_process import DaemonSettings, RunningDaemon
    from benchmarks.peers.prompts import Prompts
    from benchmarks.soak.tally import Timed
    from benchmarks.stage import Bench

_ECHO_DELAY_MS: Final = 5
_TURNS_HELD: Final = 4
"""As many of the longest turns fit into a session's context."""
_LONGEST_PAUSE_S: Final = 3.0
_SAMPLES: Final = 20
_SAMPLED_EVERY_S: Final = 1.0
_WARM_UP_S: Final = 60.0
_SLOTS: Final = 4
_SEEDS_OF_A_CLIENT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Soak:
    """What clients observed, and the daemon's memory meanwhile."""

    tally: Tally
    front: Growth | None
    engine: Growth | None
    start_s: float
    end_s: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of the run."""
        return (*self._counts(), *self._errors(), *self._memory(), *self._drift())

    def _counts(self) -> tuple[Metric, ...]:
        tally = self.tally
        return (
            *(Metric(f"acts: {kind.value}", "", count) for kind, count in sorted(tally.actions.items())),
            Metric("resumed in place", "", tally.resumed),
            Metric("turns not ended once", "", tally.not_ended_once, "lower"),
            Metric("texts unlike the transcript", "", tally.unlike_transcript, "lower"),
            Metric("characters lost", "", tally.lost_chars, "lower"),
            Metric("characters repeated", "", tally.extra_chars, "lower"),
            Metric("events misnumbered", "", tally.misnumbered, "lower"),
        )

    def _errors(self) -> tuple[Metric, ...]:
        unexplained = self.tally.unexplained()
        named = (
            Metric(f"{'expected' if met in EXPECTED else 'unexplained'}: {met[0].value}, {met[1]}", "", count)
            for met, count in sorted(self.tally.errors.items())
        )
        return (Metric("unexplained errors", "", unexplained.total(), "lower"), *named)

    def _memory(self) -> tuple[Metric, ...]:
        return tuple(
            Metric(f"RSS {name}, {what}", unit, value, "lower")
            for name, found in (("front", self.front), ("engine", self.engine))
            if found is not None
            for what, unit, value in (
                ("trend", "MiB/min", found.mib_per_min),
                ("most above first", "MiB", found.most_mib),
            )
        )

    def _drift(self) -> tuple[Metric, ...]:
        return (*self._drift_of("TTFT", self.tally.ttft), *self._drift_of("ITL", self.tally.itl))

    def _drift_of(self, name: str, delays: list[Timed]) -> tuple[Metric, ...]:
        early, late = (
            percentile(each, 50) if each else None for each in thirds(delays, start_s=self.start_s, end_s=self.end_s)
        )
        ratio = late / early if early and late is not None else None
        return (
            *metrics_if_known(f"{name} p50, first third", "ms", early, "lower"),
            *metrics_if_known(f"{name} p50, last third", "ms", late, "lower"),
            *metrics_if_known(f"{name} p50, last / first", "", ratio, "lower"),
        )


async def run(bench: Bench) -> Report:
    """Run each number of clients for the configured time, one after the other, on one daemon."""
    clients, duration_s = required(bench.options.clients), required(bench.options.duration_s)
    points = []
    async with bench.stage(_settings(bench), points=len(clients)) as stage:
        prompts = await learn_words(stage.daemon.spec)
        # One word in addition to what the server puts before a conversation.
        least_tokens = prompts.overhead_tokens + 1
        bounds = Bounds(
            least_prompt_tokens=least_tokens,
            prompt_tokens=max(one_prompt_length(bench.options), least_tokens),
            max_tokens=required(bench.options.max_tokens),
            pause_s=min(_LONGEST_PAUSE_S, duration_s / 10),
        )
        clients_of_daemon = _ClientGroup(stage.daemon, prompts, bounds)
        for n_clients in clients:
            found = []
            for _ in range(bench.repeat):
                with bench.run(f"{n_clients} clients for {duration_s:.0f} s"):
                    soaked = await clients_of_daemon.run(n_clients, duration_s=duration_s, first_seed=bench.next_seed())
                found.append(soaked.metrics())
            points.append(Point((Parameter("clients", n_clients),), (tuple(found),)))
        return Report(SCENARIO.name, stage.sides, tuple(points))


class _ClientGroup:
    """Clients of one daemon, all at once, while its memory is read and its engine is killed once."""

    def __init__(self, daemon: RunningDaemon, prompts: Prompts, bounds: Bounds) -> None:
        self._daemon = daemon
        self._prompts = prompts
        self._bounds = bounds

    async def run(self, n_clients: int, *, duration_s: float, first_seed: int) -> Soak:
        tally = Tally()
        start_s = time.monotonic()
        end_s = start_s + duration_s
        with one_failure():
            async with asyncio.TaskGroup() as group:
                memory = group.create_task(self._watch(end_s, every_s=min(_SAMPLED_EVERY_S, duration_s / _SAMPLES)))
                group.create_task(self._kill(after_s=duration_s / 2))
                for index in range(n_clients):
                    plan = actions(random.Random(first_seed + index), self._bounds)  # noqa: S311 - the same for a seed
                    client = SoakClient(
                        self._daemon.spec,
                        self._prompts,
                        tally,
                        n_ctx=self._daemon.readiness.n_ctx,
                        first_seed=first_seed + index * _SEEDS_OF_A_CLIENT,
                    )
                    group.create_task(client.run(plan, until_s=end_s))
        front, engine = memory.result()
        warm_up_s = min(_WARM_UP_S, duration_s / 5)
        return Soak(
            tally, growth(front, warm_up_s=warm_up_s), growth(engine, warm_up_s=warm_up_s), start_s=start_s, end_s=end_s
        )

    async def _watch(self, until_s: float, *, every_s: float) -> tuple[list[Sample], list[Sample]]:
        """Read the memory of front and engine at intervals; an engine that was just killed has none."""
        front, engine = [], []
        while (now_s := time.monotonic()) < until_s:
            with suppress(OSError):
                usage = self._daemon.usage()
                front.append(Sample(now_s, self._daemon.pid, usage.front.rss_bytes))
                engine.append(Sample(now_s, self._daemon.engine.pid, usage.engine.rss_bytes))
            await asyncio.sleep(every_s)
        return front, engine

    async def _kill(self, *, after_s: float) -> None:
        await asyncio.sleep(after_s)
        lost = self._daemon.engine
        self._daemon.kill_engine()
        await self._daemon.engine_after(lost)


def _settings(bench: Bench) -> DaemonSettings:
    n_tokens = one_prompt_length(bench.options) + required(bench.options.max_tokens)
    settings = bench.settings(slots=_SLOTS, n_ctx=context_tokens(_TURNS_HELD * n_tokens))
    delay_ms = _ECHO_DELAY_MS if settings.backend == "echo" else 0
    return replace(settings, loses_engines=True, echo_delay_ms=delay_ms)


SCENARIO = Scenario(
    name="soak",
    summary="minutes of mixed load with one engine killed: errors, memory, latency drift",
    run=run,
    defaults=Options(clients=(8,), prompt_tokens=(256,), max_tokens=128, duration_s=300.0, repeat=1),
    takes=OWN | {"clients", "prompt_tokens", "max_tokens", "duration_s"},
)
