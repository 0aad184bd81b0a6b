"""Common part of chat completions and completions: sampling parameters under OpenAI's names. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from inferencecenter.api.foreign_fields import DialectModel, FieldRule
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.codec import check_json_bounds
from inferencecenter.protocol.params import parse_params
from inferencecenter.protocol.params_model import (
    MAX_BIASES,
    MAX_BREAKERS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
)
from inferencecenter.protocol.requests import RawParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inferencecenter.protocol.values import Priority

MOST_CHOICES: Final = 8
MAX_CHOICES_CHARS: Final = 65_536
"""Maximum number of characters of all texts of which one is the output: each use of the form escapes them."""
MOST_PROBS: Final = 20

Grammar: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=262_144)]
Name: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]

TIERS: Final[Mapping[str, Priority | None]] = MappingProxyType(
    {"auto": None, "default": None, "priority": "interactive", "fast": "interactive", "flex": "batch"}
)
"""Priority class by OpenAI's service tier; ``None`` is the client's default."""


_ANY_OBJECT: Final[Mapping[str, Any]] = MappingProxyType({"type": "object"})


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _minus_one_is_none(value: object) -> object:
    return None if type(value) is int and value == -1 else value


def _parsed_schema(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.encode()
    check_json_bounds(text)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise PydanticCustomError("json", "the text is not JSON: {reason}", {"reason": error.msg}) from None


def _few_chars(choices: list[str]) -> list[str]:
    if (n_chars := sum(map(len, choices))) > MAX_CHOICES_CHARS:
        raise PydanticCustomError(
            "too_long", f"the choices have at most {MAX_CHOICES_CHARS} characters in total, not {n_chars}"
        )
    return choices


def _biases_by_name(value: object) -> object:
    """Return llama-server's list of pairs as an object; a list of other items is refused as no object."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {name if isinstance(name, str) else str(name): bias for name, bias in value}


# Evaluated left to right, because 0 equals False.
_Bias: TypeAlias = Annotated[float | Literal[False], Field(union_mode="left_to_right")]
Biases: TypeAlias = Annotated[
    dict[str, _Bias],
    Field(max_length=MAX_BIASES, fail_fast=True),
    BeforeValidator(_biases_by_name, json_schema_input_type=dict[str, _Bias]),
]
Breakers: TypeAlias = Annotated[list[str], Field(max_length=MAX_BREAKERS, fail_fast=True)]
Choices: TypeAlias = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]],
    Field(min_length=1, max_length=1000, fail_fast=True),
    AfterValidator(_few_chars),
]
MaxTokens: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None,
    BeforeValidator(
        _minus_one_is_none, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Literal[-1]
    ),
]
SchemaOrText: TypeAlias = Annotated[
    dict[str, Any], BeforeValidator(_parsed_schema, json_schema_input_type=dict[str, Any] | str)
]
Stop: TypeAlias = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]


class ChatStreamOptions(DialectModel):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="Whether the last chunk before the end has the token usage.")


