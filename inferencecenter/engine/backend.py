"""The interface between the engine and a decoder: llama.cpp, or the backends that need no model (echo, script).

Slots are sequence ids ``0 .. model.slots - 1``; each holds its own KV stream of at most ``model.n_ctx`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from inferencecenter.engine.images import Projector
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.messages import ModelInfo, PromptSegment, SampledLogprobs
    from inferencecenter.protocol.params import Params


@dataclass(frozen=True, slots=True)
class RowPositions:
    """Positions of a run of rows in a model with M-RoPE, where an image takes fewer positions than it has rows.

    Attributes:
        at_0: Those of a run that begins at position 0, of shape ``(4, rows)``: time, row, column, and one more.
        at_1: Those of a run that begins at position 1; they are linear in the first position.
        n_positions: How far the next token is from the first row.
    """

    at_0: NDArray[np.int32]
    at_1: NDArray[np.int32]
    n_positions: int

    def at(self, start: int) -> NDArray[np.int32]:
        """Return those of a run that begins at position ``start``."""
        return self.at_0 + (self.at_1 - self.at_0) * start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slot in a batch: ``tokens[i]`` is token ``start + i`` of the slot.

    A run of an image's rows has ``embeddings`` instead, of shape ``(rows, width)``, and is decoded alone; it has
    ``positions`` too in a model with M-RoPE.

    ``sample`` requests the logits of the last token. The last ``drafts`` tokens are guesses, each to be compared with
    the token sampled before it: ``sample`` then requests the logits of the token before them and of each draft.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool
    drafts: int = 0
    embeddings: NDArray[np.float32] | None = None
    positions: RowPositions | None = None

    @property
    def n_sampled(self) -> int:
        """Number of its tokens with logits."""
        return 1 + self.drafts if self.sample else 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request to the draft model for ``n_tokens`` after ``tokens``, all of those of a client's turn in ``slot``."""

    slot: int
    tokens: Sequence[int]
    n_tokens: int
    client_id: str


class DraftModel(Protocol):
    """A small model with the same vocabulary that drafts tokens; it has separate KV for each slot."""

    @property
    def cost(self) -> float:
        """Cost of one decode, in units of one of the model."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return drafts for requests sorted by ascending slot, at most one per slot.

        A draft has the requested length, or is missing while the turn's tokens are being prefilled.
        """


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token id, with its logprobs if requested."""

    token: int
    logprobs: SampledLogprobs | None = None


class DecodeError(Exception):
    """A batch could not be decoded; the KV of ``slots`` is invalid."""

    def __init__(self, slots: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.slots = tuple(slots)


class TurnSampler(Protocol):
    """The sampler chain of one turn; samplers of different turns run concurrently on several threads."""

    @property
    def wait_s(self) -> float:
        """Seconds until the next token may be sampled; 0 but for a scripted answer, which has a speed."""

    def sample(self, row: int) -> Sampled:
        """Sample and accept a token; ``row`` indexes the tokens with logits of the last decode."""

    def close(self) -> None:
        """Free the chain."""


class TextCodec(Protocol):
    """The vocabulary of a loaded model; all methods may be called from any thread."""

    @property
    def model(self) -> ModelInfo:
        """Properties of the loaded model."""

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, after: Sequence[int] = ()) -> list[int]:
        """Return the token ids of ``pieces``, with BOS if the model uses one and ``first`` is set.

        ``after`` are the tokens of the pieces before these, where a text is tokenized in two parts: together they are
        those of all its pieces.
        """

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; empty for control tokens."""

    def token_text(self, token: int) -> str:
        """Return a token's text in the template, control tokens included."""


class EmbeddingError(Exception):
    """A batch of texts could not be computed; other batches are unaffected."""


class Embedder(TextCodec, Protocol):
    """A model that computes one vector, or the score of a document, for each text of a batch; it keeps no state."""

    @property
    def max_texts(self) -> int:
        """Maximum number of texts in a batch."""

    def sequence(self, text: str) -> list[int]:
        """Return the tokens of a complete text, with the special tokens that the model puts around it."""

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document in the format of a reranking model."""

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return a row for each tokenized text, none of which is empty or longer than ``model.n_ctx``.

        Raises:
            EmbeddingError: llama.cpp could not compute the batch.
        """

    def close(self) -> None:
        """Free all resources."""


class Backend(TextCodec, Protocol):
    """What the executor needs. Worker threads call only ``tokenize`` and the token lookups.

    A saved sequence is owned by the caller. It can be restored into any slot of any engine whose backend has the same
    ``fingerprint``, but is not protected against corruption: the owner keeps a checksum.
    """

    @property
    def fingerprint(self) -> str:
        """Hex digest, equal where saved sequences are interchangeable, whatever the number of slots and tokens."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Approximate bytes per token of a saved sequence; at least 1."""

    @property
    def can_truncate(self) -> bool:
        """Whether ``truncate`` can cut anywhere; false for recurrent layers and sliding windows."""

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model, if one is configured."""

    @property
    def projector(self) -> Projector | None:
        """Turns images into rows; ``None`` for a model that does not see."""

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a generation."""

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; ``False`` when the slot had to be emptied instead."""

    def swap(self, a: int, b: int) -> None:
        """Swap the sequences of two slots.

        Raises:
            DecodeError: The KV of both is lost.
        """

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Replace the content of ``target`` by the first ``n_tokens`` of ``source``; ``False`` when it is empty now.

        Raises:
            ValueError: The slots are the same, or ``source`` holds fewer tokens.
        """

    def state_bytes(self, slot: int) -> int:
        """Return the bytes ``save`` would write now; 0 for an empty slot."""

    def save(self, slot: int, buffer: memoryview) -> int:
        """Write the slot's sequence into ``buffer`` and return its bytes; 0 on failure.

        The slot is unchanged. ``buffer`` is writable and has at least ``state_bytes(slot)`` bytes.
        """

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Replace a slot's content by a saved sequence of ``n_tokens``; ``False`` when the slot is empty now.

        ``data`` is only read and may be longer than the sequence.
        """

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode chunks sorted by ascending slot, at most one per slot.

        All tokens with logits must fit one batch.

        Raises:
            DecodeError: Some slots' KV is lost; the others are unchanged.
        """

    def decodes_apart(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether a ``decode`` for each of these chunks takes less time than one for all."""

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> TurnSampler:
        """Build a turn's sampler chain; the tail of ``prompt`` feeds the penalties.

        ``answer`` is what the turn generated before its prompt was shortened to ``prompt``; the slot holds it after the
        prompt. The penalties include it, and each token is drawn with the random number of the seed and its position in
        the answer, as if the answer had been sampled here. A ``constraint``, which has consumed ``answer``, restricts
        the tokens; the sampler advances it.

        Raises:
            InferenceCenterError: ``invalid_request`` for a parameter this model does not support.
        """

    def close(self) -> None:
        """Free all resources."""
