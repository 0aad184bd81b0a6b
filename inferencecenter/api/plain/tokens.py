"""``POST /tokenize`` and ``POST /detokenize``: conversion between text and tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, FailFast, Field

from inferencecenter.api.body import LARGE_BYTES, RequestModel
from inferencecenter.api.endpoint import Call, Document, Operation, document
from inferencecenter.api.errors import OWN_ERRORS
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import PromptSegment, unpack_tokens
from inferencecenter.protocol.requests import ModelName
from inferencecenter.sessions.context import check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.ipc.messages import Tokenized
    from inferencecenter.ipc.port import EnginePort

MAX_CHARS: Final = 1_048_576
"""Maximum number of characters of a text; a worker tokenizes about a million per second."""
MAX_TOKENS: Final = 262_144

_MODEL: Final = "Name of a model; if absent, the daemon's default."
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Tokenize(RequestModel):
    """A text to tokenize, in the terms of this daemon or of llama-server."""

    text: str | None = Field(default=None, max_length=MAX_CHARS, description="The text.")
    content: str | None = Field(
        default=None, max_length=MAX_CHARS, description="The text, in place of `text`, as of llama-server."
    )
    model: ModelName | None = Field(default=None, description=_MODEL)
    special: bool = Field(
        default=False,
        description="Whether names of special tokens in the text are parsed as such; otherwise they are plain text.",
    )
    parse_special: bool = Field(default=True, description="As `special`, for `content`.")
    add_bos: bool = Field(
        default=False, description="Whether to add the model's token for the beginning of a sequence."
    )
    add_special: bool = Field(default=False, description="The same as `add_bos`.")
    pieces: bool = Field(default=False, description="Whether to return the text of each token.")
    with_pieces: bool = Field(default=False, description="Whether each token is an object with its id and its text.")
    count_only: bool = Field(
        default=False, description="Whether to return `count` alone, for texts whose number of tokens is wanted."
    )


class TokenPiece(BaseModel, defer_build=True):
    """A token and its text."""

    id: int = Field(description="Token id.")
    piece: str = Field(description="Its text; incomplete characters are U+FFFD.")


class Tokens(BaseModel, defer_build=True):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece] | None = Field(
        default=None, description="Token ids; objects with `with_pieces`; absent with `count_only`."
    )
    count: int = Field(description="Number of tokens.")
    pieces: list[str] | None = Field(
        default=None, description="Text of each token, if requested; incomplete characters are U+FFFD."
    )


class Detokenize(RequestModel):
    """Tokens to convert to text."""

    tokens: Annotated[list[TokenId], FailFast()] = Field(max_length=MAX_TOKENS, description="Token ids.")
    model: ModelName | None = Field(default=None, description=_MODEL)


class Text(BaseModel, defer_build=True):
    """The text of the tokens."""

    text: str = Field(description="The text, with special tokens by name.")
    content: str = Field(description="The same, as of llama-server.")


async def tokenize(call: Call) -> Reply:
    """Return the tokens of a text."""
    body: Tokenize = call.body
    text = body.content if body.text is None else body.text
    if text is None or (body.text is not None and body.content is not None):
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "give either text or content", field="text")
    special = body.special or (body.text is None and body.parse_special)
    first = body.add_bos or body.add_special
    if body.count_only:
        if body.pieces or body.with_pieces:
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, "count_only excludes pieces", field="count_only")
        counting = _engine(call, body.model).count_tokens(
            _segments(text, special), first=first, client_id=_client_id(call)
        )
        return document({"count": (await call.request_context.wait_for(counting)).n_tokens})
    found = await tokenized(call, body.model, text, special=special, first=first)
    encode = partial(_tokens, found, pieces=body.pieces, with_pieces=body.with_pieces)
    if len(found.tokens) < LARGE_BYTES:
        return encode()
    return await call.context.worker.run(_client_id(call), encode)


def _tokens(found: Tokenized, *, pieces: bool, with_pieces: bool) -> Document:
    tokens = unpack_tokens(found.tokens)
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
    if not pieces and not with_pieces:
        return document(answer)
    texts = [spelled.decode(errors="replace") for spelled in found.spelled]
    if with_pieces:
        answer["tokens"] = [{"id": token, "piece": piece} for token, piece in zip(tokens, texts, strict=True)]
    if pieces:
        answer["pieces"] = texts
    return document(answer)


async def detokenize(call: Call) -> Reply:
    """Return the text of tokens."""
    text = await detokenized(call, call.body.model, call.body.tokens, field="tokens")
    return document({"text": text, "content": text})


async def tokenized(
    call: Call, model: str | None, text: str, *, special: bool = False, first: bool = False
) -> Tokenized:
    """Tokenize a text with a model that the caller may use.

    Raises:
        InferenceCenterError: ``model_not_found``, or ``forbidden``.
    """
    return await call.request_context.wait_for(
        _engine(call, model).tokenize(_segments(text, special), first=first, client_id=_client_id(call))
    )


def _segments(text: str, special: bool) -> tuple[PromptSegment, ...]:
    return (PromptSegment(text, special),) if text else ()


async def detokenized(call: Call, model: str | None, tokens: Sequence[int], *, field: str) -> str:
    """Convert tokens to text with a model that the caller may use.

    Raises:
        InferenceCenterError: ``model_not_found``, ``forbidden``, or ``invalid_request`` for an unknown token.
    """
    found = await call.request_context.wait_for(_engine(call, model).detokenize(tokens, client_id=_client_id(call)))
    if found.unknown is not None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{found.unknown} is not a token of this model",
            field=f"{field}.{tokens.index(found.unknown)}",
        )
    return found.text


def _engine(call: Call, model: str | None) -> EnginePort:
    context, client = call.context, call.caller.client
    name = context.models.default if model is None else model
    check_model(name, context.limits_of(client.client_id, client.token_id))
    return context.models.engine(name)


def _client_id(call: Call) -> str:
    return call.caller.client.client_id


_ERRORS: Final = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_LOADING, ErrorCode.OVERLOADED)

OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/tokenize",
        summary="Tokenize a text.",
        handler=tokenize,
        body=Tokenize,
        answer=Tokens,
        error_format=OWN_ERRORS,
        errors=_ERRORS,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Convert tokens to text.",
        handler=detokenize,
        body=Detokenize,
        answer=Text,
        error_format=OWN_ERRORS,
        errors=_ERRORS,
    ),
)
