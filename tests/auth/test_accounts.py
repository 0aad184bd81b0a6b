"""Clients and tokens in SQLite."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from inferencecenter.auth.account import Account, StaticClient
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.config.limits import AccessLimits
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope
from inferencecenter.sessions.context import AccountLimits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KITCHEN = Account(client_id="kitchen", max_sessions=2, priority="batch", scopes=frozenset({Scope.USER}))


class Clock:
    """Unix seconds that a test advances."""

    now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A stopped clock."""
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the database."""
    return tmp_path / "state" / "accounts.sqlite3"


@pytest.fixture
def accounts(path: Path, clock: Clock) -> Iterator[Accounts]:
    """Accounts with a client in the database and one in clients.toml."""
    static = {"kitchen": StaticClient(account=KITCHEN, key_sha256=hashlib.sha256(b"key").digest())}
    opened = Accounts.open(path, clock=clock, static=static)
    opened.ensure_client("ada", max_sessions=5, priority="interactive", scopes=["user", "operator"])
    yield opened
    opened.close()


def test_token_authenticates_its_client(accounts: Accounts) -> None:
    """The account has the client's limits and the token's id."""
    new = accounts.create_token("ada", name="phone")
    assert accounts.verify_token(new.token) == Account(
        client_id="ada",
        max_sessions=5,
        priority="interactive",
        scopes=frozenset({Scope.USER, Scope.OPERATOR}),
        token_id=new.token_id,
    )


def test_tokens_have_256_bits_and_differ(accounts: Accounts) -> None:
    """A token reads ``ic_<id>_<secret>`` with 64 hexadecimal digits of secret."""
    first, second = accounts.create_token("ada").token, accounts.create_token("ada").token
    assert re.fullmatch(r"ic_[0-9a-f]{12}_[0-9a-f]{64}", first)
    assert first.split("_")[2] != second.split("_")[2]


@pytest.mark.parametrize("mangle", ["{}x", "x{}", "ic_0123456789ab_{}", "", "ic__", "ic_a_b_c", "\udc80"])
def test_modified_token_authenticates_no_client(accounts: Accounts, mangle: str) -> None:
    """Near misses, unknown ids and arbitrary text match no account."""
    token = accounts.create_token("ada").token
    assert accounts.verify_token(mangle.format(token)) is None


def test_secret_of_another_token_is_refused(accounts: Accounts) -> None:
    """The secret must belong to the token's id."""
    first, second = accounts.create_token("ada").token, accounts.create_token("ada").token
    assert accounts.verify_token("_".join([*first.split("_")[:2], second.split("_")[2]])) is None


