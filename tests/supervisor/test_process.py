"""One engine process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from structlog.testing import capture_logs

from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import Configure, FromEngine, Ready
from inferencecenter.supervisor import process as process_module
from inferencecenter.supervisor.process import EngineExit, EngineProcess

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
