"""Load jobs, run by a generator process on an echo daemon."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from benchmarks.daemon_process import start_daemon
from benchmarks.jobs import (
    Aborted,
    Aborts,
    Arrival,
    ClosedLoop,
    Hold,
    Holding,
    Release,
    Round,
    Rounds,
    Turns,
    TurnSize,
)
from benchmarks.load import Generator
from benchmarks.target import TargetSpec
from inferencecenter.client import Client
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import Status
from inferencecenter.protocol.requests import Status as AskStatus
from tests.benchmarks.peer_server import FakeServer, serving
from tests.ports import free_port

if TYPE_CHECKING:
    from benchmarks.daemon_process import RunningDaemon
    from benchmarks.generator import LoadGenerator
    from inferencecenter.protocol.values import StatusType

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def reading(daemon: RunningDaemon, kind: StatusType, name: str) -> float | int | str | None:
    """Return the daemon's metrics."""
    async with Client(daemon.spec.url, token=daemon.spec.token) as client:
        status = await client.request(AskStatus(op="status", type=kind))
        assert isinstance(status, Status)
        return status.values[name]


def arrival(target: TargetSpec, *, stream: TurnSize, after_tokens: int) -> Arrival:
    """Return a job of three streams and an arriving client with 300 tokens."""
    return Arrival(
        target=target,
        streams=3,
        stream=stream,
        newcomer=TurnSize(300, 4),
        after_tokens=after_tokens,
        warm_up=TurnSize(16, 4),
        first_seed=1,
    )


