"""Turning what a client wrote under ``params`` into ``Params``, or saying exactly which part of it is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import ValidationError

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.params_model import PARAM_DOCS, ParamDoc, Params

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

_NO_BEAMS = "Beam search is gone from llama.cpp; sample with temperature and top_p."
_GONE: Mapping[str, str] = {
    "tfs_z": "Tail-free sampling is gone from llama.cpp; use min_p, top_p or typical_p.",
    "tfs": "Tail-free sampling is gone from llama.cpp; use min_p, top_p or typical_p.",
    "top_a": "llama.cpp has no top-a; use min_p.",
    "epsilon_cutoff": "llama.cpp has no epsilon cutoff; use min_p.",
    "eta_cutoff": "llama.cpp has no eta cutoff; use min_p or typical_p.",
    "smoothing_factor": "llama.cpp has no quadratic smoothing; use temperature, or dynatemp_range.",
    "penalize_nl": "llama.cpp now treats line breaks like other tokens; use logit_bias on the line break's token.",
    "num_beams": _NO_BEAMS,
    "best_of": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "cfg_scale": "Guidance is gone from llama.cpp; say what you want in the system prompt.",
    "guidance_scale": "Guidance is gone from llama.cpp; say what you want in the system prompt.",
    "repetition_penalty": "Its name here is repeat_penalty.",
    "max_new_tokens": "Its name here is max_tokens.",
    "max_completion_tokens": "Its name here is max_tokens.",
    "mirostat_mode": "Its name here is mirostat.",
    "mirostat_lr": "Its name here is mirostat_eta.",
    "mirostat_ent": "Its name here is mirostat_tau.",
}
_BESIDE_PARAMS = ("json_schema", "regex", "grammar", "tools", "tool_choice")

_DOCS: Mapping[str, ParamDoc] = {doc.name: doc for doc in PARAM_DOCS}
_NAMES: Mapping[str, str] = {spelling: doc.name for doc in PARAM_DOCS for spelling in (doc.name, *doc.aliases)}

_HINTS: Mapping[tuple[str, object], str] = {
    ("max_tokens", 0): "To add to the history without generating, use append.",
    ("mirostat", 3): "llama.cpp has mirostat 1 and 2 only.",
}


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as written: where it stood and which parameter it means."""

    name: str
    path: str
    value: object


def parse_params(raw: Mapping[str, object], *, path: str = "params") -> Params:
    """Read parameters written flat, by alias, in groups or in nested forms.

    A ``null`` counts as not given. ``path`` is where ``raw`` stands in the request.

    Raises:
        InferenceCenterError: ``invalid_request`` with the path as written, the value and what is allowed.
    """
    given: dict[str, _Given] = {}
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


def _walk(raw: Mapping[str, object], path: str) -> Iterator[_Given]:
    for key, value in raw.items():
        if key in _GROUPS:
            yield from _walk_group(_object(value, f"{path}.{key}"), f"{path}.{key}", group=key)
        else:
            yield from _read(key, value, path)


def _walk_group(raw: Mapping[str, object], path: str, *, group: str) -> Iterator[_Given]:
    for key, value in raw.items():
        for entry in _read(key, value, path):
            if (right := _DOCS[entry.name].group) != group:
                raise _invalid(entry.path, f"{entry.path}: {entry.name} belongs to the group {right}, not to {group}.")
            yield entry


def _read(key: str, value: object, path: str) -> Iterator[_Given]:
    here = f"{path}.{_short(key)}"
    if key in _NESTED and (key not in _NAMES or isinstance(value, Mapping)):
        parts = _NESTED[key]
        for part, inner in _object(value, here).items():
            if part not in parts:
                raise _unknown(part, here, known=parts)
            yield _Given(parts[part], f"{here}.{part}", inner)
    elif key in _NAMES:
        yield _Given(_NAMES[key], here, value)
    elif key in _GONE:
        # 1 turned tail-free sampling off, so that old requests that say so lose nothing.
        if not (key in {"tfs_z", "tfs"} and (value is None or (type(value) in {int, float} and value == 1))):
            raise _invalid(here, f"{here} is not supported.", hint=_GONE[key])
    elif key in _BESIDE_PARAMS:
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


def _out_of_range(entry: _Given, reason: str | None) -> InferenceCenterError:
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
    # Python refuses to print integers of several thousand digits.
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
