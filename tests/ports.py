"""Free ports. Servers that tests start import this, so it is short."""

from __future__ import annotations

import contextlib
import secrets
import socket

_LISTENING_PORTS = range(20_000, 32_768)  # the kernel takes those above for connections


def free_port() -> int:
    """A port that was free a moment ago, below the range from which the kernel takes ports of outgoing connections."""
    while True:
        port = secrets.choice(_LISTENING_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
