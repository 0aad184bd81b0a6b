"""Decodes text frames to requests and encodes events to text frames. Pure: no socket, no clock."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard, get_args

import orjson
from pydantic import BaseModel, ValidationError

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.base import Event, FirstProtocol, Request
from inferencecenter.protocol.events import AnyEvent
from inferencecenter.protocol.requests import AnyRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic_core import ErrorDetails


# The complexity of a JSON text is bounded before it is parsed. ``orjson`` holds the interpreter lock while it parses,
# so neither a thread nor a timeout protects other clients from a dense text: 8 MiB of empty lists take half a second
# and 230 MB. Therefore the characters outside strings that start lists, objects and fields are counted first, in a few
# passes over the bytes, at about one millisecond per MiB.

MAX_STRUCTURE: Final = 200_000
"""Maximum number of lists, objects and fields, which take about 50 ms to parse."""
MAX_COMMAS: Final = 1_000_000
"""Maximum number of commas, and so of values, most of which can only be numbers; they take about 30 ms to parse."""

_STRUCTURE: Final = b"[{:"
_COUNTED: Final = _STRUCTURE + b","
_NOT_COUNTED: Final = bytes(code for code in range(256) if code not in _COUNTED + b'"')


def check_json_bounds(text: bytes) -> None:
    """Refuse a text that exceeds the bounds.

    Raises:
        InferenceCenterError: ``message_too_large``.
    """
    if len(text) <= MAX_STRUCTURE or _within(text):
        return
    # Escapes are removed first, so that each remaining quote starts or ends a string. Strings without a counted
    # character are then adjacent quotes, which are removed. Of the parts between the remaining quotes every second one
    # is the content of a string.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED).replace(b'""', b"")
    if bare.count(b'"') <= 2 * (MAX_STRUCTURE + MAX_COMMAS + 1) and _within(b"".join(bare.split(b'"')[::2])):
        return
    raise InferenceCenterError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the JSON has more than {MAX_STRUCTURE} lists, objects and fields, or more than {MAX_COMMAS} values",
        hint="Send less at once; long strings are allowed.",
    )


LARGE_CHARS: Final = 64 * 1024
"""From this size on a text takes milliseconds to parse, which is too long for the event loop."""
_MANY_OBJECTS: Final = 256
"""From this number on the objects of a smaller text take milliseconds too."""
_MANY_COMMAS: Final = 2048
"""From this number on its other values take a millisecond: lists of one token each half a microsecond apiece."""


def is_slow(text: str | bytes) -> bool:
    """Return whether a text takes too long to parse for the event loop, by its length, objects and values."""
    if len(text) >= LARGE_CHARS:
        return True
    if isinstance(text, str):
        return text.count("{") >= _MANY_OBJECTS or text.count(",") >= _MANY_COMMAS
    return text.count(b"{") >= _MANY_OBJECTS or text.count(b",") >= _MANY_COMMAS


def _within(text: bytes) -> bool:
    return _count(text, _STRUCTURE) <= MAX_STRUCTURE and _count(text, b",") <= MAX_COMMAS


def _count(text: bytes, characters: bytes) -> int:
    return len(text) - len(text.translate(None, characters))


_MAX_ID_CHARS: Final = 64
_SHOWN_VALUE_CHARS: Final = 60
_MOST_FAULTS: Final = 1000
PIECE_BYTES: Final = 64 * 1024
_MANY_FIELDS: Final = 64
"""More fields than any op has, so a frame with more of them has unknown ones among the first."""
_SECRET_FIELDS: Final = frozenset({"token", "api_key"})

REQUESTS: Final[Mapping[str, type[Request]]] = MappingProxyType(
    {get_args(kind.model_fields["op"].annotation)[0]: kind for kind in get_args(AnyRequest)}
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A JSON object of ``n_chars`` with an op, not yet validated; an answer to an invalid one can echo its ``id``."""

    op: str
    id: str | None
    body: dict[str, Any]
    n_chars: int

    @property
    def session_id(self) -> str | None:
        """The session id of the frame; ``None`` if it is missing or invalid."""
        named = self.body.get("session_id")
        return named if isinstance(named, str) and len(named) <= _MAX_ID_CHARS else None

    def parse(self) -> Request:
        """Validate the frame as the request that its op names.

        Raises:
            InferenceCenterError: ``unknown_op``, or ``invalid_request`` with the first offending field.
        """
        kind = REQUESTS.get(self.op)
        if kind is None:
            raise InferenceCenterError(
                ErrorCode.UNKNOWN_OP,
                f"op {_shown(self.op)} does not exist",
                field="op",
                hint=_nearest(self.op, REQUESTS),
            )
        try:
            return kind.model_validate({**dict(islice(self.body.items(), _MANY_FIELDS)), "op": self.op})
        except ValidationError as error:
            raise invalid_request(error, known=kind.model_fields, given=self.body) from None