class ResponseFormatSchema(DialectModel):
    """JSON Schema of the output."""

    name: str | None = Field(default=None, description="Its name.")
    description: str | None = Field(default=None, description="Its purpose.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="The JSON Schema.")
    strict: bool = Field(
        default=False, description="Whether a keyword of the schema that cannot be enforced is refused."
    )


class ResponseFormat(DialectModel):
    """Format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="`json_object` is any JSON object, or one that matches `schema`."
    )
    json_schema: ResponseFormatSchema | None = Field(default=None, description="Only with the type `json_schema`.")
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="JSON Schema of the output, in the form of llama-server."
    )


class StructuredOutputs(DialectModel):
    """Form of the output, in vLLM's terms."""

    json_: SchemaOrText | None = Field(default=None, alias="json", description="JSON Schema, or its text.")
    json_object: bool = Field(default=False, description="Whether the output is any JSON object.")
    regex: Grammar | None = Field(default=None, description="Regular expression that the whole output matches.")
    choice: Choices | None = Field(default=None, description="Texts, one of which is the output.")
    grammar: Grammar | None = Field(default=None, description="Grammar of the output.")


def _sampler(name: str) -> Any:
    """Return a field for a parameter of the daemon's own protocol; its range is checked with that of ``params``."""
    return Field(default=None, description=f"As `params.{name}`.")


def _zero_is_off(value: object) -> object:
    return 0 if type(value) is int and value == -1 else value


_SAMPLERS: Final = (
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "repeat_penalty",
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "dynatemp_range",
    "dynatemp_exponent",
    "min_keep",
    "ignore_eos",
)
"""Fields that have the name and the meaning of a parameter."""


class SamplerFields(DialectModel):
    """Parameters of samplers beside the request's other fields, as llama-server and vLLM take them."""

    presence_penalty: float | None = Field(default=None, ge=-10, le=10, description="As `params.presence_penalty`.")
    frequency_penalty: float | None = Field(default=None, ge=-10, le=10, description="As `params.frequency_penalty`.")
    top_k: Annotated[int | None, BeforeValidator(_zero_is_off)] = Field(
        default=None, description="As `params.top_k`; -1 is off."
    )
    min_p: float | None = _sampler("min_p")
    typical_p: float | None = _sampler("typical_p")
    top_n_sigma: float | None = _sampler("top_n_sigma")
    xtc_probability: float | None = _sampler("xtc_probability")
    xtc_threshold: float | None = _sampler("xtc_threshold")
    repeat_penalty: float | None = _sampler("repeat_penalty")
    repetition_penalty: float | None = Field(
        default=None, description="The same as `repeat_penalty`, which takes precedence."
    )
    repeat_last_n: int | None = _sampler("repeat_last_n")
    dry_multiplier: float | None = _sampler("dry_multiplier")
    dry_base: float | None = _sampler("dry_base")
    dry_allowed_length: int | None = _sampler("dry_allowed_length")
    dry_penalty_last_n: int | None = _sampler("dry_penalty_last_n")
    dry_sequence_breakers: Breakers | None = _sampler("dry_sequence_breakers")
    mirostat: int | None = _sampler("mirostat")
    mirostat_tau: float | None = _sampler("mirostat_tau")
    mirostat_eta: float | None = _sampler("mirostat_eta")
    dynatemp_range: float | None = _sampler("dynatemp_range")
    dynatemp_exponent: float | None = _sampler("dynatemp_exponent")
    min_keep: int | None = _sampler("min_keep")
    ignore_eos: bool | None = _sampler("ignore_eos")

    @property
    def sampler_params(self) -> dict[str, Any]:
        """The given parameters by their names in ``params``."""
        given = {name: value for name in _SAMPLERS if (value := getattr(self, name)) is not None}
        if self.repetition_penalty is not None:
            given.setdefault("repeat_penalty", self.repetition_penalty)
        return given


class Sampling(SamplerFields):
    """Fields of both APIs as documented by OpenAI, and those of llama-server and vLLM that this daemon obeys.

    Absent ones use the defaults of the daemon and the model.
    """

    model: Name | None = Field(
        default=None, description="A name listed by `/v1/models`; if absent, the daemon's default."
    )
    stream: bool = Field(default=False, description="Whether the response is sent as server-sent events.")
    stream_options: ChatStreamOptions | None = Field(default=None, description="Options of a stream.")
    temperature: float | None = Field(
        default=None, ge=0, le=5, description="Sampling temperature; 0 always takes the most likely token."
    )
    top_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Nucleus sampling: keeps the most likely tokens up to this total probability.",
    )
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**63,
        description="Equal seeds draw equal random numbers; choice i has the seed plus i.",
    )
    stop: Stop | None = Field(default=None, description="Texts that end the generation where they begin.")
    logit_bias: Biases | None = Field(
        default=None,
        description="Added to the logits of tokens, by id, or of a word's tokens; from -100 to 100, false bans.",
    )
    n: int = Field(
        default=1,
        ge=1,
        le=MOST_CHOICES,
        description="Number of choices for one prompt, each generated by its own turn.",
    )
    max_tokens: MaxTokens = Field(
        default=None, description="Maximum number of generated tokens; -1 for as many as the context holds."
    )
    n_predict: MaxTokens = Field(default=None, description="The same as `max_tokens`, which takes precedence.")
    user: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None, description="Kept with the session as metadata."
    )
    params: RawParams | None = Field(
        default=None, description="Sampling parameters of the daemon's own protocol, as in `infer`."
    )
    response_format: ResponseFormat | None = Field(default=None, description="Format of the output.")
    json_schema: dict[str, Any] | None = Field(default=None, description="JSON Schema of the output.")
    regex: Grammar | None = Field(default=None, description="Regular expression that the whole output matches.")
    grammar: Grammar | None = Field(
        default=None, description="Grammar of the output: GBNF if its rules have `::=`, else Lark."
    )
    guided_json: SchemaOrText | None = Field(default=None, description="The same as `json_schema`, or its text.")
    guided_regex: Grammar | None = Field(default=None, description="The same as `regex`.")
    guided_grammar: Grammar | None = Field(default=None, description="The same as `grammar`.")
    guided_choice: Choices | None = Field(default=None, description="Texts, one of which is the output.")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="Form of the output, as of vLLM.")


