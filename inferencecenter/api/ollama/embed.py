"""``/api/embed`` and ``/api/embeddings``: vectors of texts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from pydantic import BeforeValidator, Field

from inferencecenter.api.body import LARGE_BYTES
from inferencecenter.api.embedding import MAX_TEXTS, EmbeddingCall, embed
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Document, Operation, document
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.ollama.errors import OLLAMA_ERRORS
from inferencecenter.api.ollama.keep_alive import KEEP_ALIVE_RULE, KeepAlive, load_or_unload
from inferencecenter.api.ollama.models import allowed_model
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.api.openai.sampling import Name
from inferencecenter.ipc.messages import EmbeddingInput
from inferencecenter.protocol.requests import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferencecenter.api.embedding import EmbeddingResult
    from inferencecenter.api.endpoint import Reply

_NS_PER_S: Final = 1_000_000_000

_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]


def _as_list(value: object) -> object:
    return ([value] if value else []) if isinstance(value, str) else value


class OllamaEmbedRequest(DialectModel):
    """Request for the vectors of texts."""

    model: Name = Field(description="Name of an embedding model, with or without `:latest`.")
    input: Annotated[
        list[_Text],
        Field(max_length=MAX_TEXTS, fail_fast=True),
        BeforeValidator(_as_list, json_schema_input_type=str | list[_Text]),
    ] = Field(default_factory=list, description="A text, or several; without one the model is loaded.")
    truncate: bool = Field(
        default=True, description="Whether a text that is too long is cut at its end; such a text is refused otherwise."
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Number of dimensions: vectors are truncated and normalized again; a larger number has no effect.",
    )
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(DialectModel):
    """Request for the vector of one text."""

    model: Name = Field(description="Name of an embedding model, with or without `:latest`.")
    prompt: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] = Field(
        default="", description="The text; without it the model is loaded."
    )
    keep_alive: KeepAlive = None


_RULES: Final = (FieldRule(field="options", why="vectors have no parameters"), KEEP_ALIVE_RULE)

OLLAMA_EMBED_FIELDS: Final = FieldTable("ollama-embed", OllamaEmbedRequest, rules=_RULES)
"""The fields of ``/api/embed``."""

OLLAMA_EMBEDDINGS_FIELDS: Final = FieldTable("ollama-embeddings", OllamaEmbeddingsRequest, rules=_RULES)
"""The fields of ``/api/embeddings``."""


class OllamaEmbeddings(AnswerModel):
    """The vectors of all texts, in order; durations are in nanoseconds."""

    model: str = Field(description="The model.")
    embeddings: list[list[float]] = Field(description="The vectors, of length 1.")
    total_duration: int = Field(description="Duration of the request.")
    load_duration: int = Field(description="Always 0: it is part of `total_duration`.")
    prompt_eval_count: int = Field(description="Tokens of the texts.")


class OllamaEmbedding(AnswerModel):
    """The vector of a text."""

    embedding: list[float] = Field(description="The vector, of length 1.")


async def create(call: Call) -> Reply:
    """Handle a request: compute the vectors of texts, or load or unload a model."""
    request: OllamaEmbedRequest = call.body
    started_s = call.context.monotonic()
    model = allowed_model(call, request.model)
    if not request.input:
        load_or_unload(call, model)
        return document(
            {"model": model, "embeddings": [], "total_duration": 0, "load_duration": 0, "prompt_eval_count": 0}
        )
    inputs = tuple(map(EmbeddingInput, request.input))
    _check_dimensions(call, model, request.dimensions)
    embedding_call = EmbeddingCall(
        model=model, inputs=inputs, dimensions=request.dimensions, truncate=request.truncate, cut_vectors=True
    )
    result = await embed(call, embedding_call)
    fields = {
        "model": result.model,
        "total_duration": round((call.context.monotonic() - started_s) * _NS_PER_S),
        "load_duration": 0,
        "prompt_eval_count": result.n_tokens,
    }
    return await _encoded(call, result, lambda rows: {**fields, "embeddings": rows})


def _check_dimensions(call: Call, model: str, dimensions: int | None) -> None:
    """Warn of vectors that are cut though nothing says that their first numbers suffice: Ollama cuts all."""
    spec = call.context.models.spec_of(model)
    if call.report is None or dimensions is None or dimensions == spec.n_embd:
        return
    if spec.n_embd is not None and dimensions > spec.n_embd:
        call.report.add("dimensions", f"dimensions has no effect: the model's vectors have {spec.n_embd} numbers")
    elif not spec.matryoshka:
        call.report.add(
            "dimensions", "dimensions: shorter vectors may be worse, the model's entry does not set matryoshka"
        )


async def create_one(call: Call) -> Reply:
    """Handle a request: compute the vector of one text, or load or unload a model."""
    request: OllamaEmbeddingsRequest = call.body
    model = allowed_model(call, request.model)
    if not request.prompt:
        load_or_unload(call, model)
        return document({"embedding": []})
    result = await embed(call, EmbeddingCall(model=model, inputs=(EmbeddingInput(request.prompt),)))
    return await _encoded(call, result, lambda rows: {"embedding": rows[0]})


async def _encoded(call: Call, result: EmbeddingResult, answer_of: Callable[[list[Any]], dict[str, Any]]) -> Reply:
    """Return the response with the vectors; many are encoded in a thread."""
    encode = partial(_encode, result, answer_of)
    if len(result.vectors) < LARGE_BYTES:
        return Document(encode())
    return Document(await call.context.worker.run(call.caller.client.client_id, encode))


def _encode(result: EmbeddingResult, answer_of: Callable[[list[Any]], dict[str, Any]]) -> bytes:
    # It takes a tenth of a second to import, and a daemon without embeddings needs none of it.
    import numpy as np  # noqa: PLC0415

    rows = list(np.frombuffer(result.vectors, "<f4").reshape(result.n_inputs, -1))
    return orjson.dumps(answer_of(rows), option=orjson.OPT_SERIALIZE_NUMPY)


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/api/embed",
        summary="Compute the vectors of texts, as Ollama does.",
        handler=create,
        body=OllamaEmbedRequest,
        answer=OllamaEmbeddings,
        errors=TURN_ERRORS,
        fields=OLLAMA_EMBED_FIELDS,
        error_format=OLLAMA_ERRORS,
        local_account=True,
    ),
    Operation(
        method="POST",
        path="/api/embeddings",
        summary="Compute the vector of one text, as Ollama did first.",
        handler=create_one,
        body=OllamaEmbeddingsRequest,
        answer=OllamaEmbedding,
        errors=TURN_ERRORS,
        fields=OLLAMA_EMBEDDINGS_FIELDS,
        error_format=OLLAMA_ERRORS,
        local_account=True,
    ),
)