async def test_closed_loop_keeps_each_client_busy(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """Warm-up turns differ in length, all others have the requested one, and turns follow without pauses."""
    job = ClosedLoop(
        target=daemon.spec, clients=4, prompt_tokens=40, max_tokens=16, duration_s=0.2, first_seed=1_000_000
    )
    found = await generator.do(job, Turns)

    assert [turns[0].tokens for turns in found.clients] == [4, 8, 12, 16]
    for turns in found.clients:
        assert len(turns) >= 2
        assert {turn.tokens for turn in turns[1:]} == {16}
        assert {turn.prompt_tokens for turn in turns} == {40}
        assert all(turn.started_s >= before.ended_s for before, turn in pairwise(turns))
        assert all(turn.started_s <= turn.token_times_s[0] <= turn.ended_s for turn in turns)
    assert found.cpu_s > 0


async def test_closed_loop_measures_two_turns_of_each_client(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """A duration shorter than a turn is extended, since part of a turn would show only one of its phases."""
    job = ClosedLoop(target=daemon.spec, clients=3, prompt_tokens=40, max_tokens=16, duration_s=0.001, first_seed=1)
    found = await generator.do(job, Turns)

    assert min(len(turns) for turns in found.clients) == 3


async def test_rounds_start_together(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """A round starts after all clients have finished the previous one."""
    rounds = (Round(30, 4), Round(50, 8))
    job = Rounds(target=daemon.spec, clients=3, rounds=rounds, continues=False, first_seed=1)
    found = await generator.do(job, Turns)

    firsts, seconds = zip(*found.clients, strict=True)
    assert max(turn.ended_s for turn in firsts) <= min(turn.started_s for turn in seconds)
    assert [turn.tokens for turn in firsts] == [4, 4, 4]
    assert [(turn.prompt_tokens, turn.tokens) for turn in seconds] == [(50, 8)] * 3


async def test_continued_rounds_reuse_their_context(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """The second turn prefills only its own tokens."""
    rounds = (Round(200, 1), Round(16, 8))
    job = Rounds(target=daemon.spec, clients=2, rounds=rounds, continues=True, first_seed=1)
    found = await generator.do(job, Turns)

    for first, second in found.clients:
        assert first.prompt_tokens == 200
        assert second.prompt_tokens == 200 + 1 + 16
        assert second.cached_tokens is not None
        assert second.cached_tokens >= 200


async def test_round_in_groups_runs_them_in_sequence(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """Each group starts after the previous one has ended; the last may be smaller."""
    rounds = (Round(30, 4, at_once=2),)
    job = Rounds(target=daemon.spec, clients=5, rounds=rounds, continues=False, first_seed=1)
    turns = [turn for (turn,) in (await generator.do(job, Turns)).clients]

    for group, following in pairwise((turns[:2], turns[2:4], turns[4:])):
        assert max(turn.ended_s for turn in group) <= min(turn.started_s for turn in following)
    assert turns[1].started_s < turns[0].ended_s


async def test_closed_loop_conversations_have_the_given_number_of_turns(
    daemon: RunningDaemon, generator: LoadGenerator
) -> None:
    """The next conversation begins with a new session, and the previous one is closed."""
    job = ClosedLoop(
        target=daemon.spec,
        clients=1,
        prompt_tokens=30,
        max_tokens=4,
        duration_s=0.2,
        first_seed=1,
        turns_each=3,
    )
    lengths: list[int] = []
    while len(lengths) <= 6:  # a busy machine may take longer
        (turns,) = (await generator.do(job, Turns)).clients
        lengths = [turn.prompt_tokens for turn in turns]
        job = msgspec.structs.replace(job, duration_s=job.duration_s * 2)

    assert lengths == [30, 64, 98] * (len(lengths) // 3) + [30, 64, 98][: len(lengths) % 3]


async def test_only_the_clients_of_a_round_run(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """Other conversations stay open; the result can be sorted by rounds."""
    rounds = (Round(30, 1), Round(10, 2, clients=(0, 2)), Round(20, 3, clients=(1, 2)))
    job = Rounds(target=daemon.spec, clients=3, rounds=rounds, continues=True, first_seed=1)
    found = await generator.do(job, Turns)

    assert [len(turns) for turns in found.clients] == [2, 2, 3]
    by_round = found.by_round(rounds)
    assert [[turn.tokens for turn in turns] for turns in by_round] == [[1, 1, 1], [2, 2], [3, 3]]
    assert [[turn.prompt_tokens for turn in turns] for turns in by_round] == [[30, 30, 30], [41, 41], [51, 63]]


async def test_warm_up_is_not_reported(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """It is not part of the conversations, either."""
    job = Rounds(
        target=daemon.spec, clients=2, rounds=(Round(30, 4),), continues=True, first_seed=1, warm_up=TurnSize(16, 8)
    )
    found = await generator.do(job, Turns)

    assert [[(turn.prompt_tokens, turn.tokens) for turn in turns] for turns in found.clients] == [[(30, 4)]] * 2


async def test_new_client_arrives_once_all_streams_run(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """It arrives after the given number of pieces, and is the last in the result."""
    job = arrival(daemon.spec, stream=TurnSize(20, 800), after_tokens=16)
    *streams, newcomer = [turn for (turn,) in (await generator.do(job, Turns)).clients]

    assert [turn.tokens for turn in streams] == [800] * 3
    assert (newcomer.prompt_tokens, newcomer.tokens) == (300, 4)
    assert all(turn.token_times_s[15] <= newcomer.started_s < turn.ended_s for turn in streams)


async def test_new_client_requires_running_streams(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """The job fails with the reason."""
    job = arrival(daemon.spec, stream=TurnSize(20, 8), after_tokens=16)
    with pytest.raises(InferenceCenterError, match="a stream of 8 tokens ended after 8 pieces") as failed:
        await generator.do(job, Turns)

    assert failed.value.code is ErrorCode.INVALID_REQUEST


async def test_slots_and_prefixes_reach_the_server() -> None:
    """Each client has its slot and its prompt; a prefix is that of its round; a warm-up has neither."""
    rounds = (Round(30, 1, opening_tokens=20), Round(25, 1, opening_tokens=20))
    async with serving(FakeServer(), speaks_llama=True) as server:
        job = Rounds(
            target=TargetSpec("peer", "llama-server", server.url),
            clients=2,
            rounds=rounds,
            continues=True,
            pinned=True,
            first_seed=1_000_001,
            warm_up=TurnSize(16, 1),
        )
        found = await Generator(clock=lambda: 0.0, cpu_clock=lambda: 0.0).do(job)

    assert isinstance(found, Turns)
    *warm_ups, first, second, first_again, second_again = server.bodies
    assert ["id_slot" in body for body in warm_ups] == [False, False]
    assert [body["id_slot"] for body in (first, second, first_again, second_again)] == [0, 1, 0, 1]
    assert first["prompt"][:20] == second["prompt"][:20]
    assert first["prompt"][20:] != second["prompt"][20:]
    assert first_again["prompt"][:31] == [*first["prompt"], 1001]
    assert first_again["prompt"][31:51] == second_again["prompt"][31:51]
    assert first_again["prompt"][31:50] != first["prompt"][1:20]
    assert len({body["seed"] for body in server.bodies}) == 6
    assert all(1_000_001 <= body["seed"] < 2_000_001 for body in server.bodies)


async def test_prompts_of_different_seeds_share_no_prefix(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """One job does not warm the cache for the next."""
    jobs = [
        Rounds(target=daemon.spec, clients=2, rounds=(Round(200, 1),), continues=False, first_seed=seed)
        for seed in (1_000_000, 2_000_000)
    ]
    for job in jobs:
        found = await generator.do(job, Turns)
        assert all((turn.cached_tokens or 0) < 50 for turns in found.clients for turn in turns)


async def test_aborted_turns_end(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """Each client aborts the given number of turns, and none is left running."""
    job = Aborts(
        target=daemon.spec, clients=2, count=3, prompt_tokens=40, max_tokens=1900, after_tokens=5, first_seed=1
    )
    found = await generator.do(job, Aborted)

    assert len(found.traces) == 6
    for trace in found.traces:
        assert sum(at_s <= trace.aborted_s for at_s in trace.token_times_s) == 5
        assert trace.started_s < trace.aborted_s < trace.ended_s
    assert await reading(daemon, "queue", "running") == 0


async def test_held_sessions_stay_open_until_released(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """They add up, and other jobs can run meanwhile."""
    hold = Hold(target=daemon.spec, connections=40, sessions_each=1)
    assert (await generator.do(hold, Holding)).connections == 40
    assert (await generator.do(Hold(target=daemon.spec, connections=2, sessions_each=0), Holding)).connections == 42
    await generator.do(
        Rounds(target=daemon.spec, clients=1, rounds=(Round(20, 2),), continues=False, first_seed=1), Turns
    )

    assert await reading(daemon, "sessions", "sessions") == 40
    assert (await generator.do(Release(), Holding)).connections == 0
    assert await reading(daemon, "sessions", "connections") == 1


async def test_failed_turn_fails_the_job(daemon: RunningDaemon, generator: LoadGenerator) -> None:
    """Omitting it would distort the figures; the generator can run the next job."""
    job = Rounds(target=daemon.spec, clients=2, rounds=(Round(5000, 4),), continues=False, first_seed=1)
    with pytest.raises(InferenceCenterError, match="a turn failed") as failed:
        await generator.do(job, Turns)
    assert failed.value.code is ErrorCode.ENGINE_UNAVAILABLE

    found = await generator.do(
        Rounds(target=daemon.spec, clients=1, rounds=(Round(20, 2),), continues=False, first_seed=1), Turns
    )
    assert len(found.clients) == 1


async def test_closed_port_is_reported(generator: LoadGenerator) -> None:
    """The generator's error arrives unchanged."""
    unreachable = TargetSpec("unreachable", "inferencecenter", f"ws://127.0.0.1:{free_port()}/", token="t")
    with pytest.raises(InferenceCenterError) as failed:
        await generator.do(Hold(target=unreachable, connections=2, sessions_each=0), Holding)

    assert failed.value.code is ErrorCode.DAEMON_UNREACHABLE


async def test_daemon_is_measured_by_process(daemon: RunningDaemon) -> None:
    """Front and engine are two processes, and both use memory."""
    usage = daemon.usage()

    assert usage.front.rss_bytes > 10**7
    assert usage.engine.rss_bytes > 10**7
    assert usage.front.cpu_s > 0
    engine = Path("/proc") / str(daemon.readiness.engine_pid) / "cmdline"
    assert b"inferencecenter.engine" in engine.read_bytes()
    assert daemon.readiness.engine_pid != os.getpid()


async def test_daemon_start_failure_is_reported(tmp_path: Path, daemon: RunningDaemon) -> None:
    """The error has its last output."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    settings = replace(daemon.settings, backend="llama", model=broken)
    with pytest.raises(InferenceCenterError, match="broken") as failed:
        async with start_daemon(settings):
            pass
    assert failed.value.code is ErrorCode.ENGINE_UNAVAILABLE
