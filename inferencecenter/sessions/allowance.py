"""What whoever asks for a turn may still use: the interface that the server's limits implement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from inferencecenter.config.limits import NO_LIMITS
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import Params, merge

if TYPE_CHECKING:
    from collections.abc import Collection

    from inferencecenter.config.limits import AccessLimits


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


class Unlimited:
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


UNLIMITED: Final = Unlimited()


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
