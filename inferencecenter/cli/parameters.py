"""Parameters of generation as they are written on a command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import parse_params

if TYPE_CHECKING:
    from collections.abc import Iterable


def read_params(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the parameters in ``name=value`` pairs.

    Raises:
        InferenceCenterError: ``invalid_request`` for what is no pair, no parameter, or out of range.
    """
    params: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, f"--params is {pair!r}", hint="Write name=value, as temperature=0.2."
            )
        params[name] = read_value(value)
    parse_params(params)
    return params


def read_value(text: str) -> Any:
    """Return a parameter's value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
