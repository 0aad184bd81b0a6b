"""The body of a request: read within bounds of size and time, and checked."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import invalid_request
from inferencecenter.protocol.json_bounds import check_json_bounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema
    from starlette.datastructures import Headers
    from starlette.types import Receive

    from inferencecenter.config.settings import ServerSettings
    from inferencecenter.core.fair_queue import FairShare

_MANY: Final = 200
"""More fields than anything has: where there are so many, some of the first are unknown."""

LARGE_BYTES: Final = 64 * 1024
"""From here on a body takes milliseconds to read and check, which is too long for the event loop."""

BODIES_BYTES: Final = 256 * 1024 * 1024
"""Bytes of bodies in memory, shared by the clients; as much as the connections of one client can bring by default."""

_Model = TypeVar("_Model", bound=BaseModel)


class RequestModel(BaseModel):
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


class BodyRoom:
    """What a request's body takes of the room that clients share; free again at the end of the ``with`` block.

    Args:
        room: What is held of it by all requests.
        client_id: Whom the request is from.
    """

    def __init__(self, room: FairShare, client_id: str) -> None:
        self._room = room
        self.client_id = client_id
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._room.remove(self.client_id, self._held)
            self._held = 0

    def hold(self, size: int) -> None:
        """Hold so many bytes in all; less than are held already changes nothing.

        Raises:
            InferenceCenterError: ``queue_full``.
        """
        more = size - self._held
        if more <= 0:
            return
        if not self._room.fits(self.client_id, more):
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                "The bodies of requests take too much memory, and much of it is this client's.",
                hint="Send fewer large requests at the same time.",
                retry_after_ms=1000,
            )
        self._room.add(self.client_id, more)
        self._held = size


async def read_body(
    receive: Receive, headers: Headers, settings: ServerSettings, *, hold: Callable[[int], None]
) -> bytes:
    """Return the whole body.

    Args:
        receive: Where it comes from.
        headers: May say how long it is.
        settings: Its bounds.
        hold: Called with its length before that is read, as far as it is known; refuses what there is no room for.

    Raises:
        InferenceCenterError: ``message_too_large``, before it is read where it says so itself; ``request_timeout``; and
            see ``BodyRoom.hold``.
        ConnectionError: The peer has gone before its end.
    """
    limit = settings.max_body_bytes
    declared = headers.get("content-length", "0")
    if declared.isdecimal():
        if int(declared) > limit:
            raise _too_large(limit)
        hold(int(declared))
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
                hold(len(body))
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
