"""How much a JSON text may hold, judged before it is read. Pure.

``orjson`` holds the interpreter lock while it reads, so neither a thread nor a deadline bounds what a dense text costs
all others: 8 MiB of empty lists take half a second and 230 MB. So the characters that begin lists, objects and fields
are counted first, by a few passes over the bytes that cost about a millisecond a MiB. Those in strings do not count.
"""

from __future__ import annotations

from typing import Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

MAX_STRUCTURE: Final = 200_000
"""Lists, objects and fields; about 50 ms to read."""
MAX_COMMAS: Final = 1_000_000
"""Commas, and so values, of which most can only be numbers; about 30 ms to read."""

_STRUCTURE: Final = b"[{:"
_COUNTED: Final = _STRUCTURE + b","
_NOT_COUNTED: Final = bytes(code for code in range(256) if code not in _COUNTED + b'"')


def check_json_bounds(text: bytes) -> None:
    """Refuse a text that holds more than may be read at once.

    Raises:
        InferenceCenterError: ``message_too_large``.
    """
    if len(text) <= MAX_STRUCTURE or _within(text):
        return
    # Escapes go first, so that each quote left begins or ends a string. Strings without a counted character inside
    # are then pairs of neighbouring quotes, and what stands at odd places between the other quotes is inside strings.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED).replace(b'""', b"")
    if bare.count(b'"') <= 2 * (MAX_STRUCTURE + MAX_COMMAS + 1) and _within(b"".join(bare.split(b'"')[::2])):
        return
    raise InferenceCenterError(
        ErrorCode.MESSAGE_TOO_LARGE,
        f"the JSON has more than {MAX_STRUCTURE} lists, objects and fields, or more than {MAX_COMMAS} values",
        hint="Send less at once; long strings are no problem.",
    )


def _within(text: bytes) -> bool:
    return _count(text, _STRUCTURE) <= MAX_STRUCTURE and _count(text, b",") <= MAX_COMMAS


def _count(text: bytes, characters: bytes) -> int:
    return len(text) - len(text.translate(None, characters))
