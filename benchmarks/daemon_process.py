"""Our own daemon, with the settings of a scenario, started for the measurement."""

from __future__ import annotations

import asyncio
import os
import re
import signal
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

from benchmarks.cluster.nodes import NODES_VARIABLE, node_name, node_processes
from benchmarks.target import TargetSpec
from inferencecenter.config.settings import ENV_PREFIX
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.process_usage import ProcessUsage, read_usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

OURS: Final = "inferencecenter"
START_LIMIT_S: Final = 1800.0
_STOP_LIMIT_S: Final = 20.0
_SHOWN_LINES: Final = 5
_ADDRESS: Final = re.compile(rb"^\W*Address +http(://\S+)/")
_OF_ENGINES: Final = b'"engine_'
_GPU_PREFIX: Final = f"{ENV_PREFIX}GPU__"
_REPLICATED: Final = "replicated"
_NO_RAY: Final = "127.0.0.1:1"
"""The address of the cluster's head, which nothing connects to; its machine is that on which hosts connect."""
_CHECKOUT: Final = str(Path(__file__).parents[1])
CLUSTER_DAEMON: Final = "benchmarks.cluster.daemon"
MODEL_NAMES: Final = ("first", "second")
"""Names of the models of a daemon with two; the first is its default."""
_MANY: Final = "100000"
_RARELY: Final = {"ENGINE__RESTART_BACKOFF_MAX_S": "0.5", "ENGINE__RESTART_WINDOW_S": "1"}
"""Settings that make a daemon restart engines at once, however often they are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Settings of a scenario's daemon; 0 leaves ``n_ctx`` and ``threads`` to it.

    ``store`` tells whether conversations are stored. ``loses_engines`` is set where the scenario kills engines.
    ``echo_delay_ms`` is the duration of a decode of the echo backend. ``lookup`` enables prompt lookup, ``draft`` names
    a draft model and ``mmproj`` a projector. The script backend answers by the rules of ``script``. With ``two_models``
    the file is there twice, under ``MODEL_NAMES``. The model has ``replicas`` engines, or ``hosted`` ones behind hosts,
    each on a node of its own (``benchmarks.cluster``).
    """

    backend: Literal["llama", "echo", "script"]
    model: Path | None
    slots: int
    n_ctx: int
    threads: int
    store: bool = True
    loses_engines: bool = False
    echo_delay_ms: int = 0
    lookup: bool = False
    draft: Path | None = None
    mmproj: Path | None = None
    two_models: bool = False
    script: Path | None = None
    replicas: int = 1
    hosted: int = 0

    @property
    def n_engines(self) -> int:
        """The engines of the model."""
        return self.hosted or self.replicas

    def environment(self, state_dir: Path) -> dict[str, str]:
        """Return the environment of the daemon's process: these settings, and of inherited ones those of its GPUs."""
        settings = {
            "STATE_DIR": str(state_dir),
            "SERVER__PORT": "0",
            "SERVER__MAX_CONNECTIONS": _MANY,
            "SERVER__MAX_CONNECTIONS_PER_CLIENT": _MANY,
            "SESSIONS__STORE": str(self.store),
            "ENGINE__BACKEND": self.backend,
            "ENGINE__SLOTS": str(self.slots),
            "ENGINE__N_CTX": str(self.n_ctx),
            "ENGINE__N_THREADS": str(self.threads),
            "ENGINE__N_THREADS_BATCH": str(self.threads),
            "ENGINE__ECHO_DELAY_MS": str(self.echo_delay_ms),
            "ENGINE__SPECULATIVE": "lookup" if self.lookup else "off",
            "LOG__FORMAT": "json",
        }
        if self.model is not None:
            settings["MODEL__PATH"] = str(self.model)
        if self.draft is not None:
            settings["ENGINE__DRAFT"] = str(self.draft.absolute())
        if self.mmproj is not None:
            settings["MODEL__MMPROJ"] = str(self.mmproj.absolute())
        if self.script is not None:
            settings["ENGINE__SCRIPT"] = str(self.script)
        if self.loses_engines:
            settings |= _RARELY
        if self.two_models:
            first, second = MODEL_NAMES
            entry = {second: {"path": str(self.model or "echo")}}
            settings |= {"MODEL__NAME": first, "MODELS": orjson.dumps(entry).decode()}
        if self.n_engines > 1 or self.hosted:
            settings.pop("MODEL__PATH", None)
            replicated: dict[str, object] = {"path": str(self.model or "echo")}
            if self.hosted:
                replicated["nodes"] = [node_name(index) for index in range(self.hosted)]
                settings |= {"CLUSTER__ADDRESS": _NO_RAY, "CLUSTER__PORT": "0", "CLUSTER__FILES_PORT": "0"}
            else:
                replicated["replicas"] = self.replicas
            settings |= {"MODEL__NAME": _REPLICATED, "MODELS": orjson.dumps({_REPLICATED: replicated}).decode()}
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(ENV_PREFIX) or name.startswith(_GPU_PREFIX)
        }
        environment = kept | {ENV_PREFIX + name: value for name, value in settings.items()}
        if self.hosted:
            environment |= {"PYTHONPATH": _CHECKOUT, NODES_VARIABLE: str(nodes_directory(state_dir))}
        return environment


