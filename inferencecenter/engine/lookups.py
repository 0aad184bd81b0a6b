"""What the front asks about tokens, answered by the workers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import (
    Detokenize,
    Detokenized,
    LookupFailed,
    Tokenize,
    Tokenized,
    pack_tokens,
    unpack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from inferencecenter.engine.backend import Backend
    from inferencecenter.ipc.messages import FromEngine


class Lookups:
    """Answers each question with one frame.

    Args:
        backend: Whose vocabulary is asked about.
        pool: The workers.
        send: Sends a frame to the front, from any thread; may raise ``ConnectionError``.
        on_log: Called with level and text, from any thread.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        pool: Executor,
        send: Callable[[FromEngine], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._send = send
        self._on_log = on_log

    def take(self, question: Tokenize | Detokenize) -> None:
        """Have a worker answer."""
        self._pool.submit(self._answer, question)

    def _answer(self, question: Tokenize | Detokenize) -> None:
        answer: FromEngine
        try:
            answer = self._tokenized(question) if isinstance(question, Tokenize) else self._detokenized(question)
        except InferenceCenterError as error:
            answer = LookupFailed(question.ask_id, error.code.value, error.message)
        except Exception as error:  # noqa: BLE001 - a border: whoever asked waits for an answer
            self._on_log("error", f"a look-up of tokens failed: {error!r}")
            answer = LookupFailed(question.ask_id, ErrorCode.INTERNAL.value, "The tokens could not be looked up.")
        with suppress(ConnectionError):  # the reader has noticed that the front is gone
            self._send(answer)

    def _tokenized(self, question: Tokenize) -> Tokenized:
        tokens = self._backend.tokenize(question.pieces, first=question.first)
        return Tokenized(question.ask_id, pack_tokens(tokens), tuple(map(self._spelled, tokens)))

    def _detokenized(self, question: Detokenize) -> Detokenized:
        tokens, n_vocab = unpack_tokens(question.tokens), self._backend.model.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                return Detokenized(question.ask_id, "", unknown=token)
        return Detokenized(question.ask_id, b"".join(map(self._spelled, tokens)).decode(errors="replace"))

    def _spelled(self, token: int) -> bytes:
        return self._backend.token_bytes(token) or self._backend.token_text(token).encode()
