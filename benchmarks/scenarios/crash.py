"""The engine is killed under running streams, at random moments.

It measures the visible effect: how long the text pauses, and whether any of it is lost or duplicated. Each kill has
turns of its own, so that none is suspected of having crashed two engines. The same turns run again without a kill,
since the greedy text of a turn must not depend on a change of its engine.

The daemon is configured to treat the crashes as if hours lay between them, so a restart is delayed by half a second at
most.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.concurrency import one_failure
from benchmarks.observed_turn import difference
from benchmarks.options import Options
from benchmarks.outages import Outage, Stream
from benchmarks.results import Metric, Parameter, Point, Report, metrics_if_known, percentile_metrics
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required
from benchmarks.stats import percentile
from benchmarks.target import Work
from benchmarks.turns import finished, learn_words, open_lines, open_session, run_turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.daemon_process import DaemonSettings, EngineLife, RunningDaemon
    from benchmarks.observed_turn import ObservedTurn
    from benchmarks.peers.line import Line
    from benchmarks.peers.prompts import Prompts
    from benchmarks.stage import Bench

_ECHO_DELAY_MS: Final = 5
_LATEST: Final = 0.9
"""Part of an undisturbed round by which the engine is killed: later, most turns would have ended."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Turns without a kill: how long all of them took, and how fast their prompts were read."""

    duration_s: float
    prefill_tok_s: float


@dataclass(frozen=True, slots=True)
class Crash:
    """The effect of kills on streams, each of which generates ``max_tokens``."""

    outages: tuple[Outage, ...]
    reference: Reference
    max_tokens: int

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (*self._pauses(), *self._texts())

    def _pauses(self) -> tuple[Metric, ...]:
        gaps_ms = [gap_s * 1000 for outage in self.outages for gap_s in outage.gaps_s()]
        waits_ms = [wait_s * 1000 for outage in self.outages for wait_s in outage.waits_s()]
        loads_ms = [outage.load_s * 1000 for outage in self.outages]
        reading_ms = [outage.tokens_to_read() * 1000 / self.reference.prefill_tok_s for outage in self.outages]
        beyond_s = [outage.beyond_s(prefill_tok_s=self.reference.prefill_tok_s) for outage in self.outages]
        beyond_ms = max((each * 1000 for each in beyond_s if each is not None), default=None)
        return (
            Metric("streams that had text", "", len(gaps_ms)),
            Metric("streams without text yet", "", len(waits_ms)),
            *percentile_metrics("gap", "ms", gaps_ms),
            *metrics_if_known("first text after the kill, worst", "ms", max(waits_ms, default=None), "lower"),
            Metric("no engine, worst", "ms", max(outage.down_s for outage in self.outages) * 1000, "lower"),
            Metric("engine load p50", "ms", percentile(loads_ms, 50), "lower"),
            Metric("engine load, worst", "ms", max(loads_ms), "lower"),
            Metric("prefill of what was there p50", "ms", percentile(reading_ms, 50), "lower"),
            *metrics_if_known("gap beyond load and prefill, worst", "ms", beyond_ms, "lower"),
        )

    def _texts(self) -> tuple[Metric, ...]:
        streams = [stream for outage in self.outages for stream in outage.streams]
        shown = [stream.against_transcript for stream in streams]
        greedy = [
            stream.against_undisturbed.first for stream in streams if stream.against_undisturbed.first is not None
        ]
        return (
            Metric("characters lost", "", sum(each.lost_chars for each in shown), "lower"),
            Metric("characters repeated", "", sum(each.extra_chars for each in shown), "lower"),
            Metric("texts unlike the transcript", "", sum(each.first is not None for each in shown), "lower"),
            Metric("tokens missing", "", sum(max(0, self.max_tokens - stream.tokens) for stream in streams), "lower"),
            Metric("tokens too many", "", sum(max(0, stream.tokens - self.max_tokens) for stream in streams), "lower"),
            Metric("turns failed", "", sum(stream.finishes[:1] != ("length",) for stream in streams), "lower"),
            Metric("turns not ended once", "", sum(len(stream.finishes) != 1 for stream in streams), "lower"),
            Metric("events misnumbered", "", sum(stream.misnumbered for stream in streams), "lower"),
            Metric("texts unlike the undisturbed", "", len(greedy)),
            *metrics_if_known("first character that differs", "", min(greedy, default=None)),
        )


def moments(kills: int, *, seed: int) -> tuple[float, ...]:
    """Return when each engine is killed, as parts of the time that its turns take undisturbed."""
    chance = random.Random(seed)  # noqa: S311 - the same moments for the same seed
    return tuple(chance.uniform(0, _LATEST) for _ in range(kills))


