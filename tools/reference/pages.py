"""Documentation that is generated from the code, so that it cannot diverge, and the data for the web page.

``documents`` returns every generated file; ``inferencecenter docs`` writes them, ``docs --check`` compares.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from inferencecenter.cli import config_reference
from tools.reference import (
    configuration,
    errors,
    fields,
    metrics,
    nn_keys,
    openapi,
    protocol,
    states,
    wire_params,
    wire_types,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_GENERATORS: Final[Mapping[str, Callable[[], str]]] = {
    "docs/protocol.md": protocol.page,
    "docs/protocol.schema.json": protocol.schema,
    "docs/openapi.json": openapi.document,
    "docs/errors.md": errors.page,
    "docs/fields.md": fields.page,
    "docs/configuration.md": configuration.page,
    "docs/states.md": states.page,
    "docs/metrics.md": metrics.page,
    "config/inferencecenter.toml": config_reference.default_toml,
    "clients/c/src/config_keys.inc": nn_keys.table,
    "inferencecenter/web/js/wire/types.d.ts": wire_types.module,
    "inferencecenter/web/js/wire/params.js": wire_params.module,
}
DOCUMENTS: Final = tuple(_GENERATORS)
"""The paths of the generated files, from the root of the repository."""


@cache
def text_of(name: str) -> str:
    """Return the text of a generated file."""
    return _GENERATORS[name]()


def documents() -> Mapping[str, str]:
    """Return the text of every generated file by its path."""
    return {name: text_of(name) for name in DOCUMENTS}