def _is_true(value: Any, _siblings: Mapping[str, Any]) -> bool:
    return value is True


def _is_false(value: Any, _siblings: Mapping[str, Any]) -> bool:
    return value is False


FOUND_BY_TEXT: Final = "prefixes are found in the KV cache by their text"

OBFUSCATION_RULE: Final = FieldRule(
    field="stream_options.include_obfuscation", values="`true`", why="chunks are never padded", applies=_is_true
)
SAMPLER_RULES: Final = (
    FieldRule(field="cache_prompt", values="`false`", why=FOUND_BY_TEXT, applies=_is_false),
    FieldRule(field="id_slot", why="the daemon assigns slots"),
    FieldRule(field="n_keep", why="it counts tokens; `params.n_keep` counts messages"),
    FieldRule(field="min_tokens", why="an answer may end at any token"),
    FieldRule(field="tfs_z", why="llama.cpp has removed tail-free sampling"),
    FieldRule(field="penalize_nl", why="llama.cpp treats line breaks like other tokens"),
)
"""Rules for samplers and slots, of all dialects that take ``SamplerFields``."""

SAMPLING_RULES: Final = (
    OBFUSCATION_RULE,
    *SAMPLER_RULES,
    FieldRule(
        field="stream_options",
        values="without `stream`",
        why="the answer is no stream",
        applies=lambda _, siblings: siblings.get("stream") is not True,
    ),
    FieldRule(field="stop_token_ids", why="only texts end an answer, see `stop`"),
    FieldRule(field="include_stop_str_in_output", values="`true`", why="stop texts are never sent", applies=_is_true),
    FieldRule(field="skip_special_tokens", values="`false`", why="special tokens are never sent", applies=_is_false),
    FieldRule(field="length_penalty", why="there is no beam search"),
    FieldRule(field="early_stopping", why="there is no beam search"),
    FieldRule(field="use_beam_search", values="`true`", why="there is no beam search", applies=_is_true, refused=True),
    FieldRule(field="prompt_logprobs", why="a prompt has no probabilities here", refused=True),
    FieldRule(field="bad_words", why="single tokens can be banned, by `logit_bias`"),
    FieldRule(field="allowed_token_ids", why="see `grammar`"),
    FieldRule(field="truncate_prompt_tokens", why="a prompt that is too long is refused"),
    FieldRule(field="timings_per_token", values="`true`", why="timings come with the end", applies=_is_true),
    FieldRule(
        field="continue_final_message", values="`false`", why="an answer that is begun is continued", applies=_is_false
    ),
    FieldRule(field="guided_decoding_backend", why="there is one implementation"),
    FieldRule(field="guided_whitespace_pattern", why="white space is fixed"),
    FieldRule(field="priority", why="see `service_tier`"),
    FieldRule(field="chat_template", why="the template is that of the model file"),
    FieldRule(field="reasoning_format", why="thoughts are always `reasoning_content`"),
)
"""Rules of both APIs, for fields of OpenAI, llama-server and vLLM."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The requested form of an output: the field of the request, and the one of ``infer`` with its value.

    A keyword of a schema that cannot be enforced is refused if it is ``strict``.
    """

    field: str
    kind: Literal["json_schema", "regex", "grammar"]
    value: Any
    strict: bool = False


