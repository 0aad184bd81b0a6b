"""A daemon of our own, with the settings that a scenario wants, for as long as it is measured."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import orjson

from inferencecenter.bench.target import TargetSpec
from inferencecenter.bench.usage import Usage, read_usage
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.settings import ENV_PREFIX
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OURS: Final = "inferencecenter"
START_LIMIT_S: Final = 1800.0
_STOP_LIMIT_S: Final = 20.0
_SHOWN_LINES: Final = 5
_ADDRESS: Final = re.compile(rb"^\W*Address +http(://\S+)/")
_MANY: Final = "100000"


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """What a scenario asks of the daemon; 0 leaves ``n_ctx`` and ``threads`` to it."""

    backend: Literal["llama", "echo"]
    model: Path | None
    slots: int
    n_ctx: int
    threads: int

    def environment(self, state_dir: Path) -> dict[str, str]:
        """Return the environment of the daemon's process: these settings and nobody's own."""
        settings = {
            "STATE_DIR": str(state_dir),
            "SERVER__PORT": "0",
            "SERVER__MAX_CONNECTIONS": _MANY,
            "SERVER__MAX_CONNECTIONS_PER_CLIENT": _MANY,
            "ENGINE__BACKEND": self.backend,
            "ENGINE__SLOTS": str(self.slots),
            "ENGINE__N_CTX": str(self.n_ctx),
            "ENGINE__N_THREADS": str(self.threads),
            "ENGINE__N_THREADS_BATCH": str(self.threads),
            "LOG__FORMAT": "json",
        }
        if self.model is not None:
            settings["MODEL__PATH"] = str(self.model)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        return kept | {ENV_PREFIX + name: value for name, value in settings.items()}


@dataclass(frozen=True, slots=True)
class DaemonUsage:
    """What both processes of the daemon use."""

    front: Usage
    engine: Usage


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the daemon's log says of the engine, and how long it took from the start of the process until it said so."""

    ready_s: float
    engine_pid: int
    slots: int
    n_ctx: int
    threads: int


class RunningDaemon:
    """A daemon that is ready; ``start_daemon`` makes one."""

    def __init__(self, pid: int, spec: TargetSpec, *, readiness: Readiness, settings: DaemonSettings) -> None:
        self._pid = pid
        self.spec = spec
        self.readiness = readiness
        self.settings = settings

    @property
    def library(self) -> str:
        """The version of llama.cpp, as the package that brings it is called."""
        return f"llama-cpp-python {version('llama-cpp-python')}" if self.settings.backend == "llama" else "none"

    def usage(self) -> DaemonUsage:
        """Return what the daemon's processes have used so far."""
        return DaemonUsage(front=read_usage(self._pid), engine=read_usage(self.readiness.engine_pid))


class _Output:
    """Reads a starting daemon's standard output and error, which say where it listens and when it is ready."""

    def __init__(self, stream: asyncio.StreamReader, started_s: float) -> None:
        self._stream = stream
        self._started_s = started_s
        self._engine_pid = 0
        self.last: deque[str] = deque(maxlen=_SHOWN_LINES)
        self.url = ""

    async def ready(self) -> Readiness | None:
        """Read until the engine is ready; ``None`` when the output ends first."""
        async for line in self._stream:
            if address := _ADDRESS.match(line):
                self.url = f"ws{address[1].decode()}/"
            if (found := self._event(line)) is not None:
                return found
        return None

    async def drain(self) -> None:
        """Read what is written from then on: a full pipe would stop the daemon."""
        async for line in self._stream:
            self.last.append(line.decode(errors="replace").strip())

    def _event(self, line: bytes) -> Readiness | None:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            return None  # what the daemon says to people
        self.last.append(line.decode(errors="replace").strip())
        if event["event"] == "engine_started":
            self._engine_pid = event["pid"]
        if event["event"] != "engine_ready":
            return None
        ready_s = time.monotonic() - self._started_s
        return Readiness(ready_s, self._engine_pid, event["slots"], event["n_ctx"], event["threads"])


@asynccontextmanager
async def start_daemon(settings: DaemonSettings) -> AsyncIterator[RunningDaemon]:
    """Start a daemon on a free port with a state directory of its own, and stop it when the block is left.

    Raises:
        InferenceCenterError: ``engine_unavailable`` with the daemon's last words when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="inferencecenter-bench-") as directory:
        state_dir = Path(directory) / "state"
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inferencecenter",
            "serve",
            env=settings.environment(state_dir),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None, "started with a pipe"
        output = _Output(process.stdout, started_s)
        readers = TaskGroup("bench-daemon")
        try:
            readiness = await _readiness(output)
            readers.spawn(output.drain(), name="output")
            token = (state_dir / "admin.token").read_text().strip()
            spec = TargetSpec(name=OURS, kind="inferencecenter", url=output.url, token=token)
            yield RunningDaemon(process.pid, spec, readiness=readiness, settings=settings)
        finally:
            await stop(process)
            await readers.cancel()


async def _readiness(output: _Output) -> Readiness:
    with suppress(TimeoutError):
        async with asyncio.timeout(START_LIMIT_S):
            if (readiness := await output.ready()) is not None:
                return readiness
    raise InferenceCenterError(
        ErrorCode.ENGINE_UNAVAILABLE,
        "the daemon did not become ready: " + ("\n".join(output.last) or "it said nothing"),
    )


async def stop(process: asyncio.subprocess.Process) -> None:
    """End a server as an operator would, or by force when it does not obey."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
