"""An engine behind a host and TLS, beside one that is the daemon's child.

Four measurements: how long frames of tokens take to the front, also beside copies of model files, and what they cost
there; closed loops on a daemon with an engine of either kind; whether returning turns find their KV on two nodes; and
how long streams pause when one of two nodes is lost. The hosts run on this machine and are started without Ray, which
carries no tokens.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from benchmarks.cluster.frame_times import COPY_MIB_PER_S, MODULE, TOKENS_PER_FRAME, FrameComparison, FrameTimes
from benchmarks.concurrency import one_failure
from benchmarks.daemon_process import OURS, start_daemon
from benchmarks.jobs import Round, Rounds, Turns
from benchmarks.observed_turn import Difference, difference
from benchmarks.options import Options, refused
from benchmarks.outages import Outage, Stream
from benchmarks.results import Metric, Parameter, Point, Report, percentile_metrics
from benchmarks.scenario import Scenario, context_tokens, one_prompt_length, required
from benchmarks.scenarios import crash, replicas, throughput
from benchmarks.stage import started
from benchmarks.target import Work
from benchmarks.turns import finished, learn_words, open_lines, open_session, run_turns
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.daemon_process import DaemonSettings, RunningDaemon
    from benchmarks.peers.line import Line
    from benchmarks.results import Side
    from benchmarks.stage import Bench, Measured

NODES: Final = 2
_LOCAL: Final = "local engine"
_ECHO_DELAY_MS: Final = 10
_STREAM_TOKENS: Final = 800
"""Long enough to outlast the loss of a node: 8 s and the pause."""
_ROUNDS: Final = 4
"""Turns of each conversation on two nodes."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A closed loop on an engine of one kind."""

    tok_s: float
    front_us_per_token: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (
            Metric("generation", "tok/s", self.tok_s, "higher"),
            Metric("front CPU a token", "µs", self.front_us_per_token, "lower"),
            *percentile_metrics("TTFT", "ms", self.ttft_ms),
            *percentile_metrics("ITL", "ms", self.itl_ms),
        )


def read(measured: Measured[Turns]) -> EngineKind:
    """Return the figures of a closed loop without its warm-up, and the front's CPU of all of it."""
    assert measured.before is not None and measured.after is not None, "the daemon is our own"  # noqa: PT018
    loop = throughput.read(measured)
    tokens = sum(turn.tokens for turns in measured.answer.clients for turn in turns)
    front_s = measured.after.front.cpu_s - measured.before.front.cpu_s
    return EngineKind(loop.tok_s, front_s / tokens * 1e6, loop.ttft_ms, loop.itl_ms)


def frame_metrics(found: FrameComparison) -> tuple[tuple[Metric, ...], tuple[Metric, ...]]:
    """Return the numbers of one repetition for both sides; what the host and copies add is among its own."""

    def of(side: FrameTimes) -> tuple[Metric, ...]:
        return (
            Metric("frame p50", "ms", side.p50_us / 1000, "lower"),
            Metric("frame p99", "ms", side.p99_us / 1000, "lower"),
            Metric("front CPU to receive a frame", "µs", side.cpu_us, "lower"),
        )

    added = (
        Metric("added to a frame p50", "ms", (found.hosted.p50_us - found.local.p50_us) / 1000, "lower"),
        Metric("added to a frame p99", "ms", (found.hosted.p99_us - found.local.p99_us) / 1000, "lower"),
    )
    copies = []
    for limit, beside, rate in zip(COPY_MIB_PER_S, found.beside_copies, found.copied_mib_per_s, strict=True):
        named = f"frame beside a copy of at most {limit} MiB/s"
        copies += [
            Metric(f"{named} p50", "ms", beside.p50_us / 1000, "lower"),
            Metric(f"{named} p99", "ms", beside.p99_us / 1000, "lower"),
            Metric(f"copy of at most {limit} MiB/s", "MiB/s", rate, "higher"),
        ]
    return (*of(found.hosted), *added, *copies), of(found.local)


