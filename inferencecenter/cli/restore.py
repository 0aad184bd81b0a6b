"""``inferencecenter restore``: restore a backup into the state directory, while no daemon runs."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts_db import MIGRATIONS as ACCOUNTS_STEPS
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stdout
from inferencecenter.cli.state_files import aside_name, unavailable, without_daemon
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import (
    DamagedFileError,
    check_version,
    connect,
    connect_reading,
    copy,
    database_exists,
    integrity_error,
    replace_file,
    version_of,
)
from inferencecenter.sessions.images.store import IMAGES_NAME, IMAGES_STEPS
from inferencecenter.sessions.store.database import reason_of
from inferencecenter.sessions.store.schema import DATABASE_NAME as SESSIONS_NAME
from inferencecenter.sessions.store.schema import MIGRATIONS as SESSIONS_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferencecenter.core.sqlite_file import Steps

_STEPS: Final[Mapping[str, Steps]] = {
    ACCOUNTS_NAME: ACCOUNTS_STEPS,
    SESSIONS_NAME: SESSIONS_STEPS,
    IMAGES_NAME: IMAGES_STEPS,
}


def restore(
    source: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Directory created by `inferencecenter backup`.")],
    *,
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing files, which are renamed.")] = False,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Restore the accounts and sessions of a backup into the state directory; existing files are never deleted.

    Exits with 0 when all files are restored, with 64 when files exist and --replace is not given, and with 73 when a
    daemon runs, the backup is damaged or of a newer version, or the state directory cannot be written.
    """
    settings = load_settings(config, given(state_dir=state_dir))
    files = _backup_in(source)
    with without_daemon(settings.state_dir):
        existing = [path.name for path in files if database_exists(settings.state_dir / path.name)]
        if existing and not replace:
            raise InferenceCenterError(
                ErrorCode.INVALID_REQUEST,
                f"{settings.state_dir} holds {' and '.join(existing)}",
                hint="--replace renames the existing files and restores the backup.",
            )
        kept = _restore(files, settings.state_dir)
    if json:
        print_json({"source": str(source), "restored": [path.name for path in files], "kept": kept})
        return
    stdout.print(f"Restored {' and '.join(path.name for path in files)} from {source}.", markup=False, soft_wrap=True)
    for name, other in kept.items():
        stdout.print(f"The previous {name} was renamed to {other}.", markup=False, soft_wrap=True)


def _backup_in(source: Path) -> list[Path]:
    """Return the files of a backup, each verified to be intact and of a known version."""
    files = [path for name in _STEPS if (path := source / name).is_file()]
    if not files:
        raise unavailable(
            f"{source} holds neither {ACCOUNTS_NAME} nor {SESSIONS_NAME}", "Specify a directory made by `backup`."
        )
    for path in files:
        try:
            with contextlib.closing(connect_reading(path)) as database:
                check_version(database, _STEPS[path.name], path=path)
                if (wrong := integrity_error(database)) is not None:
                    raise DamagedFileError(wrong)
                if not version_of(database):
                    raise DamagedFileError("it is empty")
        except (OSError, sqlite3.Error) as error:
            raise unavailable(
                f"{path} is damaged: {reason_of(error)}", "Nothing was changed. Use another backup."
            ) from error
    return files


def _restore(files: list[Path], state_dir: Path) -> dict[str, str]:
    """Copy the files into ``state_dir``; return the new names of replaced files."""
    kept: dict[str, str] = {}
    with contextlib.ExitStack() as leftovers:
        copies = [(path, state_dir / f"{path.name}.restoring") for path in files]
        try:
            for path, new_file in copies:
                new_file.unlink(missing_ok=True)
                leftovers.callback(new_file.unlink, missing_ok=True)
                copy(path, new_file)
                if path.name == SESSIONS_NAME:
                    _mark_old(new_file)
            for path, new_file in copies:
                target = state_dir / path.name
                aside = aside_name(target, "before-restore") if database_exists(target) else None
                replace_file(new_file, target, aside=aside)
                if aside is not None:
                    kept[target.name] = aside.name
        except (OSError, sqlite3.Error) as error:
            done = f" {', '.join(kept)} was replaced already." if kept else " Nothing was replaced."
            raise unavailable(
                f"{state_dir} cannot be written: {reason_of(error)}", f"Check the free disk space.{done}"
            ) from error
    return kept


def _mark_old(path: Path) -> None:
    """Mark the file as not cleanly closed, so that the daemon starts new epochs; see ``Recorder.finish``."""
    with contextlib.closing(connect(path)) as database:
        database.execute("UPDATE meta SET clean = 0")
