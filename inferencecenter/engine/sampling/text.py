"""From sampled tokens to text: whole characters, stop strings and patterns, repetition.

No part of a stop string is emitted. The text is examined character by character: the first character that completes a
stop string or a match ends the answer, and of several completed at once the one that begins first. So the outcome does
not depend on tokenization, and ``$`` or a negative lookahead refer to the text received so far.

All turns of a step wait until the text of each has been searched, so each turn has a time budget for its patterns.
``regex`` itself limits one search; but a pattern that looks far behind is searched again with each character and stays
below that limit each time. Such a turn exhausts its budget and fails.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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


# Context for lookbehind and word boundaries; released text kept before it is dropped.
_CONTEXT_CHARS = 256
_FORGET_AT_CHARS = 4096
# An unbounded pattern such as y[^x]*x is searched again with each character: 0.09 s in all for 512, 24 s for 4,000.
_MAX_HELD_CHARS = 512
_SEARCH_TIMEOUT_S = 0.02
# Time budget of all searches of a turn, and its refill per piece of text, which is a token. Ordinary patterns take a
# tenth of the latter.
_SPARE_S = 0.1
_PIECE_S = 0.001


@dataclass(frozen=True, slots=True)
class Scan:
    """Text that may be emitted now, and the stop string or pattern that ended the answer, if any."""

    text: str
    stop: str | None = None


@dataclass(slots=True)
class _Node:
    """A prefix of a stop string. ``longest`` is the longest stop string that ends here."""

    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    longest: str | None = None


def _automaton(strings: Iterable[str]) -> _Node:
    """Build an Aho-Corasick automaton (1975): each node falls back to its longest suffix that is also a node."""
    root = _Node(0)
    for string in strings:
        node = root
        for char in string:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.longest = string
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            child.fallback = root if node is root else _step(_fallback(node), char)
            child.longest = child.longest or child.fallback.longest
            queue.append(child)
    return root


def _fallback(node: _Node) -> _Node:
    assert node.fallback is not None
    return node.fallback


def _step(node: _Node, char: str) -> _Node:
    while (child := node.children.get(char)) is None:
        if node.fallback is None:
            return node
        node = node.fallback
    return child


class _PatternSearch:
    """Search of one pattern in a growing text; ``start`` is where a match could still begin."""

    def __init__(self, source: str) -> None:
        import regex  # noqa: PLC0415 - most engines need it late or never, and it takes 20 ms of their start

        self.source = source
        self.start = 0
        self._pattern = regex.compile(source)

    def advance(self, text: str, end: int) -> bool:
        """Search up to ``end`` and return whether a match, beginning at ``start``, is complete."""
        try:
            match = self._pattern.search(text, self.start, end, partial=True, timeout=_SEARCH_TIMEOUT_S)
        except TimeoutError:
            raise _too_slow(self.source, f"took longer than {_SEARCH_TIMEOUT_S:g} s to search") from None
        self.start = end if match is None else match.start()
        if end - self.start > _MAX_HELD_CHARS:
            raise _too_slow(self.source, f"could still match after {_MAX_HELD_CHARS} characters")
        return match is not None and not match.partial


class StopScanner:
    """Releases text as soon as it can no longer become part of a stop string or of a match.

    Args:
        strings: Stop strings, none empty.
        patterns: Sources of regular expressions.
        clock: CPU seconds of the thread; only differences within a call of ``feed`` count.
    """

    def __init__(
        self, strings: Iterable[str] = (), patterns: Iterable[str] = (), *, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._clock = clock
        self._spare_s = _SPARE_S
        self._node = _automaton(strings)
        self._searches = [_PatternSearch(source) for source in patterns]
        self._watches = bool(self._node.children or self._searches)
        self._text = ""
        self._released = 0
        self._stopped = False

    def feed(self, text: str) -> Scan:
        """Add text and return what may be emitted of it and of held-back text; nothing after a stop.

        Raises:
            InferenceCenterError: ``invalid_request`` for a pattern that takes too long or holds back too much.
        """
        if self._stopped:
            return Scan("")
        if not self._watches:
            return Scan(text)
        self._spare_s = min(_SPARE_S, self._spare_s + _PIECE_S)
        end = len(self._text)
        self._text += text
        for char in text:
            end += 1
            self._node = _step(self._node, char)
            if (stop := self._completed(end)) is not None:
                self._stopped = True
                start, source = stop
                return Scan(self._release(start), source)
        return Scan(self._release(self._safe(end)))

    def finish(self) -> str:
        """Return the held-back text at the end of the answer; nothing after a stop."""
        if self._stopped:
            return ""
        self._stopped = True
        return self._release(len(self._text))

    def _completed(self, end: int) -> tuple[int, str] | None:
        found = [] if self._node.longest is None else [(end - len(self._node.longest), self._node.longest)]
        found += [(search.start, search.source) for search in self._searches if self._advance(search, end)]
        return min(found, key=lambda place: place[0], default=None)

    def _advance(self, search: _PatternSearch, end: int) -> bool:
        """Search for a pattern and charge the time to the turn's budget."""
        began_s = self._clock()
        found = search.advance(self._text, end)
        self._spare_s -= self._clock() - began_s
        if self._spare_s < 0:
            raise _too_slow(search.source, "and the turn's other patterns take too long to search, over and over")
        return found

    def _safe(self, end: int) -> int:
        return min([end - self._node.depth, *(search.start for search in self._searches)])

    def _release(self, to: int) -> str:
        text = self._text[self._released : to]
        self._released = to
        self._forget()
        return text

    def _forget(self) -> None:
        cut = self._released - _CONTEXT_CHARS
        if cut < _FORGET_AT_CHARS:
            return
        self._text = self._text[cut:]
        self._released -= cut
        for search in self._searches:
            search.start -= cut


def _too_slow(source: str, what: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"params.stop_regex: {source[:64]!r} {what}.",
        field="params.stop_regex",
        hint="Bound the repetitions, as in [^\\n]{0,80}, avoid nested ones, and look behind for few characters.",
    )


_LONGEST = 64
# Rulers, blanks and padding repeat one token in good text; longer units rarely repeat.
_SINGLE_TOKEN_FACTOR = 4


class RepetitionDetector:
    """Detects that the same run of 1 to 64 tokens is repeated several times.

    For each distance d it counts how many consecutive tokens equalled the token d places before: a run of d tokens has
    occurred r times when that count is d * (r - 1). A single token must occur four times as often.

    Args:
        repeats: How often a run must occur in a row, at least 2.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        # No token equals -1, so a distance that reaches before the first token counts nothing.
        self._recent = deque([-1] * _LONGEST, maxlen=_LONGEST)
        self._matched = [0] * _LONGEST

    def push(self, token: int) -> bool:
        """Add a token and return whether the tokens now end in a loop; takes 64 comparisons."""
        self._matched = [
            count + 1 if token == earlier else 0 for count, earlier in zip(self._matched, self._recent, strict=True)
        ]
        self._recent.appendleft(token)
        same = self._matched[0] + 1
        if same >= self._repeats * _SINGLE_TOKEN_FACTOR:
            return True
        # A run of one token is also a repeated run of two, three, …; only the rule above applies to it.
        return any(
            count >= length * (self._repeats - 1) and same < length * self._repeats
            for length, count in enumerate(self._matched[1:], start=2)
        )
