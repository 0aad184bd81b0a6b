"""One engine: the lock that outlives a dead daemon, the process, its start, its messages and its exit."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.ipc import engine_child
from inferencecenter.ipc.channel import Channel
from inferencecenter.ipc.framing import encode, from_engine_decoder
from inferencecenter.ipc.heartbeat import Heartbeat
from inferencecenter.ipc.messages import Configure, Suspend

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import FromEngine, LogLine, Suspended, ToEngine

# The lock ensures that the engine of a dead daemon is gone before the next one starts: the engine inherits a locked
# file that its daemon then closes. So the lock is held exactly as long as the engine lives, whatever happens to the
# daemon, and the file names the process for which the next daemon has to wait.

WAIT_S: Final = 10.0
"""How long to wait for an orphan: the kernel kills it with its parent, but freeing its memory takes a while."""
EXIT_GRACE_S: Final = 3.0
"""How long a process may outlive its pipe before it is killed."""
SUSPEND_DEADLINE_S: Final = 10.0
"""How long an engine may take to write KV to disk when the daemon stops or the engine goes to sleep."""
STOP_DEADLINE_S: Final = 3.0
_MAX_LINE_BYTES: Final = 16 * 1024
_MAX_SHOWN_CHARS: Final = 400
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_log = structlog.get_logger("engine")


class NodeUnreachableError(OSError):
    """The machine of an engine cannot be reached."""


class EngineLockError(Exception):
    """Another engine holds the lock and does not exit."""


@asynccontextmanager
async def engine_lock(path: Path, *, wait_s: float = WAIT_S) -> AsyncIterator[int]:
    """Hold the lock on ``path`` and yield its file descriptor, for an engine to inherit.

    Raises:
        EngineLockError: The engine that holds the lock is still there after ``wait_s``.
        OSError: The file cannot be opened.
    """
    fd = _open_lock(path)
    try:
        while not _lock(fd):
            await _holder_gone(_holder(fd), wait_s=wait_s)
        yield fd
    finally:
        os.close(fd)


def record_holder(fd: int, pid: int) -> None:
    """Write into the lock file which process holds it."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(pid).encode(), 0)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    record_holder(fd, os.getpid())
    return True


def _holder(fd: int) -> int:
    text = os.pread(fd, 32, 0)
    if not text.isdigit():
        raise EngineLockError("another daemon is starting an engine in this state directory")
    return int(text)


