"""Another model is loaded while streams run, and becomes the one that answers.

It measures the effect on running turns: whether they are complete, and how long their text pauses while the other model
loads, compared with before. Both models are the same file, so that all rounds are equally fast. After each round the
previous model is unloaded, so every swap loads one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from benchmarks.concurrency import one_failure
from benchmarks.daemon_process import MODEL_NAMES
from benchmarks.observed_turn import difference
from benchmarks.options import Options, refused
from benchmarks.peers.line import open_line
from benchmarks.results import Metric, Parameter, Point, Report, percentile_metrics
from benchmarks.scenario import OWN, Scenario, context_tokens, one_prompt_length, required
from benchmarks.stats import percentile
from benchmarks.target import Work
from benchmarks.turns import finished, learn_words, open_lines, open_session, run_turn
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.daemon_process import DaemonSettings, RunningDaemon
    from benchmarks.observed_turn import Difference, ObservedTurn
    from benchmarks.peers.line import Line
    from benchmarks.peers.prompts import Prompts
    from benchmarks.stage import Bench

_PIECES_BEFORE: Final = 32
_ECHO_DELAY_MS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One swap under streams: when it was requested and done, and how long its engine loaded; seconds.

    ``against_transcripts`` compares the text of each stream with its session's transcript.
    """

    requested_s: float
    done_s: float
    load_s: float
    streams: tuple[ObservedTurn, ...]
    against_transcripts: tuple[Difference, ...]

    def before_ms(self) -> list[float]:
        """Return the pauses of streams that ended before the swap was requested."""
        return [(later - earlier) * 1000 for earlier, later in _pauses(self.streams) if later <= self.requested_s]

    def meanwhile_ms(self) -> list[float]:
        """Return the pauses that overlap the swap, with their full length."""
        return [
            (later - earlier) * 1000
            for earlier, later in _pauses(self.streams)
            if later > self.requested_s and earlier < self.done_s
        ]


@dataclass(frozen=True, slots=True)
class Swaps:
    """The effect of swaps on streams that generate ``max_tokens`` each."""

    changes: tuple[Change, ...]
    max_tokens: int

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        turns = [turn for change in self.changes for turn in change.streams]
        whole = [change.against_transcripts for change in self.changes]
        generated = [turn.usage.completion_tokens if turn.usage else 0 for turn in turns]
        taken_ms = [(change.done_s - change.requested_s) * 1000 for change in self.changes]
        loads_ms = [change.load_s * 1000 for change in self.changes]
        return (
            Metric("turns", "", len(turns)),
            Metric("turns failed", "", sum(turn.finishes != ["length"] for turn in turns), "lower"),
            Metric("tokens missing", "", sum(max(0, self.max_tokens - tokens) for tokens in generated), "lower"),
            Metric(
                "texts unlike the transcript",
                "",
                sum(each.first is not None for found in whole for each in found),
                "lower",
            ),
            Metric("asked to done p50", "ms", percentile(taken_ms, 50), "lower"),
            Metric("asked to done, worst", "ms", max(taken_ms), "lower"),
            Metric("engine load p50", "ms", percentile(loads_ms, 50), "lower"),
            *percentile_metrics("ITL before", "ms", [each for change in self.changes for each in change.before_ms()]),
            *percentile_metrics(
                "ITL meanwhile", "ms", [each for change in self.changes for each in change.meanwhile_ms()]
            ),
        )


async def run(bench: Bench) -> Report:
    """Measure each number of streams; a repetition has ``count`` swaps."""
    options = bench.options
    clients, count, max_tokens = required(options.clients), required(options.count), required(options.max_tokens)
    points = []
    async with bench.stage(_settings(bench), points=len(clients) * count) as stage:
        prompts = await learn_words(stage.daemon.spec)
        async with open_line(stage.daemon.spec) as operator:
            rounds = _Rounds(stage.daemon, operator, prompts, bench=bench)
            for n_streams in clients:
                found = []
                for _ in range(bench.repeat):
                    async with open_lines(stage.daemon.spec, n_streams) as lines:
                        changes = [await rounds.run(lines) for _ in range(count)]
                        found.append(Swaps(tuple(changes), max_tokens).metrics())
                points.append(Point((Parameter("streams", n_streams), Parameter("swaps", count)), (tuple(found),)))
        return Report(SCENARIO.name, stage.sides, tuple(points))


