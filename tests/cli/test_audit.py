"""The command ``inferencecenter audit``."""

from __future__ import annotations

import contextlib
import json
import time
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from inferencecenter.auth.accounts import DATABASE_NAME, Accounts
from inferencecenter.auth.audit import AuditEvent, AuditLine, audit_entry
from inferencecenter.cli.audit import cells
from inferencecenter.cli.output import text_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.conftest import Cli


NOW = round(time.time() - 60.0, 3)


@pytest.fixture
def running(state_dir: Path) -> Iterator[Accounts]:
    """The accounts as a running daemon has them open."""
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=lambda: NOW)) as accounts:
        accounts.audit(AuditEvent.DAEMON_STARTED, detail="1.0")
        accounts.ensure_client("ada", max_sessions=1, priority="normal")
        accounts.buffer_audit(audit_entry(AuditEvent.LOGIN, client_id="ada", token_id="aabb", address="192.0.2.1"))
        accounts.buffer_audit(audit_entry(AuditEvent.LOGIN, client_id="ada", token_id="aabb", address="192.0.2.1"))
        accounts.flush_audit()
        yield accounts


def _json(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    result = cli.run("audit", *arguments, "--json")
    assert result.code == 0, result.err
    lines: list[dict[str, Any]] = json.loads(result.out)
    return lines


def test_log_is_readable_beside_a_running_daemon(cli: Cli, running: Accounts) -> None:
    """Every entry with all fields, the newest last; the daemon keeps writing."""
    lines = _json(cli)
    assert [line["event"] for line in lines] == ["daemon_started", "client_created", "login"]
    login = lines[-1]
    assert (login.pop("at"), login.pop("last_at")) == (NOW, NOW)
    assert login == {
        "count": 2,
        "event": "login",
        "client_id": "ada",
        "token_id": "aabb",
        "address": "192.0.2.1",
        "detail": "",
        "actor": None,
        "line_id": 3,
    }
    running.audit(AuditEvent.DAEMON_STOPPED)
    assert _json(cli, "--last", "1")[0]["event"] == "daemon_stopped"


@pytest.mark.usefixtures("running")
def test_entries_are_filtered(cli: Cli) -> None:
    """Entries are selected by number, client and event."""
    assert [line["event"] for line in _json(cli, "--last", "2")] == ["client_created", "login"]
    assert [line["event"] for line in _json(cli, "--client", "ada")] == ["client_created", "login"]
    assert [line["event"] for line in _json(cli, "--event", "daemon_started")] == ["daemon_started"]
    assert _json(cli, "--client", "ada", "--event", "daemon_started") == []


@pytest.mark.usefixtures("running")
def test_piped_output_has_one_line_per_entry(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields are separated by tabs, times are local, and nothing is wrapped."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        result = cli.run("audit", "--event", "login")
    finally:
        monkeypatch.undo()
        time.tzset()
    at, *rest = result.out.removesuffix("\n").split("\t")
    assert at.startswith(time.strftime("%Y-%m-%d %H:%M", time.gmtime(NOW + 5.5 * 3600)))
    assert rest == ["login", "ada", "aabb", "192.0.2.1", "2", "", ""]


def test_table_shows_claims_literally() -> None:
    """A claimed name is not interpreted as markup."""
    line = AuditLine(
        at=0.0,
        last_at=0.0,
        count=3,
        event=AuditEvent.LOGIN_REFUSED,
        client_id="[/] [red]eve",
        token_id=None,
        address="192.0.2.9",
        detail="too many attempts",
    )
    console = Console(file=StringIO(), width=200)
    console.print(text_table(["column"] * 7, [cells(line)]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("login_refused", "[/] [red]eve", "192.0.2.9", "too many attempts", "3"):
        assert words in shown


def test_new_state_directory_has_an_empty_log(cli: Cli) -> None:
    """The command succeeds without output."""
    result = cli.run("audit")
    assert (result.code, result.out) == (0, "")
    assert _json(cli) == []


def test_retention_follows_the_settings(cli: Cli, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry older than ``auth.audit_days`` is not shown."""
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=lambda: time.time() - 5 * 86_400)) as old:
        old.audit(AuditEvent.DAEMON_STARTED)
    assert len(_json(cli)) == 1
    monkeypatch.setenv("INFERENCECENTER_AUTH__AUDIT_DAYS", "4")
    assert _json(cli) == []


def test_commands_prune_by_the_settings(cli: Cli, state_dir: Path) -> None:
    """Creating a token prunes by the daemon's retention."""
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=lambda: time.time() - 89 * 86_400)) as old:
        old.audit(AuditEvent.DAEMON_STARTED)
    cli.run("token", "create", "ada")
    assert _json(cli)[0]["event"] == "daemon_started"


@pytest.mark.parametrize("arguments", [["--last", "0"], ["--last", "x"], ["--event", "lunch"]])
def test_invalid_options_are_refused(cli: Cli, arguments: list[str]) -> None:
    """The message names the option."""
    result = cli.run("audit", *arguments)
    assert result.code == 2
    assert arguments[0] in result.err


def test_unusable_state_directory_is_reported(cli: Cli, tmp_path: Path) -> None:
    """The path is named, with the exit code of the error table."""
    (tmp_path / "file").touch()
    result = cli.run("audit", "--state-dir", str(tmp_path / "file" / "state"))
    assert result.code == 73
    assert str(tmp_path / "file") in result.err