async def _holder_gone(pid: int, *, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await _exited(pid)
    except ProcessLookupError:
        # The lock outlives its holder's pid until the kernel has closed the holder's files.
        raise EngineLockError(f"the engine lock is held by process {pid}, which is gone") from None
    except TimeoutError:
        raise EngineLockError(f"process {pid} still holds the engine lock after {wait_s:g} s") from None


async def _exited(pid: int) -> None:
    """Wait until a process, of this daemon or another, has exited; one of this daemon is not reaped.

    Raises:
        ProcessLookupError: There is no such process.
    """
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class EngineLink(Protocol):
    """An engine as the queue sees it."""

    @property
    def has_room(self) -> bool:
        """Whether another turn may be sent now."""

    def send(self, message: ToEngine) -> None:
        """Send a message; raises ``FramingError`` if it is too large."""


@dataclass(frozen=True, slots=True)
class EngineExit:
    """How an engine ended, and the turns that it was busy with.

    It ended ``by_itself`` unless this daemon killed it for a reason, and ``from_outside`` if another process or the OOM
    killer killed it. It is ``unreachable`` if its machine cannot be reached, or has no place for it.
    """

    detail: str
    suspects: tuple[str, ...] = ()
    by_itself: bool = True
    from_outside: bool = False
    unreachable: bool = False


class Engine(ABC):
    """A running engine behind its ``channel``, in a child process or on another machine."""

    def __init__(self) -> None:
        self._quiet = asyncio.Event()

    @property
    @abstractmethod
    def channel(self) -> EngineLink:
        """Where messages are sent; sending does nothing if the engine is gone."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process, if it runs on this machine."""

    @property
    @abstractmethod
    def ticks(self) -> int:
        """The engine's progress counter: it changes whenever the engine does something."""

    @abstractmethod
    def close(self) -> None:
        """Request the engine's exit."""

    @abstractmethod
    def kill(self, *, because: str = "") -> None:
        """Kill the engine; ``because`` becomes the detail of its ``EngineExit``."""

    @abstractmethod
    async def gone(self) -> EngineExit:
        """Wait until everything of the engine has been read and it is gone; return how it ended."""

    async def leave(self, *, suspend_deadline_s: float | None, deadline_s: float) -> None:
        """End the engine with this daemon, or leave it to the next one where that is possible; see ``end``."""
        await self.end(suspend_deadline_s=suspend_deadline_s, deadline_s=deadline_s)

    async def suspend(self, *, deadline_s: float, park_all: bool = False) -> None:
        """Have the engine stop its turns and write their KV to disk; wait for that at most ``deadline_s``.

        With ``park_all``, KV that may not be written to disk stays in memory for the next engine.
        """
        self.channel.send(Suspend(park_all))
        try:
            async with asyncio.timeout(deadline_s):
                await self._quiet.wait()
        except TimeoutError:
            _log.warning("engine_not_suspended", deadline_s=deadline_s)

    def suspended(self, message: Suspended) -> None:
        """Handle the engine's confirmation of ``suspend``."""
        _log.info("engine_suspended", sessions=message.sessions)
        self._quiet.set()

    async def end(
        self,
        *,
        suspend_deadline_s: float | None = SUSPEND_DEADLINE_S,
        deadline_s: float = STOP_DEADLINE_S,
        park_all: bool = False,
    ) -> None:
        """Request the engine's exit, and wait until it is gone.

        Args:
            suspend_deadline_s: Seconds for ``suspend`` before that; ``None`` if there is nothing to keep.
            deadline_s: Seconds for the exit after that, before the engine is killed.
            park_all: See ``suspend``.
        """
        if suspend_deadline_s is not None:
            await self.suspend(deadline_s=suspend_deadline_s, park_all=park_all)
        self.close()
        try:
            async with asyncio.timeout(deadline_s):
                await self.gone()
        except TimeoutError:
            self.kill()
            await self.gone()


class StartedChild:
    """An engine's process that has its options; what it sends waits in its socket for ``EngineProcess.attach``.

    Make it in the main thread: the kernel kills the engine when the *thread* that started it ends.

    Args:
        options: Sent as the first frame, with this process as the parent.
        keep_open: File descriptors of which the engine gets copies, to be open as long as it lives.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, options: EngineOptions, *, keep_open: Sequence[int] = ()) -> None:
        assert threading.current_thread() is threading.main_thread(), "PR_SET_PDEATHSIG watches the spawning thread"
        self.options = options
        self.heartbeat = Heartbeat.create()
        with ExitStack() as undone:
            undone.callback(self.heartbeat.close)
            self.child = engine_child.take()
            undone.pop_all()
        configure = Configure(options.replace(parent_pid=os.getpid()).model_dump_json().encode())
        with suppress(ConnectionError):  # it has died; the channel reports that
            engine_child.send_descriptors(self.child.socket, (self.heartbeat.fd, *keep_open))
            self.child.socket.sendall(encode(configure))

    def discard(self) -> None:
        """End a process that is not attached."""
        self.child.discard()
        self.heartbeat.close()


class _HeldMessages:
    """Holds back messages until ``release``: of an engine that was launched ahead they wait in its socket already."""

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        self._on_message = on_message
        self._held: list[FromEngine] | None = []

    def take(self, message: FromEngine) -> None:
        """Hold or pass on a message."""
        if self._held is None:
            self._on_message(message)
        else:
            self._held.append(message)

    def release(self) -> None:
        """Pass on what was held, and from now on each message at once."""
        held, self._held = self._held or [], None
        for message in held:
            self._on_message(message)


class EngineProcess(Engine):
    """A running ``python -m inferencecenter.engine``, its channel and its heartbeat; made by ``spawn``."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        output: asyncio.StreamReader,
        channel: Channel[ToEngine, FromEngine],
        heartbeat: Heartbeat,
    ) -> None:
        super().__init__()
        self._process = process
        self._channel = channel
        self._killed = False
        self._killed_because = ""
        self._heartbeat: Heartbeat | None = heartbeat
        self._suspects: tuple[str, ...] = ()
        self._tasks = TaskGroup("engine-process")
        self._last_line = ""
        self._output = self._tasks.spawn(self._log_output(output), name="output")

    @property
    def channel(self) -> Channel[ToEngine, FromEngine]:
        return self._channel

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ticks(self) -> int:
        return self._heartbeat.ticks if self._heartbeat else 0

    @classmethod
    async def spawn(
        cls,
        options: EngineOptions,
        *,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None] = lambda: None,
        keep_open: Sequence[int] = (),
    ) -> EngineProcess:
        """Start an engine; see ``StartedChild`` and ``attach``.

        Raises:
            OSError: The process cannot be started.
        """
        return await cls.attach(StartedChild(options, keep_open=keep_open), on_message=on_message, on_drain=on_drain)

    @classmethod
    async def attach(
        cls,
        started: StartedChild,
        *,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None] = lambda: None,
    ) -> EngineProcess:
        """Read from and write to an engine's process; await it in the coroutine that uses the result.

        Args:
            started: The process.
            on_message: Called on the event loop with each message of the engine, not before this has returned.
            on_drain: Called on the event loop when the channel has room again.
        """
        held = _HeldMessages(on_message)

        def open_channel() -> Channel[ToEngine, FromEngine]:
            return Channel(from_engine_decoder(), held.take, on_drain=on_drain)

        child = started.child
        with ExitStack() as undone:
            undone.callback(started.discard)
            pipe, output = await _read_pipe(child.process)
            undone.callback(pipe.close)
            _, channel = await asyncio.get_running_loop().create_unix_connection(open_channel, sock=child.socket)
            undone.pop_all()
        asyncio.get_running_loop().call_soon(held.release)
        return cls(child.process, output, channel, started.heartbeat)

    def close(self) -> None:
        self._channel.close()

    def kill(self, *, because: str = "") -> None:
        self._killed, self._killed_because = True, because or self._killed_because
        self._process.kill()

    async def gone(self) -> EngineExit:
        fault = await self._channel.lost()
        self._quiet.set()
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                status = await self._reaped()
        except TimeoutError:
            self.kill()
            status = await self._reaped()
        await asyncio.wait([self._output])
        if self._heartbeat is not None:
            self._suspects = self._heartbeat.suspects
            self._heartbeat.close()
            self._heartbeat = None
        if self._killed_because:
            return EngineExit(self._killed_because, self._suspects, by_itself=False)
        reason = fault or self._last_line
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return EngineExit(
            f"the engine {how}: {reason}" if reason else f"the engine {how}",
            self._suspects,
            from_outside=status == -signal.SIGKILL and not self._killed,
        )

    async def _reaped(self) -> int:
        """Wait until the process has exited, and return its status."""
        if self._process.returncode is None:
            await _exited(self._process.pid)
        return self._process.wait()

    async def _log_output(self, stream: asyncio.StreamReader) -> None:
        """Log what the process writes outside the channel, such as fatal errors of Python and llama.cpp."""
        rest = b""
        while chunk := await stream.read(_MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._log_line(line)
        self._log_line(rest)

    def _log_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").strip()
        if text:
            self._last_line = text[:_MAX_SHOWN_CHARS]
            _log.warning("engine_output", line=text, pid=self.pid)


async def _read_pipe(process: subprocess.Popen[bytes]) -> tuple[asyncio.ReadTransport, asyncio.StreamReader]:
    """Return the transport and a reader of what a process writes to its standard output."""
    stream = asyncio.StreamReader()
    assert process.stdout is not None, "the process was started with a pipe"
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), process.stdout
    )
    return transport, stream


