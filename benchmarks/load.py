"""``python -m benchmarks.load``: the load generator, in a separate process so that its CPU time is separate.

It reads one job per line on standard input, runs it, and writes one line to standard output.
"""

from __future__ import annotations

import asyncio
import math
import resource
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import uvloop

from benchmarks.concurrency import together
from benchmarks.jobs import (
    Aborted,
    Aborts,
    Answer,
    Arrival,
    ClosedLoop,
    Failed,
    Hold,
    Holding,
    Job,
    Release,
    Rounds,
    Turns,
)
from benchmarks.peers import make_target
from benchmarks.target import AbortTrace, Opening, TurnTrace, Work
from inferencecenter.client import Client
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from benchmarks.jobs import Round, TurnSize
    from benchmarks.target import Target, TargetSession, TargetSpec

Trace = TypeVar("Trace", TurnTrace, AbortTrace)

_MAX_LINE_BYTES: Final = 2**20
_CONNECTING_AT_ONCE: Final = 32
# Of the million seeds of a job, those that are not counted up from the first.
_WARM_UP_SEEDS: Final = 800_000
# Of a closed loop's clients, after their warm-up. Less than a whole turn of each would show one of its phases.
_LEAST_TURNS: Final = 2
_OPENING_SEEDS: Final = 900_000


class Generator:
    """Does jobs one after the other; ``clock`` is seconds that only rise, ``cpu_clock`` this process's CPU seconds."""

    def __init__(self, *, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._targets: dict[TargetSpec, Target] = {}
        self._held = AsyncExitStack()
        self._holding = 0

    async def do(self, job: Job) -> Answer:
        """Run a job; a failure is the result ``Failed``."""
        began_s = self._cpu_clock()
        try:
            match job:
                case ClosedLoop():
                    loop = _ClosedLoop(job, self._clock)
                    await self._together(loop.client, job.target, clients=job.clients)
                    return Turns(_frozen(loop.traces), self._cpu_clock() - began_s)
                case Rounds():
                    async with self._sessions(job.target, job.clients) as sessions:
                        traces = await _rounds(job, sessions)
                    return Turns(_frozen(traces), self._cpu_clock() - began_s)
                case Arrival():
                    async with self._sessions(job.target, job.streams + 1) as sessions:
                        traces = await _Arrival(job).run(sessions)
                    return Turns(_frozen(traces), self._cpu_clock() - began_s)
                case Aborts():
                    aborts = _Aborts(job)
                    await self._together(aborts.client, job.target, clients=job.clients)
                    return Aborted(tuple(aborts.traces), self._cpu_clock() - began_s)
                case Hold():
                    await self._hold(job)
                case Release():
                    await self.close()
        except InferenceCenterError as error:
            return Failed(error.code.value, error.message, error.hint)
        return Holding(self._holding)

    async def close(self) -> None:
        """Close the connections that are held."""
        await self._held.aclose()
        self._holding = 0

    async def _together(
        self, client: Callable[[int, TargetSession], Coroutine[None, None, None]], spec: TargetSpec, *, clients: int
    ) -> None:
        """Run a number of clients concurrently."""
        async with self._sessions(spec, clients) as sessions:
            await together(client(index, session) for index, session in enumerate(sessions))

    @asynccontextmanager
    async def _sessions(self, spec: TargetSpec, clients: int) -> AsyncIterator[list[TargetSession]]:
        """Open a connection for each client."""
        if spec not in self._targets:  # cached, because a target probes the tokenizer once
            self._targets[spec] = make_target(spec)
        async with AsyncExitStack() as open_sessions:
            yield [await open_sessions.enter_async_context(self._targets[spec].session()) for _ in range(clients)]

    async def _hold(self, job: Hold) -> None:
        for start in range(0, job.connections, _CONNECTING_AT_ONCE):
            count = min(_CONNECTING_AT_ONCE, job.connections - start)
            await together(self._hold_one(job) for _ in range(count))

    async def _hold_one(self, job: Hold) -> None:
        client = await self._held.enter_async_context(Client(job.target.url, token=job.target.token, reconnect=False))
        for _ in range(job.sessions_each):
            await client.create_session(on_disconnect="close", store=False)
        self._holding += 1


class _ClosedLoop:
    def __init__(self, job: ClosedLoop, clock: Callable[[], float]) -> None:
        self._job = job
        self._clock = clock
        self._start = asyncio.Barrier(job.clients)
        self._warming = job.clients
        self._stop_s = math.inf
        self.traces: list[list[TurnTrace]] = [[] for _ in range(job.clients)]

    async def client(self, index: int, session: TargetSession) -> None:
        job = self._job
        await self._start.wait()
        warm_up_tokens = math.ceil(job.max_tokens * (index + 1) / job.clients)
        await self._turn(index, session, max_tokens=warm_up_tokens)
        self._warming -= 1
        if not self._warming:
            self._stop_s = self._clock() + job.duration_s
        while len(self.traces[index]) <= _LEAST_TURNS or self._clock() < self._stop_s:
            await self._turn(index, session, max_tokens=job.max_tokens)

    async def _turn(self, index: int, session: TargetSession, *, max_tokens: int) -> None:
        turns = self.traces[index]
        job, number = self._job, len(turns)
        conversation, place = divmod(number, job.turns_each)
        work = Work(
            job.prompt_tokens,
            max_tokens,
            seed=job.first_seed + number * job.clients + index,
            history_id=str(conversation) if job.turns_each > 1 else None,
            ends_history=place == job.turns_each - 1 and job.turns_each > 1,
            temperature=job.temperature,
        )
        turns.append(_sound(await session.turn(work)))


async def _rounds(job: Rounds, sessions: Sequence[TargetSession]) -> list[list[TurnTrace]]:
    traces: list[list[TurnTrace]] = [[] for _ in sessions]

    async def turn(number: int, index: int) -> None:
        traces[index].append(_sound(await sessions[index].turn(_work(job, number, index))))

    if job.warm_up is not None:
        await _warm_up(sessions, job.warm_up, first_seed=job.first_seed)
    for number, each in enumerate(job.rounds):
        for group in _groups(each, job.clients):
            await together(turn(number, index) for index in group)
    return traces


def _groups(each: Round, n_clients: int) -> list[tuple[int, ...]]:
    """Return the clients of a round, grouped by when they begin."""
    active = each.active_clients(n_clients)
    size = each.at_once or len(active)
    return [active[start : start + size] for start in range(0, len(active), size)]


def _work(job: Rounds, number: int, index: int) -> Work:
    each = job.rounds[number]
    opening = Opening(each.opening_tokens, job.first_seed + _OPENING_SEEDS + number) if each.opening_tokens else None
    return Work(
        each.prompt_tokens,
        each.max_tokens,
        seed=job.first_seed + number * job.clients + index,
        history_id=f"{job.first_seed}-{index}" if job.continues else None,
        opening=opening,
        slot=index if job.pinned else None,
        image=each.image,
    )


async def _warm_up(sessions: Sequence[TargetSession], size: TurnSize, *, first_seed: int) -> None:
    async def turn(index: int, session: TargetSession) -> None:
        seed = first_seed + _WARM_UP_SEEDS + index
        _sound(await session.turn(Work(size.prompt_tokens, size.max_tokens, seed, image=size.image)))

    await together(turn(index, session) for index, session in enumerate(sessions))


class _Arrival:
    def __init__(self, job: Arrival) -> None:
        self._job = job
        self._behind = job.streams
        self._due = asyncio.Event()

    async def run(self, sessions: Sequence[TargetSession]) -> list[list[TurnTrace]]:
        job = self._job
        await _warm_up(sessions, job.warm_up, first_seed=job.first_seed)
        traces: list[list[TurnTrace]] = [[] for _ in sessions]

        async def client(index: int, session: TargetSession) -> None:
            turn = self._newcomer(session) if index == job.streams else self._stream(index, session)
            traces[index].append(_sound(await turn))

        await together(client(index, session) for index, session in enumerate(sessions))
        return traces

    async def _newcomer(self, session: TargetSession) -> TurnTrace:
        size = self._job.newcomer
        await self._due.wait()
        seed = self._job.first_seed + self._job.streams
        return await session.turn(Work(size.prompt_tokens, size.max_tokens, seed=seed, image=size.image))

    async def _stream(self, index: int, session: TargetSession) -> TurnTrace:
        size, missing = self._job.stream, self._job.after_tokens

        def count_text() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                self._behind -= 1
                if not self._behind:
                    self._due.set()

        work = Work(size.prompt_tokens, size.max_tokens, seed=self._job.first_seed + index)
        trace = await session.turn(work, on_text=count_text)
        if missing > 0 and trace.error is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"a stream of {trace.tokens} tokens ended after {len(trace.token_times_s)} pieces of text; "
                f"the newcomer comes after {self._job.after_tokens}",
            )
        return trace