def nodes_directory(state_dir: Path) -> Path:
    """Return where the nodes of ``DaemonSettings.hosted`` are."""
    return state_dir / "nodes"


@dataclass(frozen=True, slots=True)
class DaemonUsage:
    """Resource use of both processes of the daemon."""

    front: ProcessUsage
    engine: ProcessUsage


@dataclass(frozen=True, slots=True)
class Readiness:
    """The engine start as reported in the daemon's log, and its time since the start of the process."""

    ready_s: float
    engine_pid: int
    slots: int
    n_ctx: int
    threads: int


@dataclass(frozen=True, slots=True)
class EngineLife:
    """An engine that got ready: when its process was started, and when it was ready; seconds of ``time.monotonic``."""

    pid: int
    started_s: float
    ready_s: float


class RunningDaemon:
    """A daemon that became ready; ``start_daemon`` and ``Launch.ready`` make one."""

    def __init__(  # noqa: PLR0913 - keyword-only but for the first two
        self,
        pid: int,
        spec: TargetSpec,
        *,
        readiness: Readiness,
        settings: DaemonSettings,
        state_dir: Path,
        output: _Output,
    ) -> None:
        self.pid = pid
        self._state_dir = state_dir
        self._output = output
        self.spec = spec
        self.readiness = readiness
        self.settings = settings

    @property
    def library(self) -> str:
        """The version of llama.cpp, as the package that brings it is called."""
        return f"llama-cpp-python {version('llama-cpp-python')}" if self.settings.backend == "llama" else "none"

    @property
    def engine(self) -> EngineLife:
        """The engine that became ready last."""
        return self._output.engines[-1]

    def usage(self) -> DaemonUsage:
        """Return the resource use of the daemon's processes so far.

        Raises:
            OSError: A process no longer exists.
        """
        return DaemonUsage(front=read_usage(self.pid), engine=read_usage(self.engine.pid))

    async def new_token(self, client: str, *, max_sessions: int | None = None) -> str:
        """Create an account with the scope ``user`` and no limits but ``max_sessions``, and return its token."""
        limit = () if max_sessions is None else ("--max-sessions", str(max_sessions))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inferencecenter",
            "token",
            "create",
            client,
            *limit,
            "--json",
            env=self.settings.environment(self._state_dir),
            stdout=asyncio.subprocess.PIPE,
        )
        written, _ = await process.communicate()
        token: str = orjson.loads(written)["token"]
        return token

    def kill_engine(self) -> float:
        """Kill the engine that became ready last, by its id, and return when, in seconds of ``time.monotonic``."""
        killed_s = time.monotonic()
        os.kill(self.engine.pid, signal.SIGKILL)
        return killed_s

    def node_processes(self, index: int) -> tuple[int, ...]:
        """Return the process ids of the host and the engine on a node of ``DaemonSettings.hosted``.

        Raises:
            OSError: There is no host.
        """
        return node_processes(nodes_directory(self._state_dir) / node_name(index))

    async def engine_after(self, lost: EngineLife) -> EngineLife:
        """Wait until an engine is ready that came after ``lost``, and return it.

        Raises:
            InferenceCenterError: ``engine_unavailable`` with the daemon's last output when there is none.
        """
        await self._output.wait_for(lambda: self.engine.started_s > lost.started_s)
        return self.engine


