"""``inferencecenter session``: list, search, export and purge stored sessions; works alongside a running daemon."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
import typer
from rich.table import Column

from inferencecenter.auth.audit import AuditEvent
from inferencecenter.cli.options import ConfigOption, JsonOption, StateDirOption, given
from inferencecenter.cli.output import print_json, print_rows, stderr, stdout
from inferencecenter.cli.salvage import salvage_sessions
from inferencecenter.cli.state_files import open_accounts
from inferencecenter.config.loader import load_settings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.server import control
from inferencecenter.sessions.search import search_terms
from inferencecenter.sessions.store.archive import Archive, purge_file, truncate_wal
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from inferencecenter.config.settings import Settings
    from inferencecenter.protocol.values import TranscriptTurn
    from inferencecenter.sessions.journal import StoredSession
    from inferencecenter.sessions.store.archive import FoundLine, SessionLine
    from inferencecenter.sessions.store.recorder import PurgeKind

PURGE_TIMEOUT_S: Final = 10.0
"""Timeout in seconds of a purge by a running daemon."""
_POLL_S: Final = 0.05

SessionArgument = Annotated[
    str | None, typer.Argument(metavar="SESSION", help="Id of the session.", show_default=False)
]
ClientOption = Annotated[str | None, typer.Option(help="All sessions of this account.", show_default=False)]

app = typer.Typer(help="List, search, export, purge and salvage sessions.", no_args_is_help=True)


@app.command("list")
def list_sessions(
    *,
    client: Annotated[str | None, typer.Option(help="Only this account.", show_default=False)] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """List the stored sessions, oldest first; tab-separated when piped."""
    with Archive.open(_path(load_settings(config, given(state_dir=state_dir)))) as archive:
        sessions = archive.sessions(client)
    if json:
        print_json([asdict(session) for session in sessions])
        return
    counted = [Column(name, justify="right") for name in ("messages", "turns")]
    columns: list[str | Column] = [Column("session", no_wrap=True), "client", "model", *counted, "last used", "state"]
    print_rows(columns, map(cells, sessions))


def cells(session: SessionLine) -> tuple[str, ...]:
    """Return id, client, model, messages, turns, last use and state of a session."""
    counts = (str(session.messages), str(session.turns))
    state = "answering" if session.answering else "archived" if session.archived else "idle"
    return (session.session_id, session.client_id, session.model, *counts, _date(session.last_used_at), state)


@app.command("search")
def search_sessions(  # noqa: PLR0913 - one argument an option
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help='Words and "phrases".', show_default=False)],
    *,
    client: Annotated[str | None, typer.Option(help="Only this account.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(help="Number of results.", min=1, max=1000)] = 20,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Search the messages and titles of the stored sessions, most recently used first."""
    terms = search_terms(" ".join(f'"{each}"' if " " in each else each for each in words))
    with Archive.open(_path(load_settings(config, given(state_dir=state_dir)))) as archive:
        found, indexed = archive.search_all(terms, client, limit=limit)
    if indexed is not None:
        stderr.print(
            f"Incomplete: {indexed:.0%} of the stored sessions are indexed. A running daemon indexes the others.",
            soft_wrap=True,
        )
    if json:
        print_json([asdict(each) for each in found])
        return
    print_rows([Column("session", no_wrap=True), "client", "last used", "title", "text"], map(_found_cells, found))


def _found_cells(found: FoundLine) -> tuple[str, ...]:
    """Return id, client, last use, title and the text around the first hit."""
    text = found.hits[0].snippet if found.hits else ""
    return (found.session_id, found.client_id, _date(found.last_used_at), found.title, text)


