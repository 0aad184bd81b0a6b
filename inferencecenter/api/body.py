"""Request bodies: read within limits of size and time, and validated."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import LARGE_CHARS, check_json_bounds, invalid_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema
    from starlette.datastructures import Headers
    from starlette.types import Receive

    from inferencecenter.config.settings import ServerSettings
    from inferencecenter.core.fair_queue import FairShare

_MANY: Final = 200
"""More fields than any model has, so with this many at least one is unknown."""

LARGE_BYTES: Final = LARGE_CHARS
"""From this size on a body or a result takes milliseconds of the event loop."""

BODIES_BYTES: Final = 256 * 1024 * 1024
"""Maximum bytes of bodies and of large results in memory, shared by all clients.

By default it is as much as the connections of one client can send.
"""

_Model = TypeVar("_Model", bound=BaseModel)


class RequestModel(BaseModel):
    """Part of a request body: immutable, without unknown fields or coercion; null is the same as absent."""

    # Bodies and answers are built on first use, which takes at most 15 ms each, and all of them a fifth of a start.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        if len(data) > _MANY:  # one unknown field is reported, as a million would take a second
            data = dict(islice(data.items(), _MANY))
        return {name: value for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema, in which every optional field may be null."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                schema["properties"][name] = _or_null(field)
        return reference


_MEDIA: Final = frozenset({"input_audio", "input_file", "file"})


def no_media(kind: object) -> object:
    """Return the type of a part of a message, unless it is one of OpenAI's that are neither text nor an image."""
    if isinstance(kind, str) and kind in _MEDIA:
        raise PydanticCustomError("media", "the model is given text and images only, and no files or sound")
    return kind


def invalid_field(field: str, message: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field=field)


class BodyMemory:
    """Memory held by a request's body and result, out of that shared by all clients; released when the context exits.

    Args:
        share: Memory held by all requests.
        client_id: The requesting client.
    """

    def __init__(self, share: FairShare, client_id: str) -> None:
        self._share = share
        self.client_id = client_id
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held:
            self._share.remove(self.client_id, self._held)
            self._held = 0

    def hold_result(self, size: int) -> None:
        """Hold this many bytes beside the body; at most half of the memory, so that any single result fits.

        Raises:
            InferenceCenterError: ``queue_full``.
        """
        self.hold(self._held + min(size, BODIES_BYTES // 2))

    def hold(self, size: int) -> None:
        """Hold this many bytes in total; fewer than already held changes nothing.

        Raises:
            InferenceCenterError: ``queue_full``.
        """
        more = size - self._held
        if more <= 0:
            return
        if not self._share.fits(self.client_id, more):
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                "The bodies and results of requests take too much memory, much of it for this client.",
                hint="Send fewer large requests concurrently.",
                retry_after_ms=1000,
            )
        self._share.add(self.client_id, more)
        self._held = size


async def read_body(
    receive: Receive, headers: Headers, settings: ServerSettings, *, hold: Callable[[int], None]
) -> bytes:
    """Return the whole body.

    Args:
        receive: ASGI receive.
        headers: Headers of the request, for ``Content-Length``.
        settings: Limits.
        hold: Called with the length before that much is read; raises if it does not fit.

    Raises:
        InferenceCenterError: ``message_too_large``, before it is read if ``Content-Length`` shows it;
            ``request_timeout``; see also ``BodyMemory.hold``.
        ConnectionError: The peer has disconnected.
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
            ErrorCode.REQUEST_TIMEOUT, f"the body did not arrive within {settings.body_timeout_s:g} s"
        ) from None


def parse(kind: type[_Model], body: bytes, *, context: object = None) -> _Model:
    """Parse a body into a model; to be called off the event loop if it ``is_slow``.

    ``context`` is that of the validation: a ``FieldReport`` for the body of a foreign dialect.

    Raises:
        InferenceCenterError: ``message_too_large`` for too many values, ``invalid_json``, or ``invalid_request`` with
            the first invalid field.
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
    return checked(kind, value, context=context)


def checked(kind: type[_Model], value: object, *, context: object = None) -> _Model:
    """Validate a value as a model.

    Raises:
        InferenceCenterError: ``invalid_request`` with the first invalid field.
    """
    try:
        return kind.model_validate(value, context=context)
    except ValidationError as error:
        raise invalid_request(error, known=kind.model_fields, given=value) from None


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema extended by null; its annotations stay at the top level."""
    annotations: dict[str, Any] = {name: field[name] for name in ("title", "description", "default") if name in field}
    kind = {name: value for name, value in field.items() if name not in annotations}
    options = kind["anyOf"] if set(kind) == {"anyOf"} else [kind]
    return {"anyOf": [*options, {"type": "null"}], **annotations}


def _too_large(limit: int) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the body is larger than {limit} bytes",
        hint="An operator can raise server.max_body_bytes.",
    )
