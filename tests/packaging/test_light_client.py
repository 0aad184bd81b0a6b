"""The wheel without extras: the client and its commands, without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SERVER_PACKAGES = ("llama_cpp", "uvicorn", "starlette", "numpy", "llguidance", "huggingface_hub", "jinja2", "uvloop")
QUESTION = "What is the capital of France?\n"
EXAMPLES = ("many_sessions.py", "abort.py", "tool_loop.py")


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which only the wheel was installed."""
    scratch = tmp_path_factory.mktemp("bare")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", scratch, ROOT], check=True)
    (wheel,) = scratch.glob("*.whl")
    venv.create(scratch / "venv")
    done = subprocess.run(
        [*pip, "--python", scratch / "venv/bin/python", "install", "--no-compile", wheel],
        check=False,
        capture_output=True,
        text=True,
    )
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return scratch / "venv" / "bin"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model."""
    with run_daemon(tmp_path_factory.mktemp("daemon") / "state", demo_model_path) as running:
        yield running


def run(bin_dir: Path, *command: str | Path, daemon: Daemon | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of that environment in an empty folder, with the address and token of a daemon."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(bin_dir)}
    if daemon is not None:
        environment |= {
            "INFERENCECENTER_URL": f"http://127.0.0.1:{daemon.port}",
            "INFERENCECENTER_TOKEN": daemon.admin_token,
            "INFERENCECENTER_STATE_DIR": str(daemon.state_dir),
            "INFERENCECENTER_SERVER__PORT": str(daemon.port),
        }
    program, *arguments = command
    return subprocess.run(
        [bin_dir / program, *arguments],
        env=environment,
        cwd=bin_dir,
        input=QUESTION,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_no_server_dependency_is_installed(bin_dir: Path) -> None:
    """Neither compiled packages nor the packages of the HTTP server can be imported."""
    found = f"from importlib.util import find_spec; print([n for n in {SERVER_PACKAGES!r} if find_spec(n)])"
    assert run(bin_dir, "python", "-c", found).stdout == "[]\n"


@pytest.mark.parametrize("example", EXAMPLES)
def test_client_examples_run(bin_dir: Path, daemon: Daemon, example: str) -> None:
    """They need no other package."""
    done = run(bin_dir, "python", ROOT / "examples" / example, daemon=daemon)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("session", "list"),
        ("stats", "--once"),
        ("model", "list"),
        ("token", "list"),
        ("client", "list"),
        ("usage",),
        ("audit",),
        ("config", "show"),
        ("healthcheck",),
        ("chat",),
    ],
    ids=" ".join,
)
def test_client_commands_work(bin_dir: Path, daemon: Daemon, command: tuple[str, ...]) -> None:
    """Commands for a running daemon or its files import nothing of the server."""
    done = run(bin_dir, "inferencecenter", *command, daemon=daemon)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [("serve",), ("run", "demo", "Hello."), ("doctor",)], ids=" ".join)
def test_server_commands_name_the_extra(bin_dir: Path, command: tuple[str, ...]) -> None:
    """The message says what to install."""
    done = run(bin_dir, "inferencecenter", *command)
    assert done.returncode == 78
    assert 'pip install "inferencecenter[server]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_wasm_names_its_extra(bin_dir: Path) -> None:
    """The host of guests is not in the wheel's dependencies."""
    done = run(bin_dir, "inferencecenter", "wasm", "run", "guest.wasm")
    assert done.returncode == 78
    assert 'pip install "inferencecenter[wasm]"' in done.stderr


def test_bench_names_its_location(bin_dir: Path) -> None:
    """It is not in the wheel, and any arguments give the message."""
    done = run(bin_dir, "inferencecenter", "bench", "throughput", "--clients", "4")
    assert done.returncode == 78
    assert "Clone the repository" in done.stderr


def test_importing_the_client_loads_no_other_part(bin_dir: Path) -> None:
    """Neither the daemon's modules nor its logging are imported."""
    code = "import sys, json, inferencecenter.client; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(run(bin_dir, "python", "-c", code).stdout)
    packages = {name.split(".")[1] for name in modules if name.startswith("inferencecenter.")}
    assert packages == {"client", "protocol", "core"}
    assert not {"structlog", "rich", "typer", "msgspec", "websockets", "orjson"} & set(modules)
