"""Prompts with an exact number of tokens, made of words that the model's tokenizer encodes as one token each.

Nearly every vocabulary has a token for each letter after a space, so a prompt is a row of such letters, drawn by its
seed. The server is queried once for the letters that are suitable, by the number of tokens of a few texts. Where no
letter after a space is one token (byte vocabularies), letters without spaces are. Both sides of a comparison are sent
the same text, or the ids of the same text, as long as their models have the same tokenizer.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.target import Work

# This length distinguishes words that always cost one token from those that do so only sometimes.
_SAMPLE_WORDS: Final = 64
# Fewer would make prompts of different seeds begin alike.
_LEAST_WORDS: Final = 4
_SPELLINGS: Final = (" {}", "{}")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Words of one token each.

    Attributes:
        words: The words.
        overhead_tokens: Tokens the server puts before the first text of a conversation.
    """

    words: tuple[str, ...]
    overhead_tokens: int

    def text(self, work: Work, *, first: bool) -> str:
        """Return a text of ``work.prompt_tokens`` tokens, as the ``first`` of a conversation or a later one.

        Tokens that the server puts before it count as part of the opening, if any.

        Raises:
            InferenceCenterError: ``invalid_request`` when no word, or none beside the opening, would be left.
        """
        overhead_tokens = self.overhead_tokens if first else 0
        parts = [(work.prompt_tokens - overhead_tokens, work.seed)]
        if work.opening is not None:
            own_tokens = work.prompt_tokens - work.opening.tokens
            parts = [(work.opening.tokens - overhead_tokens, work.opening.seed), (own_tokens, work.seed)]
        if min(n_words for n_words, _ in parts) < 1:
            shared = f", {work.opening.tokens} of them shared," if work.opening is not None else ""
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"a prompt of {work.prompt_tokens} tokens{shared} has no room for a word beside the {overhead_tokens} "
                "tokens that the server adds",
            )
        return "".join(_row(self.words, n_words, seed=seed) for n_words, seed in parts)


async def calibrate(count: Callable[[str], Awaitable[int]]) -> Prompts:
    """Find words of one token each.

    Args:
        count: Returns the tokens of a text as the first of a conversation.

    Raises:
        InferenceCenterError: ``invalid_request`` when the vocabulary has too few such words; what ``count`` raises.
    """
    for spelling in _SPELLINGS:
        letters = tuple(spelling.format(letter) for letter in string.ascii_lowercase)
        prompts = await _fitting(letters, count)
        if prompts is None:
            # Two of each, since the first word of a text may be tokenized differently.
            counts = [await count(letter * 2) for letter in letters]
            cheapest = tuple(
                letter for letter, n_tokens in zip(letters, counts, strict=True) if n_tokens == min(counts)
            )
            prompts = await _fitting(cheapest, count)
        if prompts is not None:
            return prompts
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST, f"the model's vocabulary has fewer than {_LEAST_WORDS} letters of one token each"
    )


async def _fitting(words: tuple[str, ...], count: Callable[[str], Awaitable[int]]) -> Prompts | None:
    """Return prompts of these words if each of them is one token."""
    if len(words) < _LEAST_WORDS:
        return None
    short = await count(_row(words, _SAMPLE_WORDS, seed=1))
    long = await count(_row(words, 2 * _SAMPLE_WORDS, seed=2))
    return Prompts(words, short - _SAMPLE_WORDS) if long - short == _SAMPLE_WORDS else None


def _row(words: tuple[str, ...], n_words: int, *, seed: int) -> str:
    return "".join(random.Random(seed).choices(words, k=n_words))  # noqa: S311 - the same words for the same seed
