"""The C library, built with sanitizers, and a program that calls it as a test says."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.harness import run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.harness import Daemon

ROOT: Final = Path(__file__).parents[2]
LIBRARY: Final = ROOT / "clients" / "c"
SANITIZERS: Final = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS: Final = ("-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{LIBRARY / 'include'}")
SUCCESS, INVALID_ARGUMENT, INVALID_ENCODING, TIMEOUT, RUNTIME_ERROR = range(5)
TOO_LARGE, NOT_FOUND, SECURITY = 6, 7, 8
MODEL_NOT_FOUND = 103


def compiled(out: Path, *sources: Path, options: tuple[str, ...] = SANITIZERS) -> Path:
    """Build a program with the library's sources; skips the test without a compiler."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("gcc is not installed")
    library = sorted((LIBRARY / "src").glob("*.c"))
    subprocess.run([compiler, *FLAGS, *options, f"-I{LIBRARY / 'src'}", *library, *sources, "-o", out], check=True)
    return out


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, with AddressSanitizer and UndefinedBehaviorSanitizer."""
    return compiled(tmp_path_factory.mktemp("nn") / "driver", Path(__file__).with_name("driver.c"))


@dataclass(frozen=True)
class Reply:
    """What a call returned: the error's number, and the output or the reason."""

    error: int
    text: str


class Driver:
    """A running driver."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def call(self, *arguments: Any) -> Reply:
        """Call a function by its short name."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write("\t".join(map(str, arguments)).encode() + b"\n")
        stdin.flush()
        head = stdout.readline().split()
        assert len(head) == 2, f"the driver ended:\n{self.log}"
        text = stdout.read(int(head[1]) + 1)
        return Reply(int(head[0]), text[:-1].decode())

    def must(self, *arguments: Any) -> str:
        """Call a function that succeeds, and return its output."""
        reply = self.call(*arguments)
        assert reply.error == SUCCESS, reply
        return reply.text

    @property
    def log(self) -> str:
        """What was logged so far."""
        return self._log.read_text()


@contextmanager
def running(command: tuple[str | Path, ...], socket: Path, log: Path, token: str = "") -> Iterator[Driver]:
    """Run a driver, which has no leak and no fault at its end."""
    environment = {"INFERENCECENTER_SOCKET": str(socket), "INFERENCECENTER_TOKEN": token, "PATH": os.environ["PATH"]}
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        driver = Driver(process, log)
        yield driver
        process.communicate()
    assert process.returncode == 0, driver.log


@pytest.fixture(scope="session")
def echo_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the daemon with the echo backend listens."""
    return tmp_path_factory.mktemp("sock") / "echo.sock"


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory, echo_socket: Path) -> Iterator[Daemon]:
    """A daemon whose model answers with its prompt."""
    settings = {"INFERENCECENTER_ENGINE__BACKEND": "echo", "INFERENCECENTER_SERVER__UNIX_SOCKET": str(echo_socket)}
    with run_daemon(tmp_path_factory.mktemp("echo") / "state", None, **settings) as daemon:
        yield daemon


@pytest.fixture
def driver(program: Path, echo: Daemon, echo_socket: Path, tmp_path: Path) -> Iterator[Driver]:
    """A driver with an open backend on the echo daemon, which it closes."""
    with running((program,), echo_socket, tmp_path / "log") as driver:
        driver.must("init", "")
        yield driver
        driver.must("deinit")
