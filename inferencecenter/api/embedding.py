"""Requests for vectors and scores of all APIs.

A request is a turn without a session: ``EmbeddingJob`` is its interface to the engine. It keeps received vectors, so
that after the loss of an engine the next one computes only the others. It ends exactly once, by ``on_end``.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Cancelled, Embed, EmbeddingDelta, EmbeddingDone, EmbeddingInput, Failed
from inferencecenter.sessions.context import PRIORITY_RANK, check_model
from inferencecenter.sessions.journal import UsageRecorded
from inferencecenter.sessions.model_router import load_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferencecenter.api.endpoint import Call
    from inferencecenter.auth.account import Account
    from inferencecenter.ipc.messages import TurnEvent
    from inferencecenter.protocol.values import Priority
    from inferencecenter.server.context import ServerContext

MAX_TEXTS: Final = 2048
"""Maximum number of texts per request, as in OpenAI's API."""
FLOAT_BYTES: Final = 4
_WRITTEN_BYTES: Final = 16
"""Bytes of a number in a response, with the four that it is written from."""
_USUAL_NUMBERS: Final = 1024
"""Numbers of a vector of a model that is not loaded yet and whose file does not state them."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A request: vectors of ``inputs`` or, with a ``query``, their scores as documents.

    ``truncate`` cuts texts that are too long, which are refused otherwise. ``dimensions`` other than the model's are
    refused unless it allows them; ``cut_vectors`` cuts any model's vectors, and ignores more numbers than they have.
    """

    model: str | None
    inputs: tuple[EmbeddingInput, ...]
    query: str | None = None
    dimensions: int | None = None
    truncate: bool = False
    cut_vectors: bool = False
    priority: Priority | None = None

    @property
    def kind(self) -> str:
        """The kind of model that it needs."""
        return "embedding" if self.query is None else "reranking"


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The vectors of all inputs in order, as little-endian float32, by which model, and the tokens of the inputs."""

    model: str
    vectors: bytes
    n_inputs: int
    n_tokens: int

    def _rows(self) -> Sequence[bytes]:
        n_bytes = FLOAT_BYTES * self.dimensions
        return [self.vectors[start : start + n_bytes] for start in range(0, len(self.vectors), n_bytes)]

    @property
    def dimensions(self) -> int:
        """The length of each vector."""
        return len(self.vectors) // self.n_inputs // FLOAT_BYTES

    def base64(self) -> list[str]:
        """Return the vectors as base64."""
        return [b64encode(row).decode() for row in self._rows()]

    def ranking(self, top_n: int | None) -> list[tuple[int, float]]:
        """Return the ``top_n`` best documents, or all, as index and score, which is their vector's only number."""
        return sorted(enumerate(array("f", self.vectors).tolist()), key=lambda each: -each[1])[:top_n]


Outcome: TypeAlias = EmbeddingResult | InferenceCenterError | None
"""How a request ended; ``None`` if it was aborted."""


