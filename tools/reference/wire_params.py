"""The parameters for the web page: range, default, group and meaning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from inferencecenter.protocol.params import PARAM_DOCS, json_schema
from tools.reference.wire_types import GENERATED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.protocol.params import ParamDoc

_TYPES: Final = """\
/**
 * @typedef {object} ParamSpec
 * @property {keyof import("./types.js").ParamValues} name
 * @property {readonly string[]} aliases  names that mean the same
 * @property {"sampling" | "stopping" | "memory"} group
 * @property {"number" | "integer" | "boolean" | "texts" | "choices" | "biases"} kind  texts: any strings; choices: some
 *   of `choices`, in an order; biases: numbers, or false, by token id
 * @property {number | null} minimum  where -1 has a meaning of its own, -1; what lies between is in `allowed`
 * @property {number | null} maximum
 * @property {readonly string[] | null} choices
 * @property {number | boolean | readonly string[] | Readonly<Record<string, number | false>> | null} default  null: the
 *   daemon decides
 * @property {string} allowed  completes "must be …"
 * @property {string} description
 */
"""


def module() -> str:
    """Return ``web/js/wire/params.js``."""
    properties = json_schema()["properties"]
    rows = (json.dumps(_row(doc, properties[doc.name]), ensure_ascii=False) for doc in PARAM_DOCS)
    listed = "\n".join(f"  {row}," for row in rows)
    head = f"// @ts-check\n{GENERATED}\n\n{_TYPES}"
    return f"{head}\n/** @type {{readonly ParamSpec[]}} */\nexport const PARAMS = [\n{listed}\n];\n"


def _row(doc: ParamDoc, schema: Mapping[str, Any]) -> dict[str, Any]:
    options = [option for option in schema.get("anyOf", [schema]) if option["type"] != "null"]
    # -1 leaves the choice to the daemon, and lies below the range.
    lows = [option.get("const", option.get("minimum")) for option in options]
    kind = _kind(doc, schema)
    # An empty list is how the daemon's own model writes that no token has a bias.
    default = {} if kind == "biases" else doc.default
    return {
        "name": doc.name,
        "aliases": doc.aliases,
        "group": doc.group,
        "kind": kind,
        "minimum": min((low for low in lows if low is not None), default=None),
        "maximum": options[0].get("maximum"),
        "choices": schema["items"]["enum"] if kind == "choices" else None,
        "default": default,
        "allowed": doc.allowed,
        "description": doc.description,
    }


def _kind(doc: ParamDoc, schema: Mapping[str, Any]) -> str:
    if doc.kind == "object":
        return "biases"
    if doc.kind.endswith("array"):
        return "choices" if "enum" in schema.get("items", {}) else "texts"
    return doc.kind
