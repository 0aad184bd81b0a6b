"""The command, and the samples of examples/wasm as it runs them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.wasm.guests import Guest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.harness import Daemon
    from tests.wasm.conftest import GuestRunner

pytest.importorskip("wasmtime", reason="the extra wasm is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples" / "wasm"
HAS_CLANG = Path("/usr/lib/wasm32-wasi/libc.a").exists() and shutil.which("clang") is not None
ENDLESS = {"sampling": {"temp": 0, "ignore_eos": True}}
TALK = "My name is Ada.\nWhat is my name?\n"


@pytest.fixture
def start(daemon: Daemon) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command with the daemon's address and token."""
    environment = {
        **os.environ,
        "INFERENCECENTER_URL": f"http://127.0.0.1:{daemon.port}",
        "INFERENCECENTER_TOKEN": daemon.admin_token,
        "INFERENCECENTER_STATE_DIR": str(daemon.state_dir),
    }

    def starting(*arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "inferencecenter", "wasm", "run", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return starting


def written(guest: Guest, path: Path) -> Path:
    """Write a guest to a file, in text form."""
    path.write_text(guest.wat(), encoding="utf-8")
    return path


@pytest.mark.slow
def test_guests_stream_at_once(
    start: Callable[..., subprocess.Popen[str]], runner: GuestRunner, tmp_path: Path
) -> None:
    """Two processes with endless answers both write text; each ends by a signal, and no session remains."""
    guest = written(Guest().load(config=ENDLESS).open().input("Tell me a story.").stream(), tmp_path / "guest.wat")
    running = [start(guest), start(guest)]
    for process in running:
        assert process.stdout is not None
        assert len(process.stdout.read(200)) == 200
    assert runner.n_sessions() == 2
    for process, name in zip(running, (signal.SIGTERM, signal.SIGINT), strict=True):
        process.send_signal(name)
    codes = []
    for process in running:
        process.communicate(timeout=60)
        codes.append(process.returncode)
    assert codes == [128 + signal.SIGTERM, 130]
    assert runner.n_sessions() == 0


def test_options_reach_the_guest(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """A model under another name, a trace, a timeout and its exit code."""
    guest = Guest().load("chat", {**ENDLESS}).open().input("Tell me a story.").must("compute", 1)
    file = written(guest, tmp_path / "guest.wat")
    process = start(file, "--model", "chat=demo", "--timeout-s", "0.5", "--trace")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 124
    lines = errors.splitlines()
    assert lines[0].startswith("wasi-nn: load_by_name_with_config(")
    assert lines[-2] == "guest_timeout: guest.wat ran for more than 0.5 s"
    assert lines[-1] == "hint: --timeout-s sets the limit."


def test_missing_directory_and_file_are_named(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Before the daemon is asked."""
    guest = written(Guest(), tmp_path / "guest.wat")
    process = start(guest, "--dir", str(tmp_path / "absent"))
    assert "absent" in process.communicate(timeout=60)[1]
    assert process.returncode == 64
    process = start(tmp_path / "absent.wasm")
    assert "absent.wasm" in process.communicate(timeout=60)[1]
    assert process.returncode == 65


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CLANG, reason="clang or wasi-libc is not installed")
def test_chat_in_c(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """The sample is compiled without a warning, and remembers."""
    options = ["--target=wasm32-wasi", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["clang", *options, "-o", tmp_path / "chat.wasm", EXAMPLES / "chat.c"], check=True)
    output, errors = start(tmp_path / "chat.wasm").communicate(TALK, timeout=60)
    assert errors == ""
    assert "Ada" in output.splitlines()[1]
    process = start(tmp_path / "chat.wasm", "absent")
    assert "load_by_name_with_config: error 8: model_not_found" in process.communicate("", timeout=60)[1]
    assert process.returncode == 1


def test_stream_in_wat(start: Callable[..., subprocess.Popen[str]]) -> None:
    """The sample writes one line."""
    process = start(EXAMPLES / "stream.wat")
    output, errors = process.communicate(timeout=60)
    assert errors == ""
    assert process.returncode == 0
    assert len(output.strip()) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute to make and as long to compile, on a quiet machine
def test_component_in_python(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """The sample is made into a component, and remembers; a wrong model is an error with our message."""
    program = Path(sys.executable).with_name("componentize-py")
    if not program.exists():
        pytest.skip("componentize-py is not installed")
    shutil.copytree(EXAMPLES / "component", tmp_path / "component")
    file = tmp_path / "chat.wasm"
    options = ["--wit-path", "wit", "--world", "command", "componentize", "app", "--output", str(file)]
    subprocess.run([program, *options], cwd=tmp_path / "component", check=True, capture_output=True)
    output, errors = start(file).communicate(TALK, timeout=400)
    assert errors == ""
    assert "Ada" in output.splitlines()[1]
    process = start(file, "--model", "other=demo")
    assert "NOT_FOUND the guest may load other" in process.communicate("", timeout=400)[1]
    assert process.returncode == 1
