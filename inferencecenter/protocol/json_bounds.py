"""Bounds the complexity of a JSON text before it is parsed. Pure.

``orjson`` holds the interpreter lock while it parses, so neither a thread nor a timeout limits what a dense text costs
other clients: 8 MiB of empty lists take half a second and 230 MB. Therefore the characters that start lists, objects
and fields, outside strings, are counted first, by a few passes over the bytes at about one millisecond per MiB.
"""

from __future__ import annotations

from typing import Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

MAX_STRUCTURE: Final = 200_000
"""Lists, objects and fields; parsing takes about 50 ms."""
MAX_COMMAS: Final = 1_000_000
"""Commas, and so values, most of which can only be numbers; parsing takes about 30 ms."""

_STRUCTURE: Final = b"[{:"
_COUNTED: Final = _STRUCTURE + b","
_NOT_COUNTED: Final = bytes(code for code in range(256) if code not in _COUNTED + b'"')


def check_json_bounds(text: bytes) -> None:
    """Reject a text that exceeds the bounds.

    Raises:
        InferenceCenterError: ``message_too_large``.
    """
    if len(text) <= MAX_STRUCTURE or _within(text):
        return
    # Escapes are removed first, so that each remaining quote starts or ends a string. Strings without a counted
    # character are then pairs of adjacent quotes, and the odd parts between the other quotes are contents of strings.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED).replace(b'""', b"")
    if bare.count(b'"') <= 2 * (MAX_STRUCTURE + MAX_COMMAS + 1) and _within(b"".join(bare.split(b'"')[::2])):
        return
    raise InferenceCenterError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the JSON has more than {MAX_STRUCTURE} lists, objects and fields, or more than {MAX_COMMAS} values",
        hint="Send less at once; long strings are allowed.",
    )


def _within(text: bytes) -> bool:
    return _count(text, _STRUCTURE) <= MAX_STRUCTURE and _count(text, b",") <= MAX_COMMAS


def _count(text: bytes, characters: bytes) -> int:
    return len(text) - len(text.translate(None, characters))
