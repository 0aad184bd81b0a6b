"""A fake engine that answers tokenizer requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from inferencecenter.ipc.messages import Detokenized, Tokenized, TokensCounted, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.ipc.messages import PromptSegment

Answer = TypeVar("Answer", Tokenized, TokensCounted, Detokenized)


class CharacterTokens:
    """Answers at once; a token is a character, and its id the code point."""

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str) -> asyncio.Future[Tokenized]:
        """Return the characters as tokens, without a begin token."""
        text = "".join(piece.text for piece in pieces)
        spelled = tuple(character.encode() for character in text)
        return _answered(Tokenized(0, pack_tokens([ord(character) for character in text]), spelled))

    def count_tokens(
        self, pieces: Sequence[PromptSegment], *, first: bool, client_id: str
    ) -> asyncio.Future[TokensCounted]:
        """Return the number of characters."""
        return _answered(TokensCounted(0, sum(len(piece.text) for piece in pieces)))

    def detokenize(self, tokens: Sequence[int], *, client_id: str) -> asyncio.Future[Detokenized]:
        """Return the text, or the first id that is no character."""
        unknown = next((token for token in tokens if not 0 <= token < 0xD800), None)
        return _answered(Detokenized(0, "" if unknown is not None else "".join(map(chr, tokens)), unknown))


def _answered(answer: Answer) -> asyncio.Future[Answer]:
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    future.set_result(answer)
    return future
