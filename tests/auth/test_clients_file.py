"""The file clients.toml."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.clients_file import load_clients
from inferencecenter.config.limits import AccessLimits
from inferencecenter.config.sections import AuthSettings
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.auth.account import StaticClient

DIGEST = hashlib.sha256(b"secret").hexdigest()


def load(tmp_path: Path, text: str) -> dict[str, StaticClient]:
    """Write ``text`` and load it."""
    path = tmp_path / "clients.toml"
    path.write_text(text)
    return load_clients(AuthSettings(clients_file=path))


def test_client_with_all_fields(tmp_path: Path) -> None:
    """Every field is taken as written."""
    (client,) = load(
        tmp_path,
        f'[[client]]\nclient_id = "k"\napi_key_sha256 = "{DIGEST.upper()}"\nmax_sessions = 2\npriority = "batch"\n'
        'scopes = ["user", "operator"]\nretention_days = 30\n'
        'limits = {tokens_per_day = 5000, models = ["demo"], addresses = ["10.0.0.0/8"]}\n',
    ).values()
    assert client.key_sha256.hex() == DIGEST
    assert (client.account.client_id, client.account.max_sessions, client.account.priority) == ("k", 2, "batch")
    assert client.account.scopes == {Scope.USER, Scope.OPERATOR}
    assert client.account.retention_days == 30
    assert client.account.limits == AccessLimits(tokens_per_day=5000, models=("demo",), addresses=("10.0.0.0/8",))


def test_client_with_defaults(tmp_path: Path) -> None:
    """A plain key is hashed; limits come from the settings; the scope is ``user``."""
    (client,) = load(tmp_path, '[[client]]\nclient_id = "k"\napi_key = "secret"\n').values()
    assert client.key_sha256.hex() == DIGEST
    assert (client.account.max_sessions, client.account.priority) == (16, "normal")
    assert client.account.retention_days is None
    assert client.account.scopes == {Scope.USER}


def test_empty_file_has_no_clients(tmp_path: Path) -> None:
    """A file without tables is valid."""
    assert load(tmp_path, "") == {}


@pytest.mark.parametrize(
    ("entry", "field", "words"),
    [
        ('client_id = "k"', "client[1]", "either api_key or api_key_sha256"),
        ('client_id = "a b"\napi_key = "x"', "client[1].client_id", "not a valid client id"),
        ('client_id = "k"\napi_key = "x"\nlimits = {max_tokens = 0}', "client[1].limits.max_tokens", "greater than"),
        ('client_id = "k"\napi_key = "x"\nlimits = {tokens = 1}', "client[1].limits.tokens", "unknown field"),
        (f'client_id = "k"\napi_key = "x"\napi_key_sha256 = "{DIGEST}"', "client[1]", "either api_key"),
        ('api_key = "x"', "client[1].client_id", "client_id is missing"),
        ('client_id = ""\napi_key = "x"', "client[1].client_id", 'client_id is ""'),
        ('client_id = "k"\napi_key_sha256 = "ab"', "client[1].api_key_sha256", "pattern"),
        ('client_id = "k"\napi_key = "x"\nmax_sessions = 0', "client[1].max_sessions", "max_sessions is 0"),
        ('client_id = "k"\napi_key = "x"\nmax_sessions = "4"', "client[1].max_sessions", 'max_sessions is "4"'),
        (
            'client_id = "k"\napi_key = "x"\npriority = "high"',
            "client[1].priority",
            "'interactive', 'normal' or 'batch'",
        ),
        ('client_id = "k"\napi_key = "x"\nretention_days = 0', "client[1].retention_days", "retention_days is 0"),
        ('client_id = "k"\napi_key = "x"\nretention_days = 36501', "client[1].retention_days", "36500"),
        ('client_id = "k"\napi_key = "x"\nretention_days = inf', "client[1].retention_days", "36500"),
        ('client_id = "k"\napi_key = "x"\nretention_days = nan', "client[1].retention_days", "retention_days is"),
        ('client_id = "k"\napi_key = "x"\nretention_days = "30"', "client[1].retention_days", 'retention_days is "30"'),
        ('client_id = "k"\napi_key = "x"\nretention_days = true', "client[1].retention_days", "retention_days is"),
        ('client_id = "k"\napi_key = "x"\nscopes = ["root"]', "client[1].scopes", "'root'"),
        ('client_id = "k"\napi_key = "x"\nmax_session = 4', "client[1].max_session", "unknown field max_session"),
    ],
)
def test_invalid_entry_is_named(tmp_path: Path, entry: str, field: str, words: str) -> None:
    """The error has the file, the entry, the field and the problem."""
    with pytest.raises(InferenceCenterError) as caught:
        load(tmp_path, f"[[client]]\n{entry}\n")
    error = caught.value
    assert error.code is ErrorCode.INVALID_CONFIG
    assert error.field == field
    assert words in error.message
    assert str(tmp_path / "clients.toml") in error.message


def test_keys_are_not_shown_in_errors(tmp_path: Path) -> None:
    """A key of the wrong type does not reach a log through its error."""
    with pytest.raises(InferenceCenterError) as caught:
        load(tmp_path, '[[client]]\nclient_id = "k"\napi_key = 123456\n')
    assert "123456" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[client", "is not TOML"),
        ('[[clients]]\nclient_id = "k"', "unknown key 'clients'"),
        ('client = "k"', "not a list of tables"),
        (f"[[client]]\nmax_sessions = {'9' * 5000}", "cannot be parsed: ValueError"),
        (f"client = {'[' * 5000}", "cannot be parsed: RecursionError"),
        ('[[client]]\nclient_id = "k"\napi_key = "a"\n[[client]]\nclient_id = "k"\napi_key = "b"', "occurs twice"),
    ],
)
def test_invalid_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    """Errors of the file as a whole have its path."""
    with pytest.raises(InferenceCenterError, match=words) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "clients.toml") in caught.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    """The error has the path and the setting."""
    with pytest.raises(InferenceCenterError, match="cannot be read") as caught:
        load_clients(AuthSettings(clients_file=tmp_path / "none.toml"))
    assert "auth.clients_file" in str(caught.value.hint)
