"""The page of settings, from their own descriptions."""

from __future__ import annotations

import inspect
import itertools
from typing import Final

from inferencecenter.cli.config_reference import schema_in_words, section_of, setting_docs
from inferencecenter.config.loader import OTHER_ENVIRONMENT, SYSTEM_CONFIG
from inferencecenter.config.sections import McpServerSettings, Section
from inferencecenter.config.settings import ModelEntry, Settings, environment_name
from tools.reference import markdown

_TABLES: Final[dict[str, type[Section]]] = {"models.NAME": ModelEntry, "mcp.NAME": McpServerSettings}
_INTRODUCTION: Final = f"""\
Settings come from a TOML file, the environment and the command line; later sources override earlier ones. An unknown
name is an error that suggests the closest existing one. `inferencecenter config show` lists the effective settings and
their sources, `inferencecenter config check FILE` checks a file, `inferencecenter config default` prints the annotated
default, which is also `config/inferencecenter.toml`.

The file is that of `--config`, else of `INFERENCECENTER_CONFIG`, else `inferencecenter.toml` in the user's
configuration directory (`~/.config/inferencecenter/`), else `{SYSTEM_CONFIG}`. In a path `~` and `$VARIABLES` are
replaced; a relative path is relative to the working directory. Values in the file have their setting's type: `port =
"3000"` is refused. Values in the environment and on the command line are converted from text; lists and tables are
written as JSON."""


def page() -> str:
    """Return ``docs/configuration.md``."""
    parts = [_INTRODUCTION]
    for section, settings in itertools.groupby(setting_docs(), key=section_of):
        about = (_section_type(section).__doc__ or "").strip() if section else ""
        rows = [
            (
                markdown.code(each.name),
                each.description,
                each.allowed,
                markdown.code(each.default) if each.literal is not None else each.default,
                markdown.code(environment_name(each.name)),
            )
            for each in settings
        ]
        head = ("setting", "meaning", "allowed", "default", "environment")
        parts += [f"## {section or 'Top level'}", about, markdown.table(head, rows)]
    for name, table in _TABLES.items():
        parts += [f"## {name}", inspect.getdoc(table) or "", _entries(table)]
    others = [(markdown.code(name), meaning) for name, meaning in OTHER_ENVIRONMENT.items()]
    return markdown.page("Configuration", *parts, "## Other variables", markdown.table(("variable", "meaning"), others))


def _entries(table: type[Section]) -> str:
    schema = table.model_json_schema()["properties"]
    rows = []
    for name, field in table.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        allowed = str(extra.get("allowed_text") or schema_in_words(schema[name]))
        rows.append((markdown.code(name), field.description or "", allowed))
    return markdown.table(("setting", "meaning", "allowed"), rows)


def _section_type(section: str) -> type:
    kind = Settings.model_fields[section].annotation
    assert isinstance(kind, type)
    return kind
