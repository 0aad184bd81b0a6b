"""The commands ``inferencecenter session`` and ``inferencecenter usage``."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
import stat
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from inferencecenter.auth.accounts import DATABASE_NAME as ACCOUNTS_NAME
from inferencecenter.auth.accounts import Accounts
from inferencecenter.cli import output
from inferencecenter.cli import session as session_command
from inferencecenter.server.control import DAEMON_LOCK_NAME, ControlSocket, try_lock_state_dir
from inferencecenter.sessions.store.schema import DATABASE_NAME
from inferencecenter.sessions.store.search_index import prepare_index
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.store.stores import kept_in, settled
from tests.sessions.store.values import ended, make_end, make_turn, opened, ordered, said

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from inferencecenter.sessions.journal import Record
    from inferencecenter.sessions.store.recorder import PurgeKind
    from tests.cli.conftest import Cli

SECRET = "a very particular sentence"


def _records() -> list[Record]:
    """Ada has two sessions, one of which answers; Bob has one."""
    running: list[Record] = [ordered("s_2"), said("Well", "s_2"), said(", so", "s_2")]
    bobs = replace(ended("s_3", text="x", turn=make_turn("t_3"), end=make_end("t_3")), client_id="bob")
    return [opened("s_1"), ended(text=SECRET), opened("s_2"), *running, opened("s_3", client_id="bob"), bobs]


async def _filled(state_dir: Path) -> SessionStore:
    store = SessionStore.open(state_dir / DATABASE_NAME)
    for record in _records():
        store.write(record, flush=False)
    await settled(store)
    return store


@pytest.fixture
async def stored(state_dir: Path) -> Path:
    """A state directory with sessions and no daemon."""
    await (await _filled(state_dir)).close()
    return state_dir


def test_stored_sessions_are_searched(cli: Cli, stored: Path) -> None:
    """The words may be in sessions of all clients or of one; results show the text around them."""
    state_dir = ("--state-dir", str(stored))
    found = _json(cli, "session", "search", "particular", "very", "--json", *state_dir)
    assert [(each["session_id"], each["client_id"]) for each in found] == [("s_1", "ada")]
    (hit,) = found[0]["hits"]
    assert (hit["snippet"], hit["role"]) == (SECRET, "assistant")
    assert _json(cli, "session", "search", "very", "--client", "bob", "--json", *state_dir) == []
    assert _json(cli, "session", "search", "very sentence", "--json", *state_dir) == []
    assert SECRET in cli.run("session", "search", "particular sentence", *state_dir).out


def test_search_without_an_index_says_what_makes_one(cli: Cli, stored: Path) -> None:
    """A missing index is an error that names the setting, not an empty result."""
    with contextlib.closing(sqlite3.connect(stored / DATABASE_NAME, isolation_level=None)) as database:
        prepare_index(database, is_wanted=False)
    result = cli.run("session", "search", "very", "--state-dir", str(stored))
    assert result.code != 0
    assert "sessions.search" in result.err


def test_search_says_that_the_index_is_incomplete(cli: Cli, stored: Path) -> None:
    """The warning goes to standard error, and the results are still listed."""
    with contextlib.closing(sqlite3.connect(stored / DATABASE_NAME, isolation_level=None)) as database:
        prepare_index(database, is_wanted=False)
        prepare_index(database, is_wanted=True)
    result = cli.run("session", "search", "very", "--state-dir", str(stored))
    assert result.code == 0
    assert "0% of the stored sessions are indexed" in result.err


@pytest.fixture
async def running(state_dir: Path) -> AsyncIterator[SessionStore]:
    """The store of a running daemon with its control socket."""
    store = await _filled(state_dir)
    control = ControlSocket(state_dir, tokens_changed=lambda: None, purge=store.purge)
    control.open()
    with try_lock_state_dir(state_dir) as alone:
        assert alone
        yield store
    control.close()
    await store.close()


def _json(cli: Cli, *arguments: str) -> Any:
    result = cli.run(*arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def _contents(state_dir: Path) -> bytes:
    return b"".join(path.read_bytes() for path in state_dir.iterdir() if path.is_file())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return a function that sets the typed input."""
    typed = io.StringIO()
    monkeypatch.setattr(sys, "stdin", typed)
    return typed