def infer_fields(form: OutputForm | None) -> dict[str, Any]:
    return {} if form is None else {form.kind: form.value, "strict_schema": form.strict}


def request_fields(names: Mapping[str, str], form: OutputForm | None) -> Mapping[str, str]:
    """Return the names of ``infer``'s fields in a request with a form."""
    return names if form is None else {**names, form.kind: form.field}


def form_of(request: Sampling) -> OutputForm | None:
    """Return the form of the output, ``None`` for any text.

    Raises:
        InferenceCenterError: ``invalid_request`` for two forms.
    """
    forms = list(_forms(request))
    if len(forms) > 1:
        first, second = forms[0].field, forms[1].field
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, f"{first} excludes {second}", field=second)
    return forms[0] if forms else None


def _forms(request: Sampling) -> Iterator[OutputForm]:
    schema = _schema_of(request.response_format)
    if schema is not None:
        named = None if request.response_format is None else request.response_format.json_schema
        yield OutputForm("response_format", "json_schema", schema, strict=named is not None and named.strict)
    for field, value in (("json_schema", request.json_schema), ("guided_json", request.guided_json)):
        if value is not None:
            yield OutputForm(field, "json_schema", value)
    for field, expression in (("regex", request.regex), ("guided_regex", request.guided_regex)):
        if expression is not None:
            yield OutputForm(field, "regex", expression)
    for field, grammar in (("grammar", request.grammar), ("guided_grammar", request.guided_grammar)):
        if grammar is not None:
            yield OutputForm(field, "grammar", grammar)
    if request.guided_choice is not None:
        yield OutputForm("guided_choice", "regex", _one_of(request.guided_choice))
    if (wanted := request.structured_outputs) is not None:
        yield from _structured(wanted)


def _structured(wanted: StructuredOutputs) -> Iterator[OutputForm]:
    prefix = "structured_outputs."
    if wanted.json_ is not None:
        yield OutputForm(f"{prefix}json", "json_schema", wanted.json_)
    if wanted.json_object:
        yield OutputForm(f"{prefix}json_object", "json_schema", dict(_ANY_OBJECT))
    if wanted.regex is not None:
        yield OutputForm(f"{prefix}regex", "regex", wanted.regex)
    if wanted.choice is not None:
        yield OutputForm(f"{prefix}choice", "regex", _one_of(wanted.choice))
    if wanted.grammar is not None:
        yield OutputForm(f"{prefix}grammar", "grammar", wanted.grammar)


def _schema_of(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is not None and wanted.json_schema.schema_ is not None:
        return wanted.json_schema.schema_
    return dict(_ANY_OBJECT) if wanted.schema_ is None else wanted.schema_


def _one_of(choices: Sequence[str]) -> str:
    return f"({'|'.join(map(re.escape, choices))})"


def raw_params(request: Sampling, *, max_tokens: int | None, n_probs: int, choice: int) -> RawParams:
    """Return the request's parameters in the form of ``infer``.

    Args:
        request: The request.
        max_tokens: Maximum number of generated tokens.
        n_probs: Number of most likely tokens to report, 0 for none.
        choice: Index of the choice.

    Raises:
        InferenceCenterError: ``invalid_request`` for a value out of range, or one given twice.
    """
    given: dict[str, Any] = {
        **request.sampler_params,
        "temperature": request.temperature,
        "top_p": request.top_p,
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


def _parsed(given: Mapping[str, object]) -> frozenset[str]:
    """Return the names of the parameters in the body itself, all of which are in range."""
    try:
        return frozenset(parse_params(given).model_fields_set)
    except InferenceCenterError as error:
        field = (error.field or "").removeprefix("params.")
        raise InferenceCenterError(
            error.code, error.message.replace("params.", "", 1), hint=error.hint, field=field
        ) from None
