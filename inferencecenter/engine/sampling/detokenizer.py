"""Converts token bytes to whole characters, and emitted characters back to whole tokens."""

from __future__ import annotations

import codecs
from bisect import bisect_right


class Utf8Stream:
    """Decodes arbitrarily split bytes into whole characters; invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def pending(self) -> bool:
        """Whether the last character is still incomplete."""
        return bool(self._decoder.getstate()[0])

    def feed(self, data: bytes) -> str:
        """Return the characters that ``data`` completes."""
        return self._decoder.decode(data)


class TokenText:
    """The text of a growing token sequence, and which tokens lie completely within a prefix of that text."""

    def __init__(self) -> None:
        self._stream = Utf8Stream()
        self._n_tokens = 0
        self._n_chars = 0
        # Positions where tokens and characters end together, both ascending.
        self._tokens_at = [0]
        self._chars_at = [0]

    def push(self, token_bytes: bytes) -> str:
        """Add a token and return the characters it completes."""
        text = self._stream.feed(token_bytes)
        self._n_tokens += 1
        self._n_chars += len(text)
        if not self._stream.pending:
            self._tokens_at.append(self._n_tokens)
            self._chars_at.append(self._n_chars)
        return text

    def kept(self, shown_chars: int) -> tuple[int, int]:
        """Return how many leading tokens lie within the first ``shown_chars`` characters, and their length."""
        place = bisect_right(self._chars_at, shown_chars) - 1
        return self._tokens_at[place], self._chars_at[place]
