"""Parameters of a turn: parsing, merging of levels, warnings about ineffective ones, and serialization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params_model import PARAM_DOCS, SAMPLER_ORDER, ParamDoc, Params, SamplerName

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "PARAM_DOCS",
    "SAMPLER_ORDER",
    "ParamDoc",
    "Params",
    "SamplerName",
    "cross_check",
    "decode",
    "encode",
    "is_greedy",
    "json_schema",
    "merge",
    "parse_params",
]

_GROUPS = ("sampling", "stopping", "memory")

# Nested form: key inside the object -> flat name.
_NESTED: Mapping[str, Mapping[str, str]] = {
    "dynatemp": {"range": "dynatemp_range", "exponent": "dynatemp_exponent"},
    "dry": {
        "multiplier": "dry_multiplier",
        "base": "dry_base",
        "allowed_length": "dry_allowed_length",
        "penalty_last_n": "dry_penalty_last_n",
        "sequence_breakers": "dry_sequence_breakers",
    },
    "mirostat": {"mode": "mirostat", "tau": "mirostat_tau", "eta": "mirostat_eta"},
    "xtc": {"probability": "xtc_probability", "threshold": "xtc_threshold"},
    "adaptive": {"target": "adaptive_target", "decay": "adaptive_decay"},
}

_NO_BEAMS = "llama.cpp has removed beam search; sample with temperature and top_p."
_UNSUPPORTED: Mapping[str, str] = {
    "tfs_z": "llama.cpp has removed tail-free sampling; use min_p, top_p or typical_p.",
    "tfs": "llama.cpp has removed tail-free sampling; use min_p, top_p or typical_p.",
    "top_a": "llama.cpp has no top-a; use min_p.",
    "epsilon_cutoff": "llama.cpp has no epsilon cutoff; use min_p.",
    "eta_cutoff": "llama.cpp has no eta cutoff; use min_p or typical_p.",
    "smoothing_factor": "llama.cpp has no quadratic smoothing; use temperature, or dynatemp_range.",
    "penalize_nl": "llama.cpp now treats line breaks like other tokens; use logit_bias on the line break's token.",
    "num_beams": _NO_BEAMS,
    "best_of": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "cfg_scale": "llama.cpp has removed guidance; give instructions in the system prompt.",
    "guidance_scale": "llama.cpp has removed guidance; give instructions in the system prompt.",
    "repetition_penalty": "Use repeat_penalty.",
    "max_new_tokens": "Use max_tokens.",
    "max_completion_tokens": "Use max_tokens.",
    "mirostat_mode": "Use mirostat.",
    "mirostat_lr": "Use mirostat_eta.",
    "mirostat_ent": "Use mirostat_tau.",
}
_SEPARATE_FIELDS = ("json_schema", "regex", "grammar", "tools", "tool_choice")

_DOCS: Mapping[str, ParamDoc] = {doc.name: doc for doc in PARAM_DOCS}
_NAMES: Mapping[str, str] = {spelling: doc.name for doc in PARAM_DOCS for spelling in (doc.name, *doc.aliases)}

_HINTS: Mapping[tuple[str, object], str] = {
    ("max_tokens", 0): "To add to the history without generating, use append.",
    ("mirostat", 3): "llama.cpp has mirostat 1 and 2 only.",
}


@dataclass(frozen=True, slots=True)
class _GivenParam:
    """A given value, its path in the request, and the name of the parameter that it sets."""

    name: str
    path: str
    value: object


def parse_params(raw: Mapping[str, object], *, path: str = "params") -> Params:
    """Parse parameters, which may be given flat, by alias, in groups or in nested objects.

    ``null`` counts as absent. ``path`` is the path of ``raw`` in the request.

    Raises:
        InferenceCenterError: ``invalid_request``; the message names the given path, the value and the allowed values.
    """
    given: dict[str, _GivenParam] = {}
    for entry in _walk(raw, path):
        if (earlier := given.get(entry.name)) is not None:
            raise _invalid(entry.path, f"{entry.path} and {earlier.path} are the same parameter.", hint="Give it once.")
        given[entry.name] = entry
    values = {entry.name: entry.value for entry in given.values() if entry.value is not None}
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        reason = first["msg"] if first["type"] == "refused" else None
        raise _out_of_range(given[str(first["loc"][0])], reason) from None


def _walk(raw: Mapping[str, object], path: str) -> Iterator[_GivenParam]:
    for key, value in raw.items():
        if key in _GROUPS:
            yield from _walk_group(_object(value, f"{path}.{key}"), f"{path}.{key}", group=key)
        else:
            yield from _read(key, value, path)


def _walk_group(raw: Mapping[str, object], path: str, *, group: str) -> Iterator[_GivenParam]:
    for key, value in raw.items():
        for entry in _read(key, value, path):
            if (right := _DOCS[entry.name].group) != group:
                raise _invalid(entry.path, f"{entry.path}: {entry.name} belongs to the group {right}, not to {group}.")
            yield entry


def _read(key: str, value: object, path: str) -> Iterator[_GivenParam]:
    here = f"{path}.{_short(key)}"
    if key in _NESTED and (key not in _NAMES or isinstance(value, Mapping)):
        parts = _NESTED[key]
        for part, inner in _object(value, here).items():
            if part not in parts:
                raise _unknown(part, here, known=parts)
            yield _GivenParam(parts[part], f"{here}.{part}", inner)
    elif key in _NAMES:
        yield _GivenParam(_NAMES[key], here, value)
    elif key in _UNSUPPORTED:
        # The value 1 disables tail-free sampling, so it can be ignored.
        if not (key in {"tfs_z", "tfs"} and (value is None or (type(value) in {int, float} and value == 1))):
            raise _invalid(here, f"{here} is not supported.", hint=_UNSUPPORTED[key])
    elif key in _SEPARATE_FIELDS:
        raise _invalid(here, f"{here} is not a parameter.", hint=f"Put {key} beside params, not into it.")
    else:
        raise _unknown(key, path, known=[*_NAMES, *_NESTED, *_GROUPS])


def _object(value: object, path: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _invalid(path, f"{path} must be an object, not {_shown(value)}.")
    return value


def _invalid(field: str, message: str, *, hint: str | None = None) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field=field, hint=hint)


def _unknown(key: str, path: str, *, known: Iterable[str]) -> InferenceCenterError:
    names = list(known)
    nearest = get_close_matches(key[:64], names, n=1)
    hint = f"Did you mean {nearest[0]}?" if nearest else f"Known are {', '.join(names)}."
    field = f"{path}.{_short(key)}"
    return _invalid(field, f"{field} is not a known parameter.", hint=hint)


def _out_of_range(entry: _GivenParam, reason: str | None) -> InferenceCenterError:
    doc = _DOCS[entry.name]
    detail = f": {reason}" if reason else ""
    message = f"{entry.path} must be {doc.allowed}, not {_shown(entry.value)}{detail}."
    special = isinstance(entry.value, int | float) and _HINTS.get((entry.name, entry.value))
    return _invalid(entry.path, message, hint=special or doc.description)


def _short(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:64]}…"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(_short(value))
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, Mapping):
        return f"an object of {len(value)} entries"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} items"
    return "null" if value is None else type(value).__name__


def _number(value: float) -> str:
    # Python refuses to convert integers of several thousand digits.
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


_TRUNCATION = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "min_keep")
_DYNATEMP = ("dynatemp_range", "dynatemp_exponent")
_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
_MIROSTAT = ("mirostat_tau", "mirostat_eta")

# Parameters that have no effect when their sampler is not in ``samplers``.
_PARAMS_OF_SAMPLER = {
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
    """Return whether always the most probable token is taken, so that no random number is used."""
    return params.temperature == 0 and "temperature" in params.samplers


def cross_check(params: Params, *, given: Collection[str] | None = None) -> tuple[str, ...]:
    """Return a warning for each given parameter that has no effect in combination with the others.

    Args:
        params: Effective parameters of a turn.
        given: Names of the given parameters; by default those set explicitly in ``params``.

    Raises:
        InferenceCenterError: ``invalid_request`` for parameters that exclude each other.
    """
    if params.mirostat and params.adaptive_target >= 0:
        message = f"mirostat {params.mirostat} and adaptive_target {params.adaptive_target:g} both choose the token."
        hint = "Set mirostat to 0, or adaptive_target to -1."
        raise InferenceCenterError(ErrorCode.INVALID_REQUEST, message, field="params.adaptive_target", hint=hint)
    chosen = params.model_fields_set if given is None else given
    if not chosen:
        return ()
    warned: dict[str, str] = {}
    for names, reason in _ineffective(params):
        for name in names:
            if name in chosen:
                warned.setdefault(name, f"{name} has no effect: {reason}.")
    return tuple(warned.values())


def _ineffective(params: Params) -> Iterator[tuple[tuple[str, ...], str]]:
    for sampler, names in _PARAMS_OF_SAMPLER.items():
        if sampler not in params.samplers:
            yield names, f"{sampler} is not in samplers"
    yield from _ineffective_by_selection(params)
    yield from _ineffective_by_partner(params)


def _ineffective_by_selection(params: Params) -> Iterator[tuple[tuple[str, ...], str]]:
    if is_greedy(params):
        random = (*_TRUNCATION, *_DYNATEMP, "mirostat", *_MIROSTAT, "adaptive_target", "adaptive_decay", "seed")
        yield random, "temperature 0 always takes the most probable token"
    elif params.mirostat:
        yield _TRUNCATION, f"mirostat {params.mirostat} replaces it"
    if not params.mirostat:
        yield _MIROSTAT, "mirostat is 0"
    if params.adaptive_target < 0:
        yield ("adaptive_decay",), "adaptive_target is off"


def _ineffective_by_partner(params: Params) -> Iterator[tuple[tuple[str, ...], str]]:
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


def merge(base: Params, *overlays: Params) -> Params:
    """Return ``base`` updated with the explicitly set values of each overlay; later overlays win."""
    changed = {name: getattr(overlay, name) for overlay in overlays for name in overlay.model_fields_set}
    return base.model_copy(update=changed)


def encode(params: Params) -> bytes:
    """Return the explicitly set values as JSON; ``decode`` is the inverse."""
    return params.model_dump_json(exclude_unset=True).encode()


def decode(data: bytes | str) -> Params:
    """Return the parameters encoded by ``encode``."""
    return Params.model_validate_json(data)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the flat form, each property with its ``group`` and ``aliases``."""
    return Params.model_json_schema()