class _Aborts:
    def __init__(self, job: Aborts) -> None:
        self._job = job
        self.traces: list[AbortTrace] = []

    async def client(self, index: int, session: TargetSession) -> None:
        job = self._job
        for number in range(job.count):
            work = Work(job.prompt_tokens, job.max_tokens, job.first_seed + number * job.clients + index)
            self.traces.append(_sound(await session.turn_then_abort(work, after_tokens=job.after_tokens)))


def _sound(trace: Trace) -> Trace:
    """Return the trace of a successful turn; figures that leave out failed turns would be too good.

    Raises:
        InferenceCenterError: ``engine_unavailable`` when the turn failed.
    """
    if trace.error is None:
        return trace
    raise InferenceCenterError(
        ErrorCode.ENGINE_UNAVAILABLE, f"a turn failed, so that nothing is measured: {trace.error}"
    )


def _frozen(traces: list[list[TurnTrace]]) -> tuple[tuple[TurnTrace, ...], ...]:
    return tuple(tuple(turns) for turns in traces)


async def serve() -> None:
    """Run the jobs of standard input until it ends."""
    jobs = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(jobs), sys.stdin.buffer)
    decoder: msgspec.json.Decoder[Job] = msgspec.json.Decoder(Job)
    encoder = msgspec.json.Encoder()
    generator = Generator(clock=time.monotonic, cpu_clock=time.process_time)
    while line := await jobs.readline():
        answer = await generator.do(decoder.decode(line))
        # Written in one blocking piece: nothing is being measured now, and the reader is waiting for it.
        sys.stdout.buffer.write(encoder.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    await generator.close()


def main() -> None:
    """Run the generator, with as many open files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(KeyboardInterrupt):  # Ctrl-C reaches the whole foreground; the parent process reports it
        uvloop.run(serve())


if __name__ == "__main__":
    main()