async def run(bench: Bench) -> Report:
    """Measure each number of clients; a repetition has ``count`` kills."""
    options = bench.options
    clients, count, max_tokens = required(options.clients), required(options.count), required(options.max_tokens)
    points = []
    async with bench.stage(_settings(bench), points=len(clients) * count) as stage:
        prompts = await learn_words(stage.daemon.spec)
        for n_clients in clients:
            found = []
            for _ in range(bench.repeat):
                async with open_lines(stage.daemon.spec, n_clients) as lines:
                    rounds = _Rounds(stage.daemon, lines, prompts, bench=bench, max_tokens=max_tokens)
                    found.append((await rounds.run(count)).metrics())
            points.append(Point((Parameter("clients", n_clients), Parameter("kills", count)), (tuple(found),)))
        return Report(SCENARIO.name, stage.sides, tuple(points))


class _Rounds:
    """Turns on all connections at once, one kill in each round but the first."""

    def __init__(
        self, daemon: RunningDaemon, lines: Sequence[Line], prompts: Prompts, *, bench: Bench, max_tokens: int
    ) -> None:
        self._daemon = daemon
        self._lines = lines
        self._prompts = prompts
        self._bench = bench
        self._max_tokens = max_tokens
        self._prompt_tokens = one_prompt_length(bench.options)

    async def run(self, count: int) -> Crash:
        first_seed = self._bench.next_seed()
        reference = await self._reference(self._texts(first_seed))
        outages = []
        for number, moment in enumerate(moments(count, seed=first_seed), start=1):
            with self._bench.run(f"{len(self._lines)} streams, kill {number} of {count}"):
                texts = self._texts(first_seed + number * len(self._lines))
                outages.append(await self._killed(texts, after_s=moment * reference.duration_s))
        return Crash(tuple(outages), reference, self._max_tokens)

    def _texts(self, first_seed: int) -> list[str]:
        return [
            self._prompts.text(Work(self._prompt_tokens, self._max_tokens, seed=first_seed + index), first=True)
            for index in range(len(self._lines))
        ]

    async def _reference(self, texts: Sequence[str]) -> Reference:
        turns, _ = await self._turns(await self._sessions(), texts)
        began_s = min(turn.started_s for turn in turns)
        reading_s = max(turn.times_s[0] if turn.times_s else turn.ended_s or began_s for turn in turns) - began_s
        ended_s = max(turn.ended_s or began_s for turn in turns)
        return Reference(ended_s - began_s, sum(_read(turn) for turn in turns) / reading_s)

    async def _killed(self, texts: Sequence[str], *, after_s: float) -> Outage:
        lost, sessions = self._daemon.engine, await self._sessions()
        with one_failure():
            async with asyncio.TaskGroup() as group:
                kill = group.create_task(self._kill(after_s))
                running = group.create_task(self._turns(sessions, texts))
        (killed_s, engine), (turns, answers) = kill.result(), running.result()
        assert engine.pid != lost.pid, "another engine became ready"
        _, undisturbed = await self._turns(await self._sessions(), texts)
        streams = tuple(
            Stream(
                times_s=tuple(turn.times_s),
                prompt_tokens=self._prompt_tokens,
                tokens=turn.usage.completion_tokens if turn.usage else 0,
                finishes=tuple(turn.finishes),
                against_transcript=difference(answer, turn.text),
                against_undisturbed=difference(same, answer),
                misnumbered=turn.misnumbered,
            )
            for turn, answer, same in zip(turns, answers, undisturbed, strict=True)
        )
        return Outage(killed_s, engine.started_s, engine.ready_s, streams)

    async def _kill(self, after_s: float) -> tuple[float, EngineLife]:
        await asyncio.sleep(after_s)
        lost = self._daemon.engine
        return self._daemon.kill_engine(), await self._daemon.engine_after(lost)

    async def _sessions(self) -> list[str]:
        return [await open_session(line) for line in self._lines]

    async def _turns(self, sessions: Sequence[str], texts: Sequence[str]) -> tuple[list[ObservedTurn], list[str]]:
        """Run a turn in each session, close it, and return the received turns and the stored answers."""
        turns = await run_turns(self._lines, sessions, texts, max_tokens=self._max_tokens)
        answers = []
        for line, session, turn in zip(self._lines, sessions, turns, strict=True):
            answers.append(await finished(line, session, turn))
            await line.send(op="close_session", session_id=session)
        return turns, answers


def _settings(bench: Bench) -> DaemonSettings:
    options = bench.options
    n_tokens = one_prompt_length(options) + required(options.max_tokens)
    settings = bench.settings(slots=max(required(options.clients)), n_ctx=context_tokens(n_tokens))
    delay_ms = _ECHO_DELAY_MS if settings.backend == "echo" else 0
    return replace(settings, loses_engines=True, echo_delay_ms=delay_ms)


def _read(turn: ObservedTurn) -> int:
    return turn.usage.prompt_tokens - turn.usage.cached_tokens if turn.usage else 0


SCENARIO = Scenario(
    name="crash",
    summary="the engine is killed under running streams: pauses, and what is lost or repeated",
    run=run,
    defaults=Options(clients=(8,), count=10, prompt_tokens=(64,), max_tokens=128, repeat=1),
    takes=OWN | {"clients", "count", "prompt_tokens", "max_tokens"},
)