def loss_metrics(outages: Sequence[Outage]) -> tuple[Metric, ...]:
    """Return the pauses of streams that had text when a node was lost, and what clients lost of their texts."""
    streams = [stream for outage in outages for stream in outage.streams]
    gaps_s = [gap_s for outage in outages for gap_s in outage.gaps_s()]
    shown = [stream.against_transcript for stream in streams]
    return (
        Metric("streams", "", len(streams)),
        *percentile_metrics("gap", "s", gaps_s),
        Metric("characters lost", "", sum(each.lost_chars for each in shown), "lower"),
        Metric("characters repeated", "", sum(each.extra_chars for each in shown), "lower"),
        Metric("turns not ended once", "", sum(stream.finishes != ("length",) for stream in streams), "lower"),
    )


async def run(bench: Bench) -> Report:
    """Measure both kinds of engines in turn, then two nodes."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "cryptography")):
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            "engines behind hosts need the extra cluster",
            hint="pip install 'inferencecenter[cluster]'",
        )
    options = bench.options
    count, clients = required(options.count), required(options.clients)
    if max(clients) * NODES > (slots := required(options.slots)):
        raise refused("slots", f"one node has to take the {max(clients) * NODES} streams of two, with {slots} slots")
    settings = replace(throughput.settings(bench), echo_delay_ms=_ECHO_DELAY_MS, hosted=1)
    bench.progress.expect(bench.repeat)
    async with bench.stage(settings, points=len(clients), beside={_LOCAL: replace(settings, hosted=0)}) as stage:
        points = [await _frames(bench)]
        await throughput.closed_loops(stage, options, read=read)
        points += stage.points
        sides = stage.sides
    bench.progress.expect(len(clients) * (bench.repeat + 2 * count))
    async with start_daemon(_pair(bench), name=OURS) as daemon:
        both = ((await started(daemon)).side, sides[1])
        for each in clients:
            points.append(await _returning(bench, daemon, both, clients=each * NODES))
            for silent in (False, True):
                points.append(await _lost(bench, daemon, both, clients=each * NODES, silent=silent))
    return Report(SCENARIO.name, sides, tuple(points))


def _pair(bench: Bench) -> DaemonSettings:
    prompt_tokens, max_tokens = one_prompt_length(bench.options), required(bench.options.max_tokens)
    tokens = max(prompt_tokens + _STREAM_TOKENS, _ROUNDS * (prompt_tokens + max_tokens))
    settings = bench.settings(slots=required(bench.options.slots), n_ctx=context_tokens(tokens))
    return replace(settings, echo_delay_ms=_ECHO_DELAY_MS, hosted=NODES, loses_engines=True)


async def _frames(bench: Bench) -> Point:
    """Have a process of its own receive frames, as the front does."""
    frames = round(required(bench.options.duration_s) * 1000 / _ECHO_DELAY_MS)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        str(frames),
        str(bench.repeat),
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None, "started with a pipe"
    hosted, local = [], []
    try:
        for repetition in range(bench.repeat):
            with bench.run(f"{frames} frames of either engine ({repetition + 1} of {bench.repeat})"):
                while (line := await process.stdout.readline()) and not line.startswith(b"{"):
                    pass  # a line of the log
                if not line:
                    raise InferenceCenterError(ErrorCode.INTERNAL, "the process that receives frames has ended")
                found = frame_metrics(msgspec.json.decode(line, type=FrameComparison))
                hosted.append(found[0])
                local.append(found[1])
        await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return Point((Parameter("tokens a frame", TOKENS_PER_FRAME),), (tuple(hosted), tuple(local)))


async def _returning(bench: Bench, daemon: RunningDaemon, sides: tuple[Side, ...], *, clients: int) -> Point:
    """Run conversations on two nodes, as ``replicas`` does."""
    rounds = (Round(one_prompt_length(bench.options), required(bench.options.max_tokens)),) * _ROUNDS
    found = []
    for repetition in range(bench.repeat):
        job = Rounds(target=daemon.spec, clients=clients, rounds=rounds, continues=True, first_seed=bench.next_seed())
        with bench.run(f"{clients} conversations on {NODES} nodes ({repetition + 1} of {bench.repeat})"):
            found.append(replicas.read(await bench.generator.do(job, Turns), rounds).metrics())
    return Point((Parameter("conversations", clients), Parameter("nodes", NODES)), (tuple(found), ()), sides=sides)


async def _lost(bench: Bench, daemon: RunningDaemon, sides: tuple[Side, ...], *, clients: int, silent: bool) -> Point:
    """Lose nodes under running streams: by killing their processes, or ``silent``, by stopping them."""
    count = required(bench.options.count)
    how = "silent" if silent else "killed"
    prompt_tokens = one_prompt_length(bench.options)
    prompts = await learn_words(daemon.spec)
    outages = []
    async with open_lines(daemon.spec, clients) as lines:
        for number, moment in enumerate(crash.moments(count, seed=bench.next_seed())):
            with bench.run(f"{clients} streams, node {how} ({number + 1} of {count})"):
                works = [Work(prompt_tokens, _STREAM_TOKENS, seed=bench.next_seed()) for _ in lines]
                texts = [prompts.text(work, first=True) for work in works]
                outages.append(await _outage(daemon, lines, texts, node=number % NODES, moment=moment, silent=silent))
    parameters = (Parameter("streams", clients), Parameter(f"nodes {how}", count))
    return Point(parameters, ((loss_metrics(outages),), ()), sides=sides)


async def _outage(  # noqa: PLR0913 - keyword-only but for the first three
    daemon: RunningDaemon, lines: Sequence[Line], texts: Sequence[str], *, node: int, moment: float, silent: bool
) -> Outage:
    lost = daemon.engine
    sessions = [await open_session(line) for line in lines]

    async def lose() -> float:
        # The streams run for the rest of this time on the other node.
        await asyncio.sleep(moment * _STREAM_TOKENS * _ECHO_DELAY_MS / 1000)
        processes = daemon.node_processes(node)
        lost_s = time.monotonic()
        for which in (signal.SIGSTOP,) if silent else (signal.SIGSTOP, signal.SIGKILL):
            for pid in processes:
                with suppress(ProcessLookupError):  # an engine ends with its host
                    os.kill(pid, which)
        return lost_s

    with one_failure():
        async with asyncio.TaskGroup() as group:
            losing = group.create_task(lose())
            running = group.create_task(run_turns(lines, sessions, texts, max_tokens=_STREAM_TOKENS))
    engine = await daemon.engine_after(lost)
    streams = []
    for line, session, turn in zip(lines, sessions, running.result(), strict=True):
        answer = await finished(line, session, turn)
        streams.append(
            Stream(
                times_s=tuple(turn.times_s),
                prompt_tokens=turn.usage.prompt_tokens if turn.usage else 0,
                tokens=turn.usage.completion_tokens if turn.usage else 0,
                finishes=tuple(turn.finishes),
                against_transcript=difference(answer, turn.text),
                against_undisturbed=Difference(),  # there is no such turn
                misnumbered=turn.misnumbered,
            )
        )
        await line.send(op="close_session", session_id=session)
    return Outage(losing.result(), engine.started_s, engine.ready_s, tuple(streams))


SCENARIO = Scenario(
    name="cluster",
    summary="an engine behind a host and TLS beside a local one, and the loss of one of two nodes",
    run=run,
    defaults=Options(
        backend="echo",
        clients=(4,),
        slots=8,
        prompt_tokens=(64,),
        max_tokens=64,
        duration_s=5.0,
        count=5,
        repeat=5,
    ),
    takes=frozenset({"clients", "slots", "prompt_tokens", "max_tokens", "duration_s", "count", "repeat"}),
)
