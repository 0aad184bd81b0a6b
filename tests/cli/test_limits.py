"""Limits on the command line: ``token create --limit``, ``token limits``, ``client``, ``usage --token``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth.accounts import DATABASE_NAME, Accounts
from inferencecenter.auth.accounts_db import format_limits
from inferencecenter.cli.options import changed
from inferencecenter.config.limits import NO_LIMITS, AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.sqlite_file import connect, make_private, migrate
from inferencecenter.server.control import ControlSocket
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.schema import DATABASE_NAME as SESSIONS_NAME
from inferencecenter.sessions.store.schema import MIGRATIONS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def _json(cli: Cli, *arguments: str) -> Any:
    result = cli.run(*arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def _limits_of(state_dir: Path, token: str) -> AccessLimits:
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=time.time)) as accounts:
        account = accounts.verify_token(token)
    assert account is not None
    return account.limits


def test_token_is_created_with_limits(cli: Cli, state_dir: Path) -> None:
    """An existing account gets them, too; its other tokens stay without."""
    limits = ("--limit", "tokens_per_day=5000", "--limit", "models=demo,qwen", "--limit", "addresses=10.0.0.0/8,::1")
    made = _json(cli, "token", "create", "ada", *limits)
    expected = {"tokens_per_day": 5000, "models": ["demo", "qwen"], "addresses": ["10.0.0.0/8", "::1"]}
    assert made["limits"] == expected
    assert _limits_of(state_dir, made["token"]) == AccessLimits.model_validate(expected)
    assert _limits_of(state_dir, _json(cli, "token", "create", "ada")["token"]) == NO_LIMITS
    shown = cli.run("token", "limits", made["token_id"]).out.strip()
    assert shown == "tokens_per_day=5000 models=demo,qwen addresses=10.0.0.0/8,::1"
    assert [token["limits"] for token in _json(cli, "token", "list", "--client", "ada")] == [expected, {}]


def test_token_limits_are_changed(cli: Cli, state_dir: Path) -> None:
    """Only the named limits change; `none` removes a limit, and `default` restores the account's."""
    made = _json(cli, "token", "create", "ada", "--limit", "tokens_per_day=5000", "--limit", "max_tokens=9")
    limits = ("token", "limits", made["token_id"])
    shown = _json(cli, "client", "limits", "ada", "max_tokens=100", "concurrent_turns=2")
    assert shown["limits"] == {"max_tokens": 100, "concurrent_turns": 2}
    changed_ = _json(cli, *limits, "tokens_per_day=default", "concurrent_turns=none", "requests_per_minute=6")
    own = {"max_tokens": 9, "concurrent_turns": None, "requests_per_minute": 6}
    assert (changed_["limits"], changed_["daemon_notified"]) == (own, False)
    assert _limits_of(state_dir, made["token"]) == AccessLimits(
        max_tokens=9, concurrent_turns=None, requests_per_minute=6
    )
    assert cli.run(*limits).out.strip() == "requests_per_minute=6 concurrent_turns=none max_tokens=9"
    assert cli.run("token", "limits", _json(cli, "token", "create", "ada")["token_id"]).out.strip() == (
        "no limits of its own"
    )


def test_showing_limits_changes_nothing(cli: Cli, state_dir: Path) -> None:
    """The audit log has entries of changes only."""
    made = _json(cli, "token", "create", "ada")
    cli.run("token", "limits", made["token_id"])
    cli.run("client", "limits", "ada")
    cli.run("token", "limits", made["token_id"], "max_tokens=9")
    cli.run("client", "limits", "ada", "models=demo")
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=time.time)) as accounts:
        lines = [(line.event, line.client_id, line.token_id, line.detail) for line in accounts.audit_lines(last=2)]
    assert lines == [
        ("token_changed", "ada", made["token_id"], "limits max_tokens=9"),
        ("client_changed", "ada", None, "limits models=demo"),
    ]


