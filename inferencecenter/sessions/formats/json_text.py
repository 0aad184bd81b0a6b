"""Reading JSON while it comes, as text: only where a value ends is found out, not whether it is any good."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.sessions.formats.tape import Reading, Tape

_IN_STRING: Final = re.compile(r'[^"\\]+')
_BETWEEN: Final = re.compile(r'[^"{}\[\]]+')
_IN_PRIMITIVE: Final = re.compile(r"[\w.+-]")
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS: Final = 4
_MAX_KEY_CHARS: Final = 256


def read_value(tape: Tape, tell: Callable[[str], None]) -> Reading[None]:
    """Read one value and tell its text as it comes."""
    first = yield from tape.next()
    if first and first in "{[":
        tell(first)
        yield from _read_nested(tape, tell)
    elif first == '"':
        tell(first)
        yield from _read_raw_string(tape, tell)
    else:
        while first and _IN_PRIMITIVE.match(first):
            tell(first)
            first = yield from tape.next()
        tape.back(first)


def read_arguments(tape: Tape, tell: Callable[[str], None]) -> Reading[None]:
    """Read arguments and tell them as JSON, also where they are a JSON string with the JSON in it."""
    if (yield from tape.found('"')):
        yield from read_string(tape, tell)
    else:
        yield from read_value(tape, tell)


def read_string(tape: Tape, tell: Callable[[str], None]) -> Reading[bool]:
    """Read a string behind its first quote and tell what it means; return whether it has come to its end.

    Halves of characters become U+FFFD, and escapes that JSON does not know the characters they escape.
    """
    while True:
        tell(tape.run(_IN_STRING))
        char = yield from tape.next()
        if char == "\\":
            tell((yield from _read_escape(tape)))
        elif not char or char == '"':
            return bool(char)
        else:
            tell(char)


def read_key(tape: Tape) -> Reading[str | None]:
    """Read a short string and return what it means; ``None``, with some of it read, where there is none."""
    if not (yield from tape.found('"')):
        return None
    texts: list[str] = []
    n_chars = 0

    def tell(text: str) -> None:
        nonlocal n_chars
        texts.append(text)
        n_chars += len(text)

    while True:
        char = yield from tape.next()
        if char == "\\":
            tell((yield from _read_escape(tape)))
        elif char == '"':
            return "".join(texts)
        elif not char or n_chars > _MAX_KEY_CHARS:
            return None
        else:
            tell(char)


def quoted(text: str) -> str:
    """Return ``text`` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_nested(tape: Tape, tell: Callable[[str], None]) -> Reading[None]:
    depth = 1
    while depth:
        tell(tape.run(_BETWEEN))
        char = yield from tape.next()
        if not char:
            return
        tell(char)
        if char == '"':
            yield from _read_raw_string(tape, tell)
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1


def _read_raw_string(tape: Tape, tell: Callable[[str], None]) -> Reading[None]:
    while True:
        tell(tape.run(_IN_STRING))
        char = yield from tape.next()
        if char == "\\":
            char += yield from tape.next()
        tell(char)
        if not char or char == '"':
            return


def _read_escape(tape: Tape) -> Reading[str]:
    char = yield from tape.next()
    if char != "u":
        return _ESCAPES.get(char, char)
    unit = yield from _read_unit(tape)
    if 0xD800 <= unit < 0xDC00 and (yield from tape.found("\\u")):
        low = yield from _read_unit(tape)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + (unit - 0xD800) * 0x400 + low - 0xDC00)
        return "\ufffd" + _character(low)
    return _character(unit)


def _read_unit(tape: Tape) -> Reading[int]:
    digits = ""
    while len(digits) < _HEX_DIGITS:
        char = yield from tape.next()
        if not char or char not in "0123456789abcdefABCDEF":
            tape.back(char)
            return 0xFFFD
        digits += char
    return int(digits, 16)


def _character(unit: int) -> str:
    return "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)
