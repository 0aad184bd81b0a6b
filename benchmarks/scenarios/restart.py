"""A daemon is restarted, and a client with a long history resumes its session.

It measures the time until the session is resumed, and then to the first token of an answer, against a cold history of
the same length. That one has other words, because the same ones would reuse the KV cache of the resumed session.
``--restart-by kill`` leaves the daemon no time to save KV cache; only what it saved while idle is available.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.daemon_process import launch
from benchmarks.observed_turn import Difference, difference
from benchmarks.options import Options
from benchmarks.peers.line import named, open_line, succeeded
from benchmarks.results import Metric, Parameter, Point, Report
from benchmarks.scenario import OWN, Scenario, context_tokens, required
from benchmarks.stage import started
from benchmarks.target import Work
from benchmarks.turns import finished, learn_words, open_session, run_turn
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from benchmarks.daemon_process import DaemonSettings, Launch
    from benchmarks.observed_turn import ObservedTurn
    from benchmarks.options import RestartBy
    from benchmarks.peers.line import Frame
    from benchmarks.peers.prompts import Prompts
    from benchmarks.results import Side
    from benchmarks.stage import Bench
    from benchmarks.target import TargetSpec

_SLOTS: Final = 2
_QUESTION_TOKENS: Final = 16
_READING_S: Final = 0.5
"""How long the client reads the answer before the daemon is ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart.

    Seconds ``to_resumed_s`` and ``to_ready_s`` count from the start of the new process. ``after`` is the turn after the
    ``resumed`` one, in the same session: what is between the two is paid once for a new engine.
    """

    stop_s: float
    to_resumed_s: float
    to_ready_s: float
    is_in_place: bool
    transcript: Difference
    resumed: ObservedTurn
    after: ObservedTurn
    cold: ObservedTurn

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        resumed_ms, cold_ms = ttft_ms(self.resumed), ttft_ms(self.cold)
        return (
            Metric("TTFT resumed", "ms", resumed_ms, "lower"),
            Metric("TTFT cold", "ms", cold_ms, "lower"),
            Metric("TTFT of the next turn", "ms", ttft_ms(self.after), "lower"),
            Metric("TTFT resumed / cold", "", resumed_ms / cold_ms, "lower"),
            Metric("tokens read, resumed", "tokens", _tokens_read(self.resumed)),
            Metric("tokens read, cold", "tokens", _tokens_read(self.cold)),
            Metric("signal to end of process", "s", self.stop_s, "lower"),
            Metric("start to resumed", "s", self.to_resumed_s, "lower"),
            Metric("start to ready", "s", self.to_ready_s, "lower"),
            Metric("resumed in place", "", self.is_in_place),
            Metric("characters lost", "", self.transcript.lost_chars, "lower"),
        )


@dataclass(frozen=True, slots=True)
class _Left:
    """A session at the client's disconnect."""

    created: Frame
    first: ObservedTurn
    answer: str
    stop_s: float


def ttft_ms(turn: ObservedTurn) -> float:
    """Return the milliseconds from a request to its first text, or to its end when it has none.

    Raises:
        InferenceCenterError: ``engine_unavailable`` when the turn did not run to its end.
    """
    if turn.finishes != ["length"] or turn.ended_s is None:
        raise InferenceCenterError(
            ErrorCode.ENGINE_UNAVAILABLE, f"a turn failed, so that nothing is measured: {turn.finishes}"
        )
    return ((turn.times_s[0] if turn.times_s else turn.ended_s) - turn.started_s) * 1000


async def run(bench: Bench) -> Report:
    """Measure each length of history; every repetition ends one daemon and starts another."""
    lengths, max_tokens = required(bench.options.prompt_tokens), required(bench.options.max_tokens)
    by: RestartBy = required(bench.options.restart_by)
    settings = bench.settings(slots=_SLOTS, n_ctx=context_tokens(max(lengths) + 2 * _QUESTION_TOKENS + 3 * max_tokens))
    bench.progress.expect(len(lengths) * bench.repeat)
    points = []
    with tempfile.TemporaryDirectory(prefix="inferencecenter-bench-") as directory:
        restarts = _Restarts(bench, settings, Path(directory) / "state")
        side = await restarts.prepare()
        for n_tokens in lengths:
            found = []
            for repetition in range(bench.repeat):
                with bench.run(f"{n_tokens} tokens of history, {by} ({repetition + 1} of {bench.repeat})"):
                    found.append((await restarts.one(n_tokens, by=by)).metrics())
            points.append(Point((Parameter("tokens of history", n_tokens),), (tuple(found),)))
    return Report(SCENARIO.name, (side,), tuple(points))