def test_session_limit_of_an_account_is_changed(cli: Cli, state_dir: Path) -> None:
    """It is changed with other limits or alone; the printed form is accepted as input, and the change is logged."""
    _json(cli, "token", "create", "ada", "--max-sessions", "3")
    limits = ("client", "limits", "ada")
    changed_ = _json(cli, *limits, "max_sessions=50", "max_tokens=9")
    assert (changed_["max_sessions"], changed_["limits"], changed_["daemon_notified"]) == (50, {"max_tokens": 9}, False)
    assert cli.run(*limits).out.strip() == "max_sessions=50 max_tokens=9"
    assert _json(cli, *limits, "max_sessions=2")["limits"] == {"max_tokens": 9}
    assert _json(cli, *limits, "max_tokens=default")["max_sessions"] == 2
    assert cli.run(*limits).out.strip() == "max_sessions=2"
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=time.time)) as accounts:
        details = [line.detail for line in accounts.audit_lines(last=3)]
    assert details == ["max_sessions=50 limits max_tokens=9", "max_sessions=2 limits max_tokens=9", "limits "]


@pytest.mark.parametrize("number", ["0", "100001", "-1", "none", "default", "", "9" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_invalid_session_limit_changes_nothing(cli: Cli, number: str) -> None:
    """Neither the session limit nor the limits set with it change."""
    _json(cli, "token", "create", "ada", "--max-sessions", "3")
    refused = cli.run("client", "limits", "ada", "max_tokens=9", f"max_sessions={number}")
    assert (refused.code, "max_sessions" in refused.err) == (64, True)
    after = _json(cli, "client", "limits", "ada")
    assert (after["max_sessions"], after["limits"]) == (3, {})


def test_session_limit_belongs_to_the_account(cli: Cli) -> None:
    """A token has none."""
    made = _json(cli, "token", "create", "ada")
    refused = cli.run("token", "limits", made["token_id"], "max_sessions=3")
    assert (refused.code, "is not a limit" in refused.err) == (64, True)


async def test_running_daemon_is_notified(cli: Cli, state_dir: Path) -> None:
    """The daemon is notified of each change."""
    made = _json(cli, "token", "create", "ada")
    told = asyncio.Event()
    control = ControlSocket(state_dir, tokens_changed=told.set)
    control.open()
    try:
        for command in (("token", "limits", made["token_id"]), ("client", "limits", "ada")):
            told.clear()
            assert _json(cli, *command, "max_tokens=9")["daemon_notified"] is True
            async with asyncio.timeout(10):
                await told.wait()
    finally:
        control.close()


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("tokens_per_hour=5", "'tokens_per_hour=5' is not a limit"),
        ("tokens_per_day", "'tokens_per_day' is not a limit"),
        ("tokens_per_day=", "'tokens_per_day=' is not a limit"),
        ("tokens_per_day=0", "tokens_per_day is"),
        ("tokens_per_day=many", "tokens_per_day is"),
        ("addresses=10.0.0.0/33", "10.0.0.0/33"),
        ("models=a,,b", "models"),
    ],
)
def test_invalid_limits_change_nothing(cli: Cli, assignment: str, said: str) -> None:
    """The message names the problem, and neither token nor account is created."""
    refused = cli.run("token", "create", "ada", "--limit", assignment)
    assert (refused.code, _json(cli, "token", "list")) == (64, [])
    assert said in " ".join(refused.err.split())
    _json(cli, "token", "create", "ada")
    assert cli.run("client", "limits", "ada", assignment).code == 64
    assert _json(cli, "client", "limits", "ada")["limits"] == {}


def test_unknown_token_or_client_is_an_error(cli: Cli) -> None:
    """None is created."""
    for command in (("token", "limits", "aabbccddeeff", "max_tokens=9"), ("client", "limits", "eve", "max_tokens=9")):
        refused = cli.run(*command)
        assert (refused.code, command[2] in refused.err) == (64, True)


def test_clients_are_listed(cli: Cli) -> None:
    """The list has limits and number of tokens."""
    _json(cli, "token", "create", "ada", "--max-sessions", "3", "--scope", "user", "--scope", "operator")
    revoked = _json(cli, "token", "create", "ada")
    cli.run("token", "revoke", revoked["token_id"])
    cli.run("client", "limits", "ada", "max_tokens=9")
    listed = {client["client_id"]: client for client in _json(cli, "client", "list")}
    assert set(listed) == {"admin", "ada"}
    ada = listed["ada"]
    assert (ada["max_sessions"], ada["scopes"], ada["tokens"]) == (3, ["operator", "user"], 1)
    assert ada["limits"] == {"max_tokens": 9}
    assert "max_tokens=9" in cli.run("client", "list").out


