"""What ``doctor`` finds out about the files in the state directory; works beside a running daemon."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts_db import DAMAGED_HINT as ACCOUNTS_HINT
from inferencecenter.auth.accounts_db import MIGRATIONS as ACCOUNTS_STEPS
from inferencecenter.cli.checks import Check, Verdict
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.server.control import check_open_files
from inferencecenter.sessions.store.database import DAMAGED_HINT, HINT, MOVED_HINT, reason_of
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.schema import DATABASE_NAME, MIGRATIONS
from inferencecenter.sqlite_file import (
    DamagedFileError,
    FileMovedError,
    check_version,
    connect_reading,
    damage,
    is_damage,
    version_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.config.settings import Settings
    from inferencecenter.sqlite_file import Steps

_MAX_NAMED: Final = 3


def storage(settings: Settings) -> list[Check]:
    """Read the files of accounts and sessions, and see whether a running daemon writes to them."""
    directory = settings.state_dir
    found = [
        _file("accounts", directory / ACCOUNTS_NAME, ACCOUNTS_STEPS, damaged_hint=ACCOUNTS_HINT),
        _file("sessions", directory / DATABASE_NAME, MIGRATIONS, damaged_hint=DAMAGED_HINT),
    ]
    try:
        check_open_files(directory)
    except FileMovedError as error:
        detail = f"{error} while a daemon writes to it"
        found.append(Check("open files", Verdict.FAILED, detail, MOVED_HINT, ErrorCode.STORAGE_UNAVAILABLE))
    except OSError:
        # The state directory has a check of its own.
        return found
    return found


def _file(name: str, path: Path, steps: Steps, *, damaged_hint: str) -> Check:
    try:
        if not path.exists():
            return Check(name, Verdict.OK, f"{path}: none yet")
        with closing(connect_reading(path)) as database:
            check_version(database, steps, path=path)
            if (wrong := damage(database)) is not None:
                raise DamagedFileError(wrong)
            unreadable = list(read_all(database).unreadable) if steps is MIGRATIONS and _is_current(database) else []
    except InferenceCenterError as error:
        return Check(name, Verdict.FAILED, error.message, error.hint or "", error.code)
    except (sqlite3.Error, OSError) as error:
        detail, hint = f"{path}: {reason_of(error)}", damaged_hint if is_damage(error) else HINT
        return Check(name, Verdict.FAILED, detail, hint, ErrorCode.STORAGE_UNAVAILABLE)
    if unreadable:
        named = ", ".join(unreadable[:_MAX_NAMED]) + (", …" if len(unreadable) > _MAX_NAMED else "")
        hint = "They stay in the file and are not loaded: restore a backup, or purge them."
        return Check(name, Verdict.WARNING, f"{path}: sessions that cannot be read: {named}", hint)
    return Check(name, Verdict.OK, str(path))


def _is_current(database: sqlite3.Connection) -> bool:
    """Tell whether a file of sessions has the tables of this version; an older one gets them at the next start."""
    return version_of(database) == len(MIGRATIONS)
