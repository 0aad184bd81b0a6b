"""Validates the ``traceparent`` of W3C Trace Context. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator

_FORM: Final = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}")
_LATER_FIELDS: Final = re.compile(r"-[\x21-\x7e]{0,255}")
_UNUSED_VERSION: Final = "ff"
_FIRST_VERSION: Final = "00"


def check_traceparent(value: str) -> str:
    """Return ``value`` if it is a valid ``traceparent``.

    Later versions of the format may have further fields, which are not checked.

    Raises:
        ValueError: With the reason.
    """
    match = _FORM.match(value)
    if match is None:
        raise ValueError("traceparent must be like 00-<32 hex digits>-<16 hex digits>-01, in lower case")
    rest = value[match.end() :]
    if match["version"] == _UNUSED_VERSION:
        raise ValueError("traceparent has version ff, which is invalid")
    if rest and (match["version"] == _FIRST_VERSION or not _LATER_FIELDS.fullmatch(rest)):
        raise ValueError("traceparent has data after its flags")
    if not int(match["trace"], 16) or not int(match["span"], 16):
        raise ValueError("traceparent has a trace or a span that is all zeros")
    return value


def read_traceparent(header: str | None) -> str | None:
    """Return the value of an HTTP header; ``None`` for an invalid one, which the standard requires to be ignored."""
    try:
        return None if header is None else check_traceparent(header.strip())
    except ValueError:
        return None


Traceparent = Annotated[str, AfterValidator(check_traceparent)]
