"""Combinations of parameters: those in which a value has no effect, and those that cannot be obeyed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferencecenter.errors import ErrorCode, InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from inferencecenter.protocol.params_model import Params

_TRUNCATION = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "min_keep")
_DYNATEMP = ("dynatemp_range", "dynatemp_exponent")
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
_MIROSTAT = ("mirostat_tau", "mirostat_eta")

# Which parameters a sampler's absence from ``samplers`` silences.
_OWNED = {
    "penalties": (*_PENALTIES, "repeat_last_n"),
    "dry": ("dry_multiplier", *_DRY),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability", "xtc_threshold"),
    "temperature": ("temperature", *_DYNATEMP),
}


def is_greedy(params: Params) -> bool:
    """Tell whether every token is the likeliest one, so that nothing is drawn at random."""
    return params.temperature == 0 and "temperature" in params.samplers


def cross_check(params: Params, *, given: Collection[str] | None = None) -> tuple[str, ...]:
    """Return a sentence for each given parameter that has no effect beside the others.

    Args:
        params: Effective parameters of a turn.
        given: Names somebody chose; those set explicitly in ``params`` when omitted.

    Raises:
        InferenceCenterError: ``invalid_request`` for two parameters that exclude each other.
    """
    if params.mirostat and params.adaptive_target >= 0:
        message = f"mirostat {params.mirostat} and adaptive_target {params.adaptive_target:g} both choose the token."
        hint = "Set mirostat to 0, or adaptive_target to -1."
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field="params.adaptive_target", hint=hint)
    chosen = params.model_fields_set if given is None else given
    warned: dict[str, str] = {}
    for names, reason in _silenced(params):
        for name in names:
            if name in chosen:
                warned.setdefault(name, f"{name} has no effect: {reason}.")
    return tuple(warned.values())


def _silenced(params: Params) -> Iterator[tuple[tuple[str, ...], str]]:
    for sampler, names in _OWNED.items():
        if sampler not in params.samplers:
            yield names, f"{sampler} is not in samplers"
    yield from _silenced_by_selection(params)
    yield from _silenced_by_partner(params)


def _silenced_by_selection(params: Params) -> Iterator[tuple[tuple[str, ...], str]]:
    if is_greedy(params):
        random = (*_TRUNCATION, *_DYNATEMP, "mirostat", *_MIROSTAT, "adaptive_target", "adaptive_decay", "seed")
        yield random, "temperature 0 always takes the likeliest token"
    elif params.mirostat:
        yield _TRUNCATION, f"mirostat {params.mirostat} replaces it"
    if not params.mirostat:
        yield _MIROSTAT, "mirostat is 0"
    if params.adaptive_target < 0:
        yield ("adaptive_decay",), "adaptive_target is off"


def _silenced_by_partner(params: Params) -> Iterator[tuple[tuple[str, ...], str]]:
    if params.repeat_last_n == 0:
        yield _PENALTIES, "repeat_last_n is 0"
    elif params.repeat_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
        yield ("repeat_last_n",), "no penalty is set"
    if params.dry_multiplier == 0:
        yield _DRY, "dry_multiplier is 0"
    elif params.dry_penalty_last_n == 0:
        yield ("dry_multiplier", *_DRY), "dry_penalty_last_n is 0"
    if params.xtc_threshold > 0.5:
        yield ("xtc_probability", "xtc_threshold"), "only one token can be more probable than 0.5"
    elif params.xtc_probability == 0:
        yield ("xtc_threshold",), "xtc_probability is 0"
    if params.dynatemp_range == 0:
        yield ("dynatemp_exponent",), "dynatemp_range is 0"
    if not _truncates(params):
        yield ("min_keep",), "none of top_p, min_p, typical_p and xtc is on"


def _truncates(params: Params) -> bool:
    on = {
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
        "typ_p": params.typical_p < 1,
        "xtc": params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
    }
    return any(on[name] for name in on if name in params.samplers)
