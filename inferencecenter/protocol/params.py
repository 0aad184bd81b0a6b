"""Parameters of a turn: reading, merging levels, checking combinations, and the form they travel in."""

from __future__ import annotations

from typing import Any

from inferencecenter.protocol.params_check import cross_check, is_greedy
from inferencecenter.protocol.params_model import PARAM_DOCS, SAMPLER_ORDER, ParamDoc, Params, SamplerName
from inferencecenter.protocol.params_reading import parse_params

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


def merge(base: Params, *overlays: Params) -> Params:
    """Return ``base`` with what each overlay sets explicitly, the later ones winning."""
    changed = {name: getattr(overlay, name) for overlay in overlays for name in overlay.model_fields_set}
    return base.model_copy(update=changed)


def encode(params: Params) -> bytes:
    """Return the explicitly set values as JSON; ``decode`` gives back an equal object."""
    return params.model_dump_json(exclude_unset=True).encode()


def decode(data: bytes) -> Params:
    """Return the parameters in bytes made by ``encode``."""
    return Params.model_validate_json(data)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the flat form, each property with its ``group`` and ``aliases``."""
    return Params.model_json_schema()
