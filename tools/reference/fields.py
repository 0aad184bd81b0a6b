"""The page of the fields of foreign dialects, from their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferencecenter.api.operations import FIELD_TABLES
from tools.reference import markdown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inferencecenter.api.foreign_fields import FieldTable

_INTRODUCTION: Final = """\
Clients of other servers send fields that this daemon does not support. A table for each dialect states the treatment
of every field and value:

- **obeyed**: values of a wrong type or out of range are refused with 400 `invalid_request`, which names the field;
- **no effect**: the answer is useful without it. The answer's `warnings` name it once, as does the header `X-Warning`,
  for streams too, and the metric `inferencecenter_foreign_fields_total` counts it;
- **refused**: the caller relies on its effect.

Unknown fields have no effect; null equals an absent field. The daemon's own protocol and `/generate` refuse both kinds,
as do the dialects with `server.strict_dialects = true`, for testing clients. `[]` denotes each item of a list."""

_TITLES: Final = {
    "chat": "Chat completions",
    "completions": "Completions",
    "infill": "Infill",
    "fim": "Fill in the middle: `/v1/fim/completions`",
    "embeddings": "Embeddings",
    "rerank": "Rerank",
    "responses": "Responses",
    "messages": "Messages",
    "ollama-chat": "Ollama: `/api/chat`",
    "ollama-generate": "Ollama: `/api/generate`",
    "ollama-embed": "Ollama: `/api/embed`",
    "ollama-embeddings": "Ollama: `/api/embeddings`",
    "ollama-show": "Ollama: `/api/show`",
    "ollama-pull": "Ollama: `/api/pull`",
    "ollama-delete": "Ollama: `/api/delete`",
    "ollama-copy": "Ollama: `/api/copy`",
}


def page() -> str:
    """Return ``docs/fields.md``."""
    parts = [part for table in FIELD_TABLES for part in _section(table)]
    return markdown.page("Fields of foreign dialects", _INTRODUCTION, *parts)


def _section(table: FieldTable) -> Iterator[str]:
    yield f"## {_TITLES.get(table.dialect, table.dialect)}"
    rows = [
        (
            markdown.code(rule.field),
            rule.values or "all",
            "refused" if rule.refused else "no effect",
            _sentence(rule.why),
        )
        for rule in sorted(table.rules, key=lambda rule: rule.field)
    ]
    if rows:
        yield markdown.table(("field", "values", "", "why"), rows)
    yield "Obeyed:"
    yield markdown.table(
        ("field", "meaning"), [(markdown.code(field), meaning) for field, meaning in sorted(table.obeyed())]
    )


def _sentence(text: str) -> str:
    return f"{text}." if text.startswith("llama.cpp") else f"{text[:1].upper()}{text[1:]}."
