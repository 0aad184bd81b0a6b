"""A supervisor whose engine is behind the connection of a host, and what breaks it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.ipc.link import HostBeat
from inferencecenter.ipc.messages import Failed
from inferencecenter.ipc.port import EngineState
from inferencecenter.supervisor.remote import RemoteEngine
from tests.cluster.harness import Front
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, RecordingTurn, end_of
from tests.supervisor.stub_engine import answer

if TYPE_CHECKING:
    from inferencecenter.ipc.link import FromHost

pytestmark = pytest.mark.usefixtures("stopped")
LONG = "a long answer " * 20


async def ready(front: Front, **options: object) -> ObservedSupervisor:
    """Return a supervisor whose engine is ready."""
    watched = ObservedSupervisor(launcher=front.launcher, **options)  # type: ignore[arg-type]
    watched.supervisor.start()
    await watched.until(EngineState.READY)
    return watched


async def speaking(watched: ObservedSupervisor, turn_id: str = "t") -> RecordingTurn:
    """Return a turn in the middle of its answer."""
    turn = watched.submit(turn_id, LONG)
    await asyncio.wait_for(turn.spoke.wait(), TIMEOUT_S)
    return turn


def engine_pids(log: Path) -> list[int]:
    """Return the engines that took steps, in order."""
    return list(dict.fromkeys(int(line.split()[0]) for line in log.read_text().splitlines()))


@pytest.mark.slow
async def test_turns_run_on_a_host(front: Front) -> None:
    """The engine is no child of this process; its log lines and turns have its machine."""
    with capture_logs() as logs:
        watched = await ready(front, node="box2")
    assert {line["node"] for line in logs if line["event"] in ("engine_started", "engine_ready")} == {"box2"}
    turns = [watched.submit(f"t{n}", f"count {n}") for n in range(5)]
    for n, turn in enumerate(turns):
        await end_of(turn)
        assert (turn.text, turn.submissions, turn.nodes) == (answer(n), 1, ["box2"])
    assert watched.supervisor.status.pid is None
    assert watched.supervisor.status.node == "box2"
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_connection_reset_loses_no_text(front: Front, tmp_path: Path) -> None:
    """The host connects again, and its engine continues: nothing is loaded."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log))
    turn = await speaking(watched)
    front.proxy.cut()
    await watched.until(EngineState.READY)
    await end_of(turn)
    assert (turn.text, turn.interruptions, turn.submissions) == (LONG, 1, 2)
    assert len(engine_pids(log)) == 1
    assert len(front.starter.tickets) == 1
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_partition_is_detected_by_heartbeat(front: Front, tmp_path: Path) -> None:
    """No end is told; another host takes over, and the first one is refused when it returns."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log))
    turn = await speaking(watched)
    first = front.starter.hosts[0]
    front.proxy.hold()
    front.starter.address = front.listener.address  # the next host is on the right side
    await watched.until(EngineState.BACKOFF)
    assert "no heartbeat for 3 s" in watched.supervisor.status.detail
    await end_of(turn)
    assert (turn.text, turn.interruptions, turn.submissions) == (LONG, 1, 2)
    with capture_logs() as logs:
        front.proxy.release()
        await asyncio.to_thread(first.wait, TIMEOUT_S)
    assert "host_refused" in [line["event"] for line in logs]
    assert len(engine_pids(log)) == 2
    await watched.supervisor.stop()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["host", "engine"])
async def test_killed_process_loses_no_text(front: Front, tmp_path: Path, which: str) -> None:
    """Another host is started; a dead host's engine ends with it."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log))
    turn = await speaking(watched)
    if which == "host":
        front.starter.signal(signal.SIGKILL)
    else:
        os.kill(engine_pids(log)[0], signal.SIGKILL)
    await watched.until(EngineState.READY)
    await end_of(turn)
    assert (turn.text, turn.interruptions, turn.submissions) == (LONG, 1, 2)
    assert len(engine_pids(log)) == 2
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_stopped_host_is_replaced(front: Front, tmp_path: Path) -> None:
    """SIGSTOP of the host: its connection stays open and silent. After SIGCONT it is refused and ends."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log))
    turn = await speaking(watched)
    first = front.starter.hosts[0]
    front.starter.signal(signal.SIGSTOP)
    await end_of(turn)
    assert (turn.text, turn.interruptions) == (LONG, 1)
    first.send_signal(signal.SIGCONT)
    await asyncio.to_thread(first.wait, TIMEOUT_S)
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_hang_of_the_engine_is_detected(front: Front, tmp_path: Path) -> None:
    """The host's heartbeat goes on, and carries a counter that stands still."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log), hang_timeout_s=4.0)
    turn = await speaking(watched)
    os.kill(engine_pids(log)[0], signal.SIGSTOP)
    await watched.until(EngineState.BACKOFF)
    assert watched.supervisor.status.detail == "the engine made no progress for 4 s"
    await end_of(turn)
    assert turn.text == LONG
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_engine_that_reads_nothing_keeps_its_connection(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host stops reading while megabytes wait for the engine, heartbeats among them; that is no lost front."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log), max_queue=100)
    first = await speaking(watched)
    (engine,) = engine_pids(log)
    os.kill(engine, signal.SIGSTOP)
    large = [watched.submit(f"large{n}", "count 3", tokens=bytes(2**20)) for n in range(40)]
    beats: asyncio.Queue[None] = asyncio.Queue()
    receive = RemoteEngine._on_message

    def counted(engine: RemoteEngine, message: FromHost) -> None:
        if isinstance(message, HostBeat):
            beats.put_nowait(None)
        receive(engine, message)

    (connection,) = front.listener._connections
    monkeypatch.setattr(connection.channel, "_on_message", partial(counted, connection))
    for _ in range(6):  # twice the silence that an end tolerates
        await asyncio.wait_for(beats.get(), TIMEOUT_S)
    assert watched.supervisor.status.state is EngineState.READY
    os.kill(engine, signal.SIGCONT)
    for turn in (first, *large):
        await end_of(turn)
        assert turn.interruptions == 0
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_only_the_poison_turn_fails(front: Front, tmp_path: Path) -> None:
    """The host reads the suspects from the page of the dead engine."""
    watched = await ready(front, echo_delay_ms=5, model_path=str(tmp_path / "steps"), slots=4)
    good = [watched.submit(f"good{n}", LONG) for n in range(3)]
    bad = watched.submit("bad", "die 4")
    await asyncio.wait_for(bad.ended.wait(), TIMEOUT_S)
    (end,) = bad.terminal
    assert isinstance(end, Failed)
    assert end.code == "engine_crashed"
    for turn in good:
        await end_of(turn)
        assert turn.text == LONG
    await watched.supervisor.stop()


@pytest.mark.slow
async def test_engine_outlives_its_front(front: Front, tmp_path: Path) -> None:
    """The next front with the same state directory continues with it; what is running is given to it again."""
    log = tmp_path / "steps"
    watched = await ready(front, echo_delay_ms=5, model_path=str(log))
    turn = await speaking(watched)
    await watched.supervisor.stop(leave=True)
    said = turn.text
    port = front.listener.address[1]
    await front.listener.close()
    second = await Front.open(front.state_dir, starter=front.starter, port=port)
    again = await ready(second, echo_delay_ms=5, model_path=str(log))
    rest = again.submit("t", LONG, answer=turn.tokens, shown_chars=len(said))
    await end_of(rest)
    assert said + rest.text == LONG
    assert len(engine_pids(log)) == 1
    assert len(front.starter.tickets) == 1
    await again.supervisor.stop()
    second.files.close()
    await second.listener.close()


@pytest.mark.slow
async def test_orphan_ends_itself(front: Front, tmp_path: Path) -> None:
    """A host that finds no front ends its engine."""
    log = tmp_path / "steps"
    front.listener._orphan_s = 2.0
    watched = await ready(front, model_path=str(log))
    await end_of(watched.submit("t", "count 3"))
    front.proxy.cut(refuse=True)
    front.starter.address = front.listener.address
    await front.starter.ended()
    with pytest.raises(ProcessLookupError):
        os.kill(engine_pids(log)[0], 0)
    await watched.supervisor.stop()


async def test_stop_ends_engine_and_host(front: Front, tmp_path: Path) -> None:
    """Nothing of them is left, and no host may return."""
    log = tmp_path / "steps"
    watched = await ready(front, model_path=str(log))
    await end_of(watched.submit("t", "count 3"))
    await watched.supervisor.stop()
    await front.starter.ended()
    assert front.starter.hosts[0].returncode == 0
    assert not front.listener.may_return("stub")


async def test_stop_does_not_wait_for_a_host(front: Front) -> None:
    """A starter that starts nothing does not keep the daemon from ending."""
    front.starter.module = "json.tool"  # it reads the ticket, and never connects
    watched = ObservedSupervisor(launcher=front.launcher)
    watched.supervisor.start()
    await asyncio.wait_for(front.starter.started.wait(), TIMEOUT_S)
    async with asyncio.timeout(TIMEOUT_S):
        await watched.supervisor.stop()


def test_ticket_shows_no_secret(front: Front) -> None:
    """Neither a key nor a certificate is in its representation, which may be logged."""
    ticket = front.listener.ticket("name")
    assert re.fullmatch(r"LinkTicket\(name, epoch=\d+\)", repr(ticket))
