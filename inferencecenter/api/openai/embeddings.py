"""``/v1/embeddings``: vectors of texts; and ``/v1/rerank``: scores of documents for a query."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from inferencecenter.api.body import LARGE_BYTES
from inferencecenter.api.embedding import MAX_TEXTS, EmbeddingCall, EmbeddingResult, embed
from inferencecenter.api.endpoint import TURN_ERRORS, Call, Document, Operation, document
from inferencecenter.api.foreign_fields import DialectModel, FieldRule, FieldTable
from inferencecenter.api.openai.chat_schemas import AnswerModel
from inferencecenter.ipc.messages import EmbeddingInput, pack_tokens
from inferencecenter.protocol.requests import MAX_TEXT_CHARS, ModelName

if TYPE_CHECKING:
    from inferencecenter.api.endpoint import Reply

_MAX_TOKEN: Final = 2**31
_MAX_TOKENS: Final = 262_144
_USER: Final = FieldRule(field="user", why="requests are counted by their token")


def _input(value: object) -> EmbeddingInput:
    """Convert an input: a text or a list of tokens, neither of them empty."""
    if isinstance(value, str):
        if not 0 < len(value) <= MAX_TEXT_CHARS:
            raise PydanticCustomError("length", f"a text has 1 to {MAX_TEXT_CHARS} characters, not {len(value)}")
        return EmbeddingInput(value)
    if isinstance(value, list) and 0 < len(value) <= _MAX_TOKENS and all(map(_is_token, value)):
        return EmbeddingInput(tokens=pack_tokens(value))
    raise PydanticCustomError("input", "an input is a text or a list of token ids")


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_TOKEN


def _inputs(value: object) -> object:
    """Return a list of inputs, also of a single one."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        return [value]
    return value


_Input = Annotated[EmbeddingInput, BeforeValidator(_input, json_schema_input_type=str | list[int])]


class EmbeddingsBody(DialectModel, arbitrary_types_allowed=True):
    """Request for the vectors of texts."""

    input: Annotated[
        list[_Input],
        Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True),
        BeforeValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ] = Field(description="A text, or several; or tokens of a text, or of several.")
    model: ModelName | None = Field(
        default=None, description="Name of an embedding model; may be absent if there is one."
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Number of dimensions, if the model allows it (`matryoshka`): vectors are truncated and normalized "
        "again.",
    )
    encoding_format: Literal["float", "base64"] = Field(
        default="float",
        description="Lists of numbers, or base64 of little-endian float32, less than half as long.",
    )


class DocumentText(DialectModel):
    """A document as an object."""

    text: str = Field(min_length=1, max_length=MAX_TEXT_CHARS, description="Its text.")


def _document(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


class RerankBody(DialectModel):
    """Request for the scores of documents."""

    query: str = Field(
        min_length=1, max_length=MAX_TEXT_CHARS, description="The query that the documents are scored for."
    )
    documents: list[Annotated[DocumentText, BeforeValidator(_document, json_schema_input_type=str | DocumentText)]] = (
        Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True, description="The documents: texts, or objects.")
    )
    model: ModelName | None = Field(
        default=None, description="Name of a reranking model; may be absent if there is one."
    )
    top_n: int | None = Field(
        default=None, ge=1, description="How many of the best documents to return; all if absent."
    )
    return_documents: bool = Field(default=False, description="Whether to return the documents' texts.")


EMBEDDING_FIELDS: Final = FieldTable("embeddings", EmbeddingsBody, rules=(_USER,))
"""The fields of embeddings."""

RERANK_FIELDS: Final = FieldTable("rerank", RerankBody, rules=(_USER,))
"""The fields of reranking."""


class InputUsage(AnswerModel):
    """Token usage of a request that generates nothing."""

    prompt_tokens: int = Field(description="Tokens of the inputs.")
    total_tokens: int = Field(description="The same.")


class TextEmbedding(AnswerModel):
    """The vector of one input."""

    object: Literal["embedding"] = Field(description="Object type.")
    index: int = Field(description="Index of the input.")
    embedding: list[float] | str = Field(description="The vector, of length 1; with `base64` as a text.")


class EmbeddingList(AnswerModel):
    """The vectors of all inputs, in order."""

    object: Literal["list"] = Field(description="Object type.")
    data: list[TextEmbedding] = Field(description="The vectors.")
    model: str = Field(description="The model.")
    usage: InputUsage = Field(description="Token usage.")
    warnings: list[str] | None = Field(default=None, description="Fields that had no effect; absent if there are none.")


class RankedDocument(AnswerModel):
    """The score of one document."""

    index: int = Field(description="Index of the document in the request.")
    relevance_score: float = Field(description="The model's score; higher is more relevant, the scale is the model's.")
    document: DocumentText | None = Field(default=None, description="The document, if requested.")


class Ranking(AnswerModel):
    """Documents by score, the best first."""

    object: Literal["list"] = Field(description="Object type.")
    model: str = Field(description="The model.")
    results: list[RankedDocument] = Field(description="The documents.")
    usage: InputUsage = Field(description="Token usage.")
    warnings: list[str] | None = Field(default=None, description="Fields that had no effect; absent if there are none.")


async def create_embeddings(call: Call) -> Reply:
    """Handle a request: compute the vectors of texts."""
    body: EmbeddingsBody = call.body
    result = await embed(call, EmbeddingCall(model=body.model, inputs=tuple(body.input), dimensions=body.dimensions))
    encode = partial(_embeddings, result, encoding_format=body.encoding_format, warnings=call.warnings)
    if len(result.vectors) < LARGE_BYTES:
        return Document(encode())
    return Document(await call.context.worker.run(call.request_context.client.client_id, encode))


async def rerank(call: Call) -> Reply:
    """Handle a request: score documents for a query."""
    body: RerankBody = call.body
    inputs = tuple(EmbeddingInput(each.text) for each in body.documents)
    result = await embed(call, EmbeddingCall(model=body.model, inputs=inputs, query=body.query))
    best = result.ranking(body.top_n)
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in best]
    if body.return_documents:
        results = [{**each, "document": {"text": body.documents[each["index"]].text}} for each in results]
    return document({"object": "list", "results": results, **_common(result, call.warnings)})


def _embeddings(result: EmbeddingResult, *, encoding_format: str, warnings: list[str]) -> bytes:
    vectors: list[Any]
    if encoding_format == "base64":
        vectors = result.base64()
    else:
        # It takes a tenth of a second to import, and a daemon without embeddings needs none of it.
        import numpy as np  # noqa: PLC0415

        vectors = list(np.frombuffer(result.vectors, "<f4").reshape(result.n_inputs, -1))
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    answer = {"object": "list", "data": data, **_common(result, warnings)}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _common(result: EmbeddingResult, warnings: list[str]) -> dict[str, Any]:
    common = {
        "model": result.model,
        "usage": {"prompt_tokens": result.n_tokens, "total_tokens": result.n_tokens},
    }
    return {**common, "warnings": warnings} if warnings else common


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        summary="Compute the vectors of texts.",
        handler=create_embeddings,
        body=EmbeddingsBody,
        answer=EmbeddingList,
        errors=TURN_ERRORS,
        fields=EMBEDDING_FIELDS,
    ),
    Operation(
        method="POST",
        path="/v1/rerank",
        summary="Score documents for a query.",
        handler=rerank,
        body=RerankBody,
        answer=Ranking,
        errors=TURN_ERRORS,
        fields=RERANK_FIELDS,
    ),
)
