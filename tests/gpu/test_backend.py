"""The tests of the llama.cpp backend, with the model on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rpc.connected import SERVER_VARIABLE
from tests.vulkan import software

if TYPE_CHECKING:
    from inferencecenter.hardware.placement import Device

FOLDER = Path(__file__).parents[1] / "engine" / "llama"


@pytest.mark.parametrize("file", ["test_context.py", "test_saved_state.py", "test_adapters.py"])
def test_sequences_and_adapters(devices: tuple[Device, ...], tmp_path: Path, file: str) -> None:
    """Sequences are cut, swapped, copied, saved and restored, and adapters applied, as on the processor."""
    if software.is_software(devices[0]):
        pytest.skip("llvmpipe ends the process: it refers to freed buffers (docs/gpu.md)")
    plugin = ["-p", "tests.rpc.connected"] if devices[0].remote else []
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-n0", *plugin, FOLDER / file]
    environment = os.environ | {SERVER_VARIABLE: devices[0].name}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'in'}"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
