"""``keep_alive`` of Ollama's requests, and the requests without a question, which load a model or unload it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from inferencecenter.api.foreign_fields import FieldRule
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.api.endpoint import Call

KeepAlive: TypeAlias = Annotated[
    float | Annotated[str, StringConstraints(max_length=32)] | None,
    Field(
        description="0 in a request without a question unloads the model, for which the token must have the scope "
        "operator."
    ),
]
_ZERO: Final = re.compile(r"0+(\.0+)?(ns|us|ms|s|m|h)?")
_QUESTIONS: Final = ("messages", "prompt", "suffix", "input")


def _unloads(keep_alive: object) -> bool:
    return _ZERO.fullmatch(str(keep_alive)) is not None


def _keeps(value: Any, siblings: Mapping[str, Any]) -> bool:
    return not _unloads(value) or any(siblings.get(name) for name in _QUESTIONS)


KEEP_ALIVE_RULE: Final = FieldRule(
    field="keep_alive",
    values="other than 0 without a question",
    why="the settings of the daemon decide how long models stay in memory",
    applies=_keeps,
)


def load_or_unload(call: Call, model: str) -> Literal["load", "unload"]:
    """Begin to load the model of a request without a question, or unload it; return which.

    Raises:
        InferenceCenterError: ``rate_limited``, ``forbidden`` to unload without the scope operator, or why it could not
            be loaded.
    """
    client, keep_alive = call.caller.client, call.body.keep_alive
    call.context.operations.charge(client.client_id)
    if keep_alive is None or not _unloads(keep_alive):
        call.context.models.ensure_loaded(model, client.client_id)
        return "load"
    if Scope.OPERATOR not in client.scopes:
        raise InferenceCenterError(
            ErrorCode.FORBIDDEN,
            f"unloading a model requires the scope {Scope.OPERATOR}",
            field="keep_alive",
            hint="Use a token of a client that has it.",
        )
    call.context.models.unload(model)
    return "unload"