def test_secrets_are_compared_in_constant_time_for_unknown_ids_too(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check compares two digests through hmac once."""
    compared: list[tuple[int, int]] = []
    constant_time = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return constant_time(a, b)

    token = accounts.create_token("ada").token
    monkeypatch.setattr(hmac, "compare_digest", compare)
    accounts.verify_token(token)
    accounts.verify_token("ic_000000000000_00")
    accounts.verify_token("nonsense")
    assert compared == [(32, 32)] * 3


def test_secrets_are_not_stored(accounts: Accounts, path: Path) -> None:
    """Neither the database nor its WAL contains a secret."""
    secret = accounts.create_token("ada").token.split("_")[2]
    accounts.close()
    contents = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert hashlib.sha256(secret.encode()).digest() in contents
    assert secret.encode() not in contents
    assert bytes.fromhex(secret) not in contents


def test_files_are_private(accounts: Accounts, path: Path) -> None:
    """Only the owner can access the database, its WAL and its directory."""
    accounts.create_token("ada")
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_expired_token_is_refused(accounts: Accounts, clock: Clock) -> None:
    """It is refused from the second of its expiry on."""
    new = accounts.create_token("ada", expires_at=1060.0)
    clock.now_s = 1059.9
    account = accounts.verify_token(new.token)
    assert account is not None
    assert account.expires_at == 1060.0
    assert accounts.valid_tokens() == {new.token_id}
    clock.now_s = 1060.0
    assert accounts.verify_token(new.token) is None
    assert accounts.valid_tokens() == frozenset()


def test_revoked_token_is_refused_and_stays_listed(accounts: Accounts) -> None:
    """Revoking works once, and only for the named token."""
    new, other = accounts.create_token("ada"), accounts.create_token("ada")
    assert accounts.revoke(new.token_id)
    assert not accounts.revoke(new.token_id)
    assert not accounts.revoke("unknown")
    assert accounts.verify_token(new.token) is None
    assert accounts.verify_token(other.token) is not None
    assert accounts.valid_tokens() == {other.token_id}
    assert {info.token_id: info.revoked for info in accounts.list_tokens()} == {
        new.token_id: True,
        other.token_id: False,
    }


def test_last_use_is_recorded(accounts: Accounts, clock: Clock) -> None:
    """A successful check is recorded, a failed one is not."""
    new = accounts.create_token("ada", name="phone")
    accounts.verify_token(new.token + "0")
    assert accounts.list_tokens("ada")[0].last_used_at is None
    clock.now_s = 2000.0
    accounts.verify_token(new.token)
    (info,) = accounts.list_tokens("ada")
    assert (info.name, info.created_at, info.last_used_at) == ("phone", 1000.0, 2000.0)


def test_checking_a_token_writes_nothing(accounts: Accounts, path: Path) -> None:
    """Uses are written later in batches."""
    new = accounts.create_token("ada")
    log = path.with_name(path.name + "-wal")
    before = log.read_bytes()
    accounts.verify_token(new.token)
    assert log.read_bytes() == before
    accounts.flush_audit()
    assert log.read_bytes() != before


def test_tokens_are_listed_by_client(accounts: Accounts) -> None:
    """The list has those of one client, or of all."""
    accounts.ensure_client("bob", max_sessions=1, priority="normal")
    mine, theirs = accounts.create_token("ada").token_id, accounts.create_token("bob").token_id
    assert [info.token_id for info in accounts.list_tokens("ada")] == [mine]
    assert {info.token_id for info in accounts.list_tokens()} == {mine, theirs}


def test_token_requires_an_existing_client(accounts: Accounts) -> None:
    """The error names the unknown client."""
    with pytest.raises(InferenceCenterError, match="'eve'") as caught:
        accounts.create_token("eve")
    assert caught.value.field == "client_id"


def test_limits_can_be_changed(accounts: Accounts) -> None:
    """Updating a client keeps its tokens and sets its limits."""
    token = accounts.create_token("ada").token
    accounts.ensure_client("ada", max_sessions=9, priority="batch")
    account = accounts.verify_token(token)
    assert account is not None
    assert (account.max_sessions, account.priority) == (9, "batch")
    assert account.scopes == {Scope.USER}


def test_client_has_its_own_retention(accounts: Accounts) -> None:
    """Each of its tokens' accounts has it, until the client is updated without one."""
    token = accounts.create_token("ada").token
    for days in (0.5, 36_500, None):
        accounts.ensure_client("ada", max_sessions=1, priority="normal", retention_days=days)
        account = accounts.verify_token(token)
        assert account is not None
        assert account.retention_days == days


def test_limits_of_sessions_are_changed_and_reset(accounts: Accounts) -> None:
    """Each is changed by itself; ``None`` selects the daemon's value, and the audit log has each change."""
    accounts.create_client("bob", max_sessions=1, priority="normal", retention_days=5, archive_mib=7)
    assert accounts.change_client("bob", storage={"retention_days": 0.5})
    assert accounts.session_limits()["bob"] == AccountLimits(1, 0.5, 7)
    assert accounts.change_client("bob", storage={"retention_days": None, "archive_mib": 9})
    assert accounts.session_limits()["bob"] == AccountLimits(1, None, 9)
    account = accounts.account_of("bob")
    assert account is not None
    assert (account.retention_days, account.archive_mib) == (None, 9)
    by_token = accounts.verify_token(accounts.create_token("bob").token)
    assert by_token is not None
    assert by_token.archive_mib == 9
    for wrong in ({"retention_days": 0.0}, {"archive_mib": 0}, {"archive_mib": 2**21}):
        with pytest.raises(InferenceCenterError) as caught:
            accounts.change_client("bob", storage=wrong)
        assert caught.value.field == next(iter(wrong))
    lines = accounts.audit_lines(last=10, event=AuditEvent.CLIENT_CHANGED)
    assert [line.detail for line in lines] == ["retention_days=0.5", "retention_days=default archive_mib=9"]


def test_all_tokens_are_revoked_and_the_client_removed(accounts: Accounts) -> None:
    """The audit log has both; a missing client is reported."""
    accounts.ensure_client("bob", max_sessions=1, priority="normal")
    tokens = [accounts.create_token("bob").token for _ in range(2)]
    assert accounts.revoke_all("bob") == 2
    assert [accounts.verify_token(token) for token in tokens] == [None, None]
    assert accounts.revoke_all("bob") == 0
    assert accounts.remove_client("bob", detail="sessions kept")
    assert not accounts.remove_client("bob")
    assert accounts.revoke_all("bob") is None
    lines = accounts.audit_lines(last=2)
    assert [(line.event, line.client_id, line.detail) for line in lines] == [
        (AuditEvent.TOKEN_REVOKED, "bob", "all tokens (2)"),
        (AuditEvent.CLIENT_REMOVED, "bob", "sessions kept"),
    ]


def test_retention_of_all_clients(path: Path, clock: Clock) -> None:
    """It includes clients of the database and of clients.toml; the file takes precedence."""
    static = {
        name: StaticClient(account=replace(KITCHEN, client_id=name, retention_days=days), key_sha256=bytes(32))
        for name, days in (("kitchen", 1.5), ("both", 3.0), ("plain", None))
    }
    with closing(Accounts.open(path, clock=clock, static=static)) as opened:
        for name, days in (("ada", 7.0), ("both", 9.0), ("bob", None)):
            opened.ensure_client(name, max_sessions=1, priority="normal", retention_days=days)
        found = {name: each.retention_days for name, each in opened.session_limits().items()}
        assert found == {"ada": 7.0, "bob": None, "both": 3.0, "kitchen": 1.5, "plain": None}


@pytest.mark.parametrize("days", [0.0, -1.0, 36_501.0, float("inf"), float("nan")])
def test_invalid_retention_is_refused(accounts: Accounts, days: float) -> None:
    """The error names the field and its range, and no client is created."""
    with pytest.raises(InferenceCenterError, match="above 0 and at most 36500") as caught:
        accounts.ensure_client("eve", max_sessions=1, priority="normal", retention_days=days)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "retention_days")
    assert not accounts.has_client("eve")


