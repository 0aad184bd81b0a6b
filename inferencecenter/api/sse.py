"""Server-sent events, as bytes. Pure."""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "text/event-stream"
KEEPALIVE: Final = b": keepalive\n\n"
"""A comment, which readers skip: it prevents proxies from closing an idle connection."""
DONE: Final = b"data: [DONE]\n\n"
"""End of OpenAI's streams."""


def comment(text: str) -> bytes:
    """Return a comment in one line."""
    return b": %b\n\n" % " ".join(text.split()).encode()


def event(data: bytes, *, name: str | None = None) -> bytes:
    """Return an event; ``data`` is JSON without line breaks."""
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, data)
