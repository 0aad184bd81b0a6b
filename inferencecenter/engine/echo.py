"""A backend without a model: it answers with the last user message, and checks its KV as strictly as llama.cpp.

Everything but decoding can be tried with it. A token is a byte; two more ids are the control tokens of ChatML.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from inferencecenter.engine.backend import DecodeError, Sampled
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import ModelInfo, TokenLogprob, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.engine.backend import Chunk
    from inferencecenter.ipc.messages import EngineOptions, Piece
    from inferencecenter.protocol.params import Params

MESSAGE_START = 256
MESSAGE_END = 257
_CONTROL_TOKENS = {"<|im_start|>": MESSAGE_START, "<|im_end|>": MESSAGE_END}
_NAMES = {token: text for text, token in _CONTROL_TOKENS.items()}
_VOCABULARY = 258
_DEFAULT_CONTEXT_TOKENS = 4096
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
        options: ``slots``, ``n_ctx``, ``model_name`` and ``echo_delay_ms`` are obeyed.
        sleep: Called with the delay in seconds at each decode.
    """

    def __init__(self, options: EngineOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._held: list[list[int]] = [[] for _ in range(options.slots)]
        self._rows: list[int] = []
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
        )

    @property
    def model(self) -> ModelInfo:
        """Facts about the model that is not there."""
        return self._model

    def held(self, slot: int) -> tuple[int, ...]:
        """Return the tokens in a slot's KV."""
        return tuple(self._held[slot])

    def tokenize(self, pieces: Sequence[Piece], *, first: bool) -> list[int]:
        """Return the bytes of ``pieces``, control tokens recognised in special ones; ``first`` changes nothing."""
        tokens: list[int] = []
        for piece in pieces:
            tokens += _with_control_tokens(piece.text) if piece.special else piece.text.encode()
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token; empty for control tokens."""
        return bytes((token,)) if token < MESSAGE_START else b""

    def token_text(self, token: int) -> str:
        """Return a token's name: a control token's spelling, or the byte's character."""
        return _NAMES.get(token) or bytes((token,)).decode(errors="replace")

    def is_end(self, token: int) -> bool:
        """Tell whether the token ends a message."""
        return token == MESSAGE_END

    def truncate(self, slot: int, n_tokens: int) -> bool:
        """Keep the first ``n_tokens`` of a slot, which always works."""
        held = self._held[slot]
        if n_tokens > len(held):
            raise ValueError(f"slot {slot} holds {len(held)} tokens, not {n_tokens}")
        del held[n_tokens:]
        return True

    def swap(self, a: int, b: int) -> None:
        """Exchange the tokens of two slots."""
        self._held[a], self._held[b] = self._held[b], self._held[a]

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots.

        Raises:
            DecodeError: A slot is full; nothing was appended.
            ValueError: The chunks are not sorted, empty, or do not continue what their slots hold.
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
        self._rows = [chunk.slot for chunk in chunks if chunk.sample]

    def sampler(self, params: Params, prompt: Sequence[int]) -> EchoSampler:
        """Return the sampler that spells the answer to ``prompt``.

        Raises:
            InferenceCenterError: ``invalid_request`` for a bias: there are no logits to add it to.
        """
        if params.logit_bias:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "The echo backend has no logits that logit_bias could change.",
                hint="Leave logit_bias out, or serve a model.",
                field="params.logit_bias",
            )
        return EchoSampler(self, params, prompt)

    def row(self, row: int) -> tuple[int, ...]:
        """Return the tokens in KV under a row of the last decode."""
        return self.held(self._rows[row])

    def close(self) -> None:
        """Forget all tokens."""
        for held in self._held:
            held.clear()


class EchoSampler:
    """Spells one answer, and checks at each token that the KV is the prompt and what was sampled."""

    def __init__(self, backend: EchoBackend, params: Params, prompt: Sequence[int]) -> None:
        self._backend = backend
        self._n_probs = params.n_probs
        self._expected = list(prompt)
        self._prompt_tokens = len(prompt)
        self._answer = _last_message(self._expected)
        if not params.ignore_eos or not self._answer:
            self._answer = [*self._answer, MESSAGE_END]
        self._closed = False

    def sample(self, row: int) -> Sampled:
        """Return the next token of the answer, over and over with ``ignore_eos``.

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
        return Sampled(token, TokenLogprobs(certain, (certain,)))

    def close(self) -> None:
        """End the sampler.

        Raises:
            ValueError: It was closed before; llama.cpp would free its chain twice.
        """
        if self._closed:
            raise ValueError("the sampler is closed already")
        self._closed = True


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
    """Return the text of the last user message, or of a raw prompt all that follows the last end token."""
    tokens = list(prompt)
    end = len(tokens)
    for at in range(len(tokens) - len(_USER_HEADER), -1, -1):
        if tokens[at] == MESSAGE_START and tokens[at : at + len(_USER_HEADER)] == _USER_HEADER:
            start = at + len(_USER_HEADER)
            ends = (index for index in range(start, end) if tokens[index] == MESSAGE_END)
            return tokens[start : next(ends, end)]
    starts = (index + 1 for index in range(end - 1, -1, -1) if tokens[index] == MESSAGE_END)
    return [token for token in tokens[next(starts, 0) :] if token < MESSAGE_START]
