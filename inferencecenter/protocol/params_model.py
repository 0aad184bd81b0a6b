"""The parameters of a turn: names, ranges, defaults, aliases and descriptions, declared once.

Validation, the JSON schema, the documentation and both processes use this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

Group: TypeAlias = Literal["sampling", "stopping", "memory"]
SamplerName: TypeAlias = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"
]

# The default order of llama.cpp.
SAMPLER_ORDER: tuple[SamplerName, ...] = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
SAMPLER_ALIASES = {"typical_p": "typ_p"}

# llama.cpp treats the largest 32-bit seed as "choose a random one", so it is not a valid seed.
MAX_SEED = 2**32 - 2
MAX_TOKENS = 2**20
MAX_KEPT = 1000
MAX_REPETITIONS = 100
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_PATTERNS = 4
MAX_PATTERN_CHARS = 512
MAX_BIASES = 1024
MAX_BREAKERS = 16
# llama.cpp truncates longer sequence breakers.
MAX_BREAKER_BYTES = 40


def _refused(reason: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{reason}", {"reason": reason})


def _as_list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _minus_one_is_none(value: object) -> object:
    return None if type(value) is int and value == -1 else value


def _sampler_names(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return tuple(SAMPLER_ALIASES.get(name, name) if isinstance(name, str) else name for name in value)


def _each_once(names: tuple[SamplerName, ...]) -> tuple[SamplerName, ...]:
    for name in names:
        if names.count(name) > 1:
            raise _refused(f"{name} occurs twice")
    return names


def _bias_pairs(value: object) -> object:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple):
        return value
    if len(pairs) > MAX_BIASES:
        raise _refused(f"it has {len(pairs)} entries")
    result = tuple(_bias_pair(pair) for pair in pairs)
    if len({token for token, _ in result}) < len(result):
        raise _refused("a token occurs twice")
    return result


def _bias_pair(pair: object) -> tuple[int, object]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise _refused("a list must hold [token id, bias] pairs")
    token, bias = pair
    # JSON object keys are strings; int() alone would also take "+1", " 1" and "1_0".
    if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
        token = int(token)
    if type(token) is not int or not 0 <= token < 2**31:
        raise _refused("a token id must be an integer from 0")
    return token, bias


def _breaker(text: str) -> str:
    if not 0 < len(text.encode()) <= MAX_BREAKER_BYTES or "\0" in text:
        raise _refused("a sequence breaker is empty, too long or contains NUL")
    return text


def _pattern(source: str) -> str:
    import regex  # noqa: PLC0415 - the daemon has imported it; an engine does so for the first pattern

    try:
        pattern = regex.compile(source)
        empty = pattern.search("", timeout=0.1)
    except (regex.error, ValueError, OverflowError, RecursionError, MemoryError, TimeoutError) as error:
        raise _refused(f"{source[:64]!r} does not compile: {str(error)[:128]}") from None
    if pattern.flags & regex.REVERSE:
        raise _refused(f"{source[:64]!r} has a lookbehind, which incremental matching does not support")
    if empty is not None:
        raise _refused(f"{source[:64]!r} matches the empty text, so it would end every answer at once")
    return source


def _repeats(value: int) -> int:
    if value == 1:
        raise _refused("a run of tokens always occurs once")
    return value


# Evaluated left to right, because 0 equals False.
_Bias: TypeAlias = Annotated[
    Annotated[float, Field(ge=-100, le=100)] | Literal[False], Field(union_mode="left_to_right")
]
# JSON has no tuples: strict=False accepts a list, its items stay strict.
_Biases: TypeAlias = Annotated[
    tuple[tuple[int, _Bias], ...],
    Field(strict=False, fail_fast=True),
    BeforeValidator(_bias_pairs),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]},
            "maxProperties": MAX_BIASES,
        }
    ),
]
_Samplers: TypeAlias = Annotated[
    tuple[SamplerName, ...],
    Field(strict=False, fail_fast=True),
    BeforeValidator(_sampler_names),
    AfterValidator(_each_once),
]
_Breakers: TypeAlias = Annotated[
    tuple[Annotated[str, AfterValidator(_breaker)], ...], Field(strict=False, max_length=MAX_BREAKERS, fail_fast=True)
]
_Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Stops: TypeAlias = Annotated[
    tuple[_Stop, ...],
    Field(strict=False, max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=_Stop | Annotated[tuple[_Stop, ...], Field(max_length=MAX_STOPS)]),
]
_Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)]
_Patterns: TypeAlias = Annotated[
    tuple[Annotated[_Pattern, AfterValidator(_pattern)], ...],
    Field(strict=False, max_length=MAX_PATTERNS, fail_fast=True),
    BeforeValidator(
        _as_list, json_schema_input_type=_Pattern | Annotated[tuple[_Pattern, ...], Field(max_length=MAX_PATTERNS)]
    ),
]
_Repetitions: TypeAlias = Annotated[
    int,
    Field(ge=0, le=MAX_REPETITIONS),
    AfterValidator(_repeats),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_REPETITIONS, "not": {"const": 1}}),
]
_Seed: TypeAlias = Annotated[
    Annotated[int, Field(ge=0, le=MAX_SEED)] | None,
    BeforeValidator(_minus_one_is_none, json_schema_input_type=Annotated[int, Field(ge=0, le=MAX_SEED)] | Literal[-1]),
]
_MaxTokens: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None,
    BeforeValidator(
        _minus_one_is_none, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Literal[-1]
    ),
]


def _param(
    default: object,
    description: str,
    allowed: str,
    *,
    aliases: Sequence[str] = (),
    group: Group = "sampling",
    **bounds: Any,
) -> Any:
    extra: dict[str, Any] = {"group": group, "aliases": list(aliases), "allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


def _number(default: float, bounds: tuple[float, float], description: str, *, aliases: Sequence[str] = ()) -> Any:
    low, high = bounds
    return _param(default, description, f"a number from {low:g} to {high:g}", aliases=aliases, ge=low, le=high)


def _integer(default: int, bounds: tuple[int, int], description: str, *, aliases: Sequence[str] = ()) -> Any:
    low, high = bounds
    return _param(default, description, f"an integer from {low} to {high}", aliases=aliases, ge=low, le=high)


class Params(BaseModel):
    """Sampling and stopping parameters of a turn; ``model_fields_set`` has the given ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float = _number(
        0.8, (0, 5), "Divides the logits before sampling; 0 always takes the most probable token.", aliases=("temp",)
    )
    dynatemp_range: float = _number(
        0.0, (0, 5), "Range by which the temperature varies with the distribution's entropy; 0 is off."
    )
    dynatemp_exponent: float = _number(1.0, (0.01, 10), "How entropy maps to the dynamic temperature; 1 is linear.")
    top_k: int = _integer(40, (0, MAX_TOKENS), "Keeps the k most probable tokens; 0 is off.")
    top_p: float = _number(0.95, (0, 1), "Keeps the most probable tokens up to this cumulative probability; 1 is off.")
    min_p: float = _number(0.05, (0, 1), "Keeps tokens at least this fraction as probable as the top token; 0 is off.")
    typical_p: float = _number(
        1.0, (0, 1), "Keeps the most typical tokens (surprise near the entropy) up to this probability; 1 is off."
    )
    top_n_sigma: float = _number(
        -1.0, (-1, 100), "Keeps logits within this many standard deviations of the largest; 0 and below is off."
    )
    xtc_probability: float = _number(
        0.0, (0, 1), "Probability of removing all probable tokens but the least probable one; 0 is off."
    )
    xtc_threshold: float = _number(
        0.1, (0, 1), "Probability from which xtc_probability counts a token as probable; above 0.5 is off."
    )
    repeat_penalty: float = _number(
        1.0, (0.01, 10), "Makes tokens seen in the last repeat_last_n tokens less likely by this factor; 1 is off."
    )
    repeat_last_n: int = _integer(
        64,
        (-1, MAX_TOKENS),
        "Number of latest tokens that repeat, presence and frequency penalties consider; 0 is off, -1 is all.",
        aliases=("penalty_last_n",),
    )
    presence_penalty: float = _number(
        0.0, (-10, 10), "Subtracted from the logit of each token seen in the last repeat_last_n tokens; 0 is off."
    )
    frequency_penalty: float = _number(
        0.0, (-10, 10), "Subtracted from a token's logit for each time it was seen in repeat_last_n tokens; 0 is off."
    )
    dry_multiplier: float = _number(
        0.0, (0, 100), "Strength of the penalty on tokens that would continue a repeated sequence; 0 is off."
    )
    dry_base: float = _number(
        1.75, (1, 100), "Growth of the DRY penalty with each further token of the repeated sequence."
    )
    dry_allowed_length: int = _integer(2, (1, MAX_TOKENS), "Tokens a sequence may repeat before DRY penalizes it.")
    dry_penalty_last_n: int = _integer(
        -1, (-1, MAX_TOKENS), "Number of latest tokens that DRY considers; 0 is off, -1 is all."
    )
    dry_sequence_breakers: _Breakers = _param(
        ("\n", ":", '"', "*"),
        "Strings at which DRY ends a repeated sequence.",
        f"a list of at most {MAX_BREAKERS} non-empty strings of at most {MAX_BREAKER_BYTES} bytes",
    )
    mirostat: int = _integer(0, (0, 2), "Keeps the surprise constant instead of truncating: version 1 or 2; 0 is off.")
    mirostat_tau: float = _number(5.0, (0, 100), "Target surprise of mirostat, in bits per token.")
    mirostat_eta: float = _number(0.1, (0, 1), "Learning rate of mirostat.")
    adaptive_target: float = _number(
        -1.0, (-1, 1), "Prefers tokens near this probability (adaptive-p); below 0 is off."
    )
    adaptive_decay: float = _number(0.9, (0, 0.99), "History length of adaptive-p: about 1 / (1 - decay) tokens.")
    min_keep: int = _integer(0, (0, MAX_TOKENS), "Minimum number of tokens that top_p, min_p, typical_p and xtc keep.")
    seed: _Seed = _param(
        None,
        "Seed of the random numbers, each of which depends only on it and on the token's position in the answer; "
        "without it each turn uses a random seed.",
        f"an integer from 0 to {MAX_SEED}, or -1 for a random one",
    )
    logit_bias: _Biases = _param(
        (),
        "Bias added to the logits of individual tokens; false bans a token.",
        f"an object from token id to a number from -100 to 100 or false, with at most {MAX_BIASES} entries",
    )
    n_probs: int = _integer(
        0, (0, 20), "Number of most probable tokens reported with each token.", aliases=("logprobs",)
    )
    samplers: _Samplers = _param(
        SAMPLER_ORDER,
        "Samplers in the order in which they run; an omitted one is off.",
        f"a list, each at most once, of {', '.join(SAMPLER_ORDER)}",
    )
    ignore_eos: bool = _param(False, "Continues past the model's end-of-sequence token.", "true or false")
    stop: _Stops = _param(
        (),
        "Strings that end the answer before their match, which is never sent.",
        f"a string or a list of at most {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters",
        group="stopping",
    )
    stop_regex: _Patterns = _param(
        (),
        "Regular expressions that end the answer before their match, which is never sent.",
        f"a string or a list of at most {MAX_PATTERNS} regular expressions of at most {MAX_PATTERN_CHARS} characters",
        group="stopping",
    )
    max_tokens: _MaxTokens = _param(
        None,
        "Maximum number of tokens to generate; without it the answer may fill the context.",
        f"an integer from 1 to {MAX_TOKENS}, or -1 for as many as the context holds",
        aliases=("n_predict",),
        group="stopping",
    )
    max_time_ms: Annotated[int, Field(ge=1, le=86_400_000)] | None = _param(
        None,
        "Timeout of the turn in milliseconds from `infer` on, including the wait for a slot.",
        "an integer from 1 to 86400000",
        group="stopping",
    )
    stop_on_repetition: _Repetitions = _param(
        0,
        "Ends the answer when a sequence of tokens repeats this many times in a row; 0 is off.",
        f"0 or an integer from 2 to {MAX_REPETITIONS}",
        group="stopping",
    )
    n_keep: Annotated[int, Field(ge=0, le=MAX_KEPT)] = _param(
        0,
        "Number of first messages after the system prompt that are kept when the context is shifted.",
        f"an integer from 0 to {MAX_KEPT}",
        group="memory",
    )


@dataclass(frozen=True, slots=True)
class ParamDoc:
    """Documentation of a parameter; ``allowed`` completes the sentence "must be …", ``kind`` is the JSON type."""

    name: str
    aliases: tuple[str, ...]
    kind: str
    allowed: str
    default: object
    group: Group
    description: str


def _doc(name: str, schema: Mapping[str, Any]) -> ParamDoc:
    options = schema.get("anyOf", [schema])
    return ParamDoc(
        name=name,
        aliases=tuple(schema["aliases"]),
        kind=" or ".join(dict.fromkeys(option["type"] for option in options if option["type"] != "null")),
        allowed=schema["allowed"],
        default=Params.model_fields[name].default,
        group=schema["group"],
        description=schema["description"],
    )


PARAM_DOCS: tuple[ParamDoc, ...] = tuple(
    _doc(name, schema) for name, schema in Params.model_json_schema()["properties"].items()
)
