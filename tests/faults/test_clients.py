"""A client disconnects or stops reading at every phase of a turn, and receives what it missed after it reconnects."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import connect

from tests.e2e.harness import ENDLESS, SocketClient, connect_client
from tests.e2e.recording_client import RecordingClient
from tests.faults.harness import ECHO, LINE, daemon_harness, logged, open_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.e2e.harness import Daemon
    from tests.faults.harness import DaemonHarness

QUESTION = LINE.format("Ada") * 3


async def abort_socket(client: SocketClient) -> None:
    """Abort a socket without a close frame."""
    client.socket.transport.abort()
    await client.socket.wait_closed()


@pytest.mark.parametrize("phase", ["at once", "queued", "progress", "token", "end"])
async def test_disconnected_client_receives_missed_events(echo: DaemonHarness, phase: str) -> None:
    """The turn continues; after a resume the missing events arrive once and in order."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client, system=os.urandom(8).hex())
        await recorder.infer(QUESTION, key="k")
        if phase != "at once":
            await recorder.until(phase)
        await abort_socket(client)
    async with connect_client(echo.daemon) as client:
        answer = await recorder.resume(client)
        assert answer["resumed"] is True
        await recorder.infer(QUESTION, key="k")
        assert await recorder.finish() == QUESTION
        assert len(recorder.turns) == 1
        assert await recorder.turn("And then?") == "And then?"
        assert len((await recorder.described())["turns"]) == 2


async def test_reconnecting_every_few_tokens_loses_no_text(echo: DaemonHarness) -> None:
    """The text over many sockets equals that on one."""
    async with connect_client(echo.daemon) as client:
        recorder = await RecordingClient.open(client)
        await recorder.infer(QUESTION)
        await recorder.until("token")
        await abort_socket(client)
    for _ in range(12):
        async with connect_client(echo.daemon) as client:
            assert (await recorder.resume(client))["resumed"] is True
            for _ in range(3):
                await client.receive()
            await abort_socket(client)
    async with connect_client(echo.daemon) as client:
        await recorder.resume(client)
        assert await recorder.finish() == QUESTION
        await recorder.described()


async def test_session_moves_to_another_socket(echo: DaemonHarness) -> None:
    """The first socket is notified, gets no more events of the session, and keeps its other one."""
    async with connect_client(echo.daemon) as first, connect_client(echo.daemon) as second:
        moved, stays = await RecordingClient.open(first), await RecordingClient.open(first)
        await moved.infer(QUESTION)
        await stays.infer(QUESTION)
        await moved.until("token")
        assert (await moved.resume(second))["resumed"] is True
        detached = await first.until(lambda message: message["op"] == "session_detached")
        assert (detached["session_id"], detached["reason"]) == (moved.session_id, "resumed_elsewhere")
        n_seen = len(first.seen)
        assert await moved.finish() == QUESTION
        assert await stays.finish() == QUESTION
        assert not [message for message in first.seen[n_seen:] if message.get("session_id") == moved.session_id]
        assert await moved.turn("Here.") == "Here."
        assert await stays.turn("There.") == "There."


async def test_turn_key_makes_infer_idempotent(echo: DaemonHarness) -> None:
    """With one turn_key a turn runs once, on any socket; without one the second is refused."""
    async with connect_client(echo.daemon) as first, connect_client(echo.daemon) as second:
        recorder = await RecordingClient.open(first)
        await recorder.infer(QUESTION, key="k")
        await recorder.infer(QUESTION, key="k")
        await recorder.until("token")
        assert (await recorder.resume(second))["resumed"] is True
        await recorder.infer(QUESTION, key="k")
        await recorder.infer(QUESTION)
        busy = await second.until(lambda message: message["op"] == "error")
        assert busy["code"] == "session_busy"
        assert await recorder.finish() == QUESTION
        assert len(recorder.turns) == 1
        await recorder.infer(QUESTION, key="k")
        await recorder.until("end")
        assert len((await recorder.described())["turns"]) == 1


@pytest.fixture(scope="module")
def fast_daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[DaemonHarness]:
    """A daemon that generates as fast as it can and has small send buffers."""
    settings = {
        "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "0",
        "INFERENCECENTER_SERVER__OUTBOX_BYTES": "65536",
        "INFERENCECENTER_SESSIONS__REPLAY_KIB": "64",
    }
    with daemon_harness(tmp_path_factory.mktemp("talkative"), demo_model_path, **(ECHO | settings)) as found:
        found.start()
        yield found


@contextlib.asynccontextmanager
async def narrow_socket(daemon: Daemon) -> AsyncIterator[SocketClient]:
    """A socket with small kernel buffers, read only on request."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
    raw.connect(("127.0.0.1", daemon.port))
    raw.setblocking(False)
    headers = {"Authorization": f"Bearer {daemon.admin_token}"}
    async with connect(
        daemon.url,
        sock=raw,
        additional_headers=headers,
        subprotocols=["inferencecenter.v1"],  # type: ignore[list-item]
        max_queue=1,
        ping_interval=None,
    ) as websocket:
        yield SocketClient(websocket)


@pytest.mark.slow
async def test_client_that_never_reads_is_disconnected(fast_daemon: DaemonHarness) -> None:
    """Its socket is aborted while others continue, and it can reconnect."""
    async with connect_client(fast_daemon.daemon) as client, narrow_socket(fast_daemon.daemon) as deaf:
        recorder = await RecordingClient.open(deaf)
        others = [await RecordingClient.open(client) for _ in range(3)]
        n_open = open_files(fast_daemon.daemon.process.pid)
        await recorder.infer(LINE, n_probs=1, **ENDLESS)
        rounds = 0
        while open_files(fast_daemon.daemon.process.pid) >= n_open:
            for other in others:
                await other.infer(f"{rounds}: {LINE}")
            for other in others:
                assert await other.finish() == f"{rounds}: {LINE}"
            rounds += 1
        assert logged(fast_daemon.daemon, "slow_reader")
        await abort_socket(deaf)
    async with connect_client(fast_daemon.daemon) as client:
        answer = await recorder.resume(client)
        assert answer["reason"] == "too_old"
        if not recorder.is_over:
            await client.send(op="abort", session_id=recorder.session_id)
            await recorder.finish()
        assert await recorder.turn("I am back.") == "I am back."
        await recorder.described()


@pytest.mark.slow
async def test_client_that_reads_late_gets_everything(fast_daemon: DaemonHarness) -> None:
    """A client that resumes reading in time gets all text, in fewer frames."""
    prompt = LINE * 8
    async with narrow_socket(fast_daemon.daemon) as slow, connect_client(fast_daemon.daemon) as client:
        recorder, other = await RecordingClient.open(slow), await RecordingClient.open(client)
        await recorder.infer(prompt)
        assert await other.turn(prompt) == prompt
        assert await recorder.finish() == prompt
        assert json.dumps(recorder.text) == json.dumps(other.text)
        n_frames = [sum(message["op"] == "token" for message in each.seen) for each in (slow, client)]
        assert n_frames[0] <= n_frames[1]
        assert await recorder.turn("Next.") == "Next."
