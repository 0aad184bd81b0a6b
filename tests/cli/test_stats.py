"""The command ``inferencecenter stats`` with a scripted daemon: in a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import termios
from typing import TYPE_CHECKING, Any

import pytest
from websockets import ConnectionClosed

from inferencecenter.cli.stats import Monitor
from inferencecenter.client import Client, Timing
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.cli.chat_harness import ON_TERMINAL, Screen
from tests.cli.test_stats_view import GPU, busy_summary
from tests.client.peer import AUTH_SUCCESS, HELLO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.cli.stats import StatsSnapshot
    from tests.cli.conftest import Cli
    from tests.client.peer import Peer, Start

_TIMEOUT_S = 60


async def answer(peer: Peer, *, rate: float = 87.6) -> dict[str, Any]:
    """Answer one metrics request and return it."""
    frame = await peer.receive()
    body: dict[str, Any]
    match frame["op"]:
        case "metrics":
            metrics = busy_summary(gpu=GPU).metrics
            assert metrics is not None
            body = metrics.model_dump(exclude={"id"})
            body["inference"]["tokens_per_s"] = rate
        case "status":
            body = {"op": "status", "type": frame["type"], "values": {"connections": 6} | {"n_ctx": 4096}}
        case op:
            await peer.refuse(frame, "unknown_op")
            assert op == "list_models"
            return frame
    await peer.send(**body, id=frame["id"])
    return frame


async def answer_all(peer: Peer) -> None:
    """Welcome a client and answer every request."""
    await peer.welcome()
    with contextlib.suppress(ConnectionClosed):
        while True:
            await answer(peer)


async def test_once_prints_one_screen(cli: Cli, scripted: Start) -> None:
    """A daemon without model operations is supported."""
    result = await asyncio.to_thread(cli.run, "stats", "--url", await scripted(answer_all), "--token", "t", "--once")
    assert (result.code, result.err) == (0, "")
    assert "5 waiting" in result.out
    assert "6 connections" in result.out
    assert "\x1b" not in result.out


async def test_once_as_json(cli: Cli, scripted: Start) -> None:
    """One sample is one line of JSON."""
    url = await scripted(answer_all)
    result = await asyncio.to_thread(cli.run, "stats", "--url", url, "--token", "t", "--once", "--json")
    (output,) = result.out.splitlines()
    assert json.loads(output)["metrics"]["inference"]["slots"] == 8


async def test_pipe_prints_a_line_per_sample(cli: Cli, scripted: Start) -> None:
    """It ends with an error when the daemon stops for good."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        for _ in range(10):
            await answer(peer)
        await peer.socket.close(1000, "enough")

    url = await scripted(daemon)
    result = await asyncio.to_thread(cli.run, "stats", "--url", url, "--token", "t", "--interval", "0.1")
    assert result.code == 69
    assert [each[10:17] for each in result.out.splitlines()] == ["ready  ", "ready  "]
    assert "daemon_unreachable" in result.err


async def test_missing_daemon_is_an_error(cli: Cli) -> None:
    """It is reported at once, without retries."""
    result = await asyncio.to_thread(cli.run, "stats", "--url", "ws://127.0.0.1:1/", "--token", "t")
    assert result.code == 69
    assert "no daemon answers" in result.err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_invalid_interval_is_refused(cli: Cli, interval: str) -> None:
    """It is refused before any request."""
    assert cli.run("stats", "--interval", interval, "--token", "t").code == 2


async def _stop_after(n_samples: int, snapshots: list[StatsSnapshot], monitor: Monitor, url: str) -> None:
    """Monitor a daemon without delays, and stop after this many samples."""

    async def sleep(_interval_s: float) -> None:
        if len(monitor.snapshot.rates) >= n_samples:
            raise InferenceCenterError(ErrorCode.INTERNAL, "seen enough")

    async def no_sleep(_seconds: float) -> None:
        """Return at once instead of waiting for the next attempt."""

    monitor.draw = snapshots.append
    timing = Timing(sleep=no_sleep)
    async with Client(url, token="t", on_notice=monitor.notice, timing=timing) as client:
        with pytest.raises(InferenceCenterError, match="seen enough"):
            await monitor.run(client, interval_s=1.0, sleep=sleep)


