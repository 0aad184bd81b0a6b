"""``inferencecenter session salvage``: rebuild a sessions file from the readable parts of a damaged one."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import asdict
from typing import TYPE_CHECKING

from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, stdout
from inferencecenter.cli.state_files import aside_name, unavailable, without_daemon
from inferencecenter.config.loader import load_settings
from inferencecenter.core.sqlite_file import check_version, connect_reading, integrity_error, replace_file, version_of
from inferencecenter.sessions.store.database import reason_of
from inferencecenter.sessions.store.loader import read_all
from inferencecenter.sessions.store.salvage import salvage
from inferencecenter.sessions.store.schema import DATABASE_NAME, MIGRATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inferencecenter.sessions.store.salvage import LostSession, SalvageReport


def salvage_sessions(
    *, config: ConfigOption = None, state_dir: StateDirOption = None, json: JsonOption = False
) -> None:
    """Copy the readable sessions of a damaged file into a new one, and report what is lost.

    The damaged file is renamed and not modified. Exits with 0 when the new file is in place or none is needed, and with
    73 when a daemon runs, nothing is readable, the file is of a newer version, or the disk is full.
    """
    settings = load_settings(config, given(state_dir=state_dir))
    path = settings.state_dir / DATABASE_NAME
    if not path.exists():
        raise unavailable(f"{path} does not exist", "Check the state directory.")
    with without_daemon(settings.state_dir):
        if _is_whole(path):
            report, aside = None, None
        else:
            report, aside = _salvage(path)
    if json:
        print_json({"salvaged": None if report is None else asdict(report), "damaged": aside and str(aside)})
    elif report is None:
        stdout.print(f"{path} is intact: nothing was changed.", markup=False, soft_wrap=True)
    else:
        for line in (*_lines(report), f"The damaged file was renamed to {aside}."):
            stdout.print(line, markup=False, soft_wrap=True)


def _is_whole(path: Path) -> bool:
    """Return whether the file is intact, and every session of it readable.

    Raises:
        InferenceCenterError: ``storage_unavailable`` for a file of a newer version.
    """
    try:
        with contextlib.closing(connect_reading(path)) as database:
            check_version(database, MIGRATIONS, path=path)
            if integrity_error(database) is not None:
                return False
            return version_of(database) != len(MIGRATIONS) or not read_all(database).unreadable
    except (OSError, sqlite3.Error):
        return False


def _salvage(path: Path) -> tuple[SalvageReport, Path]:
    new_file = path.with_name(f"{path.name}.salvaging")
    with contextlib.ExitStack() as leftovers:
        leftovers.callback(new_file.unlink, missing_ok=True)
        try:
            new_file.unlink(missing_ok=True)
            report = salvage(path, new_file)
            if not report.n_saved:
                raise unavailable(
                    f"no session of {path} can be read",
                    "Nothing was changed. `inferencecenter restore` a backup; without one, move the file away while no"
                    " daemon runs, which forgets all sessions.",
                )
            aside = aside_name(path, "damaged")
            replace_file(new_file, path, aside=aside, write_back=False)
        except (OSError, sqlite3.Error) as error:
            raise unavailable(f"{path} cannot be salvaged: {reason_of(error)}", "Check the free disk space.") from error
    return report, aside


def _lines(report: SalvageReport) -> Iterator[str]:
    yield f"{_sessions(report.whole)} complete, {len(report.cut)} truncated, {len(report.lost)} lost."
    for cut in report.cut:
        yield (
            f"{cut.session_id} of {cut.client_id}: the first {cut.messages} messages were saved,"
            f" at least {cut.lost_messages} are lost."
        )
    for session_id in report.uncertain:
        yield f"{session_id}: its last messages may be missing."
    for session_id in report.reset:
        yield f"{session_id}: its messages were saved, its settings are lost."
    for session_id in report.restarted:
        yield f"{session_id}: its unfinished answer is generated again."
    for session_id in report.dropped:
        yield f"{session_id}: the prompt of its unfinished answer is lost."
    for lost in report.lost:
        yield _lost_line(lost)


def _lost_line(lost: LostSession) -> str:
    name = lost.session_id or "a session without an id"
    owner = f" of {lost.client_id}" if lost.client_id else ""
    return f"{name}{owner}: lost; {lost.messages} messages of it can be read in the damaged file."


def _sessions(count: int) -> str:
    return "1 session is" if count == 1 else f"{count} sessions are"
