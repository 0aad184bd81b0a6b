"""One engine process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import termios
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Configure, FromEngine, Ready
from inferencecenter.supervisor import process as process_module
from inferencecenter.supervisor.process import EngineExit, EngineProcess, LocalLauncher

OPTIONS = EngineOptions(backend="echo", parent_pid=0)


async def test_last_output_line_is_part_of_the_reason() -> None:
    """What the process writes outside the channel is logged."""
    with capture_logs() as logs:
        process = await EngineProcess.spawn(OPTIONS, on_message=lambda _: None)
        process.channel.send(Configure(b"{}"))
        async with asyncio.timeout(60):
            ended = await process.gone()
    assert ended.detail.startswith("the engine ended with status ")
    assert ended.detail.endswith("a second Configure")
    assert [line["pid"] for line in logs if line["event"] == "engine_output"] == [process.pid]


async def test_exited_process_can_be_killed() -> None:
    """The kernel reports its exit before the event loop does."""
    process = await EngineProcess.spawn(OPTIONS, on_message=lambda _: None)
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.kill(because="enough")
    async with asyncio.timeout(60):
        assert await process.gone() == EngineExit("enough", by_itself=False)


async def test_process_ends_when_its_pipe_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exits without a signal, with status 0; it finds its parent without the pid."""
    monkeypatch.setattr(process_module, "EXIT_GRACE_S", 60.0)  # its exit takes longer on a busy machine
    messages: list[FromEngine] = []
    ready = asyncio.Event()

    def take(message: FromEngine) -> None:
        messages.append(message)
        if isinstance(message, Ready):
            ready.set()

    process = await EngineProcess.spawn(OPTIONS, on_message=take)
    async with asyncio.timeout(60):
        await ready.wait()
        process.close()
        assert await process.gone() == EngineExit("the engine ended with status 0")


def _ahead_pid(lock: Path) -> int:
    """Return the engine that holds a lock."""
    return int(lock.read_text())


async def _launch(launcher: LocalLauncher, options: EngineOptions) -> tuple[int, list[FromEngine]]:
    """Launch an engine, end it when it is ready, and return its pid and the messages that came before."""
    messages: list[FromEngine] = []
    ready = asyncio.Event()
    has_returned = False

    def take(message: FromEngine) -> None:
        assert has_returned, "a message came before the launch returned"
        messages.append(message)
        if isinstance(message, Ready):
            ready.set()

    process = await launcher.launch(options, is_first=True, on_message=take, on_drain=lambda: None)
    has_returned = True
    async with asyncio.timeout(60):
        await ready.wait()
        await process.end(suspend_deadline_s=None)
    return process.pid, messages


async def test_engine_launched_ahead_is_used(tmp_path: Path) -> None:
    """Its messages wait, even ``Ready``, and come in order once the launch has returned."""
    lock = tmp_path / "engine.lock"
    launcher = LocalLauncher(lock)
    launcher.launch_ahead(OPTIONS)
    ahead = launcher._ahead
    assert ahead is not None
    async with asyncio.timeout(60):
        waiting = bytearray(4)
        while int.from_bytes(waiting, "little") < 40:  # more than the first message
            await asyncio.sleep(0.01)
            fcntl.ioctl(ahead.child.socket, termios.FIONREAD, waiting)
    pid, messages = await _launch(launcher, OPTIONS)
    assert pid == ahead.child.process.pid == _ahead_pid(lock)
    assert [type(each).__name__ for each in messages][:: len(messages) - 1] == ["Loading", "Ready"]


async def test_engine_launched_ahead_with_other_options_is_replaced(tmp_path: Path) -> None:
    """It is ended first, and the lock is free for the other."""
    lock = tmp_path / "engine.lock"
    launcher = LocalLauncher(lock)
    launcher.launch_ahead(OPTIONS)
    first = _ahead_pid(lock)
    pid, _ = await _launch(launcher, OPTIONS.replace(slots=3))
    assert pid == _ahead_pid(lock) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_nothing_is_launched_ahead_while_an_engine_holds_the_lock(tmp_path: Path) -> None:
    """The engine of a dead daemon is awaited on the event loop."""
    launcher, other = LocalLauncher(tmp_path / "engine.lock"), LocalLauncher(tmp_path / "engine.lock")
    launcher.launch_ahead(OPTIONS)
    other.launch_ahead(OPTIONS)
    assert other._ahead is None
    launcher.discard_ahead()
