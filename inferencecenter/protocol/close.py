"""WebSocket close codes and the reaction expected of clients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class CloseCode(IntEnum):
    """Close codes of the daemon: those of RFC 6455 and its own in the 4000s."""

    NORMAL = 1000
    SHUTDOWN = 1001
    POLICY = 1008
    TOO_LARGE = 1009
    INTERNAL = 1011
    RESTART = 1012
    OVERLOADED = 1013
    NOT_AUTHENTICATED = 4401
    TOO_SLOW = 4408
    TOO_MANY = 4429


@dataclass(frozen=True, slots=True)
class CloseSpec:
    """What a close code means, and what the client should do."""

    code: CloseCode
    meaning: str
    client_should: str


CLOSE_CODES = (
    CloseSpec(CloseCode.NORMAL, "normal", "stop"),
    CloseSpec(CloseCode.SHUTDOWN, "the daemon shuts down", "reconnect later"),
    CloseSpec(CloseCode.POLICY, "Origin refused, or an administrator closed the socket", "stop"),
    CloseSpec(CloseCode.TOO_LARGE, "frame too large", "fix, reconnect"),
    CloseSpec(CloseCode.INTERNAL, "internal error", "reconnect with back-off"),
    CloseSpec(CloseCode.RESTART, "restart", "reconnect"),
    CloseSpec(CloseCode.OVERLOADED, "overloaded", "reconnect after a while"),
    CloseSpec(CloseCode.NOT_AUTHENTICATED, "not authenticated in time, or the token was revoked", "authenticate again"),
    CloseSpec(
        CloseCode.TOO_SLOW,
        "the client reads too slowly (best effort: the socket is aborted, so clients mostly see 1006)",
        "reconnect",
    ),
    CloseSpec(CloseCode.TOO_MANY, "too many failed logins or connections", "back off"),
)
