"""`make run VULKAN=1`, as docs/building.md documents it, in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.harness import Daemon, connect_client
from tests.gpu.daemons import GREEDY, QUESTION, SETTINGS, plan_of, told_name
from tests.ports import free_port
from tests.vulkan import software

if TYPE_CHECKING:
    from collections.abc import Iterator

# Mesa compiles the shaders at the first start, before which the environment is installed.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT: Final = Path(__file__).parents[2]
_START_S: Final = 800


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of the documented commands: the device is found, and libraries only where they are installed."""
    software.use(monkeypatch)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERENCECENTER_")}
    return {
        **kept,
        "INFERENCECENTER_STATE_DIR": str(tmp_path / "state"),
        "INFERENCECENTER_LOG__FORMAT": "json",
        **SETTINGS,
    }


@contextmanager
def made_daemon(tmp_path: Path, environment: dict[str, str]) -> Iterator[Daemon]:
    """Install and start a daemon by ``make run VULKAN=1``."""
    port, log = free_port(), tmp_path / "make.log"
    command = ["make", "run", "VULKAN=1", f"PORT={port}", f"VENV={tmp_path / 'venv'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    daemon = Daemon(process=process, port=port, state_dir=tmp_path / "state", log=log)
    try:
        deadline = time.monotonic() + _START_S
        while not daemon.ready():
            assert process.poll() is None, f"make ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in time:\n{log.read_text()}"
            time.sleep(0.2)
        yield daemon
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def doctor_report(command: list[Path | str], environment: dict[str, str]) -> str:
    """Run ``doctor`` and return what it prints."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


async def test_documented_build_uses_the_device(tmp_path: Path, environment: dict[str, str]) -> None:
    """All layers are on it, and ``doctor`` names it."""
    with made_daemon(tmp_path, environment) as daemon:
        async with connect_client(daemon) as client:
            recorder = await told_name(client)
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            plan = await plan_of(client)
        assert plan["n_gpu_layers"] == plan["layers"]
        program = tmp_path / "venv" / "bin" / "inferencecenter"
        report = await asyncio.to_thread(doctor_report, [program, "doctor"], environment)
    assert "with GPU support" in report
    assert "llvmpipe" in report
