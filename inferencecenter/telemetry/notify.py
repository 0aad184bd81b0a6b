"""What systemd is told of this process: datagrams of ``NAME=value`` lines, as in sd_notify(3)."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping

_SEND_TIMEOUT_S = 0.5
_US_PER_S = 1_000_000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Notifier:
    """A service manager that wants to be told.

    Args:
        address: Its datagram socket: a path, or ``@`` and an abstract name.
        watchdog_s: Seconds within which it wants a sign of life each time; ``None`` if it wants none.
    """

    address: str
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, pid: int) -> Notifier | None:
        """Return the manager that started the process ``pid``, ``None`` if it is not to be told.

        Read are ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``. What makes no sense is logged and left out.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        if not address:
            return None
        if address[0] not in "/@" or len(address) < 2:
            _log.warning("notify_socket_unknown", address=address)
            return None
        return cls(address, _watchdog_s(environment, pid=pid))

    def send(self, **words: str | int) -> None:
        """Tell it; what cannot be told is logged and changes nothing else. Waits at most half a second."""
        datagram = "\n".join(f"{name}={_one_line(value)}" for name, value in words.items())
        # A new socket each time also reaches a manager that was started again.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_SEND_TIMEOUT_S)
            try:
                sender.sendto(datagram.encode(), _socket_name(self.address))
            except OSError as error:
                _log.warning("service_manager_not_told", words=list(words), error=str(error))


def _socket_name(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address


def _one_line(value: str | int) -> str:
    return " ".join(str(value).splitlines())


def _watchdog_s(environment: Mapping[str, str], *, pid: int) -> float | None:
    given = environment.get("WATCHDOG_USEC", "")
    if not given or environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    if not given.isascii() or not given.isdecimal() or int(given) == 0:
        _log.warning("watchdog_usec_unknown", value=given)
        return None
    return int(given) / _US_PER_S
