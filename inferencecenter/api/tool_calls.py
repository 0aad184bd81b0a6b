"""Tool calls in conversations that foreign dialects send: refused where a message of the daemon could not hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.values import MAX_CALLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferencecenter.protocol.values import ToolCall


def calls_of_message(calls: Sequence[ToolCall], field: str) -> tuple[ToolCall, ...] | None:
    """Return the calls of one message; ``None`` without any.

    Raises:
        InferenceCenterError: ``invalid_request`` with the field, for too many calls.
    """
    if len(calls) > MAX_CALLS:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"a message has {len(calls)} tool calls; {MAX_CALLS} are allowed", field=field
        )
    return tuple(calls) or None


def arguments_text(arguments: Mapping[str, Any], field: str) -> str:
    """Return the arguments of a call as JSON text.

    Raises:
        InferenceCenterError: ``invalid_request`` with the field, for values that are nested too deep.
    """
    try:
        return orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # orjson parses deeper nesting than it serializes
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"{field} has values that are nested too deep", field=field
        ) from None