def test_client_names_are_restricted(cli: Cli) -> None:
    """They appear in logs, metric labels and terminals."""
    for name in ("a b", "é", "\x1b[31m", "x" * 65, '{a="b"}'):
        refused = cli.run("token", "create", name)
        assert (refused.code, "not a valid client id" in refused.err) == (64, True)
    assert cli.run("token", "create", "ada.lovelace+phone@example.org").code == 0


def test_usage_by_token(cli: Cli, state_dir: Path) -> None:
    """Usage of keys, or from before tokens were counted, has no token."""
    state_dir.mkdir()
    with contextlib.closing(open_writing(state_dir / SESSIONS_NAME)) as database:
        database.executemany(
            "INSERT INTO usage VALUES ('ada', ?, ?, 1, 10, 4, 5)", [("", "2026-11-20"), ("aabb", "2026-11-20")]
        )
    by_token = _json(cli, "usage", "--token", "--days", "3660")
    assert [(line["token_id"], line["turns"]) for line in by_token] == [("", 1), ("aabb", 1)]
    assert [(line["turns"], line["prompt_tokens"]) for line in _json(cli, "usage", "--days", "3660")] == [(2, 20)]
    assert cli.run("usage", "--token", "--days", "3660").out.splitlines()[1] == "2026-11-20\tada\taabb\t1\t10\t4\t5"


def test_usage_without_tokens_is_migrated(tmp_path: Path) -> None:
    """It is kept without a token."""
    path = tmp_path / "sessions.sqlite3"
    make_private(path)
    with contextlib.closing(connect(path)) as database:
        migrate(database, MIGRATIONS[:2], path=path)
        database.execute("INSERT INTO usage VALUES ('ada', '2026-11-20', 2, 20, 8, 10)")
    open_writing(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT * FROM usage").fetchall() == [("ada", "", "2026-11-20", 2, 20, 8, 10)]


LIMITS = st.builds(
    AccessLimits.model_validate,
    st.dictionaries(
        st.sampled_from(["requests_per_minute", "tokens_per_day", "max_tokens"]), st.none() | st.integers(1, 10**9)
    )
    | st.dictionaries(st.just("models"), st.none() | st.lists(st.sampled_from(["a", "b.c", "d"]), min_size=1)),
)


@given(LIMITS, LIMITS)
def test_printed_limits_are_accepted_as_input(limits: AccessLimits, before: AccessLimits) -> None:
    """Assigning the printed limits gives the same limits, independent of earlier ones."""
    assert changed(format_limits(limits).split()) == limits
    assert changed(format_limits(limits).split(), before) == limits.over(before)


def test_invalid_limit_is_a_request_error() -> None:
    """The error names the field."""
    with pytest.raises(InferenceCenterError) as caught:
        changed(["max_tokens=-5"])
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "max_tokens")


def test_limits_of_sessions_are_changed(cli: Cli, state_dir: Path) -> None:
    """`default` selects the daemon's; each wrong value is named."""
    cli.run("token", "create", "ada")
    shown = _json(cli, "client", "limits", "ada", "retention_days=2.5", "archive_mib=7", "max_tokens=50")
    assert (shown["retention_days"], shown["archive_mib"], shown["limits"]) == (2.5, 7, {"max_tokens": 50})
    assert cli.run("client", "limits", "ada").out.strip().endswith("retention_days=2.5 archive_mib=7 max_tokens=50")
    shown = _json(cli, "client", "limits", "ada", "archive_mib=default")
    assert (shown["retention_days"], "archive_mib" in shown) == (2.5, False)
    for wrong in (
        "retention_days=soon",
        "retention_days=0",
        "archive_mib=1.5",
        "archive_mib=none",
        "max_sessions=default",
    ):
        refused = cli.run("client", "limits", "ada", wrong)
        assert (refused.code, wrong.partition("=")[0] in refused.err) == (64, True)
    with contextlib.closing(Accounts.open(state_dir / DATABASE_NAME, clock=time.time)) as accounts:
        assert accounts.session_limits()["ada"][1:] == (2.5, None)
