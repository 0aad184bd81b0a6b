"""The error table."""

from __future__ import annotations

import dataclasses

import pytest

from inferencecenter.core.errors import ERRORS, ErrorCode, ErrorSpec, InferenceCenterError, foreign_input
from inferencecenter.protocol.close import CloseCode

_SYSEXITS = range(64, 79)
_AS_A_SHELL_REPORTS = {
    ErrorCode.GUEST_TRAPPED: 134,
    ErrorCode.GUEST_TIMEOUT: 124,
    ErrorCode.GUEST_OUT_OF_FUEL: 152,
    ErrorCode.GUEST_OUT_OF_MEMORY: 137,
}
"""Ends of WebAssembly guests, as those of native programs: by timeout(1), SIGABRT, SIGXCPU and SIGKILL."""


def test_every_code_has_one_row() -> None:
    """Every code has a row in the table, and every row is that of its code."""
    assert set(ERRORS) == set(ErrorCode)
    assert all(code is row.code for code, row in ERRORS.items())


@pytest.mark.parametrize("row", ERRORS.values(), ids=lambda row: row.code.value)
def test_rows_are_complete(row: ErrorSpec) -> None:
    """Each has a sentence, an HTTP error status, a sysexits code, but for guests, and a valid close code."""
    assert row.message.endswith(".")
    assert 400 <= row.http_status < 600
    assert row.exit_code in _SYSEXITS or row.exit_code == _AS_A_SHELL_REPORTS.get(row.code)
    assert row.close_code is None or row.close_code in set(CloseCode)


@pytest.mark.parametrize("row", ERRORS.values(), ids=lambda row: row.code.value)
def test_retryable_errors_have_a_retryable_http_status(row: ErrorSpec) -> None:
    """No client error is retryable."""
    assert not row.retryable or row.http_status in (408, 409, 429, 503)


def test_table_is_immutable() -> None:
    """Neither the mapping nor a row can be changed."""
    with pytest.raises(TypeError):
        ERRORS[ErrorCode.INTERNAL] = ERRORS[ErrorCode.FORBIDDEN]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ERRORS[ErrorCode.INTERNAL].retryable = True  # type: ignore[misc]


def test_default_message_is_the_rows_sentence() -> None:
    """An error without a message uses the table's."""
    error = InferenceCenterError(ErrorCode.SESSION_BUSY)
    assert error.message == ERRORS[ErrorCode.SESSION_BUSY].message
    assert error.spec.exit_code == 75


def test_error_fields_are_kept() -> None:
    """Message, hint, field and retry delay can be read; ``repr`` shows code, message and field."""
    error = InferenceCenterError(
        ErrorCode.INVALID_REQUEST, "too hot", hint="At most 5.", field="params.temperature", retry_after_ms=10
    )
    assert (str(error), error.hint, error.field, error.retry_after_ms) == (
        "too hot",
        "At most 5.",
        "params.temperature",
        10,
    )
    assert repr(error) == "InferenceCenterError(invalid_request, 'too hot', field='params.temperature')"


def _refuse(reason: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_CONFIG, reason)


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (RecursionError(), "RecursionError"),
        (ValueError("a\nb\ud800"), r"ValueError: a\nb\ud800"),
        (KeyError("x" * 1000), f"KeyError: '{'x' * 189}..."),
    ],
)
def test_foreign_exception_is_converted_at_the_boundary(raised: Exception, reason: str) -> None:
    """It becomes one line of bounded length, with the cause attached."""
    with pytest.raises(InferenceCenterError) as caught, foreign_input(_refuse):
        raise raised
    assert caught.value.message == reason
    assert caught.value.__cause__ is raised


def test_own_errors_and_interrupts_pass_the_boundary() -> None:
    """They are unchanged."""
    for raised in (InferenceCenterError(ErrorCode.FORBIDDEN, "no"), KeyboardInterrupt()):
        with pytest.raises(type(raised)) as caught, foreign_input(_refuse):
            raise raised
        assert caught.value is raised
