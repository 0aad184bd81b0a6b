"""Reports to systemd that the daemon is ready, alive, reloading or stopping, and its status (sd_notify(3))."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from inferencecenter.core.tasks import TaskGroup
from inferencecenter.hardware.placement import MIB
from inferencecenter.ipc.port import EngineState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from inferencecenter.hardware.nvml import GpuReading
    from inferencecenter.ipc.port import EngineStatus
    from inferencecenter.sessions.observability import Totals

STATUS_EVERY_S: Final = 5.0
EXTENSION_S: Final = 60.0
"""By how much each notification extends the start timeout."""
KILLED_ENGINE_S: Final = 60.0
"""How long a killed engine may remain before the watchdog is no longer fed."""
_EXTEND_EVERY_S: Final = 20.0
_US_PER_S: Final = 1_000_000
_SEND_TIMEOUT_S: Final = 0.5
_SIGKILL_BIT: Final = 1 << 8

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Notifier:
    """The notification socket of the service manager (sd_notify(3)): datagrams of ``NAME=value`` lines.

    Args:
        address: Its datagram socket: a path, or ``@`` and an abstract name.
        watchdog_s: The watchdog's timeout in seconds; ``None`` without a watchdog.
    """

    address: str
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, pid: int) -> Notifier | None:
        """Return the socket of the manager that started the process ``pid``, ``None`` if there is none.

        Reads ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``. Invalid values are logged and ignored.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        if not address:
            return None
        if address[0] not in "/@" or len(address) < 2:
            _log.warning("notify_socket_unknown", address=address)
            return None
        return cls(address, _watchdog_s(environment, pid=pid))

    def send(self, **fields: str | int) -> None:
        """Send a notification; a failure is only logged. Blocks for at most half a second."""
        datagram = "\n".join(f"{name}={_one_line(value)}" for name, value in fields.items())
        # A new socket each time also reaches a restarted manager.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_SEND_TIMEOUT_S)
            try:
                sender.sendto(datagram.encode(), _socket_name(self.address))
            except OSError as error:
                _log.warning("service_manager_not_told", words=list(fields), error=str(error))


