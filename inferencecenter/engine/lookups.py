"""What the front asks about tokens, answered by the workers."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from inferencecenter.engine.fair_workers import Job, WithdrawnError
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.framing import FrameError
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

    from inferencecenter.engine.backend import Backend
    from inferencecenter.engine.fair_workers import FairWorkers
    from inferencecenter.ipc.messages import FromEngine


class Lookups:
    """Answers each question with one frame, unless it is withdrawn before.

    Args:
        backend: Whose vocabulary is asked about.
        workers: Who answer.
        send: Sends a frame to the front, from any thread; may raise ``ConnectionError``.
        on_log: Called with level and text, from any thread.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        workers: FairWorkers,
        send: Callable[[FromEngine], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._jobs: dict[int, Job] = {}
        self._send = send
        self._on_log = on_log

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self, question: Tokenize | Detokenize) -> None:
        """Have a worker answer."""
        job = Job(question.client_id, partial(self._answer, question), question.size_bytes)
        self._jobs[question.ask_id] = job
        self._workers.submit(job)

    def withdraw(self, ask_id: int) -> None:
        """Leave a question unanswered; one that is unknown has just been answered."""
        if (job := self._jobs.pop(ask_id, None)) is not None:
            self._workers.withdraw(job)

    def _answer(self, question: Tokenize | Detokenize, job: Job) -> None:
        answer: Tokenized | Detokenized | LookupFailed
        try:
            if isinstance(question, Tokenize):
                answer = self._tokenized(question, job)
            else:
                answer = self._detokenized(question, job)
        except WithdrawnError:
            return
        except InferenceCenterError as error:
            answer = LookupFailed(question.ask_id, error.code.value, error.message)
        except Exception as error:  # noqa: BLE001 - a border: what asked waits for an answer
            self._on_log("error", f"a look-up of tokens failed: {error!r}")
            answer = LookupFailed(question.ask_id, ErrorCode.INTERNAL.value, "The tokens could not be looked up.")
        if self._jobs.pop(question.ask_id, None) is not None:
            self._reply(answer)

    def _reply(self, answer: Tokenized | Detokenized | LookupFailed) -> None:
        with suppress(ConnectionError):  # the reader has noticed that the front is gone
            try:
                self._send(answer)
            except FrameError as error:
                self._send(LookupFailed(answer.ask_id, ErrorCode.MESSAGE_TOO_LARGE.value, str(error)))

    def _tokenized(self, question: Tokenize, job: Job) -> Tokenized:
        tokens = self._backend.tokenize(job.each(question.pieces), first=question.first)
        return Tokenized(question.ask_id, pack_tokens(tokens), tuple(map(self._spelled, job.each(tokens))))

    def _detokenized(self, question: Detokenize, job: Job) -> Detokenized:
        tokens, n_vocab = unpack_tokens(question.tokens), self._backend.model.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                return Detokenized(question.ask_id, "", unknown=token)
        return Detokenized(question.ask_id, b"".join(map(self._spelled, job.each(tokens))).decode(errors="replace"))

    def _spelled(self, token: int) -> bytes:
        return self._backend.token_bytes(token) or self._backend.token_text(token).encode()
