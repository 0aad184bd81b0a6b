"""Prevents text of users and models from being tokenized as special tokens, and finds images in rendered text.

Before rendering, every text that spells a special token is broken by a mark; after rendering, the result is cut at the
marks. Invariant: no piece contains the whole text of a special token that the template did not write. The marks are
lone surrogates, which cannot occur in decoded UTF-8, so they never collide with content. An image is rendered as its
digest between two such marks; the text then has the digest after ``IMAGE_MARK``, so that texts with different images
differ.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.ipc.images import ImageRef
from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.values import IMAGE_MARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferencecenter.protocol.values import MessageImage

_CUT: Final = "\udfff"
_LITERAL: Final = "\udffe"
_IMAGE: Final = "\udffd"
_MARK: Final = re.compile(f"[{_CUT}{_LITERAL}]|{_IMAGE}([0-9a-f]{{64}})/([0-9]+)x([0-9]+){_IMAGE}")
_END: Final = ""
_GRAM_CHARS: Final = 3

_Tree: TypeAlias = "dict[str, _Tree]"


def mark_image(image: MessageImage) -> str:
    """Return the text that stands for an image while a template is rendered."""
    return f"{_IMAGE}{image.digest}/{image.width}x{image.height}{_IMAGE}"


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Rendered text and the places where it must be cut.

    ``cuts`` are ascending offsets between characters that must not be tokenized together. What begins at one of
    ``literals``, up to the next cut, must be tokenized as text. If ``special`` is unset, the whole text is
    plain. ``tokens`` are the special tokens that ``begins_special`` recognizes. What begins at one of ``images``, up to
    the next cut, stands for that image.
    """

    text: str
    cuts: tuple[int, ...] = ()
    literals: frozenset[int] = frozenset()
    special: bool = True
    tokens: tuple[str, ...] = ()
    images: Mapping[int, ImageRef] = field(default_factory=dict)

    @classmethod
    def of_marked(cls, marked: str, *, tokens: tuple[str, ...] = ()) -> RenderedText:
        """Parse a rendering whose contents were marked by ``SpecialTokenEscaper.mark``."""
        cuts: list[int] = []
        literals: set[int] = set()
        images: dict[int, ImageRef] = {}
        n_marked = 0
        for mark in _MARK.finditer(marked):
            offset = mark.start() - n_marked
            n_marked += len(mark[0])
            if mark[0] == _LITERAL:
                literals.add(offset)
                cuts += [offset, offset + 1]
            elif mark[0] == _CUT:
                cuts.append(offset)
            else:
                images[offset] = ImageRef(mark[1], int(mark[2]), int(mark[3]))
                n_shown = len(_shown(mark))
                cuts += [offset, offset + n_shown]
                n_marked -= n_shown
        text = _MARK.sub(_shown, marked) if cuts else marked
        return cls(text, tuple(sorted(set(cuts))), frozenset(literals), tokens=tokens, images=images)

    @classmethod
    def of_segments(cls, segments: Iterable[PromptSegment]) -> RenderedText:
        """Return the text of segments, each of which is tokenized by itself."""
        nonempty = [segment for segment in segments if segment.text]
        starts = [*accumulate((len(segment.text) for segment in nonempty), initial=0)][:-1]
        literals = frozenset(start for start, segment in zip(starts, nonempty, strict=True) if not segment.special)
        return cls("".join(segment.text for segment in nonempty), tuple(starts), literals)

    def pieces(self, start: int = 0, end: int | None = None) -> tuple[PromptSegment, ...]:
        """Return the text from ``start`` to ``end`` as pieces; joined they are that text, except for images."""
        end = len(self.text) if end is None else end
        inside = self.cuts[bisect_right(self.cuts, start) : bisect_left(self.cuts, end)]
        bounds = [start, *inside, end]
        return tuple(
            PromptSegment("", image=self.images[begin])
            if begin in self.images
            else PromptSegment(self.text[begin:end], self.special and begin not in self.literals)
            for begin, end in pairwise(bounds)
            if begin < end
        )

    def begins_special(self, offset: int) -> bool:
        """Return whether a special token begins at ``offset``, so that a cut there changes no token."""
        following = next(iter(self.cuts[bisect_right(self.cuts, offset) :]), len(self.text))
        return any(self.text.startswith(token, offset, following) for token in self.tokens)