@app.command("export")
def export(
    session: SessionArgument = None,
    *,
    client: ClientOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File to create, accessible only to you.", metavar="FILE", show_default=False),
    ] = None,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
) -> None:
    """Export a session, or all of a client, as JSON: transcript, metadata, turns and usage."""
    kind, name = _one_of(session, client)
    with Archive.open(_path(load_settings(config, given(state_dir=state_dir)))) as archive:
        exported: dict[str, Any]
        if kind == "session":
            exported = as_json(archive.read(name))
        elif archive.holds(kind, name):
            sessions = [as_json(archive.read(each)) for each in archive.matches(kind, name)]
            usage = [asdict(line) for line in archive.usage(name)]
            exported = {"client_id": name, "sessions": sessions, "usage": usage}
        else:
            raise _not_stored(kind, name)
    if output is None:
        print_json(exported)
    else:
        _write(output, orjson.dumps(exported, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


@app.command("purge")
def purge(  # noqa: PLR0913 - one argument an option
    session: SessionArgument = None,
    *,
    client: ClientOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    config: ConfigOption = None,
    state_dir: StateDirOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a session, or all stored conversations and usage of a client, permanently."""
    settings = load_settings(config, given(state_dir=state_dir))
    kind, name = _one_of(session, client)
    with Archive.open(_path(settings)) as archive:
        if not archive.holds(kind, name):
            raise _not_stored(kind, name)
        n_sessions = len(archive.matches(kind, name))
    what = f"session {name}" if kind == "session" else f"{n_sessions_text(n_sessions)} of {name} and its usage"
    if not yes:
        typer.confirm(f"Delete {what}? This cannot be undone.", abort=True, err=True)
    purge_stored(settings, kind, name)
    _audit(settings, kind, name)
    if json:
        print_json({"kind": kind, "name": name, "sessions": n_sessions})
    else:
        stdout.print(f"Deleted {what}.", markup=False, soft_wrap=True)


app.command("salvage")(salvage_sessions)


def as_json(kept: StoredSession) -> dict[str, Any]:
    """Return a session in the export format."""
    facts, unfinished = kept.config, kept.pending_turn
    return {
        "session_id": facts.session_id,
        "client_id": facts.client_id,
        "created_at": facts.created_at,
        "last_used_at": kept.last_used_at,
        "mode": facts.mode,
        "model": facts.model,
        "priority": facts.priority,
        "on_full": facts.on_full,
        "on_disconnect": facts.on_disconnect,
        "ttl_s": facts.ttl_s,
        "metadata": facts.metadata,
        "params": facts.params.model_dump(mode="json"),
        "transcript": [message.model_dump(mode="json", exclude_none=True) for message in kept.history.messages],
        "turns": [_turn(turn, kept.notes.get(turn.turn_id)) for turn in kept.turns],
        "usage": _usage(kept.turns),
        "unfinished": None
        if unfinished is None
        else {
            "turn_id": unfinished.spec.turn_id,
            "request": unfinished.spec.request.model_dump(mode="json", exclude_unset=True),
            "content": unfinished.text,
        },
    }


def _turn(turn: TranscriptTurn, note: str | None) -> dict[str, object]:
    listed = turn.model_dump(mode="json")
    return listed if note is None else {**listed, "note": note}


def _usage(turns: tuple[TranscriptTurn, ...]) -> dict[str, int]:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    return {name: reduce(lambda total, turn: total + getattr(turn.usage, name), turns, 0) for name in names}


def purge_stored(settings: Settings, kind: PurgeKind, name: str) -> None:
    """Delete from the file, or through the daemon that has the file open.

    Raises:
        InferenceCenterError: ``daemon_unreachable`` or ``storage_unavailable``.
    """
    path = _path(settings)
    with control.try_lock_state_dir(settings.state_dir) as alone:
        if alone:
            if path.exists():
                purge_file(path, kind, name)
            return
    if not control.request_purge(settings.state_dir, kind, name):
        raise InferenceCenterError(
            ErrorCode.DAEMON_UNREACHABLE,
            f"a daemon uses {settings.state_dir}, but does not listen there",
            hint="It may be starting or stopping: try again.",
        )
    deadline = time.monotonic() + PURGE_TIMEOUT_S
    while _is_held(path, kind, name):
        if time.monotonic() > deadline:
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE,
                f"the daemon has not deleted the data within {PURGE_TIMEOUT_S:g} s",
                hint="See the daemon's log; the data is deleted once the file can be written.",
            )
        time.sleep(_POLL_S)
    if path.exists():
        truncate_wal(path)


def _is_held(path: Path, kind: PurgeKind, name: str) -> bool:
    with Archive.open(path) as archive:
        return archive.holds(kind, name)


def _audit(settings: Settings, kind: PurgeKind, name: str) -> None:
    """Record the purge in the audit log."""
    client_id = name if kind == "client" else None
    with open_accounts(settings) as accounts:
        accounts.audit(AuditEvent.SESSION_PURGED, client_id=client_id, detail="all" if client_id else name)


def n_sessions_text(count: int) -> str:
    return "1 session" if count == 1 else f"{count} sessions"


def _one_of(session: str | None, client: str | None) -> tuple[PurgeKind, str]:
    if session is not None and client is None:
        return "session", session
    if client is not None and session is None:
        return "client", client
    raise InferenceCenterError(
        ErrorCode.INVALID_REQUEST, "name a session, or a client with --client", hint="Give exactly one of the two."
    )


def _not_stored(kind: PurgeKind, name: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.SESSION_NOT_FOUND,
        f"nothing is stored for {kind} {name!r}",
        hint="`inferencecenter session list` lists stored sessions.",
    )


def _write(path: Path, content: bytes) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise InferenceCenterError(
            ErrorCode.STORAGE_UNAVAILABLE,
            f"{path} cannot be written: {error.strerror}",
            hint="Existing files are not overwritten: specify a new one.",
        ) from error


def _path(settings: Settings) -> Path:
    return settings.state_dir / DATABASE_NAME


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")
