"""Slots of the backends without a model: they hold tokens, and a saved sequence is a list of these."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from typing import TYPE_CHECKING, Final

from inferencecenter.engine.backend import DecodeError
from inferencecenter.ipc.messages import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inferencecenter.engine.backend import Chunk, DraftModel
    from inferencecenter.engine.images import Projector
    from inferencecenter.ipc.engine_options import EngineOptions

# A saved sequence: magic, number of tokens and their checksum, then two bytes per token.
_STATE_HEADER: Final = struct.Struct("<4sII")
_STATE_MARK: Final = b"ECHO"
_TOKEN_BYTES: Final = 2


def simulated_model(  # noqa: PLR0913 - keyword-only but for the options
    options: EngineOptions,
    *,
    architecture: str,
    description: str,
    n_vocab: int,
    default_n_ctx: int,
    chat_template: str,
    control: Mapping[str, int],
    end: str,
    n_embd: int = 0,
) -> ModelInfo:
    """Return the properties of a model that is no file, with these ``control`` tokens; ``end`` ends a message."""
    n_ctx = options.n_ctx or default_n_ctx
    return ModelInfo(
        name=options.model_name or architecture,
        path="",
        description=description,
        architecture=architecture,
        backend=architecture,
        n_params=0,
        size_bytes=0,
        n_vocab=n_vocab,
        n_layers=0,
        n_gpu_layers=0,
        n_ctx_train=n_ctx,
        n_ctx=n_ctx,
        slots=options.slots,
        n_threads=1,
        chat_template=chat_template,
        bos_token="",
        eos_token=end,
        add_bos=False,
        special_tokens=tuple(control),
        sampling_defaults_json=b"{}",
        library="none",
        max_token_bytes=max(map(len, control)),
        kind=options.kind,
        n_embd=n_embd,
    )


class TokenSlots:
    """The part of ``engine.backend.Backend`` that moves KV, for ids below 65,536.

    Args:
        model: Gives the number of slots and the tokens of each.
    """

    def __init__(self, model: ModelInfo) -> None:
        self.model = model
        self._held: list[list[int]] = [[] for _ in range(model.slots)]
        # Of each token with logits its slot, and how many tokens the slot held up to it.
        self._rows: list[tuple[int, int]] = []

    @property
    def fingerprint(self) -> str:
        """The same digest for all of them: their states are tokens."""
        return hashlib.sha256(_STATE_MARK).hexdigest()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes per token of a saved sequence."""
        return _TOKEN_BYTES

    @property
    def can_truncate(self) -> bool:
        """Always true."""
        return True

    @property
    def draft_model(self) -> DraftModel | None:
        """Always none."""
        return None

    @property
    def projector(self) -> Projector | None:
        """Always none."""
        return None

    def held(self, slot: int) -> tuple[int, ...]:
        """Return the tokens in a slot's KV."""
        return tuple(self._held[slot])

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; never fails."""
        held = self._held[slot]
        if n_tokens > len(held):
            raise ValueError(f"slot {slot} holds {len(held)} tokens, not {n_tokens}")
        del held[n_tokens:]
        return True

    def swap(self, a: int, b: int) -> None:
        self._held[a], self._held[b] = self._held[b], self._held[a]

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Replace the content of ``target`` by the first ``n_tokens`` of ``source``; never fails.

        Raises:
            ValueError: The slots are the same, or ``source`` holds fewer tokens.
        """
        held = self._held[source]
        if source == target or not 0 <= n_tokens <= len(held):
            raise ValueError(f"slot {source} holds {len(held)} tokens; slot {target} cannot get {n_tokens} of them")
        self._held[target] = held[:n_tokens]
        return True

    def state_bytes(self, slot: int) -> int:
        """Return the bytes ``save`` would write now; 0 for an empty slot."""
        held = self._held[slot]
        return _STATE_HEADER.size + _TOKEN_BYTES * len(held) if held else 0

    def save(self, slot: int, buffer: memoryview) -> int:
        """Write the slot's tokens into ``buffer`` and return their bytes; 0 for an empty slot or too little room.

        Raises:
            ValueError: The buffer is read-only.
        """
        if buffer.readonly:
            raise ValueError("the buffer is read-only")
        size = self.state_bytes(slot)
        if not size or size > len(buffer):
            return 0
        tokens = struct.pack(f"<{len(self._held[slot])}H", *self._held[slot])
        _STATE_HEADER.pack_into(buffer, 0, _STATE_MARK, len(self._held[slot]), zlib.crc32(tokens))
        buffer[_STATE_HEADER.size : size] = tokens
        return size

    def restore(self, slot: int, data: memoryview, n_tokens: int) -> bool:
        """Replace a slot's content by saved tokens; ``False``, with the slot empty, for invalid or too many tokens."""
        self._held[slot] = []
        tokens = _saved_tokens(data)
        if tokens is None or len(tokens) != n_tokens or n_tokens > self.model.n_ctx:
            return False
        self._held[slot] = tokens
        return True

    def decodes_apart(self, chunks: Sequence[Chunk]) -> bool:
        """Return ``False``: any number of chunks takes as long."""
        del chunks
        return False

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots.

        Raises:
            DecodeError: A slot is full; nothing was appended.
            ValueError: The chunks are not sorted, empty, or do not continue their slots.
        """
        slots = [chunk.slot for chunk in chunks]
        if slots != sorted(set(slots)):
            raise ValueError(f"slots {slots} are not ascending")
        for chunk in chunks:
            held = len(self._held[chunk.slot])
            if chunk.start != held or not chunk.tokens:
                raise ValueError(f"slot {chunk.slot} holds {held} tokens; {chunk} does not continue them")
        full = [chunk.slot for chunk in chunks if chunk.start + len(chunk.tokens) > self.model.n_ctx]
        if full:
            raise DecodeError(full, f"slots {full} are full")
        for chunk in chunks:
            self._held[chunk.slot] += chunk.tokens
        self._rows = [
            (chunk.slot, len(self._held[chunk.slot]) - left)
            for chunk in chunks
            for left in range(chunk.n_sampled - 1, -1, -1)
        ]

    def row(self, row: int) -> tuple[int, ...]:
        """Return the tokens in KV up to a row of the last decode."""
        slot, n_tokens = self._rows[row]
        return tuple(self._held[slot][:n_tokens])

    def close(self) -> None:
        for held in self._held:
            held.clear()


def _saved_tokens(data: memoryview) -> list[int] | None:
    """Return the tokens of a saved sequence, after which ``data`` may continue; ``None`` if it is invalid."""
    if len(data) < _STATE_HEADER.size:
        return None
    mark, n_tokens, checksum = _STATE_HEADER.unpack_from(data)
    saved = data[_STATE_HEADER.size : _STATE_HEADER.size + _TOKEN_BYTES * n_tokens]
    if mark != _STATE_MARK or not n_tokens or len(saved) != _TOKEN_BYTES * n_tokens or zlib.crc32(saved) != checksum:
        return None
    return list(struct.unpack(f"<{n_tokens}H", saved))


def with_control_tokens(text: str, control: Mapping[str, int], tokenize: Callable[[str], Iterable[int]]) -> list[int]:
    """Return the tokens of a text of a template, in which the names of ``control`` tokens are these tokens."""
    if not control:
        return [*tokenize(text)]
    tokens: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, control))})", text):
        tokens += (control[part],) if part in control else tokenize(part)
    return tokens
