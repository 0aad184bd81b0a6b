"""The loop of an embedding engine: read commands, compute a batch of texts, send its vectors.

Mechanism: requests are tokenized, long ones by the workers, then wait in an ``EmbeddingQueue``. Each step takes a batch
of texts from it, of any requests and clients, up to a number of tokens: of the highest class first, within a class one
text after the other from the client with the least service. A text is computed in one piece and leaves no state, so
aborting or resubmitting a request costs at most the current batch. Invariant: the vectors of a request are sent in the
order of its inputs, and every request gets exactly one terminal event, unless the engine is suspended.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import numpy as np

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.engine.backend import EmbeddingError
from inferencecenter.engine.fair_workers import Job, JobCancelledError
from inferencecenter.engine.loop import CommandLoop, LoopGauges, wrong_kind
from inferencecenter.engine.output_processor import failed, failure_of
from inferencecenter.engine.tokenization import (
    ROOM_BYTES,
    TextsTokenized,
    TokenizationFailed,
    no_room,
)
from inferencecenter.ipc.messages import (
    LOWEST_CLASS,
    Cancelled,
    Embed,
    EmbeddingDelta,
    EmbeddingDone,
    EngineLimits,
    StepStats,
    Submit,
    unpack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from inferencecenter.engine.backend import Embedder
    from inferencecenter.engine.inbox import Inbox, KvFetched, ReceivedCommand
    from inferencecenter.engine.tokenization import PreparationResult
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.heartbeat import Heartbeat
    from inferencecenter.ipc.messages import (
        FromEngine,
        ImageData,
        KvRamLimit,
        ReleaseSession,
        RetainSessions,
        TurnEvent,
    )

_SHORT_BYTES: Final = 4096
"""Size of a request that is tokenized in less than a millisecond."""
_SHOWN_CHARS: Final = 40


@dataclass(slots=True, eq=False)
class EmbeddingRequest:
    """A submitted request; ``texts`` are tokenized, of which the first ``next`` were given to batches.

    It arrived at ``at_s`` and got its first batch at ``started_s``, in monotonic seconds.
    """

    embed: Embed
    at_s: float
    size_bytes: int
    texts: Sequence[Sequence[int]] = ()
    next: int = 0
    started_s: float | None = None
    job: Job | None = None

    @property
    def turn_id(self) -> str:
        return self.embed.turn_id

    @property
    def client_id(self) -> str:
        return self.embed.client_id

    @property
    def taken(self) -> bool:
        """Whether all its texts were given to batches."""
        return self.next == len(self.texts)


@dataclass(frozen=True, slots=True)
class BatchText:
    """The text number ``index`` of a request, in a batch."""

    request: EmbeddingRequest
    index: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.texts[self.index]


class EmbeddingQueue:
    """Tokenized requests, from which batches are taken.

    A request rises a class each time it has waited ``ageing_s``. Within a class the client with the least service, in
    tokens, goes first; a client that arrives starts with the least service of those that wait.
    """

    def __init__(self, *, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._requests: dict[str, dict[str, EmbeddingRequest]] = {}
        self._served: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._requests.values()))

    def add(self, request: EmbeddingRequest) -> None:
        client_id = request.client_id
        if client_id not in self._requests:
            self._served[client_id] = min((self._served[other] for other in self._requests), default=0)
            self._requests[client_id] = {}
        self._requests[client_id][request.turn_id] = request

    def discard(self, request: EmbeddingRequest) -> None:
        """Remove a request, if it is here."""
        requests = self._requests.get(request.client_id, {})
        requests.pop(request.turn_id, None)
        if not requests:
            self._requests.pop(request.client_id, None)
            self._served.pop(request.client_id, None)

    def take(self, *, max_tokens: int, max_texts: int, lowest_class: int, now: float) -> list[BatchText]:
        """Take the next texts, at least one if there is any of the classes down to ``lowest_class``."""
        lines = {
            client_id: iter(self._in_order(requests.values(), lowest_class, now))
            for client_id, requests in self._requests.items()
        }
        # The next request of each client by its claim: class and service; clients are unique.
        heap: list[tuple[int, int, str, EmbeddingRequest]] = []

        def push_next(client_id: str) -> None:
            if (entry := next(lines[client_id], None)) is not None:
                heapq.heappush(heap, (entry[0], self._served[client_id], client_id, entry[1]))

        for client_id in lines:
            push_next(client_id)
        batch: list[BatchText] = []
        room = max_tokens
        while heap and len(batch) < max_texts:
            rank, _, client_id, request = heap[0]
            text = BatchText(request, request.next)
            n_tokens = len(text.tokens)
            if batch and n_tokens > room:
                break
            batch.append(text)
            room -= n_tokens
            self._served[client_id] += n_tokens
            request.next += 1
            if request.taken:
                heapq.heappop(heap)
                self.discard(request)
                push_next(client_id)
            else:
                heapq.heapreplace(heap, (rank, self._served[client_id], client_id, request))
        return batch

    def _in_order(
        self, requests: Iterable[EmbeddingRequest], lowest_class: int, now: float
    ) -> list[tuple[int, EmbeddingRequest]]:
        """Return a client's requests of the allowed classes, each with its class: by class, then the oldest first."""
        ranked = [(self._class(each, now), each) for each in requests if each.embed.priority <= lowest_class]
        return sorted(ranked, key=lambda pair: pair[0])

    def _class(self, request: EmbeddingRequest, now: float) -> int:
        return max(0, request.embed.priority - int((now - request.at_s) / self._ageing_s))


