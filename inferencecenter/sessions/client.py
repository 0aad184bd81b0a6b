"""Who owns sessions, and where their events go."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import Priority

PRIORITY_RANK: Final[Mapping[str, int]] = MappingProxyType({"interactive": 0, "normal": 1, "batch": 2})
"""Lower goes first, as the engine orders turns."""


@dataclass(frozen=True, slots=True)
class Client:
    """An account as sessions see it; any number of sockets may act for it.

    ``retention_days`` are days after their last use at which its sessions are deleted, ``None`` as the daemon says.
    ``token_id`` is the token that the socket showed, empty for a key.
    """

    client_id: str
    max_sessions: int
    priority: Priority
    scopes: frozenset[str]
    retention_days: float | None = None
    token_id: str = ""

    def allow_priority(self, wanted: Priority | None, *, otherwise: Priority) -> Priority:
        """Return the class to use.

        Args:
            wanted: What the frame asks for.
            otherwise: What holds when it asks for none.

        Raises:
            InferenceCenterError: ``forbidden`` for a class above the client's own without the scope.
        """
        if wanted is None:
            return otherwise
        if PRIORITY_RANK[wanted] < PRIORITY_RANK[self.priority] and Scope.PRIORITY not in self.scopes:
            raise InferenceCenterError(
                ErrorCode.FORBIDDEN,
                f"priority is {wanted}, above this client's {self.priority}",
                field="priority",
                hint=f"Leave it out, or use a token with the scope {Scope.PRIORITY}.",
            )
        return wanted


class EventSink(Protocol):
    """A socket as a session sees it."""

    def send(self, event: Event) -> None:
        """Take an event for the client; never blocks, never raises."""


class ReplaySink(EventSink, Protocol):
    """A socket that a session is resumed from."""

    def replay(self, missed: Sequence[Event]) -> None:
        """Take events that may be many and large, and send them as fast as the client reads; never blocks or raises."""