def read_frame(text: str) -> Frame:
    """Decode a text frame to an object with an ``op`` in lower case, and an ``id`` if it has a valid one.

    Raises:
        InferenceCenterError: ``message_too_large`` for too many values, ``invalid_json`` or ``invalid_request``.
    """
    if len(text) > MAX_STRUCTURE:
        check_json_bounds(text.encode())
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InferenceCenterError(
            ErrorCode.INVALID_JSON,
            f"the frame is not JSON: {error.msg} at character {error.pos}",
            hint="Send one JSON object per text frame.",
        ) from None
    if not isinstance(body, dict):
        raise InferenceCenterError(
            ErrorCode.INVALID_JSON,
            f"the frame is a JSON {_json_type(body)}, not an object",
            hint='Send an object such as {"op": "ping"}.',
        )
    request_id = body.get("id")
    if not isinstance(request_id, str) or len(request_id) > _MAX_ID_CHARS:
        request_id = None
    op = body.get("op")
    if not isinstance(op, str):
        raise FrameError(
            request_id,
            "op is missing" if op is None else f"op is a JSON {_json_type(op)}, not a string",
        )
    return Frame(op=op.lower(), id=request_id, body=body, n_chars=len(text))


class FrameError(InferenceCenterError):
    """A frame without a valid op; it may still carry an ``id`` to echo."""

    def __init__(self, request_id: str | None, message: str) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message, field="op", hint=f"One of: {', '.join(sorted(REQUESTS))}.")
        self.request_id = request_id


def invalid_request(
    error: ValidationError, *, known: Mapping[str, object], given: object = None
) -> InferenceCenterError:
    """Convert the first validation error to one that names the field, its value and the allowed values.

    Args:
        error: The validation error of pydantic.
        known: Field names, of which the most similar one is suggested for an unknown field.
        given: The validated value. If given, the location is the path in this value, and the error of the branch of a
            union that matched furthest is reported; of several, that of a branch for the value's type.
    """
    if (n_faults := error.error_count()) > _MOST_FAULTS:  # listing all could take seconds
        return InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"{n_faults} fields are unknown, missing or out of range"
        )
    faults = error.errors(include_url=False)
    first, path = faults[0], faults[0]["loc"]
    if given is not None:
        paths = [_path_in(given, fault) for fault in faults]
        index = max(
            range(len(faults)),
            key=lambda at: (
                paths[at][: len(paths[0])] == paths[0],
                len(paths[at]),
                not faults[at]["type"].endswith("_type"),
                -at,
            ),
        )
        first, path = faults[index], paths[index]
    location = ".".join(_cut(str(part), _MAX_ID_CHARS) for part in path)
    if first["type"] == "extra_forbidden":
        message, hint = f"unknown field {location}", _nearest(str(first["loc"][-1]), known)
    elif first["type"] == "missing":
        message, hint = f"{location} is missing", None
    elif first["type"] == "union_tag_invalid":
        name = "type" if first["ctx"]["discriminator"].endswith("()") else first["ctx"]["discriminator"].strip("'")
        tag, expected = _cut(str(first["ctx"]["tag"]), _MAX_ID_CHARS), first["ctx"]["expected_tags"]
        message, hint = f"{location} has the {name} {tag!r}, which is none of {expected}", None
    elif first["type"] == "value_error":
        message, hint = str(first["ctx"]["error"]), None
    else:
        value = "not valid" if path[-1:] and path[-1] in _SECRET_FIELDS else _shown(first["input"])
        message, hint = f"{location} is {value}: {first['msg'][0].lower()}{first['msg'][1:]}", None
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field=location or None, hint=hint)


