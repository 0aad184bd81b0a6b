"""``inferencecenter backup``: consistent copies of accounts, sessions and images; works alongside a running daemon."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Annotated, Final

import typer

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stdout
from inferencecenter.cli.state_files import unavailable
from inferencecenter.config.loader import load_settings
from inferencecenter.core.sqlite_file import FileMovedError, connect, copy, integrity_error
from inferencecenter.server.control import check_open_files
from inferencecenter.sessions.images.store import IMAGES_NAME
from inferencecenter.sessions.store.database import reason_of
from inferencecenter.sessions.store.schema import DATABASE_NAME as SESSIONS_NAME

# Images last: those that the copied sessions name are there by then.
_NAMES: Final = (ACCOUNTS_NAME, SESSIONS_NAME, IMAGES_NAME)


def backup(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Directory to create, accessible only to you.")],
    *,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Back up the databases of accounts, sessions and images into a new directory; `restore` puts them back."""
    settings = load_settings(config, given(state_dir=state_dir))
    _check_in_place(settings.state_dir)
    sources = [path for name in _NAMES if (path := settings.state_dir / name).exists()]
    if not sources:
        raise unavailable(f"{settings.state_dir} holds neither accounts nor sessions", "Check the state directory.")
    try:
        target.mkdir(mode=0o700)
    except OSError as error:
        raise unavailable(
            f"{target} cannot be created: {error.strerror}",
            "An existing backup is never overwritten: name a new directory.",
        ) from error
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, target)
        for source in sources:
            _copy(source, target / source.name)
        on_failure.pop_all()
    if json:
        print_json({"target": str(target), "files": [source.name for source in sources]})
    else:
        copied = " and ".join(source.name for source in sources)
        stdout.print(f"Copied {copied} to {target}.", markup=False, soft_wrap=True)


def _check_in_place(state_dir: Path) -> None:
    try:
        check_open_files(state_dir)
    except FileMovedError as error:
        raise unavailable(
            f"{error} while a daemon has it open",
            "The daemon writes to a file outside the state directory, so a copy would be incomplete.",
        ) from error
    except OSError as error:
        raise unavailable(f"{state_dir} cannot be read: {error.strerror}", "Check the state directory.") from error


def _copy(source: Path, target: Path) -> None:
    try:
        copy(source, target)
        with contextlib.closing(connect(target)) as copied:
            if (found := integrity_error(copied)) is not None:
                raise sqlite3.DatabaseError(found)
            if source.name == SESSIONS_NAME:
                # Later events were already sent to clients: a daemon on this copy must start new epochs.
                copied.execute("UPDATE meta SET clean = 0")
    except (OSError, sqlite3.Error) as error:
        raise unavailable(
            f"{source} cannot be copied: {reason_of(error)}",
            "The incomplete copy was removed. Check the free disk space.",
        ) from error
