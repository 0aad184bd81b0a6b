"""``POST /tokenize`` and ``POST /detokenize``: conversion between text and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from pydantic import BaseModel, FailFast, Field

from inferencecenter.api.body import RequestModel
from inferencecenter.api.endpoint import Call, Operation, document
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import Detokenized, PromptSegment, Tokenized, unpack_tokens
from inferencecenter.protocol.requests import ModelName
from inferencecenter.sessions.client import check_model

if TYPE_CHECKING:
    import asyncio

    from inferencecenter.api.endpoint import Reply
    from inferencecenter.ipc.port import EnginePort

MAX_CHARS: Final = 1_048_576
"""Maximum number of characters of a text; a worker tokenizes about a million per second."""
MAX_TOKENS: Final = 262_144

_MODEL: Final = "Name of a model; if absent, the daemon's default."
_Found = TypeVar("_Found", Tokenized, Detokenized)
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Tokenize(RequestModel):
    """A text to tokenize."""

    text: str = Field(max_length=MAX_CHARS, description="The text.")
    model: ModelName | None = Field(default=None, description=_MODEL)
    special: bool = Field(
        default=False,
        description="Whether names of special tokens in the text are parsed as such; otherwise they are plain text.",
    )
    add_bos: bool = Field(
        default=False, description="Whether to add the model's token for the beginning of a sequence."
    )
    pieces: bool = Field(default=False, description="Whether to return the text of each token.")


class Tokens(BaseModel):
    """The tokens of a text."""

    tokens: list[int] = Field(description="Token ids.")
    count: int = Field(description="Number of tokens.")
    pieces: list[str] | None = Field(
        default=None, description="Text of each token, if requested; incomplete characters are U+FFFD."
    )


class Detokenize(RequestModel):
    """Tokens to convert to text."""

    tokens: Annotated[list[_TokenId], FailFast()] = Field(max_length=MAX_TOKENS, description="Token ids.")
    model: ModelName | None = Field(default=None, description=_MODEL)


class Text(BaseModel):
    """The text of the tokens."""

    text: str = Field(description="The text, with special tokens by name.")


async def tokenize(call: Call) -> Reply:
    """Return the tokens of a text."""
    body: Tokenize = call.body
    pieces = (PromptSegment(body.text, body.special),) if body.text else ()
    found = await _answer(
        call, _engine(call, body.model).tokenize(pieces, first=body.add_bos, client_id=_client_id(call))
    )
    tokens = unpack_tokens(found.tokens)
    answer = {"tokens": tokens, "count": len(tokens)}
    if body.pieces:
        return document({**answer, "pieces": [spelled.decode(errors="replace") for spelled in found.spelled]})
    return document(answer)


async def detokenize(call: Call) -> Reply:
    """Return the text of tokens."""
    body: Detokenize = call.body
    found = await _answer(call, _engine(call, body.model).detokenize(body.tokens, client_id=_client_id(call)))
    if found.unknown is not None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{found.unknown} is not a token of this model",
            field=f"tokens.{body.tokens.index(found.unknown)}",
        )
    return document({"text": found.text})


def _engine(call: Call, model: str | None) -> EnginePort:
    """Return the engine of a model that the caller may use.

    Raises:
        InferenceCenterError: ``model_not_found``, or ``forbidden``.
    """
    context, client = call.context, call.caller.client
    name = context.models.default if model is None else model
    check_model(name, context.limits_of(client.client_id, client.token_id))
    return context.models.engine(name)


def _client_id(call: Call) -> str:
    return call.caller.client.client_id


async def _answer(call: Call, asked: asyncio.Future[_Found]) -> _Found:
    """Await the engine's result, unless the client disconnects."""

    def give_up(reason: Exception) -> None:
        if not asked.done():
            asked.set_exception(reason)

    call.request_context.listen(give_up)
    try:
        return await asked
    finally:
        call.request_context.forget(give_up)


_ERRORS: Final = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_LOADING, ErrorCode.OVERLOADED)

OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/tokenize",
        summary="Tokenize a text.",
        handler=tokenize,
        body=Tokenize,
        answer=Tokens,
        errors=_ERRORS,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Convert tokens to text.",
        handler=detokenize,
        body=Detokenize,
        answer=Text,
        errors=_ERRORS,
    ),
)
