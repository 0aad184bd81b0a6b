"""``POST /tokenize`` and ``POST /detokenize``: what tokens a text is made of, and what text tokens spell."""

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
"""Characters of a text; a worker reads about a million in a second."""
MAX_TOKENS: Final = 262_144

_MODEL: Final = "Name of a model; without it the daemon's choice."
_Found = TypeVar("_Found", Tokenized, Detokenized)
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Tokenize(RequestModel):
    """A text."""

    text: str = Field(max_length=MAX_CHARS, description="The text.")
    model: ModelName | None = Field(default=None, description=_MODEL)
    special: bool = Field(
        default=False,
        description="Whether the names of special tokens in the text are these tokens; if not, they are text as any.",
    )
    add_bos: bool = Field(
        default=False, description="Whether the text begins a sequence, with the token that the model wants there."
    )
    pieces: bool = Field(default=False, description="Whether the answer says what each token spells.")


class Tokens(BaseModel):
    """The tokens of a text."""

    tokens: list[int] = Field(description="Their numbers in the vocabulary.")
    count: int = Field(description="How many they are.")
    pieces: list[str] | None = Field(
        default=None, description="What each spells, if asked for; bytes that are no whole character are U+FFFD."
    )


class Detokenize(RequestModel):
    """Tokens."""

    tokens: Annotated[list[_TokenId], FailFast()] = Field(
        max_length=MAX_TOKENS, description="Their numbers in the vocabulary."
    )
    model: ModelName | None = Field(default=None, description=_MODEL)


class Text(BaseModel):
    """The text that tokens spell."""

    text: str = Field(description="The text, special tokens by their names.")


async def tokenize(call: Call) -> Reply:
    """Tell the tokens of a text."""
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
    """Tell the text of tokens."""
    body: Detokenize = call.body
    found = await _answer(call, _engine(call, body.model).detokenize(body.tokens, client_id=_client_id(call)))
    if found.unknown is not None:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{found.unknown} is no token of this model",
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
    """Return what the engine says, unless nobody waits for it any more."""

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
        summary="Show the tokens of a text.",
        handler=tokenize,
        body=Tokenize,
        answer=Tokens,
        errors=_ERRORS,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Show the text of tokens.",
        handler=detokenize,
        body=Detokenize,
        answer=Text,
        errors=_ERRORS,
    ),
)