class _Restarts:
    """Daemons in one state directory, one after the other."""

    def __init__(self, bench: Bench, settings: DaemonSettings, state_dir: Path) -> None:
        self._bench = bench
        self._settings = settings
        self._state_dir = state_dir
        self._max_tokens = required(bench.options.max_tokens)
        self._prompts: Prompts | None = None

    async def prepare(self) -> Side:
        """Start and stop a daemon, which brings the model into the page cache, and return its facts."""
        async with launch(self._settings, self._state_dir) as launched:
            daemon = await launched.ready()
            self._prompts = await learn_words(daemon.spec)
            return (await started(daemon)).side

    async def one(self, n_tokens: int, *, by: RestartBy) -> Restart:
        """Disconnect from a session with a history of this length, and resume it after the restart."""
        seed = self._bench.next_seed()
        async with launch(self._settings, self._state_dir) as launched:
            left = await self._leave(launched, self._text(n_tokens, seed, first=True), by=by)
        async with launch(self._settings, self._state_dir) as launched:
            return await self._resume(launched, left, seed=seed + 1)

    async def _leave(self, launched: Launch, text: str, *, by: RestartBy) -> _Left:
        daemon = await launched.ready()
        async with open_line(daemon.spec) as line:
            created = await line.create_session(stored=True)
            first = await run_turn(line, named(created), text, max_tokens=self._max_tokens)
            answer = await finished(line, named(created), first)
        await asyncio.sleep(_READING_S)
        stopping_s = time.monotonic()
        await (launched.stop() if by == "term" else launched.kill())
        return _Left(created, first, answer, time.monotonic() - stopping_s)

    async def _resume(self, launched: Launch, left: _Left, *, seed: int) -> Restart:
        session_id = named(left.created)
        async with open_line(await launched.listening()) as line:
            answered = await line.request(
                op="resume_session", session_id=session_id, epoch=left.created.epoch, last_seq=left.first.seq
            )
            resumed_s = time.monotonic()
            back = succeeded(answered, "session_resumed")
            daemon = await launched.ready()
            kept = await finished(line, session_id, left.first)
            resumed, after = [
                await run_turn(
                    line, session_id, self._text(_QUESTION_TOKENS, each, first=False), max_tokens=self._max_tokens
                )
                for each in (seed, seed + 1)
            ]
            await line.request(op="close_session", session_id=session_id)
        return Restart(
            stop_s=left.stop_s,
            to_resumed_s=resumed_s - launched.started_s,
            to_ready_s=daemon.readiness.ready_s,
            is_in_place=back.resumed is True,
            transcript=difference(left.answer, kept),
            resumed=resumed,
            after=after,
            cold=await self._cold(daemon.spec, resumed, seed=seed + 2),
        )

    async def _cold(self, spec: TargetSpec, resumed: ObservedTurn, *, seed: int) -> ObservedTurn:
        """Run a turn with a new prompt that is as long as that of another turn."""
        n_tokens = resumed.usage.prompt_tokens if resumed.usage else 0
        async with open_line(spec) as line:
            session_id = await open_session(line)
            text = self._text(max(1, n_tokens), seed, first=True)
            cold = await run_turn(line, session_id, text, max_tokens=self._max_tokens)
            await line.request(op="close_session", session_id=session_id)
            return cold

    def _text(self, n_tokens: int, seed: int, *, first: bool) -> str:
        assert self._prompts is not None, "prepared before"
        return self._prompts.text(Work(n_tokens, self._max_tokens, seed), first=first)


def _tokens_read(turn: ObservedTurn) -> int:
    return turn.usage.prompt_tokens - turn.usage.cached_tokens if turn.usage else 0


SCENARIO = Scenario(
    name="restart",
    summary="restart of the daemon: time until a session is resumed, and its first token against a cold prefill",
    run=run,
    defaults=Options(prompt_tokens=(1000,), max_tokens=16, restart_by="term", repeat=5),
    takes=OWN | {"prompt_tokens", "max_tokens", "restart_by"},
)
