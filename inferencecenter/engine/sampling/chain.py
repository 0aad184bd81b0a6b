"""The sampler chain of a turn as plain values, in llama.cpp's order of execution."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params import is_greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from inferencecenter.protocol.params import Params, SamplerName

# LLAMA_DEFAULT_SEED: llama.cpp then draws a seed itself.
RANDOM_SEED = 2**32 - 1
# Number of candidates from which mirostat 1 estimates the slope of the distribution, as in llama.cpp's programs.
MIROSTAT_CANDIDATES = 100


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Adds a bias to single tokens; minus infinity bans one."""

    biases: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Makes tokens of the last ``last_n`` less likely."""

    last_n: int
    repeat: float
    frequency: float
    presence: float


@dataclass(frozen=True, slots=True)
class Dry:
    """Penalizes tokens that would continue a sequence of the last ``last_n`` tokens again."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """Keeps logits within ``n`` standard deviations of the largest."""

    n: float


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the ``k`` likeliest tokens."""

    k: int


@dataclass(frozen=True, slots=True)
class TypicalP:
    """Keeps the most typical tokens up to the probability ``p``."""

    p: float
    min_keep: int


@dataclass(frozen=True, slots=True)
class TopP:
    """Keeps the likeliest tokens up to the probability ``p``."""

    p: float
    min_keep: int


@dataclass(frozen=True, slots=True)
class MinP:
    """Keeps tokens at least ``p`` times as probable as the likeliest."""

    p: float
    min_keep: int


@dataclass(frozen=True, slots=True)
class Xtc:
    """Removes, with a chance, all but the least likely of the tokens above a threshold."""

    probability: float
    threshold: float
    min_keep: int
    seed: int


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divides the logits; ``dynamic_range`` moves the divisor with the entropy."""

    temperature: float
    dynamic_range: float
    exponent: float


@dataclass(frozen=True, slots=True)
class Greedy:
    """Takes the likeliest token."""


@dataclass(frozen=True, slots=True)
class Dist:
    """Draws from the distribution."""

    seed: int


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Draws so that the surprise stays near ``tau`` bits; ``version`` is 1 or 2."""

    version: int
    tau: float
    eta: float
    seed: int


@dataclass(frozen=True, slots=True)
class AdaptiveP:
    """Draws so that the probability of what is drawn stays near ``target``."""

    target: float
    decay: float
    seed: int


SamplerSpec: TypeAlias = (
    LogitBias
    | Penalties
    | Dry
    | TopNSigma
    | TopK
    | TypicalP
    | TopP
    | MinP
    | Xtc
    | Temperature
    | Greedy
    | Dist
    | Mirostat
    | AdaptiveP
)


def seed_at(spec: Xtc | Dist | Mirostat | AdaptiveP, position: int) -> int:
    """Return a sampler's seed for the token at a ``position`` of the answer, counted from 0.

    It is derived from the turn's seed, the position and the kind of sampler, so a draw does not depend on earlier
    draws. ``RANDOM_SEED``, for which llama.cpp draws one, stays.
    """
    if spec.seed == RANDOM_SEED:
        return RANDOM_SEED
    digest = hashlib.sha256(f"{type(spec).__name__} {spec.seed} {position}".encode()).digest()
    return int.from_bytes(digest[:4]) % RANDOM_SEED


def plan_chain(
    params: Params, *, n_vocab: int, n_ctx: int, end_tokens: Collection[int] = ()
) -> tuple[SamplerSpec, ...]:
    """Return the samplers that have an effect, in order; the last one chooses the token.

    Args:
        params: Effective parameters. Without a seed, llama.cpp draws one.
        n_vocab: Tokens in the vocabulary.
        n_ctx: Tokens that a slot holds; the value of -1 for the penalties.
        end_tokens: Tokens that end a generation, banned by ``ignore_eos``.

    Raises:
        InferenceCenterError: ``invalid_request`` for a biased token that the vocabulary lacks, or if all are banned.
    """
    bias = _logit_bias(params, n_vocab=n_vocab, end_tokens=end_tokens)
    if is_greedy(params):
        names: Collection[SamplerName] = ("penalties", "dry")
    elif params.mirostat:
        names = ("penalties", "dry", "temperature")
    else:
        names = params.samplers
    built = (_BUILDERS[name](params, n_ctx) for name in params.samplers if name in names)
    return (*bias, *(spec for spec in built if spec is not None), _final(params))


