"""The body of a request: read within bounds of size and time, and checked."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import invalid_request
from inferencecenter.protocol.json_bounds import check_json_bounds

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema
    from starlette.datastructures import Headers
    from starlette.types import Receive

    from inferencecenter.settings import ServerSettings

_MANY: Final = 200
"""More fields than anything has: where there are so many, some of the first are unknown."""

LARGE_BYTES: Final = 64 * 1024
"""From here on a body takes milliseconds to read and check, which is too long for the event loop."""

_Model = TypeVar("_Model", bound=BaseModel)


class Fields(BaseModel):
    """Part of a body: immutable, no unknown fields, nothing coerced; a null is as if the field were absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > _MANY:  # one unknown field is refused as a million are, which takes a second to say
            data = dict(islice(data.items(), _MANY))
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema, in which every field that may be absent may be null."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                schema["properties"][name] = _or_null(field)
        return reference


async def read_body(receive: Receive, headers: Headers, settings: ServerSettings) -> bytes:
    """Return the whole body.

    Raises:
        InferenceCenterError: ``message_too_large``, before it is read where it says so itself; ``request_timeout``.
        ConnectionError: The peer has gone before its end.
    """
    limit = settings.max_body_bytes
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ConnectionAbortedError
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise InferenceCenterError(
            ErrorCode.REQUEST_TIMEOUT, f"the body was not there within {settings.body_timeout_s:g} s"
        ) from None


def parse(kind: type[_Model], body: bytes) -> _Model:
    """Return a body as a model; call it off the event loop where the body is ``LARGE_BYTES`` or more.

    Raises:
        InferenceCenterError: ``message_too_large`` where it holds too many values, ``invalid_json``, or
            ``invalid_request`` with the first offending field.
    """
    check_json_bounds(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_JSON,
            f"the body is not JSON: {error.msg} at character {error.pos}",
            hint="Send a JSON object.",
        ) from None
    if not isinstance(value, dict):
        raise InferenceCenterError(ErrorCode.INVALID_JSON, "the body is JSON, but not an object")
    return checked(kind, value)


def checked(kind: type[_Model], value: object) -> _Model:
    """Return a value as a model.

    Raises:
        InferenceCenterError: ``invalid_request`` with the first offending field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error, known=kind.model_fields) from None


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field, with null beside what it may be; what is said of it stays where it is."""
    said: dict[str, Any] = {name: field[name] for name in ("title", "description", "default") if name in field}
    kind = {name: value for name, value in field.items() if name not in said}
    options = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    return {"anyOf": [*options, {"type": "null"}], **said}


def _too_large(limit: int) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the body is larger than {limit} bytes",
        hint="An operator may raise server.max_body_bytes.",
    )