class EmbeddingJob:
    """A request from its submission to its end; implements ``ipc.port.EngineTurn``.

    Args:
        context: The rest of the daemon.
        client: The sender.
        call: The request.
        on_end: Called with the outcome, once, on the event loop, and never by the constructor.
        hold: Called with the size of the response in bytes before anything is computed; may raise.

    Raises:
        InferenceCenterError: The request is refused: ``model_not_found``, ``forbidden``, ``invalid_request`` for a
            model of another kind, ``rate_limited``, ``quota_exceeded``, ``overloaded``, or what the engine raises.
    """

    def __init__(
        self,
        context: ServerContext,
        client: Account,
        call: EmbeddingCall,
        *,
        on_end: Callable[[Outcome], None],
        hold: Callable[[int], None] | None = None,
    ) -> None:
        limits = context.limits_of(client.client_id, client.token_id)
        self.turn_id = f"emb_{secrets.token_urlsafe(16)}"
        self.client_id = client.client_id
        self.n_tokens = 0  # none are generated
        self.model = _model_of(context, call)
        check_model(self.model, limits)
        _check_kind(context, self.model, call.kind)
        self._context = context
        self._token_id = client.token_id
        self._priority = PRIORITY_RANK[client.allow_priority(call.priority, otherwise=client.priority)]
        self._call = call
        self._matryoshka = context.models.spec_of(self.model).matryoshka
        self._on_end = on_end
        self._quota = context.quotas.of(client.client_id, client.token_id)
        self._vectors: list[bytes] = []
        self._n_done = 0
        self._n_read = 0
        self._quota_is_used_up = False
        context.sessions.admit()
        self._quota.check_turn()
        if hold is not None:
            hold(self._response_bytes())
        if context.models.engine(self.model).status.model is None:
            try:
                context.models.ensure_loaded(self.model, self.client_id)
            except InferenceCenterError as error:
                raise load_refusal(self.model, error) from error
        context.models.engine(self.model).submit(self)
        self._quota.begin_turn()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.turn_id}, {self.model!r}, {self._n_done} of {len(self._call.inputs)})"

    def abort(self) -> None:
        """End the request; it costs the engine at most the batch that it computes."""
        self._context.models.engine(self.model).abort(self.turn_id)

    def _response_bytes(self) -> int:
        """Return the approximate size of the response in bytes: an unread response stays in memory."""
        call, models = self._call, self._context.models
        loaded = models.engine(self.model).status.model
        width = loaded.n_embd if loaded else models.spec_of(self.model).n_embd or _USUAL_NUMBERS
        n_numbers = 1 if call.query is not None else call.dimensions or width
        return _WRITTEN_BYTES * n_numbers * len(call.inputs)

    # The engine's side.

    @property
    def session_kv(self) -> None:
        """There is no session."""

    def submission(self, then: Callable[[], None]) -> Embed:
        """Return the remaining inputs; see ``EngineTurn``."""
        call, dimensions = self._call, self._call.dimensions or 0
        loaded = self._context.models.engine(self.model).status.model
        if call.cut_vectors and loaded is not None:
            dimensions = min(dimensions, loaded.n_embd)
        return Embed(
            turn_id=self.turn_id,
            client_id=self.client_id,
            priority=self._priority,
            inputs=call.inputs[self._n_done :],
            query=call.query,
            dimensions=dimensions,
            matryoshka=self._matryoshka or call.cut_vectors,
            truncate=call.truncate,
            done=self._n_done,
        )

    def on_engine_event(self, event: TurnEvent) -> None:
        """Keep vectors, and end with the last event."""
        match event:
            case EmbeddingDelta():
                self._vectors.append(event.vectors)
                self._n_done += event.n_inputs
                self._n_read += event.n_tokens
                if not self._quota.use(event.n_tokens) and self._n_done < len(self._call.inputs):
                    self._quota_is_used_up = True
                    self.abort()
            case EmbeddingDone():
                _log.info(
                    "embedding_ended",
                    client=self.client_id,
                    model=self.model,
                    request=self.turn_id,
                    texts=self._n_done,
                    tokens=self._n_read,
                    queue_ms=round(event.queue_ms, 1),
                    total_ms=round(event.total_ms, 1),
                )
                self._end(EmbeddingResult(self.model, b"".join(self._vectors), self._n_done, self._n_read))
            case Failed():
                code = ErrorCode(event.code) if event.code in ERRORS else ErrorCode.INTERNAL
                self._end(InferenceCenterError(code, event.message, hint=event.hint, field=event.field))
            case Cancelled():
                self._end(self._out_of_quota() if self._quota_is_used_up else None)

    def on_placed(self, node: str) -> None:
        """Do nothing: it is not traced."""

    def on_delay(self, seconds: float) -> None:
        """Do nothing: there is no event for it."""

    def on_engine_lost(self) -> None:
        """Do nothing: the vectors that arrived stay."""

    def resubmit(self) -> None:
        """Submit the rest to the model's current engine."""
        try:
            self._context.models.engine(self.model).submit(self)
        except InferenceCenterError as error:
            self._end(error)

    def _out_of_quota(self) -> InferenceCenterError:
        try:
            self._quota.check_turn()
        except InferenceCenterError as error:
            return error
        return InferenceCenterError(ErrorCode.QUOTA_EXCEEDED)  # the next day has begun meanwhile

    def _end(self, outcome: Outcome) -> None:
        context = self._context
        self._quota.end_turn()
        context.sessions.record_usage(
            UsageRecorded(
                client_id=self.client_id,
                token_id=self._token_id,
                at=context.clock(),
                prompt_tokens=self._n_read,
                turns=1,
            )
        )
        match outcome:
            case EmbeddingResult():
                finish = "done"
            case None:
                finish = "cancelled"
            case error:
                finish = error.code.value
                _log.info(
                    "embedding_failed",
                    client=self.client_id,
                    model=self.model,
                    request=self.turn_id,
                    code=finish,
                    reason=error.message,
                )
        context.metrics.embedding_ended(
            model=self.model, client_id=self.client_id, finish=finish, n_tokens=self._n_read
        )
        self._on_end(outcome)


async def embed(call: Call, embedding: EmbeddingCall) -> EmbeddingResult:
    """Return the result of an HTTP request; it is aborted when the client disconnects.

    Raises:
        InferenceCenterError: The request was refused or has failed.
    """
    result: asyncio.Future[EmbeddingResult] = asyncio.get_running_loop().create_future()

    def end(outcome: Outcome) -> None:
        if result.done():
            return
        if isinstance(outcome, EmbeddingResult):
            result.set_result(outcome)
        else:
            result.set_exception(outcome or InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE))

    job = EmbeddingJob(call.context, call.request_context.client, embedding, on_end=end, hold=call.hold_result)

    def give_up(reason: Exception) -> None:
        if not result.done():
            result.set_exception(reason)
            job.abort()

    call.request_context.listen(give_up)
    try:
        return await result
    finally:
        call.request_context.forget(give_up)


def _model_of(context: ServerContext, call: EmbeddingCall) -> str:
    """Return the model of a request: the one that it names, else the only one of its kind, or the default."""
    models = context.models
    if call.model is not None:
        return call.model
    of_kind = [name for name in models.names if models.kind_of(name) == call.kind]
    if models.default in of_kind:
        return models.default
    if len(of_kind) == 1:
        return of_kind[0]
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        "model is required: there are several" if of_kind else f"there is no {call.kind} model",
        field="model",
        hint=_hint(context, call.kind),
    )


def _check_kind(context: ServerContext, model: str, wanted: str) -> None:
    kind = context.models.kind_of(model)
    if kind == wanted:
        return
    does = {"chat": "generates text", "embedding": "makes embeddings", "reranking": "ranks documents"}[kind]
    lacks = "makes no embeddings" if wanted == "embedding" else "ranks no documents"
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST,
        f"{model} {does} and {lacks}",
        field="model",
        hint=_hint(context, wanted),
    )


def _hint(context: ServerContext, kind: str) -> str:
    names = sorted(name for name in context.models.names if context.models.kind_of(name) == kind)
    if names:
        return f"Models for that: {', '.join(names)}."
    return f'An operator can add one, or make a file one that does not state it: kind = "{kind}" in [models.NAME].'
