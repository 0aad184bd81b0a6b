"""The account that owns sessions, the sockets that take their events, and the limits of its turns."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.config.limits import NO_LIMITS
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import Params, merge
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.protocol.base import Event
    from inferencecenter.protocol.values import Priority


PRIORITY_RANK: Final[Mapping[str, int]] = MappingProxyType({"interactive": 0, "normal": 1, "batch": 2})
"""Lower goes first, as the engine orders turns."""


@dataclass(frozen=True, slots=True)
class Principal:
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


class Allowance(Protocol):
    """What one token may use, or a client that shows a key instead; on the event loop."""

    @property
    def limits(self) -> AccessLimits:
        """The limits as they are now."""

    def check_turn(self) -> None:
        """Refuse another turn if there may be none now.

        Raises:
            InferenceCenterError: ``rate_limited`` or ``quota_exceeded``, with the time after which it may be asked
                again.
        """

    def begin_turn(self) -> None:
        """Count a turn that was asked for, until ``end_turn``."""

    def go_on(self, n_tokens: int) -> None:
        """Count a turn that was asked for before this daemon began, and that generated ``n_tokens`` then."""

    def use(self, n_tokens: int) -> bool:
        """Count tokens that were read or generated; ``False`` once there are none left for today."""

    def end_turn(self) -> None:
        """Count a turn as running no more."""


class UnlimitedAllowance:
    """The allowance of a daemon that sets no limits and counts nothing."""

    limits = NO_LIMITS

    def check_turn(self) -> None:
        """Refuse nothing."""

    def begin_turn(self) -> None:
        """Count nothing."""

    def go_on(self, n_tokens: int) -> None:
        """Count nothing."""

    def use(self, n_tokens: int) -> bool:
        """There are always more."""
        return True

    def end_turn(self) -> None:
        """Count nothing."""


UNLIMITED: Final = UnlimitedAllowance()


def unlimited(_client_id: str, _token_id: str) -> Allowance:
    """Return the allowance of anybody where there are no limits."""
    return UNLIMITED


def check_model(name: str, limits: AccessLimits) -> None:
    """Refuse a model that is not among those allowed.

    Raises:
        InferenceCenterError: ``forbidden``.
    """
    if not limits.allows_model(name):
        raise InferenceCenterError(
            ErrorCode.FORBIDDEN,
            f"model is {name}, which this token may not use",
            field="model",
            hint=f"One of: {', '.join(limits.models or ())}.",
        )


def limited(asked: Params, limits: AccessLimits, *, session: Params, chosen: Collection[str]) -> Params:
    """Return a turn's own parameters with the most tokens that its answer may have.

    Args:
        asked: Those that the turn sets.
        limits: What holds for whoever asks.
        session: What holds for what the turn does not set.
        chosen: Those of the session that the client set itself.

    Raises:
        InferenceCenterError: ``invalid_request`` for more tokens than there may be, if the client asked for them.
    """
    most = limits.max_tokens
    if most is None:
        return asked
    itself = "max_tokens" in asked.model_fields_set
    wanted = asked.max_tokens if itself else session.max_tokens
    if wanted is not None and wanted <= most:
        return asked
    if wanted is not None and (itself or "max_tokens" in chosen):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"max_tokens is {wanted}; answers for this token have at most {most}",
            field="params.max_tokens",
            hint="Ask for less, or leave it out.",
        )
    return merge(asked, Params(max_tokens=most))
