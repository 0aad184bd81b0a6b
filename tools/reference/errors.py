"""The page of errors, from the one table."""

from __future__ import annotations

from typing import Final

from inferencecenter.core.errors import ERRORS
from tools.reference import markdown

_INTRODUCTION: Final = """\
Every failure has a code. It is reported on sockets as an `error` event, over HTTP as a status, by the command line
as an exit code (sysexits(3): 64 usage, 65 data, 66 input missing, 69 unavailable, 70 software, 73 cannot create, 75
try again later, 77 permission, 78 configuration). A close code is given if the socket is closed too. Retryable
requests may succeed unchanged later, after `retry_after_ms` if that is known."""


def page() -> str:
    """Return ``docs/errors.md``."""
    rows = [
        (
            markdown.code(row.code.value),
            row.message,
            "yes" if row.retryable else "",
            str(row.http_status),
            str(row.close_code or ""),
            str(row.exit_code),
            "" if row.on_wire else "HTTP only" if row.on_http else "command line only",
        )
        for row in ERRORS.values()
    ]
    head = ("code", "meaning", "retryable", "HTTP", "close", "exit", "")
    return markdown.page("Errors", _INTRODUCTION, markdown.table(head, rows))
