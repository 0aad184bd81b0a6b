"""A device that is gone when the engine starts, that comes back, or that has less memory than it says."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import connect_client, run_daemon
from tests.gpu.daemons import GREEDY, QUESTION, SETTINGS, plan_of, told_name, unload
from tests.vulkan import software

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


class Plug:
    """Lets Vulkan's loader find the device, or not: it is there with the file that describes its driver."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.plug_in()

    def plug_in(self) -> None:
        """Have the next process find the device."""
        shutil.copy(software.driver(), self._file)

    def pull_out(self) -> None:
        """Have the next process find none."""
        self._file.unlink()


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plug:
    """A device that is there."""
    file = tmp_path / "driver.json"
    software.use(monkeypatch, described_by=file)
    return Plug(file)


async def test_device_disappears_and_returns(tmp_path: Path, plug: Plug, demo_model_path: Path) -> None:
    """The next start uses the host instead, the one after that the device again; the session is the same."""
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as daemon:
        async with connect_client(daemon) as client:
            recorder = await told_name(client)
            layers = (await plan_of(client))["n_gpu_layers"]
            assert layers > 0
            for change, expected in ((plug.pull_out, 0), (plug.plug_in, layers)):
                await unload(client)
                change()
                assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
                assert (await plan_of(client))["n_gpu_layers"] == expected
            await recorder.described()


async def test_configured_device_is_waited_for(tmp_path: Path, plug: Plug, demo_model_path: Path) -> None:
    """Turns fail as long as the device that the settings name is gone, and succeed when it is back."""
    settings = SETTINGS | {"INFERENCECENTER_GPU__DEVICES": '["Vulkan0"]'}
    with run_daemon(tmp_path / "state", demo_model_path, **settings) as daemon:
        async with connect_client(daemon) as client:
            recorder = await told_name(client)
            await unload(client)
            plug.pull_out()
            await recorder.infer(QUESTION, **GREEDY)
            await recorder.finish()
            assert (recorder.end["op"], recorder.end["code"]) == ("error", "engine_unavailable")
            assert "Vulkan0" in recorder.end["message"]
            plug.plug_in()
            await client.until(lambda message: message["op"] == "engine" and message["state"] == "ready")
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            assert (plan := await plan_of(client))["n_gpu_layers"] == plan["layers"]


@pytest.mark.usefixtures("plug")
async def test_memory_that_another_program_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model_path: Path
) -> None:
    """The device overstates its free memory: the engine is restarted with fewer layers until it loads."""
    monkeypatch.setenv("GGML_VK_FORCE_MAX_BUFFER_SIZE", str(2 * 2**20))
    with run_daemon(tmp_path / "state", demo_model_path, **SETTINGS) as daemon:
        async with connect_client(daemon) as client:
            recorder = await told_name(client)
            assert "Ada" in await recorder.turn(QUESTION, **GREEDY)
            plan = await plan_of(client)
    assert 0 < plan["n_gpu_layers"] < plan["layers"]
    assert "engine_uses_fewer_layers" in daemon.log.read_text()
