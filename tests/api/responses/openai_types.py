"""Validates the daemon's responses and events with the types of the openai package, which must know every field."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response, ResponsesServerEvent
from pydantic import BaseModel, TypeAdapter

_UNTYPED = {"store", "warnings"}  # of hosted responses, and of this daemon: fields that the package does not declare
_UNTYPED_OF = {"ResponseCustomToolCall": {"status"}}  # hosted responses have it, as have all other calls
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
_RESPONSES: TypeAdapter[Any] = TypeAdapter(Response)


def event(data: dict[str, Any]) -> Any:
    """Parse an event with the openai package.

    Raises:
        AssertionError: It has a field that the package does not know.
        ValidationError: It lacks one, or has one of another type.
    """
    parsed = _EVENTS.validate_python(data)
    _check_known(parsed, "event")
    return parsed


def response(data: dict[str, Any]) -> Response:
    """Parse a response with the openai package; see ``event``."""
    parsed: Response = _RESPONSES.validate_python(data)
    _check_known(parsed, "response")
    return parsed


def _check_known(parsed: object, where: str) -> None:
    if isinstance(parsed, BaseModel):
        unknown = sorted(set(parsed.model_extra or {}) - _UNTYPED - _UNTYPED_OF.get(type(parsed).__name__, set()))
        assert not unknown, f"{where} has {unknown}, which {type(parsed).__name__} does not know"
        for name in type(parsed).model_fields:
            _check_known(getattr(parsed, name), f"{where}.{name}")
    elif isinstance(parsed, list):
        for at, each in enumerate(parsed):
            _check_known(each, f"{where}.{at}")
