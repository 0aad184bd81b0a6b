"""What scenarios use: running servers, the load generator, and repetitions in which the sides alternate."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from benchmarks.compare import Comparison, compare
from benchmarks.daemon_process import OURS, DaemonSettings, start_daemon
from benchmarks.jobs import Aborted, Turns
from benchmarks.peer_process import filled, start_peer
from benchmarks.peers import detect, make_target
from benchmarks.results import Metric, Parameter, Point, Side
from inferencecenter.config.settings import bundled_model
from inferencecenter.hardware.nvml import Gpu

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from benchmarks.daemon_process import DaemonUsage, RunningDaemon
    from benchmarks.generator import LoadGenerator
    from benchmarks.jobs import Job
    from benchmarks.options import Options
    from benchmarks.results import Result
    from benchmarks.target import TargetFacts, TargetSpec

A = TypeVar("A", Turns, Aborted)

SpecTransform: TypeAlias = "Callable[[TargetSpec], TargetSpec]"
"""Returns the target of our daemon for another protocol; the name is set afterwards."""

_SEEDS_OF_A_JOB = 1_000_000


class Progress(Protocol):
    """Called with the progress of a run."""

    def expect(self, runs: int) -> None:
        """Announce further runs."""

    def begin(self, what: str) -> None:
        """A run begins."""

    def done(self) -> None:
        """A run has ended."""


@dataclass(frozen=True, slots=True)
class Measured(Generic[A]):
    """One run of a job on one side.

    ``before`` and ``after`` are the usage of our daemon's processes, ``vram_bytes`` what is in use on the GPU after the
    run by any program; ``None`` where that is unknown.
    """

    answer: A
    before: DaemonUsage | None = None
    after: DaemonUsage | None = None
    vram_bytes: int | None = None

    def cpu_metrics(self) -> tuple[Metric, ...]:
        """Return the CPU seconds of the generator and of the daemon's processes."""
        found = [Metric("CPU generator", "s", self.answer.cpu_s)]
        if self.before is not None and self.after is not None:
            found += [
                Metric("CPU front", "s", self.after.front.cpu_s - self.before.front.cpu_s),
                Metric("CPU engine", "s", self.after.engine.cpu_s - self.before.engine.cpu_s),
            ]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; ``daemon`` is set for one that the benchmark started."""

    spec: TargetSpec
    side: Side
    daemon: RunningDaemon | None = None


class Stage:
    """Running servers, ours first, and what was measured on them so far.

    Args:
        bench: The run.
        servers: The sides.
        is_one_server: Whether they are ways to speak to one server.
    """

    def __init__(self, bench: Bench, servers: tuple[Server, ...], *, is_one_server: bool = False) -> None:
        self._bench = bench
        self._is_one_server = is_one_server
        self.servers = servers
        self.points: list[Point] = []

    @property
    def sides(self) -> tuple[Side, ...]:
        """The facts of each server."""
        return tuple(server.side for server in self.servers)

    @property
    def daemon(self) -> RunningDaemon:
        """Our own daemon, for scenarios that take no other."""
        daemon = self.servers[0].daemon
        assert daemon is not None, "the scenario takes no --url"
        return daemon

    async def measure(
        self,
        *parameters: Parameter,
        job: Callable[..., Job],
        answer: type[A],
        read: Callable[[Measured[A]], Result],
    ) -> None:
        """Run a job on each side in turn, with the configured number of repetitions, and keep the results as one point.

        Only one server is under load at any moment. All get the same prompts, except where the sides are protocols of
        one server, whose cache would contain the prompts of the other side.

        Args:
            parameters: What distinguishes this point.
            job: Makes the job, given its ``target`` and its ``first_seed``, from which a million seeds are its own.
            answer: What the generator answers.
            read: Turns what was measured into the scenario's result.
        """
        results: list[list[tuple[Metric, ...]]] = [[] for _ in self.servers]
        label = ", ".join(f"{parameter.value} {parameter.name}" for parameter in parameters)
        repeat = self._bench.repeat
        for repetition in range(repeat):
            common_seed = self._bench.next_seed()
            for server, kept in zip(self.servers, results, strict=True):
                seed = self._bench.next_seed() if self._is_one_server else common_seed
                with self._bench.run(f"{server.spec.name}: {label} ({repetition + 1} of {repeat})"):
                    kept.append(
                        read(await self._one(server, job(target=server.spec, first_seed=seed), answer)).metrics()
                    )
        self.points.append(Point(parameters, tuple(tuple(kept) for kept in results)))

    async def _one(self, server: Server, job: Job, answer: type[A]) -> Measured[A]:
        daemon = server.daemon
        before = daemon.usage() if daemon else None
        answered = await self._bench.generator.do(job, answer)
        if daemon is None or before is None:
            return Measured(answered)
        vram_bytes = (await asyncio.to_thread(self._bench.gpu.read)).vram_used_bytes
        return Measured(answered, before, daemon.usage(), vram_bytes)


class Bench:
    """One run of one scenario."""

    def __init__(self, options: Options, generator: LoadGenerator, progress: Progress) -> None:
        self.options = options
        self.generator = generator
        self.progress = progress
        self.gpu = Gpu()
        self._seeds = itertools.count(1, _SEEDS_OF_A_JOB)

    @property
    def repeat(self) -> int:
        """Repetitions of each point."""
        assert self.options.repeat is not None, "every scenario has a default"
        return self.options.repeat

    @property
    def n_sides(self) -> int:
        """Servers that are measured."""
        return 1 + len(self.options.peers or ())

    def next_seed(self) -> int:
        """Return the first of a million seeds that no other run uses."""
        return next(self._seeds)

    @contextmanager
    def run(self, what: str) -> Iterator[None]:
        """Show one run on the progress bar while it lasts."""
        self.progress.begin(what)
        yield
        self.progress.done()

    def settings(self, *, slots: int, n_ctx: int) -> DaemonSettings:
        """Return the settings of our daemon: those of the options, else those that the scenario needs."""
        options = self.options
        backend = options.backend or "llama"
        return DaemonSettings(
            backend=backend,
            model=None if backend == "echo" else options.model or bundled_model(),
            slots=options.slots or slots,
            n_ctx=options.n_ctx or n_ctx,
            threads=options.threads or 0,
        )

    @asynccontextmanager
    async def stage(
        self,
        settings: DaemonSettings,
        *,
        points: int,
        beside: Mapping[str, DaemonSettings] | None = None,
        protocols: Mapping[str, SpecTransform] | None = None,
    ) -> AsyncIterator[Stage]:
        """Start our daemon, unless one is named, detect the peers, and compare their facts.

        Args:
            settings: Of our daemon.
            points: How often ``measure`` will be called.
            beside: Further daemons of ours to be measured as peers are, by name.
            protocols: Protocols of our daemon, by name: each is a side, in place of the usual protocol.

        Raises:
            InferenceCenterError: A server does not answer, or our daemon does not become ready.
        """
        others = beside or {}
        n_sides = self.n_sides - 1 + len(protocols or (OURS,)) + len(others)
        self.progress.expect(points * self.repeat * n_sides)
        async with AsyncExitStack() as stack:
            if self.options.url is not None:
                ours = await found(OURS, self.options.url, token=self.options.token)
            else:
                ours = await started(await stack.enter_async_context(start_daemon(settings)))
            servers = [ours] if protocols is None else protocol_sides(ours, protocols)
            for name, other in others.items():
                another = await started(await stack.enter_async_context(start_daemon(other, name=name)))
                servers.append(replace(another, side=compared(ours.side.facts, another.side.facts, self.options)))
            for peer in self.options.peers or ():
                if peer.command is not None:
                    command = filled(peer.command, slots=settings.slots, n_ctx=settings.n_ctx)
                    await stack.enter_async_context(start_peer(command, url=peer.url))
                theirs = await found(peer.name, peer.url, token=peer.token)
                servers.append(replace(theirs, side=compared(ours.side.facts, theirs.side.facts, self.options)))
            yield Stage(self, tuple(servers), is_one_server=protocols is not None)


def protocol_sides(server: Server, protocols: Mapping[str, SpecTransform]) -> list[Server]:
    """Return one server as several sides, one for each protocol; they run the same model."""
    specs = [replace(transform(server.spec), name=name) for name, transform in protocols.items()]
    sides = [
        Side(replace(server.side.facts, name=spec.name, kind=spec.kind), Comparison((), ()) if index else None)
        for index, spec in enumerate(specs)
    ]
    return [replace(server, spec=spec, side=side) for spec, side in zip(specs, sides, strict=True)]


async def found(name: str, url: str, *, token: str | None = None) -> Server:
    """Query a running server's name and model.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` or ``not_authenticated``.
    """
    spec = await detect(name, url, token=token)
    return Server(spec, Side(await make_target(spec).facts(), None))


async def started(daemon: RunningDaemon) -> Server:
    """Return our own daemon as a server."""
    facts = await make_target(daemon.spec).facts()
    return Server(daemon.spec, Side(complete(facts, daemon), None), daemon)


def compared(ours: TargetFacts, theirs: TargetFacts, options: Options) -> Side:
    """Return a peer's side, compared with ours."""
    return Side(theirs, compare(ours, theirs, assume_same=options.assume_same or ()))


def complete(facts: TargetFacts, daemon: RunningDaemon) -> TargetFacts:
    """Return a daemon's facts, completed with what is known of a daemon started here."""
    return replace(
        facts,
        library=facts.library or daemon.library,
        threads=daemon.readiness.threads if facts.threads is None else facts.threads,
        slots=daemon.readiness.slots if facts.slots is None else facts.slots,
        n_ctx=daemon.readiness.n_ctx if facts.n_ctx is None else facts.n_ctx,
    )
