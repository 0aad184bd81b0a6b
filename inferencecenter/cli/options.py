"""Options shared by several commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from pydantic import ValidationError

from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterable


LIMITS_HELP: Final = (
    f"A limit, such as tokens_per_day=50000: {', '.join(AccessLimits.model_fields)}. Lists with commas; `none` for no"
    " limit, `default` for the value of the next higher level."
)
_LISTS: Final = frozenset({"models", "addresses"})


def changed(assignments: Iterable[str], before: AccessLimits = NO_LIMITS) -> AccessLimits:
    """Return limits updated with the assignments.

    Raises:
        InferenceCenterError: ``invalid_request`` naming the limit and the problem.
    """
    given = before.given()
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if name not in AccessLimits.model_fields or not separator or not text:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{assignment!r} is not a limit",
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
        from inferencecenter.protocol.codec import invalid_request  # noqa: PLC0415 - only for an error

        raise invalid_request(error, known=AccessLimits.model_fields) from None


def read_params(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse ``name=value`` pairs to parameters.

    Raises:
        InferenceCenterError: ``invalid_request`` for an invalid pair, an unknown parameter, or a value out of range.
    """
    # Imported here: only two commands have parameters.
    from inferencecenter.protocol.params import parse_params  # noqa: PLC0415

    params: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, f"--params is {pair!r}", hint="Write name=value, such as temperature=0.2."
            )
        params[name] = read_value(value)
    parse_params(params)
    return params


def read_value(text: str) -> Any:
    """Return a parameter's value: parsed as JSON if possible, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


ConfigOption: TypeAlias = Annotated[
    Path | None, typer.Option("--config", help="Configuration file.", metavar="FILE", show_default=False)
]
StateDirOption: TypeAlias = Annotated[
    Path | None, typer.Option("--state-dir", help="Directory of accounts and sessions.", show_default=False)
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def given(**values: Any) -> dict[str, Any]:
    """Return the given command line values under dotted setting names: ``server__port`` is ``server.port``."""
    return {name.replace("__", "."): value for name, value in values.items() if value is not None}


_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_s(text: str) -> int:
    """Return the seconds in ``30d``, ``12h``, ``45m`` or ``90s``.

    Raises:
        InferenceCenterError: ``invalid_request`` for anything else.
    """
    match = re.fullmatch(r"([1-9]\d{0,8})([smhd])", text)
    if match is None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"--expires-in is {text!r}",
            field="expires_in",
            hint="A number with s, m, h or d, such as 30d.",
        )
    return int(match[1]) * _SECONDS[match[2]]
