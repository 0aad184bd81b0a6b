"""The seam between the engine and what decodes: llama.cpp, or the echo backend that needs no model.

Slots are sequence ids ``0 .. model.slots - 1``; each holds its own KV stream of at most ``model.n_ctx`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.messages import ModelInfo, PromptSegment, SampledLogprobs
    from inferencecenter.protocol.params import Params


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slot in a batch: ``tokens[i]`` sits at position ``start + i``.

    ``sample`` asks for the logits of the last token. Its last ``drafts`` tokens are guesses, of which each is to be
    compared with what is sampled before it: then ``sample`` asks for the logits of the token before them and of theirs.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool
    drafts: int = 0

    @property
    def n_sampled(self) -> int:
        """How many of its tokens have logits."""
        return 1 + self.drafts if self.sample else 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token id, with its logprobs when the turn asked for them."""

    token: int
    logprobs: SampledLogprobs | None = None


class DecodeError(Exception):
    """A batch could not be decoded; the KV of ``slots`` cannot be trusted any more."""

    def __init__(self, slots: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.slots = tuple(slots)


class TurnSampler(Protocol):
    """The sampler chain of one turn; different turns' samplers run at once on different threads."""

    def sample(self, row: int) -> Sampled:
        """Sample and accept a token from the last decode; ``row`` counts its tokens with logits."""

    def close(self) -> None:
        """Free the chain."""


class Backend(Protocol):
    """What the executor needs. Worker threads call ``tokenize`` and the look-ups of tokens, and nothing else.

    A saved sequence belongs to whoever saved it. It can be restored into any slot of any engine whose backend has the
    same ``fingerprint``, but is not guarded against changed bytes: who keeps it keeps a checksum.
    """

    @property
    def model(self) -> ModelInfo:
        """Facts about the loaded model."""

    @property
    def fingerprint(self) -> str:
        """A hex digest that is equal where a saved sequence means the same, whatever the number of slots and tokens."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Roughly how many bytes a token takes in a saved sequence; at least 1."""

    @property
    def can_truncate(self) -> bool:
        """Whether ``truncate`` can cut anywhere: not so with recurrent layers and sliding windows."""

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool) -> list[int]:
        """Return the token ids of ``pieces``, BOS included where the model wants one and ``first`` is set."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes a token adds to the text; empty for control tokens."""

    def token_text(self, token: int) -> str:
        """Return a token's name as the template spells it, control tokens included."""

    def is_end(self, token: int) -> bool:
        """Tell whether the token ends a generation."""

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; ``False`` when the slot had to be emptied instead."""

    def swap(self, a: int, b: int) -> None:
        """Exchange the sequences of two slots.

        Raises:
            DecodeError: The KV of both is lost.
        """

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Replace what ``target`` holds by the first ``n_tokens`` of ``source``; ``False`` when it is empty now.

        Raises:
            ValueError: The slots are the same, or ``source`` holds fewer tokens.
        """

    def state_bytes(self, slot: int) -> int:
        """Return how many bytes ``save`` would write now; 0 for an empty slot."""

    def save(self, slot: int, buffer: memoryview) -> int:
        """Write the slot's sequence into ``buffer`` and return its bytes; 0 when it could not.

        The slot stays as it is. ``buffer`` is writable bytes, at least ``state_bytes(slot)`` of them.
        """

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Replace what a slot holds by a saved sequence of ``n_tokens``; ``False`` when the slot is empty now.

        ``data`` is only read, and may go on after the sequence.
        """

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Decode chunks sorted by ascending slot, at most one a slot.

        All tokens with logits must fit one batch.

        Raises:
            DecodeError: Some slots' KV is lost; the others are as before.
        """

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> TurnSampler:
        """Build a turn's sampler chain; the tail of ``prompt`` feeds the penalties.

        ``answer`` is what the turn generated before its prompt was made shorter to ``prompt``; the slot holds it after
        the prompt. The penalties see it as if it had been sampled here, and each token is drawn with the random number
        of the seed and its position in the answer, as it would have been. A ``constraint`` says what may be sampled;
        it has taken ``answer`` in, and the sampler keeps it up to date.

        Raises:
            InferenceCenterError: ``invalid_request`` for a parameter this model cannot obey.
        """

    def close(self) -> None:
        """Free everything."""
