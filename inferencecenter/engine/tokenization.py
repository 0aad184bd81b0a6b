"""Submitted turns before the scheduler: grammar compilation, then tokenization of the prompt.

Each of the two is a job of the turn's client (see ``FairWorkers``). The loop's thread submits it to the workers and
takes its result from the inbox, so only that thread knows whether a turn is still here and which job it waits for. When
a turn ends early, its job is cancelled and its share of the text budget is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.engine.fair_workers import FairWorkers, Job, JobCancelledError
from inferencecenter.engine.images import find_spans
from inferencecenter.engine.output_processor import OutputProcessor, failure_of
from inferencecenter.engine.scheduler.state import EngineRequest
from inferencecenter.ipc.framing import FramingError
from inferencecenter.ipc.messages import (
    Detokenized,
    DetokenizeRequest,
    LookupAnswer,
    LookupFailed,
    Tokenized,
    TokenizeRequest,
    TokensCounted,
    pack_tokens,
    unpack_tokens,
)
from inferencecenter.protocol import params as turn_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.engine.backend import Backend, TextCodec
    from inferencecenter.engine.grammar_cache import CompiledGrammar, GrammarCache
    from inferencecenter.engine.images import ImageSpan, Projector
    from inferencecenter.engine.sampling.constraint import Constraint
    from inferencecenter.ipc.heartbeat import Heartbeat
    from inferencecenter.ipc.messages import FromEngine, PromptSegment, Submit
    from inferencecenter.protocol.params import Params


ROOM_BYTES: Final = 256 * 1024 * 1024
"""Bytes of submissions that may wait here, shared fairly among clients."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a submitted turn is compiled; its prompt is not tokenized yet."""

    turn_id: str
    grammar: CompiledGrammar


@dataclass(frozen=True, slots=True)
class TokenizedTurn:
    """A submitted turn for the scheduler, and its output, which has replayed the turn's earlier answer, if any."""

    request: EngineRequest
    output: OutputProcessor

    @property
    def turn_id(self) -> str:
        return self.request.turn_id

    @property
    def prompt(self) -> list[int]:
        """The tokens without the earlier answer."""
        return self.request.tokens[: self.request.prompt_tokens - self.output.n_answered]


@dataclass(frozen=True, slots=True)
class TokenizationFailed:
    """A submitted turn whose prompt could not be tokenized."""

    turn_id: str
    error: InferenceCenterError


@dataclass(frozen=True, slots=True)
class TextsTokenized:
    """The inputs of an ``Embed`` are tokenized."""

    turn_id: str
    texts: Sequence[Sequence[int]]


PreparationResult: TypeAlias = GrammarReady | TokenizedTurn | TokenizationFailed


@dataclass(slots=True)
class PendingSubmission:
    """A submitted turn; ``at_s`` is the monotonic second of its arrival, ``arrival`` its sequence number.

    With ``ending`` it ends for this reason once its earlier answer is tokenized. It counts ``size_bytes`` and waits for
    ``job``, which compiles its grammar if it ``needs_grammar``.
    """

    submit: Submit
    arrival: int
    at_s: float
    size_bytes: int
    job: Job | None = None
    needs_grammar: bool = False
    prepared: TokenizedTurn | TokenizationFailed | None = None
    ending: str | None = None


