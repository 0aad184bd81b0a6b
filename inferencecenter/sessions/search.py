"""Full-text search of stored sessions: queries, results, and the excerpts around the hits. Pure.

A query consists of words and "phrases", all of which must occur in a session, in any of its messages or its title. The
last word also matches as a prefix, for search as you type. Case and diacritics are ignored. Words are those of SQLite's
tokenizer ``unicode61``: letters, digits and their marks. Of Korean and of scripts without spaces between words each
character is a word, and a run of them is a phrase, so any part of such a text is found.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from inferencecenter.protocol.values import Role
    from inferencecenter.sessions.archive import ArchivedSession

MAX_TERMS: Final = 16
"""Maximum number of words and phrases of a query."""
MAX_INDEXED_CHARS: Final = 128 * 1024
"""Number of leading characters of a message that are searched."""
SNIPPET_CHARS: Final = 160
"""Length of an excerpt in characters."""
MARKED_BLOCKS: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
"""Thai, Lao, Myanmar and Khmer, whose vowel signs and tone marks are words of their own; a character class."""
SPACELESS: Final = MARKED_BLOCKS + "\u3005-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
"""These, kana, bopomofo, Hangul syllables and Han: each character is a word; a character class."""
MAX_EXCERPT_COST: Final = 8 * 1024 * 1024
"""Maximum number of characters searched for the excerpts of a search, multiplied by the number of words."""
_FOLDING_COST: Final = 4
"""What a character of a text that is not ASCII costs beside that, in words."""
_MAX_PHRASE_WORDS: Final = 16
_PART_CHARS: Final = 8192
_OVERLAP_CHARS: Final = 1024
_BEFORE_CHARS: Final = 50
"""Characters of an excerpt before the first hit."""
_MIN_PREFIX: Final = 2
_MAX_FOLDED: Final = 4096

_TERMS: Final = re.compile(r'"([^"]*)(?:"|$)|([^\s"]+)')
_LETTER: Final = rf"[^\W_{SPACELESS}]"
_COMBINING: Final = "\u0300-\u036f"
# No character is both a mark and the begin of a separator: with two ways to divide a run of marks between them, the
# time of a phrase would be exponential in the number of its words.
_SEPARATOR: Final = rf"(?:(?![{MARKED_BLOCKS}{_COMBINING}])[\W_][{_COMBINING}]*)"
# These two are compiled when they are first used, as that takes 4 ms each.
_TOKENS: Final = rf"[{MARKED_BLOCKS}]|(?=[{SPACELESS}])\w|{_LETTER}+"
_SPACELESS_CHAR: Final = f"[{SPACELESS}]"
_MARKS: Final = f"[{_COMBINING}]*"
_NO_MARK: Final = re.compile(f"[^{_COMBINING}]")
_BREAKS: Final = re.compile(r"[\r\n\t]")


@dataclass(frozen=True, slots=True)
class SearchTerm:
    """A word or a phrase without quotation marks; with ``is_prefix`` its last word is a prefix."""

    text: str
    is_prefix: bool = False

    @property
    def expression(self) -> str:
        """The term as a string of an FTS5 query, which has no operators."""
        words = re.sub(_SPACELESS_CHAR, r" \g<0> ", self.text)
        return f'"{words}"' + (" *" if self.is_prefix else "")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A hit in a message, or in the session's title if ``message_index`` is ``None``.

    ``marks`` are the ranges of the matched words in ``snippet``.
    """

    snippet: str
    marks: tuple[tuple[int, int], ...]
    message_index: int | None = None
    role: Role | None = None
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session that has all terms of a query; its sizes are known only if it ``is_archived``."""

    session: ArchivedSession
    is_archived: bool
    hits: tuple[SearchHit, ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A page of the sessions found, most recently used first.

    ``indexed`` is the indexed share of the stored sessions, ``None`` once all are.
    """

    found: tuple[FoundSession, ...]
    has_more: bool
    indexed: float | None


