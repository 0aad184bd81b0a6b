"""Errors in Ollama's format. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from inferencecenter.api.errors import ErrorFormat, openai_status
from inferencecenter.api.ollama.chat_schemas import OllamaError
from inferencecenter.core.errors import ErrorCode

if TYPE_CHECKING:
    from inferencecenter.core.errors import InferenceCenterError

NDJSON: Final = "application/x-ndjson"
"""Media type of streams."""


def ollama_error_body(error: InferenceCenterError) -> bytes:
    """Return the JSON body of an error; the message names the field, for which there is no other place."""
    message = error.message
    if error.code is ErrorCode.MODEL_NOT_FOUND:  # clients look for these words
        message = f"model not found: {message}"
    if error.field is not None and error.field not in message:
        message = f"{error.field}: {message}"
    if error.hint is not None:
        message = f"{message.rstrip('.')}. {error.hint}"
    return orjson.dumps({"error": message})


def line(document: bytes) -> bytes:
    """Return a line of a stream."""
    return document + b"\n"


OLLAMA_ERRORS: Final = ErrorFormat(answer=OllamaError, body=ollama_error_body, status=openai_status, last=line)