def test_removing_a_client_removes_its_tokens(accounts: Accounts) -> None:
    """They no longer authenticate."""
    token = accounts.create_token("ada").token
    accounts.remove_client("ada")
    assert accounts.verify_token(token) is None
    assert accounts.list_tokens() == []


def test_keys_of_clients_toml(accounts: Accounts) -> None:
    """A key authenticates its own client and no other."""
    assert accounts.verify_key("kitchen", "key") == KITCHEN
    assert accounts.verify_key("kitchen", "other") is None
    assert accounts.verify_key("ada", "key") is None


def test_token_works_as_api_key_of_its_client(accounts: Accounts) -> None:
    """Programs that only know client id and API key can use a token."""
    token = accounts.create_token("ada").token
    account = accounts.verify_key("ada", token)
    assert account is not None
    assert account.client_id == "ada"
    assert accounts.verify_key("kitchen", token) is None


def test_account_without_a_credential(accounts: Accounts) -> None:
    """It is the one of a key: without token, with the client's own limits."""
    assert accounts.account_of("kitchen") == KITCHEN
    assert accounts.account_of("missing") is None
    limits = AccessLimits(tokens_per_day=5)
    accounts.change_client("ada", limits=limits)
    account = accounts.account_of("ada")
    assert account is not None
    assert (account.client_id, account.token_id, account.limits) == ("ada", "", limits)
    assert account.scopes == {Scope.USER, Scope.OPERATOR}


def test_accounts_persist_across_reopening(accounts: Accounts, path: Path, clock: Clock) -> None:
    """Clients and tokens are there after the database is opened again."""
    token = accounts.create_token("ada").token
    accounts.close()
    again = Accounts.open(path, clock=clock)
    assert again.has_clients()
    assert again.verify_token(token) is not None
    again.close()


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be looked at" * 30, b"SQLite format 3\0" * 300]
)
def test_damaged_file_is_refused_and_kept(path: Path, clock: Clock, content: bytes) -> None:
    """The error names the file, which stays unchanged."""
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InferenceCenterError, match=re.escape(str(path))) as caught:
        Accounts.open(path, clock=clock)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    assert caught.value.hint
    assert path.read_bytes() == content


def test_file_of_a_newer_version_is_refused(accounts: Accounts, path: Path, clock: Clock) -> None:
    """A downgrade changes nothing."""
    with accounts._file.transaction() as database:
        database.execute("PRAGMA user_version = 99")
    accounts.close()
    with pytest.raises(InferenceCenterError, match="version 99") as caught:
        Accounts.open(path, clock=clock)
    assert caught.value.hint is not None
    assert "restore" in caught.value.hint
    assert "move" not in caught.value.hint


@pytest.mark.parametrize("is_replaced", [False, True])
def test_moved_or_replaced_database_authenticates_no_client(
    accounts: Accounts, path: Path, clock: Clock, *, is_replaced: bool
) -> None:
    """Revocations by other processes would be missed; a file moved back is used again."""
    accounts.ensure_client("ada", max_sessions=3, priority="normal")
    token = accounts.create_token("ada").token
    assert accounts.is_in_place
    path.rename(path.with_name("elsewhere"))
    if is_replaced:
        path.touch()
    assert not accounts.is_in_place
    with pytest.raises(InferenceCenterError) as caught:
        accounts.verify_token(token)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE
    with pytest.raises(InferenceCenterError):
        accounts.create_token("ada")
    path.with_name("elsewhere").rename(path)
    assert accounts.verify_token(token) is not None


def test_directory_that_cannot_be_created_is_named(tmp_path: Path, clock: Clock) -> None:
    """The error has the path of the database."""
    (tmp_path / "state").write_text("a file")
    with pytest.raises(InferenceCenterError, match=re.escape(str(tmp_path / "state"))) as caught:
        Accounts.open(tmp_path / "state" / "accounts.sqlite3", clock=clock)
    assert caught.value.code is ErrorCode.STORAGE_UNAVAILABLE


def test_failed_transaction_is_rolled_back(accounts: Accounts) -> None:
    """Its statements are applied together or not at all."""
    with pytest.raises(InferenceCenterError):
        _delete_and_fail(accounts)
    assert accounts.has_client("ada")


def _delete_and_fail(accounts: Accounts) -> None:
    with accounts._file.transaction() as database:
        database.execute("DELETE FROM clients")
        database.execute("SELECT * FROM nothing")