class TokenizationStage:
    """Prepares turns for the scheduler. Turns of a session leave in order of arrival.

    Args:
        backend: Tokenizes, on the workers.
        grammars: Compiles on its own thread: a turn that needs no new grammar does not wait for one.
        workers: Tokenize, beside other work.
        put: Takes the result of each job, on its thread.
        heartbeat: Records which turn's prompt a job works on.
        queue_timeout_s: Seconds within which a turn must get a slot; infinite for no limit.
        on_ready: Called with each turn that leaves.
        on_log: Called with level and text, from any thread.
    """

    def __init__(  # noqa: PLR0913 - keyword-only but for what it works on
        self,
        backend: Backend,
        *,
        grammars: GrammarCache,
        workers: FairWorkers,
        put: Callable[[PreparationResult], None],
        heartbeat: Heartbeat,
        queue_timeout_s: float,
        on_ready: Callable[[PendingSubmission, TokenizedTurn | TokenizationFailed], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self._backend = backend
        self._grammars = grammars
        self._workers = workers
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compilations = FairWorkers(self._compiler, most=1)
        self._put = put
        self._heartbeat = heartbeat
        self._queue_timeout_s = queue_timeout_s
        self._on_ready = on_ready
        self._on_log = on_log
        self._room = FairShare(ROOM_BYTES)
        self._pending: dict[str, PendingSubmission] = {}
        self._sessions: dict[str, deque[str]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, turn_id: str) -> PendingSubmission | None:
        """Return a turn that is still here."""
        return self._pending.get(turn_id)

    def of_session(self, session_id: str) -> tuple[str, ...]:
        """Return a session's turns that are still here, in order."""
        return tuple(self._sessions.get(session_id, ()))

    def add(self, submit: Submit, *, at_s: float, size_bytes: int) -> None:
        """Prepare a turn that arrived at ``at_s``; without room it fails with ``queue_full``."""
        self._arrivals += 1
        pending = PendingSubmission(submit, self._arrivals, at_s, size_bytes)
        begun = submit.accepted or submit.answer
        if not (begun or self._room.fits(submit.client_id, pending.size_bytes)):
            self._on_ready(pending, TokenizationFailed(submit.turn_id, no_room()))
            return
        self._room.add(submit.client_id, pending.size_bytes)
        self._pending[submit.turn_id] = pending
        self._sessions.setdefault(submit.session_id, deque()).append(submit.turn_id)
        grammar = None if submit.grammar is None else self._grammars.find(submit.grammar, submit.markers)
        if submit.grammar is not None and grammar is None:
            pending.needs_grammar = True
            self._submit_job(pending, self._compilations, partial(self._compile, submit))
        else:
            self._submit_job(pending, self._workers, partial(self._tokenize, pending, grammar))

    def take(self, result: PreparationResult) -> None:
        """Handle a job's result; it is dropped if its turn has ended meanwhile."""
        pending = self._pending.get(result.turn_id)
        if pending is None:
            return
        if isinstance(result, GrammarReady):
            if pending.needs_grammar:
                pending.needs_grammar = False
                self._submit_job(pending, self._workers, partial(self._tokenize, pending, result.grammar))
            return
        pending.prepared, pending.job = result, None
        self._advance(pending.submit.session_id)

    def conclude(self, pending: PendingSubmission, reason: str) -> None:
        """End a turn for this reason when it leaves; it generates nothing more, so it needs no grammar."""
        pending.ending = reason
        if pending.needs_grammar:
            pending.needs_grammar = False
            self._cancel_job(pending)
            self._submit_job(pending, self._workers, partial(self._tokenize, pending, None))

    def cancel(self, turn_id: str) -> PendingSubmission | None:
        """Remove and return a turn, if it is still here, and cancel its job."""
        pending = self._pending.pop(turn_id, None)
        if pending is not None:
            self._free(pending)
            session_id = pending.submit.session_id
            self._sessions[session_id].remove(turn_id)
            self._advance(session_id)
        return pending

    def clear(self) -> None:
        """Remove all turns and cancel their jobs."""
        for pending in self._pending.values():
            self._free(pending)
        self._pending.clear()
        self._sessions.clear()

    def close(self) -> None:
        """Stop the compiler thread."""
        self._compilations.close()
        self._grammars.interrupt()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _advance(self, session_id: str) -> None:
        turns = self._sessions[session_id]
        while turns and (prepared := self._pending[turns[0]].prepared) is not None:
            pending = self._pending.pop(turns.popleft())
            self._free(pending)
            self._on_ready(pending, prepared)
        if not turns:
            del self._sessions[session_id]

    def _submit_job(
        self, pending: PendingSubmission, workers: FairWorkers, work: Callable[[Job], TokenizedTurn | GrammarReady]
    ) -> None:
        run = partial(self._run, pending.submit.turn_id, workers, work)
        pending.job = Job(pending.submit.client_id, run, pending.size_bytes)
        workers.submit(pending.job)

    def _free(self, pending: PendingSubmission) -> None:
        """Free a turn's share of the budget and cancel its job."""
        self._room.remove(pending.submit.client_id, pending.size_bytes)
        self._cancel_job(pending)

    def _cancel_job(self, pending: PendingSubmission) -> None:
        if pending.job is not None:
            self._workers.cancel(pending.job)
            self._compilations.cancel(pending.job)
            self._grammars.interrupt()

    def _run(
        self, turn_id: str, workers: FairWorkers, work: Callable[[Job], TokenizedTurn | GrammarReady], job: Job
    ) -> None:
        """Run a turn's job on a worker thread and put its result into the inbox."""
        result: PreparationResult
        try:
            with self._heartbeat.preparing(turn_id):
                result = work(job)
        except JobCancelledError:
            return
        # Errors stay within their turn: a job that ends without a result would leave its turn waiting forever. A panic
        # in llguidance, which is written in Rust, is no ``Exception``.
        except BaseException as error:  # noqa: BLE001
            message = "The turn could not be prepared."
            result = TokenizationFailed(turn_id, failure_of(error, "preparing a turn", message, on_log=self._on_log))
        workers.unless_cancelled(job, partial(self._put, result))

    def _compile(self, submit: Submit, job: Job) -> GrammarReady:
        assert submit.grammar is not None, "it has one"
        grammar = self._grammars.compile(
            submit.grammar, submit.markers, client_id=submit.client_id, wanted=lambda: not job.cancelled
        )
        return GrammarReady(submit.turn_id, grammar)

    def _tokenize(self, pending: PendingSubmission, grammar: CompiledGrammar | None, job: Job) -> TokenizedTurn:
        submit = pending.submit
        answer = unpack_tokens(submit.answer)
        params = turn_params.decode(submit.params_json)
        constraint = None if grammar is None else self._constraint(grammar, params, answer)
        prompt, prefix_tokens = self._prompt(submit, job)
        output = OutputProcessor(
            submit,
            self._backend,
            params=params,
            prompt_tokens=len(prompt),
            n_ctx=self._backend.model.n_ctx,
            submitted_s=pending.at_s,
            answer=answer,
            constraint=constraint,
            queue_timeout_s=self._queue_timeout_s,
        )
        request = EngineRequest(
            turn_id=submit.turn_id,
            session_id=submit.session_id,
            client_id=submit.client_id,
            priority=submit.priority,
            arrival=pending.arrival,
            submitted_s=pending.at_s,
            prefix_tokens=prefix_tokens,
            public=submit.public,
            durable=submit.durable,
            tokens=prompt + answer,
            spans=self._spans(submit, prompt),
        )
        return TokenizedTurn(request, output)

    def _constraint(self, grammar: CompiledGrammar, params: Params, answer: Sequence[int]) -> Constraint:
        """Return the constraint that enforces the turn's grammar."""
        if params.ignore_eos:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "Structured output ends where its grammar is complete; ignore_eos cannot apply.",
                hint="Omit ignore_eos or the response format.",
                field="params.ignore_eos",
            )
        return self._grammars.constraint(grammar, answer)

    def _prompt(self, submit: Submit, job: Job) -> tuple[list[int], int]:
        """Return the tokens of the prompt, and how many of them are those of the shared pieces."""
        history = unpack_tokens(submit.tokens)
        if history:
            return history + self._pieces(submit.pieces, job, first=False), 0
        shared, own = submit.pieces[: submit.shared_pieces], submit.pieces[submit.shared_pieces :]
        prefix = self._pieces(shared, job, first=True) if shared else []
        return prefix + self._pieces(own, job, first=True, after=prefix), len(prefix)

    def _pieces(
        self, pieces: Sequence[PromptSegment], job: Job, *, first: bool, after: Sequence[int] = ()
    ) -> list[int]:
        return tokens_of(pieces, self._backend, self._backend.projector, job, first=first, after=after)

    def _spans(self, submit: Submit, tokens: Sequence[int]) -> tuple[ImageSpan, ...]:
        """Return the rows of images in a prompt."""
        images = {*submit.images, *(piece.image for piece in submit.pieces if piece.image is not None)}
        if not images or self._backend.projector is None:
            return ()
        return find_spans(tokens, images, self._backend.projector)


def tokens_of(  # noqa: PLR0913 - what it depends on, by name
    pieces: Sequence[PromptSegment],
    codec: TextCodec,
    projector: Projector | None,
    job: Job,
    *,
    first: bool,
    after: Sequence[int] = (),
) -> list[int]:
    """Return the tokens of texts and images; ``first`` and ``after`` are those of ``TextCodec.tokenize``.

    Raises:
        InferenceCenterError: ``invalid_request`` for an image without a projector.
    """
    tokens: list[int] = []
    begin = 0
    for number, piece in enumerate(pieces):
        if piece.image is None:
            continue
        if projector is None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                "This model does not take images.",
                hint="Choose a model with a projector (mmproj).",
                field="images",
            )
        tokens += codec.tokenize(job.each(pieces[begin:number]), first=first, after=[*after, *tokens])
        tokens += projector.tokens(piece.image)
        begin = number + 1
    return tokens + codec.tokenize(job.each(pieces[begin:]), first=first, after=[*after, *tokens])


