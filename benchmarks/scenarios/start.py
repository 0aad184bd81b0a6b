"""From the start of the process until turns can run, which is how long a restart interrupts clients.

The first start of each side is not counted: it brings the model file into the page cache. A peer takes part when
``--peer-command NAME=COMMAND`` gives its start command; it is ready when its ``/health`` answers with 200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.daemon_process import OURS, start_daemon
from benchmarks.options import Options, refused
from benchmarks.peer_process import filled, start_peer
from benchmarks.results import Metric, Point, Report, Side
from benchmarks.scenario import OWN, Scenario
from benchmarks.stage import compared, found, started

if TYPE_CHECKING:
    from benchmarks.daemon_process import DaemonSettings
    from benchmarks.options import Peer
    from benchmarks.stage import Bench
    from benchmarks.target import TargetFacts

_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds until ready."""

    ready_s: float

    def metrics(self) -> tuple[Metric, ...]:
        """Return the numbers of one repetition."""
        return (Metric("time to ready", "s", self.ready_s, "lower"),)


async def run(bench: Bench) -> Report:
    """Start and stop each side in turn; only one runs at a time."""
    settings = bench.settings(slots=_SLOTS, n_ctx=0)
    peers = bench.options.peers or ()
    for peer in peers:
        if peer.command is None:
            raise refused("peer_command", f"the start command of {peer.name} is unknown", hint="Give NAME=COMMAND.")
    bench.progress.expect((1 + bench.repeat) * bench.n_sides)
    ours, _ = await _start_ours(bench, settings)
    sides = [Side(ours, None)]
    for peer in peers:
        theirs, _ = await _start_peer(bench, peer, ours)
        sides.append(compared(ours, theirs, bench.options))
    times: list[list[tuple[Metric, ...]]] = [[] for _ in sides]
    for _ in range(bench.repeat):
        times[0].append((await _start_ours(bench, settings))[1].metrics())
        for peer, of_peer in zip(peers, times[1:], strict=True):
            of_peer.append((await _start_peer(bench, peer, ours))[1].metrics())
    point = Point((), tuple(tuple(of_side) for of_side in times))
    return Report(SCENARIO.name, tuple(sides), (point,))


async def _start_ours(bench: Bench, settings: DaemonSettings) -> tuple[TargetFacts, Start]:
    with bench.run(f"{OURS} starts"):
        async with start_daemon(settings) as daemon:
            return (await started(daemon)).side.facts, Start(daemon.readiness.ready_s)


async def _start_peer(bench: Bench, peer: Peer, ours: TargetFacts) -> tuple[TargetFacts, Start]:
    assert peer.command is not None, "checked before the first start"
    command = filled(peer.command, slots=ours.slots or 1, n_ctx=ours.n_ctx or 0)
    with bench.run(f"{peer.name} starts"):
        async with start_peer(command, url=peer.url) as ready_s:
            return (await found(peer.name, peer.url, token=peer.token)).side.facts, Start(ready_s)


SCENARIO = Scenario(
    name="start",
    summary="from the start of the process until turns can run",
    run=run,
    defaults=Options(repeat=5),
    takes=OWN | {"peers", "assume_same"},
)
