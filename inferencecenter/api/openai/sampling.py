"""What chat completions and completions have in common: how a turn samples, under OpenAI's names. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, StringConstraints

from inferencecenter.api.body import RequestModel
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import parse_params
from inferencecenter.protocol.params_model import MAX_BIASES, MAX_SEED, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS
from inferencecenter.protocol.requests import RawParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.protocol.values import Priority

MOST_CHOICES: Final = 8
MOST_PROBS: Final = 20

Grammar: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=262_144)]
Name: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]

TIERS: Final[Mapping[str, Priority | None]] = MappingProxyType(
    {"auto": None, "default": None, "priority": "interactive", "fast": "interactive", "flex": "batch"}
)
"""The class of a turn by OpenAI's service tier; ``None`` is the client's own."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop: TypeAlias = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


class ChatStreamOptions(RequestModel):
    """What a stream has beside the answer."""

    include_usage: bool = Field(default=False, description="Whether the last chunk before the end counts tokens.")
    include_obfuscation: Literal[False] = Field(default=False, description="Chunks are never padded.")


class Sampling(RequestModel):
    """Fields of both, each as OpenAI documents it; what is absent is as the daemon and the model have it."""

    model: Name | None = Field(default=None, description="As `/v1/models` lists it; without it the daemon's default.")
    stream: bool = Field(default=False, description="Whether the answer comes as server-sent events.")
    stream_options: ChatStreamOptions | None = Field(default=None, description="Only with `stream`.")
    temperature: float | None = Field(default=None, ge=0, le=5, description="0 always takes the likeliest token.")
    top_p: float | None = Field(default=None, ge=0, le=1, description="Keeps the likeliest tokens up to this sum.")
    presence_penalty: float | None = Field(default=None, ge=-10, le=10, description="As `params.presence_penalty`.")
    frequency_penalty: float | None = Field(default=None, ge=-10, le=10, description="As `params.frequency_penalty`.")
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**63,
        description="Equal seeds draw equal random numbers; choice i has the seed plus i.",
    )
    stop: Stop | None = Field(default=None, description="Texts that end the answer where they begin.")
    logit_bias: dict[str, float] | None = Field(
        default=None,
        max_length=MAX_BIASES,
        fail_fast=True,
        description="Added to the logits of tokens, by id; from -100 to 100.",
    )
    n: int = Field(default=1, ge=1, le=MOST_CHOICES, description="Answers to one question, each a turn of its own.")
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS, description="Tokens to generate at most.")
    user: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None, description="Kept with the session as metadata."
    )
    params: RawParams | None = Field(
        default=None, description="Sampling parameters of the daemon's own, as those of `infer`."
    )
    regex: Grammar | None = Field(default=None, description="This expression matches the whole answer.")
    grammar: Grammar | None = Field(
        default=None, description="This grammar spells the answer: GBNF where its rules have `::=`, else Lark."
    )


def raw_params(request: Sampling, *, max_tokens: int | None, n_probs: int, choice: int) -> RawParams:
    """Return the parameters of a request as ``infer`` takes them.

    Args:
        request: What was asked for.
        max_tokens: Tokens to generate at most.
        n_probs: Likeliest tokens to report, 0 for none.
        choice: Which of several answers to the same question.

    Raises:
        InferenceCenterError: ``invalid_request`` for a value out of range, or one given twice.
    """
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "seed": None if request.seed is None else (request.seed + choice) % (MAX_SEED + 1),
        "stop": request.stop,
        "logit_bias": request.logit_bias,
        "max_tokens": max_tokens,
        "n_probs": n_probs or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    own = request.params or {}
    named = _parsed(given)
    for name in parse_params(own).model_fields_set & named:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, f"{name} is given twice: also in params", field=f"params.{name}"
        )
    return {**given, **own}


def check_stream_options(request: Sampling) -> None:
    """Refuse what only a stream has, where there is none.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    if request.stream_options is not None and not request.stream:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "stream_options is only for streams", field="stream_options", hint="Set stream."
        )


def rephrased(error: InferenceCenterError, names: Mapping[str, str]) -> InferenceCenterError:
    """Return an error of ``infer`` that names fields as the request did, by their names here."""
    field = names.get(error.field or "")
    if field is None:
        return error
    return InferenceCenterError(
        error.code,
        error.message.replace(error.field or "", field),
        hint=error.hint,
        field=field,
        retry_after_ms=error.retry_after_ms,
    )


def _parsed(given: Mapping[str, object]) -> frozenset[str]:
    """Return the names of parameters that stand in the body itself, when all are in range."""
    try:
        return frozenset(parse_params(given).model_fields_set)
    except InferenceCenterError as error:
        field = (error.field or "").removeprefix("params.")
        raise InferenceCenterError(
            error.code, error.message.replace("params.", "", 1), hint=error.hint, field=field
        ) from None