def no_room() -> InferenceCenterError:
    """Return why a submission is refused that exceeds its client's share of the text that may wait."""
    return InferenceCenterError(
        ErrorCode.QUEUE_FULL,
        "The tokenization queue is full, and this client uses more than its share of it.",
        hint="Send less text at once and wait for answers before sending more.",
        retry_after_ms=1000,
    )


class TokenizerService:
    """Answers each tokenizer lookup with one frame, unless it is cancelled first.

    Args:
        backend: Provides the vocabulary.
        workers: Run the lookups.
        send: Sends a frame to the front, from any thread; may raise ``ConnectionError``.
        on_log: Called with level and text, from any thread.
        projector: The projector of a model that takes images.
    """

    def __init__(
        self,
        backend: TextCodec,
        *,
        workers: FairWorkers,
        send: Callable[[FromEngine], None],
        on_log: Callable[[str, str], None],
        projector: Projector | None = None,
    ) -> None:
        self._backend = backend
        self._projector = projector
        self._workers = workers
        self._jobs: dict[int, Job] = {}
        self._send = send
        self._on_log = on_log

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, question: TokenizeRequest | DetokenizeRequest) -> None:
        """Run a lookup on a worker."""
        job = Job(question.client_id, partial(self._answer, question), question.size_bytes)
        self._jobs[question.lookup_id] = job
        self._workers.submit(job)

    def cancel(self, lookup_id: int) -> None:
        """Cancel a lookup; an unknown one has just been answered."""
        if (job := self._jobs.pop(lookup_id, None)) is not None:
            self._workers.cancel(job)

    def clear(self) -> None:
        """Cancel all lookups."""
        for lookup_id in tuple(self._jobs):
            self.cancel(lookup_id)

    def _answer(self, question: TokenizeRequest | DetokenizeRequest, job: Job) -> None:
        answer: LookupAnswer
        try:
            if isinstance(question, TokenizeRequest):
                answer = self._tokenized(question, job)
            else:
                answer = self._detokenized(question, job)
        except JobCancelledError:
            return
        except Exception as error:  # noqa: BLE001 - a border: the caller waits for a reply
            failure = failure_of(error, "a token lookup", "The token lookup failed.", on_log=self._on_log)
            answer = LookupFailed(question.lookup_id, failure.code.value, failure.message)
        if self._jobs.pop(question.lookup_id, None) is not None:
            self._reply(answer)

    def _reply(self, answer: LookupAnswer) -> None:
        with suppress(ConnectionError):  # the reader has noticed that the front has disconnected
            try:
                self._send(answer)
            except FramingError as error:
                self._send(LookupFailed(answer.lookup_id, ErrorCode.MESSAGE_TOO_LARGE.value, str(error)))

    def _tokenized(self, question: TokenizeRequest, job: Job) -> Tokenized | TokensCounted:
        tokens = tokens_of(question.pieces, self._backend, self._projector, job, first=question.first)
        if question.count_only:
            return TokensCounted(question.lookup_id, len(tokens))
        return Tokenized(question.lookup_id, pack_tokens(tokens), tuple(map(self._spelled, job.each(tokens))))

    def _detokenized(self, question: DetokenizeRequest, job: Job) -> Detokenized:
        tokens, n_vocab = unpack_tokens(question.tokens), self._backend.model.n_vocab
        for token in tokens:
            if not 0 <= token < n_vocab:
                return Detokenized(question.lookup_id, "", unknown=token)
        return Detokenized(question.lookup_id, b"".join(map(self._spelled, job.each(tokens))).decode(errors="replace"))

    def _spelled(self, token: int) -> bytes:
        return self._backend.token_bytes(token) or self._backend.token_text(token).encode()