def test_list_shows_stored_sessions(cli: Cli, stored: Path) -> None:
    """The oldest is first; lists of one client or of all have size and state of each session."""
    listed = _json(cli, "session", "list", "--json")
    assert [each["session_id"] for each in listed] == ["s_1", "s_2", "s_3"]
    first = {name: listed[0][name] for name in ("client_id", "model", "messages", "turns", "tokens", "answering")}
    assert first == {
        "client_id": "ada",
        "model": "toy",
        "messages": 2,
        "turns": 1,
        "tokens": len(SECRET),
        "answering": False,
    }
    assert [each["answering"] for each in listed] == [False, True, False]
    assert [each["session_id"] for each in _json(cli, "session", "list", "--client", "bob", "--json")] == ["s_3"]
    lines = cli.run("session", "list").out.splitlines()
    assert lines[1] == "s_2\tada\ttoy\t0\t0\t2026-11-18 11:06\tanswering"
    assert len(lines) == 3


def test_terminal_lists_are_tables(cli: Cli, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal lists have a heading, and no message content."""
    monkeypatch.setattr(output, "stdout", Console(force_terminal=True, width=120))
    listed = cli.run("session", "list").out
    assert all(word in listed for word in ("last used", "s_1", "ada", "answering"))
    assert SECRET not in listed
    usage = cli.run("usage", "--days", "10000").out
    assert all(word in usage for word in ("of these cached", "2026-11-18", "ada"))


def test_missing_store_is_empty(cli: Cli, state_dir: Path) -> None:
    """Lists are empty, and no file is created."""
    assert _json(cli, "session", "list", "--json") == []
    assert _json(cli, "usage", "--json") == []
    assert cli.run("session", "export", "s_1").code == 66
    assert cli.run("session", "purge", "--client", "ada", "--yes").code == 66
    assert not (state_dir / DATABASE_NAME).exists()


def test_export_contains_the_whole_session(cli: Cli, stored: Path) -> None:
    """The export has its transcript, metadata, parameters, turns and usage."""
    exported = _json(cli, "session", "export", "s_1")
    assert exported["transcript"] == [{"role": "user", "content": "?"}, {"role": "assistant", "content": SECRET}]
    assert exported["metadata"] == {"title": "Überschrift"}
    usage = {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 4, "reasoning_tokens": 0}
    assert exported["turns"][0]["usage"] == usage
    assert exported["usage"] == {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 4}
    assert exported["params"]["temperature"] == 0.5
    assert exported["unfinished"] is None


async def test_export_of_a_client_beside_a_daemon(cli: Cli, running: SessionStore, tmp_path: Path) -> None:
    """The file has all its sessions, also an unfinished answer, and its usage; it is private and not overwritten."""
    target = tmp_path / "ada.json"
    result = await asyncio.to_thread(cli.run, "session", "export", "--client", "ada", "--output", str(target))
    assert result.code == 0, result.err
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    exported = json.loads(target.read_text())
    assert [each["session_id"] for each in exported["sessions"]] == ["s_1", "s_2"]
    unfinished = exported["sessions"][1]["unfinished"]
    assert (unfinished["content"], unfinished["request"]["prompt"]) == ("Well, so", "Who?")
    assert [(line["day"], line["turns"]) for line in exported["usage"]] == [("2026-11-18", 1)]
    again = await asyncio.to_thread(cli.run, "session", "export", "s_1", "--output", str(target))
    assert again.code == 73
    assert str(target) in again.err
    assert json.loads(target.read_text()) == exported


@pytest.mark.parametrize("command", ["export", "purge"])
def test_session_or_client_is_required(cli: Cli, stored: Path, command: str) -> None:
    """Naming neither, both or unknown ones is refused."""
    assert cli.run("session", command).code == 64
    assert cli.run("session", command, "s_1", "--client", "ada").code == 64
    assert cli.run("session", command, "s_9").code == 66
    missing = cli.run("session", command, "--client", "eve")
    assert missing.code == 66
    assert "'eve'" in missing.err


async def test_purge_without_a_daemon_overwrites(cli: Cli, stored: Path) -> None:
    """No file contains the content any more; other sessions are unchanged, and the audit log has an entry."""
    result = await asyncio.to_thread(cli.run, "session", "purge", "s_1", "--yes", "--json")
    assert json.loads(result.out) == {"kind": "session", "name": "s_1", "sessions": 1}
    assert set(await kept_in(stored / DATABASE_NAME)) == {"s_2", "s_3"}
    assert SECRET.encode() not in _contents(stored)
    with contextlib.closing(Accounts.open(stored / ACCOUNTS_NAME, clock=time.time)) as accounts:
        lines = accounts.audit_lines(last=10)
    assert [(line.event.value, line.detail) for line in lines] == [("session_purged", "s_1")]


async def test_purge_of_a_client_includes_its_usage(cli: Cli, stored: Path) -> None:
    """Nothing is left under its name; other clients' sessions stay."""
    result = await asyncio.to_thread(cli.run, "session", "purge", "--client", "ada", "--yes")
    assert "2 sessions of ada" in result.out
    assert set(await kept_in(stored / DATABASE_NAME)) == {"s_3"}
    with contextlib.closing(sqlite3.connect(stored / DATABASE_NAME)) as database:
        assert database.execute("SELECT client_id FROM usage").fetchall() == [("bob",)]


async def test_purge_beside_a_daemon_is_done_by_the_daemon(cli: Cli, running: SessionStore, state_dir: Path) -> None:
    """The command waits until the rows are gone, also from the WAL."""
    for arguments in (("s_1",), ("--client", "bob")):
        result = await asyncio.to_thread(cli.run, "session", "purge", *arguments, "--yes")
        assert result.code == 0, result.err
    with contextlib.closing(sqlite3.connect(state_dir / DATABASE_NAME)) as database:
        assert database.execute("SELECT session_id FROM sessions").fetchall() == [("s_2",)]
    assert SECRET.encode() not in _contents(state_dir)
    running.write(said("!", "s_2"), flush=False)
    await settled(running)
    assert running.fault is None


def test_purge_is_confirmed(cli: Cli, stored: Path, answers: io.StringIO) -> None:
    """Anything but a yes changes nothing."""
    answers.write("n\n")
    answers.seek(0)
    refused = cli.run("session", "purge", "s_1")
    assert refused.code == 1
    assert "Delete session s_1?" in refused.err
    assert len(_json(cli, "session", "list", "--json")) == 3
    answers.seek(0)
    answers.write("y\n")
    answers.seek(0)
    assert cli.run("session", "purge", "s_1").code == 0
    assert len(_json(cli, "session", "list", "--json")) == 2


def test_unresponsive_daemon_is_not_bypassed(cli: Cli, stored: Path) -> None:
    """While it holds the directory, nothing is deleted."""
    with try_lock_state_dir(stored) as alone:
        assert alone
        result = cli.run("session", "purge", "s_1", "--yes")
    assert result.code == 69
    assert "does not listen" in result.err
    assert len(_json(cli, "session", "list", "--json")) == 3
    assert (stored / DAEMON_LOCK_NAME).exists()


async def test_failing_purge_of_the_daemon_is_reported(
    cli: Cli, running: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has a time limit."""

    def ignore(kind: PurgeKind, name: str) -> None:
        """Ignore the request, like a daemon with a full disk."""

    monkeypatch.setattr(session_command, "PURGE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(running, "purge", ignore)
    result = cli.run("session", "purge", "s_1", "--yes")
    assert result.code == 73
    assert "has not deleted the data" in result.err


def test_unusable_file_is_reported(cli: Cli, state_dir: Path) -> None:
    """The message has the path, and the file is unchanged."""
    state_dir.mkdir()
    path = state_dir / DATABASE_NAME
    path.write_bytes(b"no database" * 100)
    for command in (["session", "list"], ["session", "export", "s_1"], ["session", "purge", "s_1"], ["usage"]):
        result = cli.run(*command)
        assert result.code == 73
        assert str(path) in result.err.replace("\n", "")
    assert path.read_bytes() == b"no database" * 100


def test_inconsistent_session_is_reported(cli: Cli, stored: Path) -> None:
    """An export names it, and it can be purged."""
    with contextlib.closing(sqlite3.connect(stored / DATABASE_NAME, isolation_level=None)) as database:
        database.execute("DELETE FROM messages WHERE n = 0")
    result = cli.run("session", "export", "s_1")
    assert result.code == 73
    assert "s_1" in result.err
    assert cli.run("session", "purge", "s_1", "--yes").code == 0
    assert len(_json(cli, "session", "list", "--json")) == 2


def test_usage_by_client_and_day(cli: Cli, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage covers the last days, of one client or of all."""
    with contextlib.closing(sqlite3.connect(stored / DATABASE_NAME, isolation_level=None)) as database:
        database.execute("INSERT INTO usage VALUES ('ada', 'aabb', '2026-11-16', 5, 50, 0, 500)")
    monkeypatch.setattr(time, "time", lambda: 1_795_000_000.0)
    lines = _json(cli, "usage", "--days", "3", "--json")
    assert [(line["day"], line["client_id"], line["turns"]) for line in lines] == [
        ("2026-11-16", "ada", 5),
        ("2026-11-18", "ada", 1),
        ("2026-11-18", "bob", 1),
    ]
    assert len(_json(cli, "usage", "--days", "2", "--json")) == 2
    assert len(_json(cli, "usage", "--client", "ada", "--json")) == 2
    assert cli.run("usage").out.splitlines()[0] == "2026-11-16\tada\t5\t50\t0\t500"


@pytest.mark.parametrize("fate", ["delete", "keep"])
def test_account_is_deleted_with_or_without_its_sessions(
    cli: Cli, stored: Path, answers: io.StringIO, fate: str
) -> None:
    """It is told before what is lost; without a yes nothing changes, and without the choice it is an error."""
    token = _json(cli, "token", "create", "ada", "--json")["token"]
    assert cli.run("client", "delete", "ada", "--yes").code == 2
    answers.write("n\n")
    answers.seek(0)
    refused = cli.run("client", "delete", "ada", "--sessions", fate)
    assert refused.code == 1
    words = "are deleted" if fate == "delete" else "stay stored and belong to a new account of this name"
    assert f"1 of its tokens stop working; 2 sessions with 0.0 MiB of text {words}." in refused.err
    with contextlib.closing(Accounts.open(stored / ACCOUNTS_NAME, clock=time.time)) as accounts:
        assert accounts.verify_token(token) is not None
    deleted = _json(cli, "client", "delete", "ada", "--sessions", fate, "--yes", "--json")
    assert deleted == {
        "client_id": "ada",
        "sessions": fate,
        "tokens": 1,
        "stored_sessions": 2,
        "stored_chars": deleted["stored_chars"],
    }
    assert deleted["stored_chars"] > len(SECRET)
    left = {each["client_id"] for each in _json(cli, "session", "list", "--json")}
    assert left == ({"bob"} if fate == "delete" else {"ada", "bob"})
    with contextlib.closing(Accounts.open(stored / ACCOUNTS_NAME, clock=time.time)) as accounts:
        assert accounts.verify_token(token) is None
        assert not accounts.has_client("ada")
        assert [(line.event.value, line.detail) for line in accounts.audit_lines(last=2)] == [
            ("token_revoked", "all tokens (1)"),
            ("client_removed", "sessions deleted" if fate == "delete" else "sessions kept"),
        ]
    assert cli.run("client", "delete", "ada", "--sessions", fate, "--yes").code == 64


async def test_account_is_deleted_beside_a_daemon(cli: Cli, running: SessionStore, state_dir: Path) -> None:
    """The daemon deletes the sessions; the account goes last."""
    await asyncio.to_thread(cli.run, "token", "create", "bob")
    result = await asyncio.to_thread(cli.run, "client", "delete", "bob", "--sessions", "delete", "--yes")
    assert result.code == 0, result.err
    with contextlib.closing(sqlite3.connect(state_dir / DATABASE_NAME)) as database:
        assert set(database.execute("SELECT client_id FROM sessions")) == {("ada",)}
    with contextlib.closing(Accounts.open(state_dir / ACCOUNTS_NAME, clock=time.time)) as accounts:
        assert not accounts.has_client("bob")
