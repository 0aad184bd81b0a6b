"""The interfaces that outside programs rely on, one fact a line, read from the generated pages and the help.

``python -m tests.compatibility.surface`` prints it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from inferencecenter.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("surface.txt")


def surface() -> list[str]:
    """Return every fact, sorted."""
    return sorted({*_protocol(), *_http(), *_settings(), *_table("metrics", 2), *_table("errors", 6), *_commands()})


def _read(path: str) -> str:
    return (ROOT / path).read_text()


def _protocol() -> Iterator[str]:
    schema = json.loads(_read("docs/protocol.schema.json"))
    for kind in ("requests", "events"):
        for name, shape in schema[kind]["$defs"].items():
            subject = shape.get("properties", {}).get("op", {}).get("const", name)
            yield from _fields(kind.removesuffix("s"), subject, shape)
    yield from _fields("parameters", "of a turn", schema["params"])


def _fields(kind: str, subject: str, shape: dict[str, Any]) -> Iterator[str]:
    for name, field in shape.get("properties", {}).items():
        yield f"{kind} {subject}: {name}"
        for alias in field.get("aliases", ()):
            yield f"{kind} {subject}: {alias}"
        for value in field.get("enum", ()):
            yield f"{kind} {subject}: {name} = {value}"
    for name in shape.get("required", ()):
        yield f"{kind} {subject}: {name} is required"


def _http() -> Iterator[str]:
    for path, operations in json.loads(_read("docs/openapi.json"))["paths"].items():
        for method in operations:
            yield f"http {method.upper()} {path}"


def _settings() -> Iterator[str]:
    section = ""
    for line in _read("config/inferencecenter.toml").splitlines():
        if header := re.match(r"#?\[([\w.]+)\]$", line):
            section = f"{header[1]}."
        elif setting := re.match(r"#?(\w+) = ", line):
            yield f"setting {section}{setting[1]}"


def _table(page: str, n_columns: int) -> Iterator[str]:
    """Yield the rows of a page's table without their descriptions, which are in the second or third column."""
    for line in _read(f"docs/{page}.md").splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            kept = cells[:n_columns] if page == "metrics" else [cells[0], *cells[2:n_columns]]
            yield f"{page} {' '.join(cell or '-' for cell in kept)}"


def _commands() -> Iterator[str]:
    yield from _options("inferencecenter", typer.main.get_command(app))


def _options(path: str, command: Any) -> Iterator[str]:
    yield f"command {path}"
    for parameter in command.params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            yield f"command {path} {name if name.startswith('-') else f'<{name}>'}"
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            found = command.get_command(None, name)
            if not found.hidden:
                yield from _options(f"{path} {name}", found)


if __name__ == "__main__":
    print("\n".join(surface()))  # noqa: T201