class EmbeddingLoop(CommandLoop):
    """Computes embeddings until the front disconnects.

    Args:
        embedder: The loop's thread is the only caller, except for the vocabulary.
        options: Size of a batch, how long requests may wait, and the number of worker threads.
        inbox, heartbeat, send, clock: See ``CommandLoop``.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        embedder: Embedder,
        options: EngineOptions,
        *,
        inbox: Inbox,
        heartbeat: Heartbeat,
        send: Callable[[FromEngine], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(embedder, options, inbox=inbox, heartbeat=heartbeat, send=send, clock=clock)
        self._embedder = embedder
        self._batch_tokens = options.n_ubatch
        self._room = FairShare(ROOM_BYTES)
        self._requests: dict[str, EmbeddingRequest] = {}
        self._queue = EmbeddingQueue(ageing_s=options.ageing_s)
        self._limits = EngineLimits(active_slots=1)

    def _wait(self) -> None:
        if (
            not self._has_work
            and (command := self._inbox.get(timeout_s=self._deadlines.wait_s(self._clock()))) is not None
        ):
            self._handle(command)

    @property
    def _has_work(self) -> bool:
        # With a pause after each step, classes may be barred: then the next limits are awaited.
        return bool(self._queue) and (self._limits.lowest_class == LOWEST_CLASS or self._has_allowed())

    def _has_allowed(self) -> bool:
        waiting = (each for each in self._requests.values() if each.texts and not each.taken)
        return any(each.embed.priority <= self._limits.lowest_class for each in waiting)

    def _step(self, now: float) -> None:
        batch = self._queue.take(
            max_tokens=max(1, round(self._batch_tokens * self._limits.prefill_share)),
            max_texts=self._embedder.max_texts,
            lowest_class=self._limits.lowest_class,
            now=now,
        )
        if not batch:
            return
        for text in batch:
            text.request.started_s = text.request.started_s or now
        self._heartbeat.step(tuple(dict.fromkeys(text.request.turn_id for text in batch)))
        self._compute(batch)
        self._heartbeat.step(())
        n_tokens = sum(len(text.tokens) for text in batch)
        self._work = StepStats(step_s=self._clock() - now, texts=len(batch), text_tokens=n_tokens)
        self._throttle.begin()

    def _is_active(self, turn_id: str) -> bool:
        return turn_id in self._requests

    def _end_expired(self, turn_id: str, *, now: float) -> None:
        request = self._requests.get(turn_id)
        if request is not None and request.started_s is None and now >= request.at_s + self._queue_timeout_s:
            error = f"The request waited {self._queue_timeout_s:g} s and was not begun."
            self._fail(request, InferenceCenterError(ErrorCode.QUEUE_TIMEOUT, error))

    def _compute(self, batch: Sequence[BatchText]) -> None:
        """Compute a batch; if it fails, compute its texts one by one, so that a defect fails only its own request."""
        try:
            rows = self._embedder.embed([text.tokens for text in batch])
        except EmbeddingError as error:
            if len(batch) == 1:
                self._fail(batch[0].request, InferenceCenterError(ErrorCode.INTERNAL, str(error)))
                return
            for text in batch:
                if text.request.turn_id in self._requests:
                    self._compute([text])
            return
        start = 0
        for end in range(1, len(batch) + 1):  # texts of a request follow one another, or come in several deltas
            if end == len(batch) or batch[end].request is not batch[start].request:
                self._deliver(batch[start:end], rows[start:end])
                start = end

    def _deliver(self, texts: Sequence[BatchText], rows: NDArray[np.float32]) -> None:
        request = texts[0].request
        if request.turn_id not in self._requests:  # another of its texts failed
            return
        embed = request.embed
        vectors = rows if embed.query is not None else normalized(rows[:, : embed.dimensions or None])
        if not np.isfinite(vectors).all():
            self._fail(request, InferenceCenterError(ErrorCode.INTERNAL, "the model computed no finite numbers"))
            return
        n_tokens = sum(len(text.tokens) for text in texts)
        self._events.append(
            EmbeddingDelta(request.turn_id, vectors.astype("<f4", copy=False).tobytes(), len(texts), n_tokens)
        )
        if texts[-1].index == len(request.texts) - 1:
            now, started_s = self._clock(), request.started_s or request.at_s
            self._end(
                request,
                EmbeddingDone(request.turn_id, 1000 * (started_s - request.at_s), 1000 * (now - request.at_s)),
            )

    def _gauges(self) -> LoopGauges:
        running = sum(each.started_s is not None for each in self._requests.values())
        return LoopGauges(running, len(self._requests) - running)

    def _manage_kv(self, command: ReleaseSession | RetainSessions | KvRamLimit) -> None:
        """Do nothing: no KV is kept."""

    def _take_result(self, result: PreparationResult | TextsTokenized | KvFetched | ImageData) -> None:
        match result:
            case TextsTokenized(turn_id=turn_id, texts=texts) if turn_id in self._requests:
                self._enqueue(self._requests[turn_id], texts)
            case TokenizationFailed(turn_id=turn_id, error=error) if turn_id in self._requests:
                self._fail(self._requests[turn_id], error)

    def _submit(self, received: ReceivedCommand, request: Submit | Embed) -> None:
        if isinstance(request, Submit):
            self._refuse(request.turn_id, "makes embeddings and generates no text")
        else:
            self._add(EmbeddingRequest(request, received.at_s, received.size_bytes))

    def _abort(self, turn_id: str) -> None:
        if (request := self._requests.get(turn_id)) is not None:
            self._end(request, Cancelled(turn_id))

    def _limit(self, limits: EngineLimits) -> None:
        self._limits = limits

    def _add(self, request: EmbeddingRequest) -> None:
        embed = request.embed
        if not (embed.accepted or self._room.fits(embed.client_id, request.size_bytes)):
            self._events.append(failed(embed.turn_id, no_room()))
            return
        self._room.add(embed.client_id, request.size_bytes)
        self._requests[embed.turn_id] = request
        self._deadlines.add(embed.turn_id, (request.at_s + self._queue_timeout_s,))
        request.job = Job(embed.client_id, partial(self._put_tokenized, embed), request.size_bytes)
        if request.size_bytes > _SHORT_BYTES:
            self._workers.submit(request.job)
        elif (result := self._tokenize(embed, request.job)) is not None:
            self._handle(result)  # at once, so that short requests that come together are computed together

    def _put_tokenized(self, embed: Embed, job: Job) -> None:
        result = self._tokenize(embed, job)
        if result is not None and not job.cancelled:
            self._inbox.put(result)

    def _tokenize(self, embed: Embed, job: Job) -> TextsTokenized | TokenizationFailed | None:
        """Return the tokens of a request's inputs, or why there are none; ``None`` if the job was cancelled."""
        try:
            with self._heartbeat.preparing(embed.turn_id):
                self._check(embed)
                texts = tuple(self._tokens(embed, index) for index in job.each(range(len(embed.inputs))))
        except JobCancelledError:
            return None
        except Exception as error:  # noqa: BLE001 - a border: without a result the request would wait forever
            return TokenizationFailed(embed.turn_id, failure_of(error, "tokenizing a request", on_log=self._on_log))
        return TextsTokenized(embed.turn_id, texts)

    def _check(self, embed: Embed) -> None:
        model = self._embedder.model
        if (embed.query is not None) != (model.kind == "reranking"):
            raise wrong_kind("ranks documents" if embed.query is None else "makes embeddings and ranks no documents")
        if embed.dimensions not in (0, model.n_embd) and (embed.dimensions > model.n_embd or not embed.matryoshka):
            may = "" if embed.matryoshka else " and cannot be shortened"
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"dimensions is {embed.dimensions}; this model's vectors have {model.n_embd} numbers{may}",
                field="dimensions",
                hint=None if embed.matryoshka else "Omit it; an operator can allow it by matryoshka of [models.NAME].",
            )

    def _tokens(self, embed: Embed, index: int) -> Sequence[int]:
        """Return the tokens of an input.

        Raises:
            InferenceCenterError: ``prompt_too_long``, or ``invalid_request`` for an input that has no tokens, or
                numbers that are none.
        """
        embedding_input, number = embed.inputs[index], embed.done + index
        name = f"input.{number}" if embed.query is None else f"documents.{number}"
        tokens: Sequence[int]
        if not embedding_input.text:
            tokens = unpack_tokens(embedding_input.tokens)
        elif embed.query is None:
            tokens = self._embedder.sequence(embedding_input.text)
        else:
            tokens = self._embedder.pair(embed.query, embedding_input.text)
        model = self._embedder.model
        unknown = next((token for token in tokens if not 0 <= token < model.n_vocab), None)
        if unknown is not None:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST, f"{unknown} in {name} is not a token of this model", field=name
            )
        if not tokens:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"{name} is empty", field=name)
        if len(tokens) > model.n_ctx and embed.truncate and embedding_input.text and embed.query is None:
            tokens = self._truncated(tokens)
        if len(tokens) > model.n_ctx:
            begin = f" (it begins with {embedding_input.text[:_SHOWN_CHARS]!r})" if embedding_input.text else ""
            raise InferenceCenterError(
                ErrorCode.PROMPT_TOO_LONG,
                f"{name} has {len(tokens)} tokens{begin}; this model's maximum context length is {model.n_ctx} tokens",
                field=name,
                hint="Split it into shorter texts.",
            )
        return tokens

    def _truncated(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return as many tokens of a text as the model reads: the first ones, and those that it wants at the end."""
        ends = zip(reversed(self._embedder.sequence("")), reversed(tokens), strict=False)
        n_end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
        return [*tokens[: self._embedder.model.n_ctx - n_end], *tokens[len(tokens) - n_end :]]

    def _enqueue(self, request: EmbeddingRequest, texts: Sequence[Sequence[int]]) -> None:
        request.texts, request.job = texts, None
        self._queue.add(request)

    def _fail(self, request: EmbeddingRequest, error: InferenceCenterError) -> None:
        self._end(request, failed(request.turn_id, error))

    def _end(self, request: EmbeddingRequest, event: TurnEvent) -> None:
        """Remove a request, with its last event."""
        del self._requests[request.turn_id]
        self._forget(request)
        self._events.append(event)

    def _forget(self, request: EmbeddingRequest) -> None:
        self._queue.discard(request)
        self._room.remove(request.client_id, request.size_bytes)
        if request.job is not None:
            self._workers.cancel(request.job)

    def _drop_all(self, *, park_all: bool) -> int:
        """Drop all requests; the next engine gets them again."""
        self._drop_turns()
        return 0

    def _drop_turns(self) -> None:
        for request in self._requests.values():
            self._forget(request)
        self._requests.clear()


def normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows scaled to length 1; a row of zeros stays one."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    return (rows / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