def log_line(message: LogLine, *, log: structlog.stdlib.BoundLogger) -> None:
    """Log a line of the engine under the name of its logger there."""
    log.log(_LEVELS.get(message.level, logging.INFO), message.event, logger=message.source)


class EngineLauncher(Protocol):
    """Starts the engines of a model, one after the other."""

    async def launch(
        self,
        options: EngineOptions,
        *,
        is_first: bool,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None],
    ) -> Engine:
        """Start an engine, which adopts parked KV.

        Of the KV that another daemon's engine parked, only that of durable sessions is adopted. The first engine that
        is ready deletes the rest, so all that is found later was parked for sessions of this daemon.

        Args:
            options: The engine's configuration.
            is_first: Whether no engine of this daemon has been ready before.
            on_message: Called on the event loop with each message of the engine.
            on_drain: Called on the event loop when the channel has room again.

        Raises:
            EngineLockError: Another engine holds the lock and does not exit.
            NodeUnreachableError: The engine's machine cannot be reached.
            OSError: The engine cannot be started.
        """


class LocalLauncher:
    """Starts engines as children of this process; implements ``EngineLauncher``.

    Args:
        lock_path: Each engine holds this lock as long as it lives; ``None`` for no lock.
    """

    def __init__(self, lock_path: Path | None = None) -> None:
        self._lock_path = lock_path
        self._ahead: StartedChild | None = None

    def launch_ahead(self, options: EngineOptions) -> None:
        """Start the first engine before the event loop runs; ``launch`` attaches it if it is to have these options.

        Nothing is started while the engine of a dead daemon holds the lock.

        Raises:
            OSError: The engine cannot be started.
        """
        assert self._lock_path is not None, "a daemon's engines have a lock"
        fd = _open_lock(self._lock_path)
        try:
            if _lock(fd):
                self._ahead = StartedChild(options.replace(kv_adopt="durable"), keep_open=(fd,))
                record_holder(fd, self._ahead.child.process.pid)
        finally:
            os.close(fd)

    def discard_ahead(self) -> None:
        """End the engine of ``launch_ahead`` if it was not attached."""
        if self._ahead is not None:
            self._ahead.discard()
            self._ahead = None

    async def launch(
        self,
        options: EngineOptions,
        *,
        is_first: bool,
        on_message: Callable[[FromEngine], None],
        on_drain: Callable[[], None],
    ) -> EngineProcess:
        """Start an engine; see ``EngineLauncher``."""
        options = options.replace(kv_adopt="durable" if is_first else "all")
        if self._ahead is not None and self._ahead.options == options:
            started, self._ahead = self._ahead, None
            return await EngineProcess.attach(started, on_message=on_message, on_drain=on_drain)
        self.discard_ahead()
        if self._lock_path is None:
            return await EngineProcess.spawn(options, on_message=on_message, on_drain=on_drain)
        async with engine_lock(self._lock_path) as fd:
            process = await EngineProcess.spawn(options, on_message=on_message, on_drain=on_drain, keep_open=(fd,))
            record_holder(fd, process.pid)
            return process
