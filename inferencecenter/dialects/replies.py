"""What a handler gives back: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON document, written out."""

    body: bytes
    status: int = 200


@dataclass(frozen=True, slots=True)
class Stream:
    """Server-sent events, as ``sse`` writes them.

    Nothing is sent before there is a first chunk: until then a failure has its own HTTP status. Afterwards it is the
    last event. The generator is closed when nobody listens any more.
    """

    chunks: AsyncGenerator[bytes, None]


Reply: TypeAlias = Document | Stream


def document(value: Any, *, status: int = 200) -> Document:
    """Return what ``orjson`` can write as a document."""
    return Document(orjson.dumps(value), status)
