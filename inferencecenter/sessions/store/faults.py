"""Why the file of sessions cannot be used: words for clients, and what its operator can do."""

from __future__ import annotations

import sqlite3
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.journal import RETRY_LATER_MS, RETRY_SOON_MS, StorageFault
from inferencecenter.sqlite_file import DAMAGE_CODES, FileMovedError, code_of, is_damage

if TYPE_CHECKING:
    from collections.abc import Mapping

HINT: Final = "Check that it and its directory are yours and writable, and that the disk has room."
"""What an operator can do about a file that is whole."""

DAMAGED_HINT: Final = (
    "Stop the daemon and run `inferencecenter session salvage`: it copies what can be read into a new file and keeps"
    " this one under another name. Or `inferencecenter restore` a backup."
)
"""What an operator can do about a damaged file."""

MOVED_HINT: Final = (
    "Move it back while the daemon runs, if it was moved: what was written to it is lost when the daemon ends."
)
"""What an operator can do about a file that is no longer where it was opened."""

_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SEALED: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN})
_WORDS: Final[Mapping[int, tuple[str, int]]] = MappingProxyType(
    dict.fromkeys(DAMAGE_CODES, ("it is damaged", RETRY_LATER_MS))
    | dict.fromkeys(_BUSY, ("another program holds it", RETRY_SOON_MS))
    | dict.fromkeys(_SEALED, ("it is not writable", RETRY_LATER_MS))
    | {
        sqlite3.SQLITE_FULL: ("the disk is full", RETRY_SOON_MS),
        sqlite3.SQLITE_IOERR: ("its disk reports an error", RETRY_SOON_MS),
    }
)


def fault_of(error: BaseException, *, name: str) -> StorageFault:
    """Return what clients are told of ``error``, which kept the file called ``name`` from being written."""
    words, retry_after_ms = "an internal error", RETRY_LATER_MS
    if isinstance(error, FileMovedError):
        words = "it was deleted or moved" if error.is_missing else "it was replaced by another file"
    elif is_damage(error):
        words = "it is damaged"
    elif isinstance(error, OSError):
        words = "it is not writable"
    elif isinstance(error, sqlite3.Error):
        words, retry_after_ms = _WORDS.get(code_of(error) or 0, ("an internal error", RETRY_SOON_MS))
    return StorageFault(f"{name} cannot be written: {words}", retry_after_ms)


def hint_of(error: BaseException) -> str:
    """Return what an operator can do about ``error``."""
    if isinstance(error, FileMovedError):
        return MOVED_HINT
    return DAMAGED_HINT if is_damage(error) else HINT


def is_busy(error: BaseException) -> bool:
    """Tell whether another program holds the file."""
    return isinstance(error, sqlite3.Error) and code_of(error) in _BUSY


def is_full(error: BaseException) -> bool:
    """Tell whether the disk has no room."""
    return isinstance(error, sqlite3.Error) and code_of(error) == sqlite3.SQLITE_FULL


def reason_of(error: BaseException) -> str:
    """Return what went wrong as SQLite or the system says it: for operators and the log."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
