"""A character stream that is fed in pieces, and incremental readers of JSON values on it.

What reads is a generator: it yields where it needs more, so that it is written as if all of the text were there, and
where the pieces were cut makes no difference to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Reads from a tape and yields where the tape has to go on; it returns ``T``."""


class CharStream:
    """A growing text with a place up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._again: list[str] = []  # characters that were put back, the next one last
        self._tried: list[str] | None = None  # characters that were read since something was tried
        self.ended = False

    @property
    def n_unread(self) -> int:
        """Characters that are there and have not been read."""
        return len(self._again) + len(self._text) - self._at

    def extend(self, text: str) -> None:
        """Add what comes next; all that came before must have been read."""
        self._text, self._at = text, 0

    def next(self) -> Reading[str]:
        """Read a character; none at the end of the text."""
        if self._again:
            char = self._again.pop()
        else:
            while self._at == len(self._text):
                if self.ended:
                    return ""
                yield
            char = self._text[self._at]
            self._at += 1
        if self._tried is not None:
            self._tried.append(char)
        return char

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what ``pattern`` matches of the text that is there already, possibly nothing.

        Whatever comes next, what the pattern matches must be right to read.
        """
        if self._again or self._tried is not None:
            return ""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def push_back(self, text: str) -> None:
        """Have ``text``, which was read last, read again."""
        self._again.extend(reversed(text))
        if self._tried and text:
            del self._tried[-len(text) :]

    def mark(self) -> None:
        """From here on remember what is read, so that it can be read another way."""
        self._tried = []

    def commit(self) -> None:
        """Whatever was read is read for good."""
        self._tried = None

    def rollback(self) -> None:
        """Have all read again since something was tried."""
        tried, self._tried = self._tried or [], None
        self._again.extend(reversed(tried))

    def read_blank(self) -> Reading[str]:
        """Read white space as far as it goes."""
        read = ""
        while (char := (yield from self.next())) and char.isspace():
            read += char
        self.push_back(char)
        return read

    def accept(self, *wanted: str) -> Reading[str]:
        """Read the one of ``wanted`` that comes next and return it; if there is none, read nothing."""
        read = ""
        while (char := (yield from self.next())) and any(text.startswith(read + char) for text in wanted):
            read += char
            if read in wanted:
                return read
        self.push_back(read + char)
        return ""


_IN_STRING: Final = re.compile(r'[^"\\]+')
_BETWEEN: Final = re.compile(r'[^"{}\[\]]+')
_IN_PRIMITIVE: Final = re.compile(r"[\w.+-]")
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS: Final = 4
_MAX_KEY_CHARS: Final = 256


def read_value(tape: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    """Read one value and tell its text as it comes."""
    first = yield from tape.next()
    if first and first in "{[":
        emit(first)
        yield from _read_nested(tape, emit)
    elif first == '"':
        emit(first)
        yield from _read_raw_string(tape, emit)
    else:
        while first and _IN_PRIMITIVE.match(first):
            emit(first)
            first = yield from tape.next()
        tape.push_back(first)


def read_arguments(tape: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    """Read arguments and tell them as JSON, also where they are a JSON string with the JSON in it."""
    if (yield from tape.accept('"')):
        yield from read_string(tape, emit)
    else:
        yield from read_value(tape, emit)


def read_string(tape: CharStream, emit: Callable[[str], None]) -> Reading[bool]:
    """Read a string behind its first quote and tell what it means; return whether it has come to its end.

    Halves of characters become U+FFFD, and escapes that JSON does not know the characters they escape.
    """
    while True:
        emit(tape.match(_IN_STRING))
        char = yield from tape.next()
        if char == "\\":
            emit((yield from _read_escape(tape)))
        elif not char or char == '"':
            return bool(char)
        else:
            emit(char)


def read_key(tape: CharStream) -> Reading[str | None]:
    """Read a short string and return what it means; ``None``, with some of it read, where there is none."""
    if not (yield from tape.accept('"')):
        return None
    texts: list[str] = []
    n_chars = 0

    def emit(text: str) -> None:
        nonlocal n_chars
        texts.append(text)
        n_chars += len(text)

    while True:
        char = yield from tape.next()
        if char == "\\":
            emit((yield from _read_escape(tape)))
        elif char == '"':
            return "".join(texts)
        elif not char or n_chars > _MAX_KEY_CHARS:
            return None
        else:
            emit(char)


def json_string(text: str) -> str:
    """Return ``text`` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_nested(tape: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    depth = 1
    while depth:
        emit(tape.match(_BETWEEN))
        char = yield from tape.next()
        if not char:
            return
        emit(char)
        if char == '"':
            yield from _read_raw_string(tape, emit)
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1


def _read_raw_string(tape: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    while True:
        emit(tape.match(_IN_STRING))
        char = yield from tape.next()
        if char == "\\":
            char += yield from tape.next()
        emit(char)
        if not char or char == '"':
            return


def _read_escape(tape: CharStream) -> Reading[str]:
    char = yield from tape.next()
    if char != "u":
        return _ESCAPES.get(char, char)
    unit = yield from _read_unit(tape)
    if 0xD800 <= unit < 0xDC00 and (yield from tape.accept("\\u")):
        low = yield from _read_unit(tape)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + (unit - 0xD800) * 0x400 + low - 0xDC00)
        return "\ufffd" + _character(low)
    return _character(unit)


def _read_unit(tape: CharStream) -> Reading[int]:
    digits = ""
    while len(digits) < _HEX_DIGITS:
        char = yield from tape.next()
        if not char or char not in "0123456789abcdefABCDEF":
            tape.push_back(char)
            return 0xFFFD
        digits += char
    return int(digits, 16)


def _character(unit: int) -> str:
    return "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)
