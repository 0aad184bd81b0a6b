"""What a handler gives back: one JSON document, or a stream of server-sent events."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON document, written out, with headers of its own; status 304 stands for one that the client has."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)


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
