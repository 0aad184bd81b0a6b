"""How long a frame of tokens takes from an engine to the front, and what it costs there.

``python -m benchmarks.cluster.frames FRAMES REPETITIONS`` receives as the daemon does: from an engine that is its
child, and from one behind a host and TLS, in turn. It prints the figures of each repetition as a line of JSON. With
``--fd`` the module is such an engine, with ``--copy`` it copies a model file again and again, and without arguments it
is the host of an engine. Engines write the time of sending, by the
clock that all processes of a machine share, into each frame.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from benchmarks.cluster.driver import start_host
from benchmarks.cluster.frame_times import COPY_MIB_PER_S, MODULE, TOKENS_PER_FRAME, FrameComparison, FrameTimes
from benchmarks.stats import percentile
from inferencecenter import __version__
from inferencecenter.cluster import engine_host
from inferencecenter.cluster.certificates import ClusterCertificates
from inferencecenter.cluster.engine_cluster import LOST_AFTER_S
from inferencecenter.cluster.file_transfer import FileCopier, FileServer
from inferencecenter.config.sections import EngineSettings
from inferencecenter.ipc import engine_child
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.framing import BlockingChannel
from inferencecenter.ipc.link import HostHello, LinkTicket, ModelFile, file_digest
from inferencecenter.ipc.messages import AbortTurn, Loading, StepOutput, TokenDelta
from inferencecenter.supervisor.process import LocalLauncher
from inferencecenter.supervisor.remote import HostListener, HostRegistry, RemoteLauncher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.ipc.messages import FromEngine
    from inferencecenter.supervisor.process import Engine, EngineLauncher

STEP_S: Final = 0.01
_ORPHAN_S: Final = 30.0
_MIB: Final = 2**20
_COPIED_BYTES: Final = 256 * _MIB


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def _run_engine(fd: int) -> int:
    """Send as many frames as the id of an ``AbortTurn`` says, for each."""
    connection = socket.socket(fileno=fd)
    engine_child.receive_descriptors(connection)
    channel = BlockingChannel(connection)
    channel.read()
    channel.send(Loading(1.0))
    deltas = tuple(TokenDelta(f"turn-{index}", b"\1\0\0\0", " word") for index in range(TOKENS_PER_FRAME))
    while isinstance(message := channel.read(), AbortTurn):
        for _ in range(int(message.turn_id)):
            time.sleep(STEP_S)
            channel.send(StepOutput(events=deltas, running=_now_us(), waiting=0, rss_bytes=0))
    return 0


class _Starter:
    """Starts the host on this machine; implements ``HostStarter``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.host: subprocess.Popen[bytes] | None = None

    async def start(self, ticket: LinkTicket) -> None:
        """Start it; see ``HostStarter``."""
        self.host = start_host(msgspec.json.encode(ticket), self._directory, module=MODULE)


class _Receiver:
    """Measures the frames of one engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._times_us: list[int] = []
        self._wanted = 0
        self._is_ready = asyncio.Event()
        self._is_done = asyncio.Event()

    async def start(self, launcher: EngineLauncher) -> None:
        """Start the engine, and wait until it can be told to send."""
        options = EngineOptions(backend="echo")
        self._engine = await launcher.launch(options, is_first=True, on_message=self._on_message, on_drain=lambda: None)
        await self._is_ready.wait()

    async def measure(self, frames: int) -> FrameTimes:
        """Have the engine send frames."""
        assert self._engine is not None, "it was started"
        self._times_us, self._wanted = [], frames
        self._is_done.clear()
        before_s = time.process_time()
        self._engine.channel.send(AbortTurn(str(frames)))
        await self._is_done.wait()
        cpu_s = time.process_time() - before_s
        return FrameTimes(percentile(self._times_us, 50), percentile(self._times_us, 99), cpu_s / frames * 1e6)

    async def stop(self) -> None:
        """End the engine."""
        if self._engine is not None:
            await self._engine.end(suspend_deadline_s=None)

    def _on_message(self, message: FromEngine) -> None:
        if not isinstance(message, StepOutput):
            self._is_ready.set()
            return
        self._times_us.append(_now_us() - message.running)
        if len(self._times_us) == self._wanted:
            self._is_done.set()


class _CopyOrder(msgspec.Struct, frozen=True):
    """What a process is to copy, and how it is admitted."""

    ticket: LinkTicket
    port: int
    key: str
    file: ModelFile
    directory: str


def _copy() -> int:
    """Copy a file again and again, until this process is ended."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_CopyOrder)
    copier = FileCopier(
        Path(order.directory),
        order.ticket,
        access=lambda: (order.port, order.key),
        on_progress=lambda _name, _done: None,
    )
    while True:
        (copier.fetch([order.file]) / Path(order.file.path).name).unlink()