class Launch:
    """A daemon's process from its start on; ``launch`` makes one. ``started_s`` is of ``time.monotonic``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        *,
        started_s: float,
        name: str,
        settings: DaemonSettings,
        state_dir: Path,
    ) -> None:
        assert process.stdout is not None, "started with a pipe"
        self.started_s = started_s
        self.output = _Output(process.stdout, started_s)
        self._process = process
        self._name = name
        self._settings = settings
        self._state_dir = state_dir

    async def listening(self) -> TargetSpec:
        """Wait until clients can connect, which is before turns can run, and return where.

        Raises:
            InferenceCenterError: ``engine_unavailable`` with the daemon's last output when it exits first.
        """
        await self.output.wait_for(lambda: bool(self.output.url))
        token = (self._state_dir / "admin.token").read_text().strip()
        return TargetSpec(name=self._name, kind="inferencecenter", url=self.output.url, token=token)

    async def ready(self) -> RunningDaemon:
        """Wait until turns can run.

        Raises:
            InferenceCenterError: ``engine_unavailable`` with the daemon's last output when it does not become ready.
        """
        spec = await self.listening()
        await self.output.wait_for(lambda: len(self.output.engines) >= self._settings.n_engines)
        assert self.output.readiness is not None, "it was waited for"
        return RunningDaemon(
            self._process.pid,
            spec,
            readiness=self.output.readiness,
            settings=self._settings,
            state_dir=self._state_dir,
            output=self.output,
        )

    async def kill(self) -> None:
        """Kill the process, as the kernel does when memory is exhausted."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """Terminate the process, as an operator does."""
        await stop(self._process)


class _Output:
    """Follows a daemon's standard output and error, which report its address and its engines."""

    def __init__(self, stream: asyncio.StreamReader, started_s: float) -> None:
        self._stream = stream
        self._started_s = started_s
        self._last: deque[bytes] = deque(maxlen=_SHOWN_LINES)
        self._engine_pid = 0
        self._engine_started_s = 0.0
        self._has_ended = False
        self._changed = asyncio.Condition()
        self.url = ""
        self.readiness: Readiness | None = None
        self.engines: list[EngineLife] = []

    async def follow(self) -> None:
        """Read to the end: a full pipe would stop the daemon."""
        async for line in self._stream:
            self._last.append(line)
            if not self.url and (address := _ADDRESS.match(line)):
                self.url = f"ws{address[1].decode()}/"
            elif _OF_ENGINES in line:
                self._note(line)
            else:
                continue
            await self._notify()
        self._has_ended = True
        await self._notify()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a reading fulfills a condition.

        Raises:
            InferenceCenterError: ``engine_unavailable`` with the daemon's last output when it ends before or takes
                longer than ``START_LIMIT_S``.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(START_LIMIT_S), self._changed:
                await self._changed.wait_for(lambda: condition() or self._has_ended)
        if not condition():
            output = b"".join(self._last).decode(errors="replace").strip()
            raise InferenceCenterError(
                ErrorCode.ENGINE_UNAVAILABLE, "the daemon did not become ready: " + (output or "it printed nothing")
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _note(self, line: bytes) -> None:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            return  # output for people
        now_s = time.monotonic()
        if event["event"] == "engine_started":
            self._engine_pid, self._engine_started_s = event["pid"], now_s
        elif event["event"] == "engine_on_host":
            self._engine_pid = event["remote_pid"]
        elif event["event"] == "engine_ready":
            self.engines.append(EngineLife(self._engine_pid, self._engine_started_s, now_s))
            if self.readiness is None:
                self.readiness = Readiness(
                    now_s - self._started_s, self._engine_pid, event["slots"], event["n_ctx"], event["threads"]
                )


@asynccontextmanager
async def launch(settings: DaemonSettings, state_dir: Path, *, name: str = OURS) -> AsyncIterator[Launch]:
    """Start a daemon's process on a free port, and end it when the block is left."""
    started_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        CLUSTER_DAEMON if settings.hosted else "inferencecenter",
        "serve",
        env=settings.environment(state_dir),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    launched = Launch(process, started_s=started_s, name=name, settings=settings, state_dir=state_dir)
    readers = TaskGroup("bench-daemon")
    try:
        readers.spawn(launched.output.follow(), name="output")
        yield launched
    finally:
        await stop(process)
        await readers.cancel()


@asynccontextmanager
async def start_daemon(settings: DaemonSettings, *, name: str = OURS) -> AsyncIterator[RunningDaemon]:
    """Start a daemon with its own state directory, and stop it at the end of the block.

    Raises:
        InferenceCenterError: ``engine_unavailable`` with the daemon's last output when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="inferencecenter-bench-") as directory:
        async with launch(settings, Path(directory) / "state", name=name) as launched:
            yield await launched.ready()


async def stop(process: asyncio.subprocess.Process) -> None:
    """Terminate a server, as an operator does, and kill it if it does not exit."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
