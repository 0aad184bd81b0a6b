"""Limits on the command line, as ``tokens_per_day=50000`` or ``models=demo,qwen``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import invalid_request

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMITS_HELP: Final = (
    f"A limit, as tokens_per_day=50000: {', '.join(AccessLimits.model_fields)}. Lists with commas; `none` for no limit,"
    " `default` for what holds one level up."
)
_LISTS: Final = frozenset({"models", "addresses"})


def changed(assignments: Iterable[str], before: AccessLimits = NO_LIMITS) -> AccessLimits:
    """Return limits with those that are assigned; the others stay.

    Raises:
        InferenceCenterError: ``invalid_request`` naming the limit and what is wrong.
    """
    given = before.given()
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if name not in AccessLimits.model_fields or not separator or not text:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{assignment!r} is no limit",
                field=name if separator else None,
                hint=f"NAME=VALUE, with one of {', '.join(AccessLimits.model_fields)}.",
            )
        if text == "default":
            given.pop(name, None)
        elif text == "none":
            given[name] = None
        else:
            given[name] = tuple(text.split(",")) if name in _LISTS else text
    try:
        return AccessLimits.model_validate(given)
    except ValidationError as error:
        raise invalid_request(error, known=AccessLimits.model_fields) from None
