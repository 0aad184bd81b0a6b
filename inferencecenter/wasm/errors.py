"""Errors of wasi-nn: each kind with its number for core modules and its name for components."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from inferencecenter.core.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.core.errors import InferenceCenterError


@dataclass(frozen=True, slots=True)
class _Row:
    errno: int
    wit: str
    meaning: str


class NnErrorKind(Enum):
    """A row of the table: the number in ``wasi_ephemeral_nn``, the name in ``wasi:nn``, and the meaning.

    Numbers to 8 are those of the WITX specification, numbers from 100 those of WasmEdge.
    """

    INVALID_ARGUMENT = _Row(1, "invalid-argument", "A handle, index, pointer, length or value is wrong.")
    INVALID_ENCODING = _Row(
        2, "invalid-encoding", "A text is not UTF-8, a configuration is not JSON, or it is no text."
    )
    MISSING_MEMORY = _Row(3, "runtime-error", "The module exports no memory named `memory`.")
    BUSY = _Row(4, "runtime-error", "A limit of the guest, or a temporary refusal of the daemon: try again later.")
    RUNTIME_ERROR = _Row(5, "runtime-error", "The turn or the connection failed.")
    UNSUPPORTED_OPERATION = _Row(6, "unsupported-operation", "The daemon does not offer this.")
    TOO_LARGE = _Row(7, "too-large", "The input is larger than the daemon accepts, or the output than the buffer.")
    NOT_FOUND = _Row(8, "not-found", "No such model, or the guest may not use it.")
    SECURITY = _Row(5, "security", "The token does not permit this, or its quota is used up.")
    TIMEOUT = _Row(5, "timeout", "The turn reached its `max_time_ms`.")
    END_OF_SEQUENCE = _Row(100, "unknown", "`compute_single`: the answer is complete.")
    CONTEXT_FULL = _Row(101, "runtime-error", "The context is full; the output so far can be read.")
    PROMPT_TOO_LONG = _Row(102, "too-large", "The prompt does not fit the context.")

    @property
    def errno(self) -> int:
        return self.value.errno

    @property
    def wit(self) -> str:
        return self.value.wit

    @property
    def meaning(self) -> str:
        return self.value.meaning


SUCCESS: Final = 0


class WasiNnError(Exception):
    """A failed call of a guest; the guest gets the kind, and the message on request."""

    def __init__(self, kind: NnErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_KINDS: Final[Mapping[ErrorCode, NnErrorKind]] = {
    ErrorCode.INVALID_REQUEST: NnErrorKind.INVALID_ARGUMENT,
    ErrorCode.INVALID_GRAMMAR: NnErrorKind.INVALID_ARGUMENT,
    ErrorCode.NOT_AUTHENTICATED: NnErrorKind.SECURITY,
    ErrorCode.FORBIDDEN: NnErrorKind.SECURITY,
    ErrorCode.QUOTA_EXCEEDED: NnErrorKind.SECURITY,
    ErrorCode.PROMPT_TOO_LONG: NnErrorKind.PROMPT_TOO_LONG,
    ErrorCode.CONTEXT_FULL: NnErrorKind.CONTEXT_FULL,
    ErrorCode.MESSAGE_TOO_LARGE: NnErrorKind.TOO_LARGE,
    ErrorCode.MODEL_NOT_FOUND: NnErrorKind.NOT_FOUND,
    ErrorCode.DAEMON_UNREACHABLE: NnErrorKind.RUNTIME_ERROR,
}


def wasi_nn_error(error: InferenceCenterError) -> WasiNnError:
    """Return the daemon's refusal, or the client's, as an error of wasi-nn."""
    kind = _KINDS.get(error.code, NnErrorKind.BUSY if error.spec.retryable else NnErrorKind.RUNTIME_ERROR)
    hint = f" {error.hint}" if error.hint else ""
    return WasiNnError(kind, f"{error.code.value}: {error.message}{hint}")
