"""The command ``inferencecenter token``."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.auth.account import Account
from inferencecenter.auth.accounts import DATABASE_NAME, Accounts
from inferencecenter.cli.options import duration_s
from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.server import control

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def _verify(state_dir: Path, token: str) -> Account | None:
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=time.time)) as accounts:
        return accounts.verify_token(token)


def _json(cli: Cli, *arguments: str) -> Any:
    result = cli.run("token", *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_create_makes_client_and_token(cli: Cli, state_dir: Path) -> None:
    """In a pipe the token is the only output, and it authenticates with the defaults."""
    token = cli.run("token", "create", "ada").out.strip()
    account = _verify(state_dir, token)
    assert account is not None
    assert (account.client_id, account.max_sessions, account.priority) == ("ada", 16, "normal")
    assert account.scopes == {"user"}


def test_create_sets_the_limits_of_a_new_client(cli: Cli, state_dir: Path) -> None:
    """Scopes, sessions, priority and expiry are those of the options."""
    limits = ["--scope", "user", "--scope", "operator", "--max-sessions", "3", "--priority", "batch"]
    limits += ["--retention-days", "7.5"]
    created = _json(cli, "create", "ops", "--name", "laptop", "--expires-in", "1h", *limits)
    account = _verify(state_dir, created["token"])
    assert account is not None
    assert (account.max_sessions, account.priority, account.retention_days) == (3, "batch", 7.5)
    assert account.scopes == {"user", "operator"}
    assert created["expires_at"] > time.time()
    assert (created["client_id"], created["name"]) == ("ops", "laptop")


def test_second_token_keeps_the_clients_limits(cli: Cli, state_dir: Path) -> None:
    """Limits are set with the first token only."""
    _json(cli, "create", "ada", "--max-sessions", "3")
    second = _json(cli, "create", "ada")
    account = _verify(state_dir, second["token"])
    assert account is not None
    assert account.max_sessions == 3
    for limit in (["--max-sessions", "4"], ["--retention-days", "0"]):
        refused = cli.run("token", "create", "ada", *limit)
        assert refused.code == 64
        assert "'ada' already exists" in refused.err


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "40000"])
def test_invalid_retention_creates_no_client(cli: Cli, days: str) -> None:
    """The message has the valid range."""
    refused = cli.run("token", "create", "ada", f"--retention-days={days}")
    assert refused.code == 64
    assert "above 0 and at most 36500" in refused.err
    assert _json(cli, "list", "--client", "ada") == []
    assert cli.run("token", "create", "ada", "--max-sessions", "2").code == 0


def test_name_is_shown_literally(cli: Cli) -> None:
    """Markup in a name is not interpreted."""
    _json(cli, "create", "ada", "--name", "[/the] [red]phone")
    listed = cli.run("token", "list")
    assert listed.code == 0
    assert "[/the] [red]phone" in listed.out


def test_administrator_is_still_created(cli: Cli, state_dir: Path) -> None:
    """A token created before the daemon's first run does not prevent it."""
    cli.run("token", "create", "ada")
    path = state_dir / "admin.token"
    assert path.stat().st_mode & 0o777 == 0o600
    admin = _verify(state_dir, path.read_text().strip())
    assert admin is not None
    assert "admin" in admin.scopes


def test_list_has_no_secrets(cli: Cli) -> None:
    """JSON and table have ids, clients and states, but no secret."""
    created = _json(cli, "create", "ada", "--name", "phone")
    (listed,) = _json(cli, "list", "--client", "ada")
    assert (listed["token_id"], listed["name"], listed["revoked"]) == (created["token_id"], "phone", False)
    secret = created["token"].rpartition("_")[2]
    table = cli.run("token", "list").out
    assert created["token_id"] in table
    assert "admin" in table
    assert secret not in table


def test_revoked_token_is_invalid(cli: Cli, state_dir: Path) -> None:
    """The list shows it; without a daemon no notification is sent."""
    created = _json(cli, "create", "ada")
    assert _json(cli, "revoke", created["token_id"]) == {
        "token_id": created["token_id"],
        "revoked": True,
        "daemon_notified": False,
    }
    assert _verify(state_dir, created["token"]) is None
    assert [token["revoked"] for token in _json(cli, "list", "--client", "ada")] == [True]


async def test_revoke_notifies_a_running_daemon(cli: Cli, state_dir: Path) -> None:
    """The notice is sent through the control socket of the state directory."""
    created = _json(cli, "create", "ada")
    told: list[bool] = []
    listening = control.ControlSocket(state_dir, tokens_changed=lambda: told.append(True))
    listening.open()
    try:
        assert _json(cli, "revoke", created["token_id"])["daemon_notified"] is True
        listening._read()
    finally:
        listening.close()
    assert told == [True]


def test_revoking_an_unknown_token_is_an_error(cli: Cli) -> None:
    """An unknown token and a token that is already revoked are refused with exit code 64 and a hint."""
    created = _json(cli, "create", "ada")
    cli.run("token", "revoke", created["token_id"])
    for token_id in ("0000", created["token_id"]):
        result = cli.run("token", "revoke", token_id)
        assert result.code == 64
        assert token_id in result.err
        assert "token list" in result.err


def test_unusable_state_directory_is_reported(cli: Cli, tmp_path: Path) -> None:
    """The message has path and reason, the exit code is that of the error table."""
    (tmp_path / "file").touch()
    result = cli.run("token", "list", "--state-dir", str(tmp_path / "file" / "state"))
    assert result.code == 73
    assert str(tmp_path / "file") in result.err


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("45m", 2700), ("12h", 43_200), ("30d", 2_592_000)])
def test_durations(text: str, seconds: int) -> None:
    """A duration is a number with a unit."""
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "0d", "-1d", "1.5h", "1w", "1d ", "9999999999d"])
def test_invalid_durations_are_refused(text: str) -> None:
    """The message has an example."""
    with pytest.raises(InferenceCenterError, match="expires-in"):
        duration_s(text)


def test_rotated_token_replaces_another(cli: Cli, state_dir: Path) -> None:
    """It has its name, end and limits; the old one is revoked, and cannot be rotated again."""
    old = _json(cli, "create", "ada", "--name", "phone", "--expires-in", "1h", "--limit", "max_tokens=9")
    new = _json(cli, "rotate", old["token_id"])
    assert (new["revoked"], new["daemon_notified"]) == (old["token_id"], False)
    assert _verify(state_dir, old["token"]) is None
    account = _verify(state_dir, new["token"])
    assert account is not None
    assert (account.client_id, account.limits.max_tokens) == ("ada", 9)
    assert account.expires_at == old["expires_at"]
    assert {each["token_id"]: (each["name"], each["revoked"]) for each in _json(cli, "list")}.items() >= {
        (old["token_id"], ("phone", True)),
        (new["token_id"], ("phone", False)),
    }
    refused = cli.run("token", "rotate", old["token_id"])
    assert refused.code == 64
    assert "is not a token id, or is already revoked" in refused.err


def test_rotated_token_alone_is_written_to_a_pipe(cli: Cli, state_dir: Path) -> None:
    """The output is the new token alone, as that of ``token create``."""
    old = _json(cli, "create", "ada")
    token = cli.run("token", "rotate", old["token_id"]).out.strip()
    assert _verify(state_dir, token) is not None