def _path_in(value: Any, fault: ErrorDetails) -> tuple[int | str, ...]:
    """Return the path of a fault in the validated value, without the names of the branches of unions."""
    path: list[int | str] = []
    for n_parts, part in enumerate(fault["loc"], start=1):
        is_item = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        if is_item or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
        elif fault["type"] == "missing" and n_parts == len(fault["loc"]):
            path.append(part)
    return tuple(path)


def encode(event: Event, *, first_protocol: bool = False) -> str | None:
    """Return an event as a text frame.

    Args:
        event: The event.
        first_protocol: Whether the socket uses the first protocol, which has only the ops and fields marked †.

    Returns:
        The frame, or ``None`` if the op is not part of the socket's protocol.
    """
    if first_protocol and not event.first_protocol:
        return None
    return _dumped(event, include=_FIRST_PROTOCOL_FIELDS[type(event)] if first_protocol else None).decode()


def encode_in_pieces(event: Event) -> Iterator[tuple[bytes, bool]]:
    """Yield an event as the pieces of one text frame, each with whether it is the last.

    Pieces are produced lazily; all but the last have ``PIECE_BYTES``. Long texts are encoded in parts, and items of
    lists whose length a client controls one by one, because encoding a transcript of 16 MiB at once would block the
    event loop for 30 ms, and a file of 8 MiB for 12 ms.
    """
    lists = {name: items for name, items in event if _is_list_of_values(items)}
    texts = {name: text for name, text in event if isinstance(text, str) and len(text) > PIECE_BYTES}
    piece = bytearray(_dumped(event, exclude={*lists, *texts}))
    del piece[-1:]
    for name, text in texts.items():
        piece += b',%b:"' % orjson.dumps(name)
        for start in range(0, len(text), PIECE_BYTES):
            piece += orjson.dumps(text[start : start + PIECE_BYTES])[1:-1]
            while len(piece) >= PIECE_BYTES:
                yield bytes(piece[:PIECE_BYTES]), False
                del piece[:PIECE_BYTES]
        piece += b'"'
    for name, items in lists.items():
        piece += b",%b:[" % orjson.dumps(name)
        for index, item in enumerate(items):
            piece += (b"," if index else b"") + orjson.dumps(item.model_dump(exclude_none=not event.keeps_null))
            while len(piece) >= PIECE_BYTES:
                yield bytes(piece[:PIECE_BYTES]), False
                del piece[:PIECE_BYTES]
        piece += b"]"
    yield bytes(piece + b"}"), True


def _dumped(event: Event, *, include: _Include | None = None, exclude: set[str] | None = None) -> bytes:
    body = event.model_dump(exclude_none=not event.keeps_null, include=include, exclude=exclude)
    if body.get("id", "") is None:
        del body["id"]
    return orjson.dumps(body)


def _is_list_of_values(value: object) -> TypeGuard[tuple[BaseModel, ...]]:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], BaseModel)


_Include: TypeAlias = "dict[str, _Include | bool]"


def _first_protocol_fields(kind: type[BaseModel]) -> _Include:
    """Return the message's fields of the first protocol, as pydantic's nested ``include``."""
    chosen: _Include = {"op": True} if issubclass(kind, Event) else {}
    for name, field in kind.model_fields.items():
        if any(isinstance(mark, FirstProtocol) for mark in field.metadata):
            nested = field.annotation
            chosen[name] = (
                _first_protocol_fields(nested) if isinstance(nested, type) and issubclass(nested, BaseModel) else True
            )
    return chosen


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _shown(value: object) -> str:
    """Return a value as JSON, as the client sent it, shortened."""
    try:
        text = orjson.dumps(value, default=lambda other: type(other).__name__).decode()
    except orjson.JSONEncodeError:  # orjson parses deeper nesting than it serializes
        return f"a JSON {_json_type(value)} of many levels"
    return _cut(text, _SHOWN_VALUE_CHARS)


def _cut(text: str, n_chars: int) -> str:
    return text if len(text) <= n_chars else text[:n_chars] + "…"


def _nearest(name: str, known: Mapping[str, object]) -> str | None:
    close = difflib.get_close_matches(name[:_MAX_ID_CHARS], known, n=1)
    return f"Did you mean {close[0]}?" if close else (f"One of: {', '.join(known)}." if known else None)


_FIRST_PROTOCOL_FIELDS: Final = {kind: _first_protocol_fields(kind) for kind in get_args(AnyEvent)}
