"""What the daemon says, checked with the types of the openai package, which must know every field."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponsesServerEvent
from pydantic import BaseModel, TypeAdapter

_UNTYPED = {"store"}  # what hosted responses have, and the package has no field for
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
_RESPONSES: TypeAdapter[Any] = TypeAdapter(Response)


def event(told: dict[str, Any]) -> Any:
    """Return an event as the openai package reads it.

    Raises:
        AssertionError: It has a field that the package does not know.
        ValidationError: It lacks one, or has one of another type.
    """
    read = _EVENTS.validate_python(told)
    _check_known(read, "event")
    return read


def response(told: dict[str, Any]) -> Response:
    """Return a response as the openai package reads it; see ``event``."""
    read: Response = _RESPONSES.validate_python(told)
    _check_known(read, "response")
    return read


def _check_known(read: object, where: str) -> None:
    if isinstance(read, BaseModel):
        unknown = sorted(set(read.model_extra or {}) - _UNTYPED)
        assert not unknown, f"{where} has {unknown}, which {type(read).__name__} does not know"
        for name in type(read).model_fields:
            _check_known(getattr(read, name), f"{where}.{name}")
    elif isinstance(read, list):
        for at, each in enumerate(read):
            _check_known(each, f"{where}.{at}")
