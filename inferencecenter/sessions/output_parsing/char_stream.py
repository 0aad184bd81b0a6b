"""A character stream that is fed in chunks, with backtracking, and incremental JSON readers on it.

Readers are generators that yield when they need more input. They are written as if the whole text were available, and
their result does not depend on how the text is chunked.
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
"""A reader that yields when the stream is exhausted, and returns ``T``."""


class CharStream:
    """Text that grows at its end, with a read position."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._pushed_back: list[str] = []  # pushed back characters, the next one last
        self._since_mark: list[str] | None = None  # characters read since ``mark``
        self.ended = False

    @property
    def n_unread(self) -> int:
        return len(self._pushed_back) + len(self._text) - self._at

    def extend(self, text: str) -> None:
        """Append a chunk; all earlier text must have been read."""
        self._text, self._at = text, 0

    def next(self) -> Reading[str]:
        """Read a character; empty at the end of the text."""
        if self._pushed_back:
            char = self._pushed_back.pop()
        else:
            while self._at == len(self._text):
                if self.ended:
                    return ""
                yield
            char = self._text[self._at]
            self._at += 1
        if self._since_mark is not None:
            self._since_mark.append(char)
        return char

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what ``pattern`` matches in the available text, possibly nothing.

        The match must be valid to read whatever text follows.
        """
        if self._pushed_back or self._since_mark is not None:
            return ""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def push_back(self, text: str) -> None:
        """Unread ``text``, which was read last."""
        self._pushed_back.extend(reversed(text))
        if self._since_mark and text:
            del self._since_mark[-len(text) :]

    def mark(self) -> None:
        """Start recording, so that ``rollback`` can return to this position."""
        self._since_mark = []

    def commit(self) -> None:
        """Discard the mark."""
        self._since_mark = None

    def rollback(self) -> None:
        """Return to the mark."""
        since_mark, self._since_mark = self._since_mark or [], None
        self._pushed_back.extend(reversed(since_mark))

    def read_blank(self) -> Reading[str]:
        read = ""
        while (char := (yield from self.next())) and char.isspace():
            read += char
        self.push_back(char)
        return read

    def accept(self, *wanted: str) -> Reading[str]:
        """Read whichever of ``wanted`` comes next and return it; otherwise read nothing."""
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


def read_value(stream: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    """Read one JSON value and emit its text incrementally."""
    first = yield from stream.next()
    if first and first in "{[":
        emit(first)
        yield from _read_nested(stream, emit)
    elif first == '"':
        emit(first)
        yield from _read_raw_string(stream, emit)
    else:
        while first and _IN_PRIMITIVE.match(first):
            emit(first)
            first = yield from stream.next()
        stream.push_back(first)


def read_arguments(stream: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    """Read arguments and emit them as JSON, unwrapping a JSON string that contains the JSON."""
    if (yield from stream.accept('"')):
        yield from read_string(stream, emit)
    else:
        yield from read_value(stream, emit)


def read_string(stream: CharStream, emit: Callable[[str], None]) -> Reading[bool]:
    """Read a string after its opening quote and emit its decoded text; return whether it is terminated.

    Lone surrogates become U+FFFD; an unknown escape becomes the escaped character.
    """
    while True:
        emit(stream.match(_IN_STRING))
        char = yield from stream.next()
        if char == "\\":
            emit((yield from _read_escape(stream)))
        elif not char or char == '"':
            return bool(char)
        else:
            emit(char)


def read_key(stream: CharStream) -> Reading[str | None]:
    """Read a short string and return it decoded; ``None``, with some of it read, if there is none."""
    if not (yield from stream.accept('"')):
        return None
    texts: list[str] = []
    n_chars = 0

    def emit(text: str) -> None:
        nonlocal n_chars
        texts.append(text)
        n_chars += len(text)

    while True:
        char = yield from stream.next()
        if char == "\\":
            emit((yield from _read_escape(stream)))
        elif char == '"':
            return "".join(texts)
        elif not char or n_chars > _MAX_KEY_CHARS:
            return None
        else:
            emit(char)


def json_string(text: str) -> str:
    """Return ``text`` escaped for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_nested(stream: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    depth = 1
    while depth:
        emit(stream.match(_BETWEEN))
        char = yield from stream.next()
        if not char:
            return
        emit(char)
        if char == '"':
            yield from _read_raw_string(stream, emit)
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1


def _read_raw_string(stream: CharStream, emit: Callable[[str], None]) -> Reading[None]:
    while True:
        emit(stream.match(_IN_STRING))
        char = yield from stream.next()
        if char == "\\":
            char += yield from stream.next()
        emit(char)
        if not char or char == '"':
            return


def _read_escape(stream: CharStream) -> Reading[str]:
    char = yield from stream.next()
    if char != "u":
        return _ESCAPES.get(char, char)
    unit = yield from _read_unit(stream)
    if 0xD800 <= unit < 0xDC00 and (yield from stream.accept("\\u")):
        low = yield from _read_unit(stream)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + (unit - 0xD800) * 0x400 + low - 0xDC00)
        return "\ufffd" + _character(low)
    return _character(unit)


def _read_unit(stream: CharStream) -> Reading[int]:
    digits = ""
    while len(digits) < _HEX_DIGITS:
        char = yield from stream.next()
        if not char or char not in "0123456789abcdefABCDEF":
            stream.push_back(char)
            return 0xFFFD
        digits += char
    return int(digits, 16)


def _character(unit: int) -> str:
    return "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)
