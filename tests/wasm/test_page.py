"""docs/wasm.md has every error, key and function, as the code has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inferencecenter.wasm.errors import NnErrorKind
from inferencecenter.wasm.guest_config import ALIASES, KEYS, PARAMETERS
from tests.wasm.guests import FUNCTIONS
from tools.reference import markdown

if TYPE_CHECKING:
    from inferencecenter.wasm.guest_config import ConfigKey

PAGE = (Path(__file__).parents[2] / "docs" / "wasm.md").read_text(encoding="utf-8")


def _key_row(key: ConfigKey) -> tuple[str, ...]:
    group = key.path.rpartition(".")[0]
    return markdown.code(group), markdown.code(key.name), key.allowed, key.use, key.meaning


def tables() -> dict[str, str]:
    """The parts of the page that come from the code."""
    errors = [(str(kind.errno), markdown.code(kind.wit), kind.meaning) for kind in NnErrorKind]
    params = sorted(dict.fromkeys(PARAMETERS))
    return {
        "ERRORS": markdown.table(("core module", "component", "meaning"), errors),
        "PARAMETERS": ", ".join(map(markdown.code, params)) + ".",
        "ALIASES": ", ".join(f"`{given}` for `{name}`" for given, name in ALIASES.items()),
        "KEYS": markdown.table(("group", "key", "value", "sets", "meaning"), map(_key_row, KEYS.values())),
    }


@pytest.mark.parametrize("name", tables())
def test_page_has_what_the_code_has(name: str) -> None:
    """Line breaks aside."""
    assert " ".join(tables()[name].split()) in " ".join(PAGE.split())


def test_page_has_every_function_with_its_parameters() -> None:
    """Each row names as many parameters as the function has."""
    rows = dict(re.findall(r"^\| `(\w+)\(([^)]*)\)` \|", PAGE, re.MULTILINE))
    assert {name: len(given.split(",")) for name, given in rows.items()} == {**FUNCTIONS, "last_error": 3}
