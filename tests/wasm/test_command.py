"""The command, and the samples of examples/wasm as it runs them."""

from __future__ import annotations

import contextlib
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
    from collections.abc import Callable, Iterator

    from tests.e2e.harness import Daemon
    from tests.wasm.conftest import GuestRunner

pytest.importorskip("wasmtime", reason="the extra wasm is not installed")

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.wasm import run as wasm_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "wasm"
HAS_CLANG = Path("/usr/lib/wasm32-wasi/libc.a").exists() and shutil.which("clang") is not None
ENDLESS = {"sampling": {"temp": 0, "ignore_eos": True}}
FOREVER = """(i32.store (i32.const 1024) (i32.const 0)) (i32.store (i32.const 1040) (i32.const 1))
    (i64.store (i32.const 1048) (i64.const 3000000000000))
    (drop (call $poll_oneoff (i32.const 1024) (i32.const 1088) (i32.const 1) (i32.const 1152)))"""
READ_INPUT = """(i32.store (i32.const 1024) (i32.const 1088)) (i32.store (i32.const 1028) (i32.const 8))
    (drop (call $fd_read (i32.const 0) (i32.const 1024) (i32.const 1) (i32.const 1152)))"""
TALK = "My name is Ada.\nWhat is my name?\n"


@pytest.fixture
def start(daemon: Daemon) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command with the daemon's address and token; what still runs at the end is killed."""
    environment = {
        **os.environ,
        "INFERENCECENTER_URL": f"http://127.0.0.1:{daemon.port}",
        "INFERENCECENTER_TOKEN": daemon.admin_token,
        "INFERENCECENTER_STATE_DIR": str(daemon.state_dir),
    }

    def starting(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferencecenter", "wasm", "run", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.enter_context(process)
        started.callback(process.kill)
        return process

    with contextlib.ExitStack() as started:
        yield starting


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


def test_file_without_a_size_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device or a pipe may be endless."""
    monkeypatch.setattr(wasm_run, "MAX_GUEST_BYTES", 1024)
    with pytest.raises(InferenceCenterError, match="larger than"):
        wasm_run.read_guest(Path("/dev/zero"))


WAITS = {"poll_oneoff": FOREVER, "fd_read": READ_INPUT}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("by", ["timeout", "signal"])
def test_wait_within_wasi_does_not_hold_up_the_process(
    start: Callable[..., subprocess.Popen[str]], runner: GuestRunner, tmp_path: Path, name: str, by: str
) -> None:
    """It cannot be interrupted, but the process ends, with the exit code of the timeout or the signal."""
    waiting = Guest().load().open().add("(call $print (i32.const 56) (i32.const 3))").add(WAITS[name])
    process = start(written(waiting, tmp_path / "guest.wat"), "--timeout-s", "3" if by == "timeout" else "600")
    assert process.stdout is not None
    assert process.stdout.readline() == "[]\n"
    if by == "signal":
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == (124 if by == "timeout" else 128 + signal.SIGTERM)
    assert runner.n_sessions() == 0
    process.communicate()


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


_PROBE = """
import os
import socket
import sys

import app
from wit_world import exports


def outcome(attempt):
    try:
        return repr(attempt())
    except OSError as error:
        return type(error).__name__


class Run(exports.Run):
    def run(self) -> None:
        if sys.argv[1:] != ["probe"]:
            app.Run().run()
            return
        address = ("127.0.0.1", int(sys.stdin.readline()))
        print(dict(os.environ))
        print(outcome(lambda: os.listdir("/")))
        print(outcome(lambda: open("/etc/passwd")))
        print(outcome(lambda: socket.socket().connect(address)))
        print(outcome(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(address)))
        print(outcome(lambda: socket.socket().bind(("127.0.0.1", 0))))
"""


@pytest.fixture(scope="module")
def component(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample in Python as a component; with the argument `probe` it tries what it may not do."""
    program = Path(sys.executable).with_name("componentize-py")
    if not program.exists():
        pytest.skip("componentize-py is not installed")
    folder = tmp_path_factory.mktemp("component") / "source"
    shutil.copytree(EXAMPLES / "component", folder)
    (folder / "probe.py").write_text(_PROBE, encoding="utf-8")
    options = ["--wit-path", "wit", "--world", "command", "componentize", "probe", "--output", "chat.wasm"]
    subprocess.run([program, *options], cwd=folder, check=True, capture_output=True)
    return folder / "chat.wasm"


# A minute to make the component and as long to compile it, once, on a quiet machine.
_TAKES_MINUTES = pytest.mark.timeout(900)


@pytest.mark.slow
@_TAKES_MINUTES
def test_component_in_python(start: Callable[..., subprocess.Popen[str]], component: Path) -> None:
    """The sample remembers; a wrong model is an error with our message."""
    output, errors = start(component).communicate(TALK, timeout=400)
    assert errors == ""
    assert "Ada" in output.splitlines()[1]
    process = start(component, "--model", "other=demo")
    assert "NOT_FOUND the guest may load other" in process.communicate("", timeout=400)[1]
    assert process.returncode == 1


@pytest.mark.slow
@_TAKES_MINUTES
def test_component_reaches_nothing_else(
    start: Callable[..., subprocess.Popen[str]], component: Path, daemon: Daemon
) -> None:
    """It has no environment, no files and no network."""
    output, errors = start(component, "probe").communicate(f"{daemon.port}\n", timeout=400)
    assert errors == ""
    assert output.splitlines() == ["{}", *["FileNotFoundError"] * 2, *["PermissionError"] * 3]
