"""Every row of the error table has an exception class."""

from __future__ import annotations

import pytest

from inferencecenter.client import (
    DaemonError,
    NotAllowedError,
    NotFoundError,
    RequestError,
    TooLongError,
    TryLaterError,
    UnreachableError,
)
from inferencecenter.client.errors import as_exception, error_class, failure
from inferencecenter.core.errors import ERRORS, ErrorCode, InferenceCenterError
from inferencecenter.protocol.events import Error


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_specific_class(code: ErrorCode) -> None:
    """None is the bare base class, and retryable ones are one of two classes."""
    kind = error_class(code)
    assert kind is not InferenceCenterError
    assert (kind in (TryLaterError, UnreachableError)) == ERRORS[code].retryable
    error = failure(code, "m", hint="h", field="f", retry_after_ms=5)
    assert (error.code, error.message, error.hint, error.field, error.retry_after_ms) == (code, "m", "h", "f", 5)


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (RequestError, "invalid_json invalid_request unknown_op invalid_grammar"),
        (TooLongError, "prompt_too_long context_full message_too_large"),
        (NotFoundError, "session_not_found turn_not_found nothing_to_abort model_not_found"),
        (NotAllowedError, "not_authenticated forbidden quota_exceeded"),
        (DaemonError, "internal engine_crashed"),
        (UnreachableError, "daemon_unreachable"),
        (TryLaterError, "overloaded rate_limited queue_full queue_timeout session_busy model_loading session_limit"),
    ],
)
def test_codes_have_their_class(kind: type[InferenceCenterError], codes: str) -> None:
    """The class of an error depends on what the caller can do about it."""
    assert {error_class(ErrorCode(code)) for code in codes.split()} == {kind}


def test_unknown_code_is_a_server_error() -> None:
    """A different request cannot avoid it."""
    error = as_exception(Error(code="tea_time", message="m", error="m", retryable=False))
    assert isinstance(error, DaemonError)
    assert error.code is ErrorCode.INTERNAL
