"""Tests of ``inferencecenter stats`` against a scripted daemon: in a pipe, and on a terminal of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import pytest
from websockets import ConnectionClosed

from inferencecenter.cli.stats import Watch
from inferencecenter.client import Client, Timing
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from tests.cli.chatting import CONTROL, Screen
from tests.cli.test_stats_view import GPU, glance
from tests.client.peer import AUTH_SUCCESS, HELLO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.cli.stats import Glance
    from tests.cli.conftest import Cli
    from tests.client.peer import Peer, Start

_TIMEOUT_S = 60


async def answer(peer: Peer, *, rate: float = 87.6) -> dict[str, Any]:
    """Answer a question about how the daemon is, and return it."""
    frame = await peer.receive()
    body: dict[str, Any]
    match frame["op"]:
        case "metrics":
            metrics = glance(gpu=GPU).metrics
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
    """Welcome a client and tell it whatever it wants to know."""
    await peer.welcome()
    with contextlib.suppress(ConnectionClosed):
        while True:
            await answer(peer)


async def test_one_look(cli: Cli, scripted: Start) -> None:
    """``--once`` prints a screen and leaves; a daemon that knows no models is no obstacle."""
    result = await asyncio.to_thread(cli.run, "stats", "--url", await scripted(answer_all), "--token", "t", "--once")
    assert (result.code, result.err) == (0, "")
    assert "5 waiting" in result.out
    assert "6 connections" in result.out
    assert "\x1b" not in result.out


async def test_one_look_as_data(cli: Cli, scripted: Start) -> None:
    """A line of JSON."""
    url = await scripted(answer_all)
    result = await asyncio.to_thread(cli.run, "stats", "--url", url, "--token", "t", "--once", "--json")
    (told,) = result.out.splitlines()
    assert json.loads(told)["metrics"]["inference"]["slots"] == 8


async def test_lines_in_a_pipe(cli: Cli, scripted: Start) -> None:
    """A line for each look until the daemon stops for good, which is an error like any other."""

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


async def test_no_daemon(cli: Cli) -> None:
    """Is an error at once: there is nothing to come back."""
    result = await asyncio.to_thread(cli.run, "stats", "--url", "ws://127.0.0.1:1/", "--token", "t")
    assert result.code == 69
    assert "no daemon answers" in result.err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_that_is_none(cli: Cli, interval: str) -> None:
    """Is refused before anything is asked."""
    assert cli.run("stats", "--interval", interval, "--token", "t").code == 2


async def _stop_after(n_looks: int, seen: list[Glance], watch: Watch, url: str) -> None:
    """Watch a daemon without waiting in between, and end after some looks."""

    async def sleep(_interval_s: float) -> None:
        if len(watch.glance.rates) >= n_looks:
            raise InferenceCenterError(ErrorCode.INTERNAL, "seen enough")

    async def at_once(_seconds: float) -> None:
        """Wait for nothing before the next attempt."""

    watch.draw = seen.append
    timing = Timing(sleep=at_once)
    async with Client(url, token="t", on_notice=watch.notice, timing=timing) as client:
        with pytest.raises(InferenceCenterError, match="seen enough"):
            await watch.run(client, interval_s=1.0, sleep=sleep)


async def test_rates_are_kept(scripted: Start) -> None:
    """Each look adds its tokens a second to what the sparkline shows."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        for look in range(3):
            for _ in range(5):
                await answer(peer, rate=float(look))

    seen: list[Glance] = []
    await _stop_after(3, seen, Watch("here"), await scripted(daemon))
    assert [each.rates for each in seen] == [(0.0,), (0.0, 1.0), (0.0, 1.0, 2.0)]
    assert seen[-1].status["memory"] == {"connections": 6, "n_ctx": 4096}
    assert seen[-1].version == "0.1.0"


async def test_a_daemon_that_comes_back(scripted: Start) -> None:
    """What was known stays in view with a notice; then the looks go on, and the notice is gone."""

    async def first(peer: Peer) -> None:
        await peer.welcome()
        for _ in range(5):
            await answer(peer)
        await peer.receive()
        await peer.send(op="going_away", deadline_ms=1000, resume=True)
        await peer.socket.close(1012, "restart")

    seen: list[Glance] = []
    await _stop_after(2, seen, Watch("here"), await scripted(first, answer_all))
    notices = [each.notice for each in seen]
    assert notices[0] == ""
    assert "the daemon is about to restart…" in notices
    assert "connection lost, reconnecting…" in notices
    assert notices[-1] == ""
    assert all(each.metrics is not None for each in seen)


async def test_heat_is_shown_at_once(scripted: Start) -> None:
    """Not only at the next look."""

    async def daemon(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(op="thermal", state="warm", temp=82.0, action="half of the slots")
        for _ in range(5):
            await answer(peer)

    seen: list[Glance] = []
    await _stop_after(1, seen, Watch("here"), await scripted(daemon))
    assert seen[0].heat is not None
    assert seen[0].heat.state == "warm"


async def test_an_administrator_sees_clients(scripted: Start) -> None:
    """They are requested every ten seconds, as the daemon audits it; other accounts may not list them."""

    async def daemon(peer: Peer) -> None:
        await peer.send(**HELLO)
        auth = await peer.receive()
        await peer.send(**AUTH_SUCCESS | {"scopes": ["user", "admin"]}, id=auth["id"])
        for look in range(5):
            for _ in range(5):
                await answer(peer)
            if look in (0, 3):
                asked = await peer.receive()
                assert asked["op"] == "list_clients"
                ada = {"connections": 1, "addresses": 1, "sessions": 2, "busy": look, "tokens_today": 7}
                await peer.send(op="clients", id=asked["id"], clients=[{"client_id": "ada", **ada}])

    seen: list[Glance] = []
    watch = Watch("here", monotonic=lambda: 4.0 * len(seen))
    await _stop_after(5, seen, watch, await scripted(daemon))
    assert [each.clients[0].busy for each in seen] == [0, 0, 0, 3, 3]


@contextlib.contextmanager
def _on_terminal(url: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Stats on a terminal of its own; gives the process and both ends of the terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
    command = [sys.executable, "-m", "inferencecenter", "stats", "--url", url, "--token", "t", "--interval", "0.1"]
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROL, *command],
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
async def test_leaving_restores_the_terminal(scripted: Start, how: str) -> None:
    """By q, Ctrl-C or a signal: the other screen is left, the cursor is back, keys are shown again; exit code 0."""
    with _on_terminal(await scripted(answer_all)) as (process, ours, theirs):
        before = termios.tcgetattr(theirs)
        screen = Screen(ours)
        await screen.until("\x1b[?1049h")
        await screen.until("5 waiting")
        await screen.until("q leaves")
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


async def test_the_end_of_a_connection_is_told_on_the_usual_screen(scripted: Start) -> None:
    """After the terminal was restored, with the exit code of the error."""

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