class _Copies:
    """Copies of a file to another process, which has no other part in the measurement."""

    def __init__(self, directory: Path, listener: HostListener, registry: HostRegistry) -> None:
        self._directory = directory
        self._registry = registry
        self._ticket = listener.ticket("copies")
        hello = HostHello(version=__version__, engine="copies", epoch=self._ticket.epoch, key=self._ticket.key, node="")
        self._key = registry.admit(hello) or ""
        path = directory / "model.gguf"
        path.touch()
        os.truncate(path, _COPIED_BYTES)
        self._file = ModelFile(str(path), _COPIED_BYTES, file_digest(path), path.stat().st_mtime_ns, str(path))

    @contextmanager
    def run(self, certificates: ClusterCertificates, mib_per_s: float) -> Iterator[subprocess.Popen[bytes]]:
        """Copy while the block runs."""
        server = FileServer(certificates, self._registry, bytes_per_s=mib_per_s * _MIB)
        server.open("127.0.0.1", 0)
        server.offer("copies", (self._file,))
        order = _CopyOrder(self._ticket, server.port, self._key, self._file, str(self._directory / "copies"))
        process = subprocess.Popen([sys.executable, "-m", MODULE, "--copy"], stdin=subprocess.PIPE)  # noqa: S603
        try:
            assert process.stdin is not None, "it was started with a pipe"
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.close()
            yield process
        finally:
            process.kill()
            process.wait()
            server.close()


def _written_bytes(process: subprocess.Popen[bytes]) -> int:
    """Return what a process has written to files."""
    lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar:")).split()[1])


async def _beside_copy(receiver: _Receiver, frames: int, process: subprocess.Popen[bytes]) -> tuple[FrameTimes, float]:
    """Measure frames once the copy runs, and how many MiB a second it has."""
    while _written_bytes(process) < _MIB:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.05)
    before, begun_s = _written_bytes(process), time.monotonic()
    found = await receiver.measure(frames)
    return found, (_written_bytes(process) - before) / _MIB / (time.monotonic() - begun_s)


async def _measure(frames: int, repetitions: int, directory: Path) -> None:
    certificates, registry = ClusterCertificates(directory / "certificates"), HostRegistry(directory / "hosts.json")
    listener = HostListener(certificates, registry, lost_after_s=LOST_AFTER_S, orphan_s=_ORPHAN_S)
    await listener.open("127.0.0.1", 0)
    hosted, local, starter = _Receiver(), _Receiver(), _Starter(directory / "node")
    try:
        await local.start(LocalLauncher())
        await hosted.start(RemoteLauncher("frames", EngineSettings(backend="echo"), listener=listener, starter=starter))
        copies = _Copies(directory, listener, registry)
        for _ in range(repetitions):
            alone, beside_local = await hosted.measure(frames), await local.measure(frames)
            beside = []
            for mib_per_s in COPY_MIB_PER_S:
                with copies.run(certificates, mib_per_s) as process:
                    beside.append(await _beside_copy(hosted, frames, process))
            times, rates = zip(*beside, strict=True)
            found = FrameComparison(hosted=alone, local=beside_local, beside_copies=times, copied_mib_per_s=rates)
            sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
            sys.stdout.buffer.flush()
    finally:
        await hosted.stop()
        await local.stop()
        await listener.close()
        if starter.host is not None:
            starter.host.kill()
            starter.host.wait()


def main() -> int:
    """Run what the arguments say; see the module."""
    vars(engine_child).update(MODULE=MODULE)
    match sys.argv[1:]:
        case ["--fd", fd]:
            return _run_engine(int(fd))
        case ["--copy"]:
            return _copy()
        case [frames, repetitions]:
            with tempfile.TemporaryDirectory(prefix="inferencecenter-bench-") as directory:
                uvloop.run(_measure(int(frames), int(repetitions), Path(directory)))
            return 0
        case _:
            return engine_host.main()


if __name__ == "__main__":
    sys.exit(main())