def learns(params: Params) -> str | None:
    """Return the name of the sampler whose state a replay cannot restore; ``None`` if there is none.

    All others are restored by accepting the same tokens, and draw by seed and position.
    """
    match _final(params):
        case Mirostat():
            return "mirostat"
        case AdaptiveP():
            return "adaptive-p"
    return None


def _logit_bias(params: Params, *, n_vocab: int, end_tokens: Collection[int]) -> tuple[LogitBias, ...]:
    biases = {token: float("-inf") if bias is False else bias for token, bias in params.logit_bias}
    for token in biases:
        if token >= n_vocab:
            message = f"params.logit_bias: token {token} does not exist; this model has tokens 0 to {n_vocab - 1}."
            raise InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field="params.logit_bias")
    if params.ignore_eos:
        biases.update(dict.fromkeys(end_tokens, float("-inf")))
    if sum(bias == float("-inf") for bias in biases.values()) == n_vocab:
        message = "logit_bias and ignore_eos ban every token that this model has."
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field="params.logit_bias")
    return (LogitBias(tuple(biases.items())),) if biases else ()


def _final(params: Params) -> SamplerSpec:
    seed = RANDOM_SEED if params.seed is None else params.seed
    if is_greedy(params):
        return Greedy()
    if params.mirostat:
        return Mirostat(version=params.mirostat, tau=params.mirostat_tau, eta=params.mirostat_eta, seed=seed)
    if params.adaptive_target >= 0:
        return AdaptiveP(target=params.adaptive_target, decay=params.adaptive_decay, seed=seed)
    return Dist(seed)


def _look_back(n_tokens: int, n_ctx: int) -> int:
    return n_ctx if n_tokens == -1 else min(n_tokens, n_ctx)


def _penalties(params: Params, n_ctx: int) -> SamplerSpec | None:
    spec = Penalties(
        last_n=_look_back(params.repeat_last_n, n_ctx),
        repeat=params.repeat_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )
    idle = spec.repeat == 1 and spec.frequency == 0 and spec.presence == 0
    return None if idle or spec.last_n == 0 else spec


def _dry(params: Params, n_ctx: int) -> SamplerSpec | None:
    last_n = _look_back(params.dry_penalty_last_n, n_ctx)
    if params.dry_multiplier == 0 or last_n == 0:
        return None
    return Dry(
        multiplier=params.dry_multiplier,
        base=params.dry_base,
        allowed_length=params.dry_allowed_length,
        last_n=last_n,
        breakers=params.dry_sequence_breakers,
    )


def _xtc(params: Params, _: int) -> SamplerSpec | None:
    if params.xtc_probability == 0 or params.xtc_threshold > 0.5:
        return None
    seed = RANDOM_SEED if params.seed is None else params.seed
    return Xtc(params.xtc_probability, params.xtc_threshold, min_keep=params.min_keep, seed=seed)


def _temperature(params: Params, _: int) -> SamplerSpec | None:
    if params.temperature == 1 and params.dynatemp_range == 0:
        return None
    return Temperature(params.temperature, params.dynatemp_range, params.dynatemp_exponent)


_BUILDERS: Mapping[SamplerName, Callable[[Params, int], SamplerSpec | None]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda params, _: TopNSigma(params.top_n_sigma) if params.top_n_sigma > 0 else None,
    "top_k": lambda params, _: TopK(params.top_k) if params.top_k > 0 else None,
    "typ_p": lambda params, _: TypicalP(params.typical_p, params.min_keep) if params.typical_p < 1 else None,
    "top_p": lambda params, _: TopP(params.top_p, params.min_keep) if params.top_p < 1 else None,
    "min_p": lambda params, _: MinP(params.min_p, params.min_keep) if params.min_p > 0 else None,
    "xtc": _xtc,
    "temperature": _temperature,
}