async def test_sparkline_accumulates_rates(scripted: Start) -> None:
    """Each sample adds its tokens per second."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        for look in range(3):
            for _ in range(5):
                await answer(peer, rate=float(look))

    snapshots: list[StatsSnapshot] = []
    await _stop_after(3, snapshots, Monitor("here"), await scripted(daemon))
    assert [each.rates for each in snapshots] == [(0.0,), (0.0, 1.0), (0.0, 1.0, 2.0)]
    assert snapshots[-1].status["memory"] == {"connections": 6, "n_ctx": 4096}
    assert snapshots[-1].version == "0.1.0"


async def test_daemon_that_returns(scripted: Start) -> None:
    """The last values stay visible with a notice until samples continue."""

    async def first(peer: Peer) -> None:
        await peer.welcome()
        for _ in range(5):
            await answer(peer)
        await peer.receive()
        await peer.send(op="going_away", deadline_ms=1000, resume=True)
        await peer.socket.close(1012, "restart")

    snapshots: list[StatsSnapshot] = []
    await _stop_after(2, snapshots, Monitor("here"), await scripted(first, answer_all))
    notices = [each.notice for each in snapshots]
    assert notices[0] == ""
    assert "the daemon is about to restart…" in notices
    assert "connection lost, reconnecting…" in notices
    assert notices[-1] == ""
    assert all(each.metrics is not None for each in snapshots)


async def test_throttling_is_shown_immediately(scripted: Start) -> None:
    """Throttling is shown before the next sample."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(op="thermal", state="warm", temp=82.0, action="half of the slots")
        for _ in range(5):
            await answer(peer)

    snapshots: list[StatsSnapshot] = []
    await _stop_after(1, snapshots, Monitor("here"), await scripted(daemon))
    assert snapshots[0].heat is not None
    assert snapshots[0].heat.state == "warm"


async def test_administrator_sees_clients(scripted: Start) -> None:
    """They are requested every ten seconds and not with every sample, because the daemon audits the request."""

    async def daemon(peer: Peer) -> None:
        await peer.send(**HELLO)
        auth = await peer.receive()
        await peer.send(**AUTH_SUCCESS | {"scopes": ["user", "admin"]}, id=auth["id"])
        for look in range(5):
            for _ in range(5):
                await answer(peer)
            if look in (0, 3):
                request = await peer.receive()
                assert request["op"] == "list_clients"
                ada = {"connections": 1, "addresses": 1, "sessions": 2, "busy": look, "tokens_today": 7}
                await peer.send(op="clients", id=request["id"], clients=[{"client_id": "ada", **ada}])

    snapshots: list[StatsSnapshot] = []
    monitor = Monitor("here", monotonic=lambda: 4.0 * len(snapshots))
    await _stop_after(5, snapshots, monitor, await scripted(daemon))
    assert [each.clients[0].busy for each in snapshots] == [0, 0, 0, 3, 3]


@contextlib.contextmanager
def _on_terminal(url: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Run stats on its own terminal; yields the process and both ends."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
    command = [*ON_TERMINAL, "stats", "--url", url, "--token", "t", "--interval", "0.1"]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
    )
    try:
        yield process, ours, theirs
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
async def test_exit_restores_the_terminal(scripted: Start, how: str) -> None:
    """After q, Ctrl-C or a signal, screen, cursor and echo are restored, and the exit code is 0."""
    with _on_terminal(await scripted(answer_all)) as (process, ours, theirs):
        before = termios.tcgetattr(theirs)
        screen = Screen(ours)
        await screen.until("\x1b[?1049h")
        await screen.until("5 waiting")
        await screen.until("q quits")
        assert termios.tcgetattr(theirs) != before
        if how == "sigterm":
            process.send_signal(signal.SIGTERM)
        else:
            os.write(ours, b"q" if how == "q" else b"\x03")
        await screen.until("\x1b[?1049l")
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), _TIMEOUT_S) == 0
        assert termios.tcgetattr(theirs) == before
        assert "\x1b[?25h" in screen.text
        assert "Traceback" not in screen.text


async def test_connection_error_is_shown_on_the_main_screen(scripted: Start) -> None:
    """It is shown after the terminal was restored; the exit code is that of the error."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        for _ in range(5):
            await answer(peer)
        await peer.socket.close(4401, "the token was revoked")

    with _on_terminal(await scripted(daemon)) as (process, ours, theirs):
        before = termios.tcgetattr(theirs)
        screen = Screen(ours)
        await screen.until("\x1b[?1049l")
        await screen.until("not_authenticated")
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), _TIMEOUT_S) == 77
        assert termios.tcgetattr(theirs) == before
