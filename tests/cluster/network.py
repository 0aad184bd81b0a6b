"""A machine of its own, as the network sees it: a namespace, and a wire to it that can be broken.

Mechanism: both ends of the wire are TUN devices, one here and one in the namespace, and a thread carries the IP packets
between them. It drops or delays them for each direction, so that the kernel's TCP on both sides sees what it would
see of a real network: silence, with no reset and no lost carrier. A veth pair would need netem for that, which the
kernels of test machines often lack. The namespace and the devices end with their processes, also after a failure.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU = 60_000
_PACKET_BYTES = 65_536


@dataclass
class WireEnd:
    """A device, and what happens to the packets that leave the wire by it."""

    fd: int
    drops: bool = False
    delay_s: float = 0.0
    waiting: list[tuple[float, int, bytes]] = field(default_factory=list)


class Wire:
    """Carries packets between two TUN devices until ``close``."""

    def __init__(self, here: int, there: int) -> None:
        self.to_here = WireEnd(here)
        self.to_there = WireEnd(there)
        self._numbers = itertools.count()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="wire")
        self._thread.start()

    def close(self) -> None:
        """Stop; the devices stay open."""
        os.close(self._waker)
        self._thread.join()
        os.close(self._wake)

    def cut(self, *, to_here: bool = True, to_there: bool = True) -> None:
        """Drop what is sent in these directions, also what is on its way."""
        self.to_here.drops, self.to_there.drops = to_here, to_there

    def mend(self) -> None:
        """Carry everything, at once."""
        for end in (self.to_here, self.to_there):
            end.drops, end.delay_s = False, 0.0

    def delay(self, seconds: float) -> None:
        """Carry packets so much later, in both directions."""
        self.to_here.delay_s = self.to_there.delay_s = seconds

    def _carry(self) -> None:
        ends = {self.to_here.fd: self.to_there, self.to_there.fd: self.to_here}
        while True:
            due_s = min((end.waiting[0][0] for end in ends.values() if end.waiting), default=None)
            timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            readable = select.select([self._wake, *ends], [], [], timeout_s)[0]
            if self._wake in readable:
                return
            now_s = time.monotonic()
            for fd in readable:
                end = ends[fd]
                with suppress(OSError):  # the device is down
                    packet = os.read(fd, _PACKET_BYTES)
                    heapq.heappush(end.waiting, (now_s + end.delay_s, next(self._numbers), packet))
            for end in ends.values():
                while end.waiting and end.waiting[0][0] <= now_s:
                    packet = heapq.heappop(end.waiting)[2]
                    if not end.drops:
                        with suppress(OSError):
                            os.write(end.fd, packet)


@dataclass
class Machine:
    """A network namespace, whose address is ``address``; this machine has ``front_address`` on the wire to it."""

    address: str
    front_address: str
    wire: Wire
    pid: int
    device: str

    @property
    def command(self) -> tuple[str, ...]:
        """What makes a command run in the namespace."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def unplug(self) -> None:
        """Take its device down: its connections stay, and it has no route for further ones."""
        _run(*self.command, "ip", "link", "set", self.device, "down")

    def plug_in(self) -> None:
        """Take its device up again."""
        _run(*self.command, "ip", "link", "set", self.device, "up")
        _run(*self.command, "ip", "route", "add", "default", "dev", self.device)

    def reset_connections(self) -> None:
        """Abort its TCP connections to this machine: both ends are told."""
        _run(*self.command, "ss", "--kill", "--tcp", "dst", self.front_address)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def open_machine(module: str | None = None) -> Iterator[Machine]:
    """Start a machine with this Python module as its first process; skip the test where that is not permitted."""
    program = ["-c", "input()"] if module is None else ["-m", module]
    device = f"ic{secrets.token_hex(4)}"
    block = secrets.randbelow(2**14)
    here, there = (f"198.18.{block // 64}.{block % 64 * 4 + last}" for last in (1, 2))
    with ExitStack() as held:
        try:
            fds = [_open_device(f"{device}{end}", held) for end in "ht"]
            first = subprocess.Popen(["unshare", "--net", sys.executable, *program], stdin=subprocess.PIPE)
            held.callback(_end, first)
            wire = Wire(*fds)
            held.callback(wire.close)
            machine = Machine(there, here, wire, first.pid, f"{device}t")
            _until_separate(first.pid)
            _run("ip", "link", "set", machine.device, "netns", str(first.pid))
            _set_up((), f"{device}h", here, there)
            _set_up(machine.command, machine.device, there, here)
            _run(*machine.command, "ip", "route", "add", "default", "dev", machine.device)
            _run(*machine.command, "ip", "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"no network namespaces and TUN devices here: {reason.strip()}")
        yield machine


def _open_device(name: str, held: ExitStack) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    held.callback(os.close, fd)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return fd


def _set_up(within: Sequence[str], device: str, own: str, other: str) -> None:
    _run(*within, "ip", "address", "add", own, "peer", other, "dev", device)
    _run(*within, "ip", "link", "set", device, "mtu", str(_MTU), "up")


def _until_separate(pid: int) -> None:
    """Wait until a process has its own namespace.

    Raises:
        OSError: It ended before.
    """
    own = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        time.sleep(0.01)


def processes(pid: int) -> list[int]:
    """Return a process and those below it."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(each for child in listed for each in processes(int(child)))]


def _end(first: subprocess.Popen[bytes]) -> None:
    for pid in processes(first.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert first.stdin is not None
    first.stdin.close()
    first.wait(60)