class _Rounds:
    """Turns on all connections at once, during which the model is swapped; rounds alternate between two models."""

    def __init__(self, daemon: RunningDaemon, operator: Line, prompts: Prompts, *, bench: Bench) -> None:
        self._daemon = daemon
        self._operator = operator
        self._prompts = prompts
        self._bench = bench
        self._max_tokens = required(bench.options.max_tokens)
        self._prompt_tokens = one_prompt_length(bench.options)
        self._answering, self._other = MODEL_NAMES

    async def run(self, lines: Sequence[Line]) -> Change:
        """Run one round.

        Raises:
            InferenceCenterError: ``engine_unavailable`` when the other model cannot be loaded, ``invalid_request`` when
                all streams ended before it was.
        """
        with self._bench.run(f"{len(lines)} streams, {self._answering} to {self._other}"):
            sessions = [await open_session(line) for line in lines]
            streams = _Streams(len(lines))
            with one_failure():
                async with asyncio.TaskGroup() as group:
                    turns = [
                        group.create_task(
                            run_turn(line, session, text, max_tokens=self._max_tokens, on_frame=streams.observe)
                        )
                        for line, session, text in zip(lines, sessions, self._texts(len(lines)), strict=True)
                    ]
                    await streams.flowing.wait()
                    requested_s, done_s, load_s = await self._swap()
            shown = tuple(turn.result() for turn in turns)
            if all(turn.ended_s is not None and turn.ended_s < done_s for turn in shown):
                raise refused(
                    "max_tokens",
                    "all streams ended before the other model was loaded",
                    hint="Let the streams be longer.",
                )
            answers = [await finished(*of) for of in zip(lines, sessions, shown, strict=True)]
            for line, session in zip(lines, sessions, strict=True):
                await line.send(op="close_session", session_id=session)
            await self._unload()
        return Change(
            requested_s=requested_s,
            done_s=done_s,
            load_s=load_s,
            streams=shown,
            against_transcripts=tuple(
                difference(answer, turn.text) for answer, turn in zip(answers, shown, strict=True)
            ),
        )

    def _texts(self, count: int) -> list[str]:
        first_seed = self._bench.next_seed()
        return [
            self._prompts.text(Work(self._prompt_tokens, self._max_tokens, seed=first_seed + index), first=True)
            for index in range(count)
        ]

    async def _swap(self) -> tuple[float, float, float]:
        """Load the other model; return when that was requested and done, and how long its engine loaded."""
        before, requested_s = self._daemon.engine, time.monotonic()
        request_id = await self._operator.send(op="load_model", name=self._other)
        while True:
            frame = await self._operator.receive()
            if frame.id == request_id and (frame.op == "error" or frame.phase in ("done", "failed")):
                break
        done_s = time.monotonic()
        if frame.phase != "done":
            raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, frame.detail or frame.message)
        engine = await self._daemon.engine_after(before)
        return requested_s, done_s, engine.ready_s - engine.started_s

    async def _unload(self) -> None:
        """Free the model used so far, and continue with the other."""
        await self._operator.send(op="unload_model", name=self._answering)
        while (frame := await self._operator.receive()).op != "engine" or frame.state != "asleep":
            if frame.op == "error":
                raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, frame.message)
        self._answering, self._other = self._other, self._answering


class _Streams:
    """Turns that have just started; ``flowing`` when each has generated enough, or has ended."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._flowing: set[int] = set()
        self.flowing = asyncio.Event()

    def observe(self, turn: ObservedTurn) -> None:
        if len(turn.times_s) >= _PIECES_BEFORE or turn.finishes:
            self._flowing.add(id(turn))
        if len(self._flowing) == self._count:
            self.flowing.set()


def _pauses(turns: Iterable[ObservedTurn]) -> list[tuple[float, float]]:
    return [pause for turn in turns for pause in pairwise(turn.times_s)]


def _settings(bench: Bench) -> DaemonSettings:
    options = bench.options
    n_tokens = one_prompt_length(options) + required(options.max_tokens)
    settings = bench.settings(slots=max(required(options.clients)), n_ctx=context_tokens(n_tokens))
    delay_ms = _ECHO_DELAY_MS if settings.backend == "echo" else 0
    return replace(settings, two_models=True, echo_delay_ms=delay_ms)


SCENARIO = Scenario(
    name="swap",
    summary="another model is loaded under running streams: failed turns, pauses, how long it takes",
    run=run,
    defaults=Options(clients=(8,), count=6, prompt_tokens=(64,), max_tokens=512, repeat=1),
    takes=OWN | {"clients", "count", "prompt_tokens", "max_tokens"},
)