def _shown(mark: re.Match[str]) -> str:
    return f"{IMAGE_MARK}{mark[1]}" if mark[1] else ""


class SpecialTokenEscaper:
    """Finds and breaks the texts of a model's special tokens.

    Args:
        texts: The texts of the tokens, such as ``<|im_start|>``.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text})
        self.texts = tuple(known)
        self._long = tuple(text for text in known if len(text) > 1)
        self._max_chars = max(map(len, self._long), default=0)
        self._prefixes = frozenset(text[:size] for text in self._long for size in range(1, len(text)))
        self._suffixes = frozenset(text[-size:] for text in self._long for size in range(1, len(text)))
        self._grams = frozenset(
            text[start : start + size]
            for text in self._long
            for size in range(1, _GRAM_CHARS + 1)
            for start in range(len(text) - size + 1)
        )
        self._occurrence = _first_characters(self._long)
        single = "".join(re.escape(text) for text in known if len(text) == 1)
        self._single = re.compile(f"[{single}]") if single else None

    def mark(self, text: str) -> str:
        """Return ``text`` with marks where it spells a special token, or could do so with adjacent text.

        Templates strip and join contents, so the text is checked with and without its outer white space. A template
        that slices contents elsewhere and completes a special token with its own text is not covered.
        """
        if not self._may_need_marks(text):
            return text
        cuts = {match.end() for match in self._occurrence.finditer(text)} if self._occurrence else set()
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        cuts.update(stop for stop in (len(text), end) if self._ends_in_prefix(text[:stop]))
        cuts.update(start for start in (0, begin) if self._starts_with_suffix(text[start : start + self._max_chars]))
        if 0 < end - begin < self._max_chars and any(text[begin:end] in special for special in self._long):
            cuts.update((begin, end))
        literals = {match.start() for match in self._single.finditer(text)} if self._single else set()
        if not cuts and not literals:
            return text
        bounds = [0, *sorted(cuts | literals), len(text)]
        return "".join(
            (_CUT if begin in cuts else "") + (_LITERAL if begin in literals else "") + text[begin:end]
            for begin, end in pairwise(bounds)
            if begin < end
        ) + (_CUT if len(text) in cuts else "")

    def _may_need_marks(self, text: str) -> bool:
        """Fast rejection by the edges of a text; most texts, such as keys of schemas, need no marks."""
        bare = text.strip()
        return bool(
            len(bare) < len(text)
            or bare[:_GRAM_CHARS] in self._grams
            or bare[-_GRAM_CHARS:] in self._grams
            or bare[:1] in self._suffixes
            or bare[:2] in self._suffixes
            or bare[-1:] in self._prefixes
            or bare[-2:] in self._prefixes
            or (self._occurrence is not None and self._occurrence.search(bare))
            or (self._single is not None and self._single.search(bare))
        )

    def _ends_in_prefix(self, text: str) -> bool:
        return any(text[-size:] in self._prefixes for size in range(1, min(len(text), self._max_chars - 1) + 1))

    def _starts_with_suffix(self, text: str) -> bool:
        return any(text[:size] in self._suffixes for size in range(1, min(len(text), self._max_chars - 1) + 1))


def _first_characters(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of each occurrence of ``texts``, overlapping ones included.

    The texts form a trie, so each position costs the length of its match and not the number of tokens: hundreds of
    tokens with a common prefix cost as much as one.
    """
    if not texts:
        return None
    tree: _Tree = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile("|".join(re.escape(first) + f"(?={_rest(rest)})" for first, rest in sorted(tree.items())))


def _rest(node: _Tree) -> str:
    """Return the expression of a trie node; where one text is a prefix of another, the shorter one suffices."""
    chain: list[str] = []
    while _END not in node and len(node) == 1:
        ((character, node),) = node.items()
        chain.append(re.escape(character))
    if _END not in node:
        chain.append(f"(?:{'|'.join(re.escape(first) + _rest(rest) for first, rest in sorted(node.items()))})")
    return "".join(chain)