def search_terms(query: str) -> tuple[SearchTerm, ...]:
    """Return the words and phrases of a query; a query without letters and digits has none.

    Raises:
        InferenceCenterError: ``invalid_request`` for too many.
    """
    found = [(phrase or word, bool(word)) for phrase, word in _TERMS.findall(query.replace("\0", " "))]
    terms = [(text, is_word) for text, is_word in found if any(map(str.isalnum, text))]
    if len(terms) > MAX_TERMS:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"query has {len(terms)} words and phrases; {MAX_TERMS} are allowed",
            field="query",
            hint='Leave out some, or quote consecutive words ("...").',
        )
    return tuple(
        SearchTerm(text, is_word and n == len(terms) and sum(map(str.isalnum, text)) >= _MIN_PREFIX)
        for n, (text, is_word) in enumerate(terms, 1)
    )


class Excerpts:
    """Excerpts around the hits of one search. Their cost is bounded in sum, and no step holds the interpreter for long.

    A phrase is recognized by its first words. Once the cost is used up, only the beginnings of texts are read.

    Args:
        terms: The terms of the query.
    """

    def __init__(self, terms: tuple[SearchTerm, ...]) -> None:
        words = [_words(term) for term in terms]
        patterns = [_pattern(own, is_prefix=term.is_prefix) for own, term in zip(words, terms, strict=True)]
        self._wanted = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._n_words = max(1, sum(map(len, words)))
        self._left = MAX_EXCERPT_COST

    def of(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return the part of a text around the first hit, and the ranges of the hits in it.

        Where the words of the text are not split as in the index, it is the beginning of the text, without hits.
        """
        cost = self._n_words if text.isascii() else self._n_words + _FOLDING_COST
        searched = text[: max(SNIPPET_CHARS, self._left // cost)]
        self._left -= len(searched) * cost
        folded = searched.lower() if searched.isascii() else searched.translate(_FOLDED)
        first = self._first(folded)
        start = max(0, (first.start() if first else 0) - _BEFORE_CHARS)
        if start:
            # The excerpt starts at a word boundary.
            space = folded.find(" ", start, start + _BEFORE_CHARS // 2)
            start = space + 1 if space >= 0 else start
        end = min(len(text), start + SNIPPET_CHARS)
        marks: list[tuple[int, int]] = []
        for hit in self._wanted.finditer(folded, first.start() if first else end, end):
            marks.append((hit.start() - start, hit.end() - start))
        if first is not None and not marks:
            # The phrase is longer than the excerpt.
            marks.append((first.start() - start, end - start))
        return _BREAKS.sub(" ", text[start:end]), tuple(marks)

    def _first(self, folded: str) -> re.Match[str] | None:
        """Return the first hit. A regular expression holds the interpreter lock, so the text is searched in parts."""
        for start in range(0, len(folded), _PART_CHARS):
            end = start + _PART_CHARS + _OVERLAP_CHARS
            hit = self._wanted.search(folded, start, end)
            # At the end of a part a word may be cut off.
            if hit is not None and (hit.end() < end or end >= len(folded)):
                return hit
        return None


def _words(term: SearchTerm) -> list[str]:
    folded = unicodedata.normalize("NFC", term.text).translate(_FOLDED)
    return re.findall(_TOKENS, folded)[:_MAX_PHRASE_WORDS]


def _pattern(words: list[str], *, is_prefix: bool) -> str:
    pattern, was_spaceless = "", True
    for word in words:
        is_spaceless = re.match(_SPACELESS_CHAR, word) is not None
        if pattern:
            pattern += _SEPARATOR + ("*" if is_spaceless or was_spaceless else "+")
        elif not is_spaceless:
            pattern = f"(?<!{_LETTER})"
        pattern += re.escape(word) if is_spaceless else _MARKS.join(map(re.escape, word)) + _MARKS
        was_spaceless = is_spaceless
    if was_spaceless:
        return pattern
    return pattern + (f"{_LETTER}*" if is_prefix else f"(?!{_LETTER})")


class _FoldingTable(dict[int, str]):
    """Maps each character to one without case and diacritics, so that positions are preserved; a bounded cache."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        parts = unicodedata.normalize("NFD", char)
        # Parts of kana and of Hangul syllables are no diacritics.
        folded = char if _NO_MARK.search(parts, 1) else parts[0].lower()[0]
        if len(self) < _MAX_FOLDED:
            self[code] = folded
        return folded


_FOLDED: Final = _FoldingTable()
