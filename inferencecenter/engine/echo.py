"""A backend without a model: it answers with the last user message and validates its KV as strictly as llama.cpp.

It serves to test everything except decoding. A token is a byte; two more ids are the control tokens of ChatML.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.backend import Sampled
from inferencecenter.engine.token_slots import TokenSlots, simulated_model, with_control_tokens
from inferencecenter.ipc.messages import SampledLogprobs, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from inferencecenter.engine.backend import Chunk
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import ModelInfo, PromptSegment
    from inferencecenter.protocol.params import Params

MESSAGE_START = 256
MESSAGE_END = 257
_CONTROL_TOKENS = {"<|im_start|>": MESSAGE_START, "<|im_end|>": MESSAGE_END}
_NAMES = {token: text for text, token in _CONTROL_TOKENS.items()}
_VOCABULARY = 258
_DEFAULT_CONTEXT_TOKENS = 4096
_EMBEDDING_WIDTH = 16
_USER_HEADER = [MESSAGE_START, *b"user\n"]
_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _model_info(options: EngineOptions, description: str) -> ModelInfo:
    return simulated_model(
        options,
        architecture="echo",
        description=description,
        n_vocab=_VOCABULARY,
        default_n_ctx=_DEFAULT_CONTEXT_TOKENS,
        chat_template=_TEMPLATE,
        control=_CONTROL_TOKENS,
        end=_NAMES[MESSAGE_END],
        n_embd=_EMBEDDING_WIDTH,
    )


class EchoVocabulary:
    """The tokens of the simulated model."""

    model: ModelInfo

    def tokenize(self, pieces: Sequence[PromptSegment], *, first: bool, after: Sequence[int] = ()) -> list[int]:
        """Return the bytes of ``pieces``, with control tokens parsed in special ones."""
        tokens: list[int] = []
        for piece in pieces:
            control = _CONTROL_TOKENS if piece.special else {}
            tokens += with_control_tokens(piece.text, control, str.encode)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Return the byte of a token; empty for control tokens."""
        return bytes((token,)) if token < MESSAGE_START else b""

    def token_text(self, token: int) -> str:
        """Return a control token's name, or the byte's character."""
        return _NAMES.get(token) or bytes((token,)).decode(errors="replace")


class EchoEmbedder(EchoVocabulary):
    """Embeds a text as its counts of token ids by remainder; a score is the overlap with the query.

    Args:
        options: Uses ``n_ctx``, ``model_name``, ``kind`` and ``echo_delay_ms``.
        sleep: Called with the delay in seconds at each batch.
    """

    max_texts = 256

    def __init__(self, options: EngineOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._delay_s = options.echo_delay_ms / 1000
        self._sleep = sleep
        self.model = _model_info(options, "counts the tokens of a text")

    def sequence(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def pair(self, query: str, document: str) -> list[int]:
        """Return the bytes of both, separated by a control token."""
        return [*query.encode(), MESSAGE_END, *document.encode()]

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the counts of each text, or how many different tokens of the query its document has."""
        if self._delay_s:
            self._sleep(self._delay_s)
        if self.model.kind == "embedding":
            return np.array(
                [
                    np.bincount([token % _EMBEDDING_WIDTH for token in text], minlength=_EMBEDDING_WIDTH)
                    for text in texts
                ],
                np.float32,
            )
        cuts = [list(text).index(MESSAGE_END) for text in texts]
        shared = [len({*text[:cut]} & {*text[cut + 1 :]}) for text, cut in zip(texts, cuts, strict=True)]
        return np.array(shared, np.float32)[:, None]

    def close(self) -> None:
        """Do nothing."""


class EchoBackend(EchoVocabulary, TokenSlots):
    """Slots of byte tokens.

    Args:
        options: Uses ``slots``, ``n_ctx``, ``model_name`` and ``echo_delay_ms``.
        sleep: Called with the delay in seconds at each decode.
    """

    def __init__(self, options: EngineOptions, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(_model_info(options, "answers with the last user message"))
        self._delay_s = options.echo_delay_ms / 1000
        self._sleep = sleep

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a message."""
        return token == MESSAGE_END

    def decode(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots, after the delay."""
        if self._delay_s:
            self._sleep(self._delay_s)
        super().decode(chunks)

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


class EchoSampler:
    """Spells one answer and verifies at each token that the KV holds the prompt and the sampled tokens.

    ``answer`` was sampled before and follows the prompt in the KV.
    """

    wait_s: float = 0.0

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