def _socket_name(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address


def _one_line(value: str | int) -> str:
    return " ".join(str(value).splitlines())


def _watchdog_s(environment: Mapping[str, str], *, pid: int) -> float | None:
    interval_us = environment.get("WATCHDOG_USEC", "")
    if not interval_us or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    if not interval_us.isascii() or not interval_us.isdecimal() or int(interval_us) == 0:
        _log.warning("watchdog_usec_unknown", value=interval_us)
        return None
    return int(interval_us) / _US_PER_S


class ReportedEngine(Protocol):
    """The engine whose state is reported."""

    @property
    def status(self) -> EngineStatus:
        """The engine's current status."""

    def subscribe(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call ``listener`` when the state changes."""


class SystemdNotifier:
    """Notifies the service manager; without one it does nothing and keeps no timer.

    ``READY`` is sent when the engine is ready for the first time, or will not be; until then the start timeout is
    extended for as long as the event loop runs, since the supervisor limits how long and how often a model is loaded.

    The watchdog is fed from the event loop, so a stuck daemon is killed. A hung engine is killed by the supervisor;
    only one that the kernel does not release for a minute ends the feeding. Each watchdog tick also checks whether the
    status has changed; without a watchdog the status is sent when the engine's state changes.

    Args:
        notifier: The service manager's socket; ``None`` without one.
        engine: The engine whose state is reported.
        totals: Returns figures over all sessions.
        read_gpu: Reads the GPU; called off the event loop.
        settled: Returns whether the daemon continues to serve without an engine.
        stop_s: Seconds that stopping takes at most.
        kill_pending: Returns whether a process was killed and still exists.
        monotonic: Monotonic clock in seconds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only; the last two have defaults
        self,
        notifier: Notifier | None,
        *,
        engine: ReportedEngine,
        totals: Callable[[], Totals],
        read_gpu: Callable[[], GpuReading],
        settled: Callable[[], bool],
        stop_s: float,
        kill_pending: Callable[[int], bool] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notifier = notifier
        self._engine = engine
        self._totals = totals
        self._read_gpu = read_gpu
        self._settled = settled
        self._stop_s = stop_s
        self._kill_pending = kill_pending or kill_is_pending
        self._monotonic = monotonic
        self._tasks = TaskGroup("reporter")
        self._timer: asyncio.TimerHandle | None = None
        self._is_ready = False
        self._stopping = False
        self._changed = False
        self._status_task_runs = False
        self._last_status = ""
        self._last_inputs: tuple[object, ...] = ()
        self._killed: tuple[int, float] | None = None

    def begin(self) -> None:
        """Start notifying; call it on the event loop before the engine is started."""
        if self._notifier is not None:
            self._engine.subscribe(self._engine_changed)
            self._extend_start()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel()

    async def drain_and_stop(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Notify that the daemon stops and how long that may take, then await ``drain``."""
        self._stopping = True
        if self._notifier is not None:
            extension_us = int(self._stop_s * _US_PER_S)
            self._notifier.send(STOPPING=1, STATUS="stopping", EXTEND_TIMEOUT_USEC=extension_us)
        await drain()

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Notify that settings are being reloaded, and at the end that the daemon is ready again."""
        notifier = self._notifier if self._is_ready else None
        if notifier is not None:
            notifier.send(RELOADING=1, MONOTONIC_USEC=int(self._monotonic() * _US_PER_S))
        try:
            yield
        finally:
            if notifier is not None:
                notifier.send(READY=1)

    # Readiness.

    def _extend_start(self) -> None:
        if self._notifier is not None:
            self._notifier.send(EXTEND_TIMEOUT_USEC=int(EXTENSION_S * _US_PER_S))
        self._timer = asyncio.get_running_loop().call_later(_EXTEND_EVERY_S, self._extend_start)

    def _engine_changed(self, status: EngineStatus) -> None:
        if not self._is_ready and (status.state is EngineState.READY or self._settled()):
            self._become_ready()
        self._update_status()

    def _become_ready(self) -> None:
        assert self._notifier is not None, "only subscribed with a notifier"
        self._is_ready = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._notifier.send(READY=1)
        if self._notifier.watchdog_s is not None:
            self._tick(self._notifier, self._notifier.watchdog_s / 2)

    # Watchdog.

    def _tick(self, notifier: Notifier, every_s: float) -> None:
        # Rescheduled before anything can fail: without ticks the service manager kills the daemon.
        self._timer = asyncio.get_running_loop().call_later(every_s, self._tick, notifier, every_s)
        if not self._engine_survives_kill():
            notifier.send(WATCHDOG=1)
        if self._status_inputs() != self._last_inputs:
            self._update_status()

    def _engine_survives_kill(self) -> bool:
        pid = self._engine.status.pid
        if pid is None or not self._kill_pending(pid):
            self._killed = None
            return False
        if self._killed is None or self._killed[0] != pid:
            self._killed = (pid, self._monotonic())
        if self._monotonic() - self._killed[1] < KILLED_ENGINE_S:
            return False
        _log.error("watchdog_not_fed", reason="the killed engine has not exited", pid=pid)
        return True

    # Status.

    def _status_inputs(self) -> tuple[object, ...]:
        """Return what determines the status and is cheap to read."""
        engine = self._engine.status
        return engine.state, engine.running, engine.waiting, self._totals().total_sessions

    def _update_status(self) -> None:
        self._changed = True
        if self._notifier is not None and not self._status_task_runs:
            self._status_task_runs = True
            self._tasks.keep_running(partial(self._keep_notifying, self._notifier), name="status")

    async def _keep_notifying(self, notifier: Notifier) -> None:
        """Send the status every few seconds for as long as it changes or turns run."""
        while self._changed:
            self._changed = False
            self._last_inputs = self._status_inputs()
            gpu = await asyncio.to_thread(self._read_gpu)
            text = describe(self._engine.status, self._totals(), gpu, stopping=self._stopping)
            if text != self._last_status:
                self._last_status = text
                notifier.send(STATUS=text)
            await asyncio.sleep(STATUS_EVERY_S)
            engine = self._engine.status
            self._changed |= bool(engine.running or engine.waiting) or self._status_inputs() != self._last_inputs
        self._status_task_runs = False


def describe(engine: EngineStatus, totals: Totals, gpu: GpuReading, *, stopping: bool) -> str:
    """Return the daemon's state as one line for ``systemctl status``."""
    state = "stopping" if stopping else f"engine {engine.state.value}"
    if engine.state is EngineState.STARTING and not stopping:
        state = f"loading the model, {engine.load_fraction:.0%}"
    if engine.detail and not stopping:
        state += f" ({engine.detail})"
    parts = [f"{totals.total_sessions} sessions", f"{engine.running} turns running", f"{engine.waiting} waiting"]
    if gpu.vram_used_bytes is not None and gpu.vram_total_bytes is not None:
        parts.append(f"VRAM {gpu.vram_used_bytes // MIB} of {gpu.vram_total_bytes // MIB} MiB")
    return f"{state}: {', '.join(parts)}"


def kill_is_pending(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Return whether a process was killed but not ended by the kernel, as when a driver does not return."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    facts = dict(line.split(":", maxsplit=1) for line in lines if ":" in line)
    if facts.get("State", "").split()[:1] == ["Z"]:
        return True
    return any(int(facts.get(name, "0"), 16) & _SIGKILL_BIT for name in ("SigPnd", "ShdPnd"))
