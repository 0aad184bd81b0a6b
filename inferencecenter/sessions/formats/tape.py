"""Text that comes in pieces and is read as one.

What reads is a generator: it yields where it needs more, so that it is written as if all of the text were there, and
where the pieces were cut makes no difference to it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    import re

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Reads from a tape and yields where the tape has to go on; it returns ``T``."""


class Tape:
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

    def run(self, pattern: re.Pattern[str]) -> str:
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

    def back(self, text: str) -> None:
        """Have ``text``, which was read last, read again."""
        self._again.extend(reversed(text))
        if self._tried and text:
            del self._tried[-len(text) :]

    def try_on(self) -> None:
        """From here on remember what is read, so that it can be read another way."""
        self._tried = []

    def settle(self) -> None:
        """Whatever was read is read for good."""
        self._tried = None

    def give_up(self) -> None:
        """Have all read again since something was tried."""
        tried, self._tried = self._tried or [], None
        self._again.extend(reversed(tried))

    def blank(self) -> Reading[str]:
        """Read white space as far as it goes."""
        read = ""
        while (char := (yield from self.next())) and char.isspace():
            read += char
        self.back(char)
        return read

    def found(self, *wanted: str) -> Reading[str]:
        """Read the one of ``wanted`` that comes next and return it; if there is none, read nothing."""
        read = ""
        while (char := (yield from self.next())) and any(text.startswith(read + char) for text in wanted):
            read += char
            if read in wanted:
                return read
        self.back(read + char)
        return ""
