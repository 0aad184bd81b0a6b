"""A backend without a model: it answers with the last user message and validates its KV as strictly as llama.cpp.

It serves to test everything except decoding. A token is a byte; two more ids are the control tokens of ChatML.
"""

from __future__ import annotations

import hashlib
import struct
import time
import zlib
from typing import TYPE_CHECKING

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import DecodeError, Sampled
from inferencecenter.ipc.messages import ModelInfo, SampledLogprobs, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.backend import Chunk, DraftModel
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import PromptSegment
    from inferencecenter.protocol.params import Params

MESSAGE_START = 256
MESSAGE_END = 257
_CONTROL_TOKENS = {"<|im_start|>": MESSAGE_START, "<|im_end|>": MESSAGE_END}
_NAMES = {token: text for text, token in _CONTROL_TOKENS.items()}
_VOCABULARY = 258
_DEFAULT_CONTEXT_TOKENS = 4096
# A saved sequence: magic, number of tokens and their checksum, then two bytes per token.
_STATE_HEADER = struct.Struct("<4sII")
_STATE_MARK = b"ECHO"
_TOKEN_BYTES = 2
_USER_HEADER = [MESSAGE_START, *b"user\n"]
_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class EchoBackend:
    """Slots of byte tokens.

    Args:
        options: Uses ``slots``, ``n_ctx``, ``model_name`` and ``echo_delay_ms``.
        sleep: Called with the delay in seconds at each decode.
    """

    def __init__(self, options: EngineOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._held: list[list[int]] = [[] for _ in range(options.slots)]
        # Of each token with logits its slot, and how many tokens the slot held up to it.
        self._rows: list[tuple[int, int]] = []
        self._delay_s = options.echo_delay_ms / 1000
        self._sleep = sleep
        n_ctx = options.n_ctx or _DEFAULT_CONTEXT_TOKENS
        self._model = ModelInfo(
            name=options.model_name or "echo",
            path="",
            description="answers with the last user message",
            architecture="echo",
            backend="echo",
            n_params=0,
            size_bytes=0,
            n_vocab=_VOCABULARY,
            n_layers=0,
            n_gpu_layers=0,
            n_ctx_train=n_ctx,
            n_ctx=n_ctx,
            slots=options.slots,
            n_threads=1,
            chat_template=_TEMPLATE,
            bos_token="",
            eos_token=_NAMES[MESSAGE_END],
            add_bos=False,
            special_tokens=tuple(_CONTROL_TOKENS),
            sampling_defaults_json=b"{}",
            library="none",
            max_token_bytes=max(4, *map(len, _CONTROL_TOKENS)),
        )

    @property
    def model(self) -> ModelInfo:
        """Properties of the simulated model."""
        return self._model

    @property
    def fingerprint(self) -> str:
        """The same digest for all echo backends: their states are tokens."""
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

    def held(self, slot: int) -> tuple[int, ...]:
        """Return the tokens in a slot's KV."""
        return tuple(self._held[slot])

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool) -> list[int]:
        """Return the bytes of ``pieces``, with control tokens parsed in special ones; ``first`` has no effect."""
        tokens: list[int] = []
        for piece in pieces:
            tokens += _with_control_tokens(piece.text) if piece.special else piece.text.encode()
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token; empty for control tokens."""
        return bytes((token,)) if token < MESSAGE_START else b""

    def token_text(self, token: int) -> str:
        """Return a control token's name, or the byte's character."""
        return _NAMES.get(token) or bytes((token,)).decode(errors="replace")

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a message."""
        return token == MESSAGE_END

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot; never fails."""
        held = self._held[slot]
        if n_tokens > len(held):
            raise ValueError(f"slot {slot} holds {len(held)} tokens, not {n_tokens}")
        del held[n_tokens:]
        return True

    def swap(self, a: int, b: int) -> None:
        """Swap the tokens of two slots."""
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
        if tokens is None or len(tokens) != n_tokens or n_tokens > self._model.n_ctx:
            return False
        self._held[slot] = tokens
        return True

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
        full = [chunk.slot for chunk in chunks if chunk.start + len(chunk.tokens) > self._model.n_ctx]
        if full:
            raise DecodeError(full, f"slots {full} are full")
        if self._delay_s:
            self._sleep(self._delay_s)
        for chunk in chunks:
            self._held[chunk.slot] += chunk.tokens
        self._rows = [
            (chunk.slot, len(self._held[chunk.slot]) - left)
            for chunk in chunks
            for left in range(chunk.n_sampled - 1, -1, -1)
        ]

    def sampler(
        self, params: Params, prompt: Sequence[int], answer: Sequence[int] = (), constraint: Constraint | None = None
    ) -> EchoSampler:
        """Return the sampler that spells the rest of the answer to ``prompt`` after ``answer``.

        Raises:
            InferenceCenterError: ``invalid_request`` for a logit bias, because there are no logits, or for a constraint
                that the message, the only possible answer, does not fit.
        """
        if params.logit_bias:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "The echo backend has no logits that logit_bias could change.",
                hint="Omit logit_bias, or serve a model.",
                field="params.logit_bias",
            )
        sampler = EchoSampler(self, params, prompt, answer)
        if constraint is not None and not constraint.fits(sampler.rest):
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "The echo backend answers with the last message, which does not match the requested grammar.",
                hint="Send a message that matches, or serve a model.",
            )
        return sampler

    def row(self, row: int) -> tuple[int, ...]:
        """Return the tokens in KV up to a row of the last decode."""
        slot, n_tokens = self._rows[row]
        return tuple(self._held[slot][:n_tokens])

    def close(self) -> None:
        """Clear all slots."""
        for held in self._held:
            held.clear()


class EchoSampler:
    """Spells one answer and verifies at each token that the KV holds the prompt and the sampled tokens.

    ``answer`` was sampled before and follows the prompt in the KV.
    """

    def __init__(self, backend: EchoBackend, params: Params, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
        self._backend = backend
        self._n_probs = params.n_probs
        self._expected = [*prompt, *answer]
        self._prompt_tokens = len(prompt)
        self._answer = _last_message(prompt)
        if not params.ignore_eos or not self._answer:
            self._answer = [*self._answer, MESSAGE_END]
        self._closed = False

    @property
    def rest(self) -> list[int]:
        """The rest of the answer, not repeated."""
        return self._answer[len(self._expected) - self._prompt_tokens :]

    def sample(self, row: int) -> Sampled:
        """Return the next token of the answer, repeating it with ``ignore_eos``.

        Raises:
            ValueError: The sampler is closed, or the KV is not that of its turn.
        """
        if self._closed:
            raise ValueError("the sampler is closed")
        held = self._backend.row(row)
        if held != tuple(self._expected):
            raise ValueError(f"row {row} has {len(held)} tokens in KV that are not the turn's {len(self._expected)}")
        token = self._answer[(len(held) - self._prompt_tokens) % len(self._answer)]
        self._expected.append(token)
        if not self._n_probs:
            return Sampled(token)
        certain = TokenLogprob(self._backend.token_text(token), token, 0.0)
        return Sampled(token, SampledLogprobs(certain, (certain,)))

    def close(self) -> None:
        """Close the sampler.

        Raises:
            ValueError: It was closed before; llama.cpp would free its chain twice.
        """
        if self._closed:
            raise ValueError("the sampler is closed already")
        self._closed = True


def _saved_tokens(data: memoryview) -> list[int] | None:
    """Return the tokens of a saved sequence, after which ``data`` may continue; ``None`` if it is invalid."""
    if len(data) < _STATE_HEADER.size:
        return None
    mark, n_tokens, checksum = _STATE_HEADER.unpack_from(data)
    saved = data[_STATE_HEADER.size : _STATE_HEADER.size + _TOKEN_BYTES * n_tokens]
    if mark != _STATE_MARK or not n_tokens or len(saved) != _TOKEN_BYTES * n_tokens or zlib.crc32(saved) != checksum:
        return None
    return list(struct.unpack(f"<{n_tokens}H", saved))


def _with_control_tokens(text: str) -> list[int]:
    tokens: list[int] = []
    while text:
        found = [(at, name) for name in _CONTROL_TOKENS if (at := text.find(name)) >= 0]
        at, name = min(found, default=(len(text), ""))
        tokens += text[:at].encode()
        if name:
            tokens.append(_CONTROL_TOKENS[name])
        text = text[at + len(name) :]
    return tokens


def _last_message(prompt: Sequence[int]) -> list[int]:
    """Return the text of the last user message, or, of a raw prompt, everything after the last end token."""
    tokens = list(prompt)
    end = len(tokens)
    for at in range(len(tokens) - len(_USER_HEADER), -1, -1):
        if tokens[at] == MESSAGE_START and tokens[at : at + len(_USER_HEADER)] == _USER_HEADER:
            start = at + len(_USER_HEADER)
            ends = (index for index in range(start, end) if tokens[index] == MESSAGE_END)
            return tokens[start : next(ends, end)]
    starts = (index + 1 for index in range(end - 1, -1, -1) if tokens[index] == MESSAGE_END)
    return [token for token in tokens[next(starts, 0) :] if token < MESSAGE_START]
