"""Audit entries of logins, and logins while the audit log cannot be written."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.auth import authentication
from inferencecenter.auth.account import Account, StaticClient
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.auth.authentication import (
    Authenticator,
    Credential,
    KeyCredential,
    TokenCredential,
    refusal,
)
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.scopes import Scope
from inferencecenter.telemetry.metrics import DaemonMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

KITCHEN = Account(client_id="kitchen", max_sessions=2, priority="batch", scopes=frozenset({Scope.USER}))
HERE = "192.0.2.1"
SECRET = "5e" * 32


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    """Accounts with a client of each kind."""
    static = {"kitchen": StaticClient(account=KITCHEN, key_sha256=hashlib.sha256(b"key").digest())}
    with closing(Accounts.open(tmp_path / "accounts.sqlite3", clock=lambda: 1000.0, static=static)) as opened:
        opened.ensure_client("ada", max_sessions=1, priority="normal")
        yield opened


@pytest.fixture
async def authenticator(accounts: Accounts) -> AsyncIterator[Authenticator]:
    """An authenticator that allows an address two failures; its clock is stopped."""
    running = Authenticator(accounts, attempts_per_minute=2, clock=lambda: 0.0, metrics=DaemonMetrics())
    yield running
    await running.close()


def lines(accounts: Accounts) -> list[tuple[Any, ...]]:
    """Return the entries about logins."""
    return [
        (line.event.value, line.client_id, line.token_id, line.address, line.count, line.detail)
        for line in accounts.audit_lines(last=100)
        if line.event in (AuditEvent.LOGIN, AuditEvent.LOGIN_REFUSED)
    ]


def refuse(authenticator: Authenticator, credential: Credential, *, address: str = HERE) -> ErrorCode:
    """Return the error of a refused credential."""
    with pytest.raises(InferenceCenterError) as caught:
        authenticator.authenticate(credential, address=address)
    return caught.value.code


async def test_logins_are_logged(authenticator: Authenticator, accounts: Accounts) -> None:
    """A token's entry has its id, a key's has none; ten sockets of one program share an entry."""
    new = accounts.create_token("ada")
    for _ in range(10):
        authenticator.authenticate(TokenCredential(new.token), address=HERE)
    authenticator.authenticate(KeyCredential("kitchen", "key"), address="2001:db8::1")
    assert lines(accounts) == [
        ("login", "ada", new.token_id, HERE, 10, ""),
        ("login", "kitchen", None, "2001:db8::1", 1, ""),
    ]


async def test_programs_on_this_machine_get_no_scope_but_user(authenticator: Authenticator, accounts: Accounts) -> None:
    """Their account may have others, and what they do is logged as without a token."""
    accounts.ensure_client("eve", max_sessions=1, priority="normal", scopes=("user", "operator", "admin"))
    account = authenticator.admit_local("eve", address="127.0.0.1")
    assert (account.client_id, account.token_id) == ("eve", "")
    assert account.scopes == {Scope.USER}
    assert accounts.audit_lines(last=1)[0].detail == "without a token"
    with pytest.raises(InferenceCenterError) as caught:
        authenticator.admit_local("missing", address="127.0.0.1")
    assert caught.value.code is ErrorCode.NOT_AUTHENTICATED


async def test_refused_logins_are_logged(authenticator: Authenticator, accounts: Accounts) -> None:
    """The log has the address and the claimed client, known or not."""
    new = accounts.create_token("ada")
    accounts.revoke(new.token_id)
    assert refuse(authenticator, TokenCredential(new.token)) is ErrorCode.NOT_AUTHENTICATED
    assert refuse(authenticator, KeyCredential("kitchen", "guess")) is ErrorCode.NOT_AUTHENTICATED
    assert lines(accounts) == [
        ("login_refused", None, new.token_id, HERE, 1, ""),
        ("login_refused", "kitchen", None, HERE, 1, ""),
    ]


async def test_flood_from_one_network_is_one_entry(authenticator: Authenticator, accounts: Accounts) -> None:
    """Claims of a locked-out address are not checked, and its whole network shares an entry."""
    for number in range(100):
        refuse(authenticator, KeyCredential(f"claim {number}", "guess"), address=f"2001:db8::{number + 1:x}")
    assert lines(accounts) == [
        ("login_refused", "claim 0", None, "2001:db8::1", 1, ""),
        ("login_refused", "claim 1", None, "2001:db8::2", 1, ""),
        ("login_refused", None, None, "2001:db8::/64", 98, "too many attempts"),
    ]


@pytest.mark.parametrize(
    ("credential", "client_id", "token_id"),
    [
        (TokenCredential(f"ic_00112233aabb_{SECRET}"), None, "00112233aabb"),
        (TokenCredential(f"ic_{SECRET}_00112233aabb"), None, None),
        (TokenCredential(SECRET), None, None),
        (TokenCredential(""), None, None),
        (KeyCredential("kitchen", SECRET), "kitchen", None),
        (KeyCredential("ada", f"ic_00112233aabb_{SECRET}"), "ada", "00112233aabb"),
        (KeyCredential(f"ic_00112233aabb_{SECRET}", "ada"), None, None),
        (KeyCredential(SECRET, "ada"), None, None),
        (KeyCredential("sk-" + "aZ9_" * 10, "ada"), None, None),
        (KeyCredential("the key", "the key"), None, None),
        (KeyCredential("x " * 200, "key"), "x " * 32, None),
        (KeyCredential("\x1b[2J", "key"), "\ufffd[2J", None),
    ],
)
def test_entry_of_a_refused_credential(credential: Credential, client_id: str | None, token_id: str | None) -> None:
    """It has a token's id only for a well-formed token, and the claimed client unless it may be a misplaced key."""
    line = refusal(credential, address=HERE)
    assert (line.event, line.client_id, line.token_id) == (AuditEvent.LOGIN_REFUSED, client_id, token_id)


HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


NO_HEX = st.text(st.characters(exclude_characters="0123456789abcdef"), max_size=80)


@given(HEX, NO_HEX, st.sampled_from(["{0}", "ic_00112233aabb_{0}", "ic_{0}", "{1}{0}", "{0}{1}"]))
def test_no_entry_contains_a_secret(secret: str, other: str, form: str) -> None:
    """No long part of a secret is recorded, whichever field contained it."""
    text = form.format(secret, other)
    for credential in (TokenCredential(text), KeyCredential(text, other), KeyCredential(other, text)):
        shown = repr(refusal(credential, address=HERE))
        assert not any(secret[at : at + 16] in shown for at in range(48))


@given(st.text(), st.text())
def test_any_claim_can_be_recorded(client_id: str, api_key: str) -> None:
    """No text makes a refusal fail, and its entry is short."""
    line = refusal(KeyCredential(client_id, api_key), address=HERE)
    assert line.client_id is None or (len(line.client_id) <= 64 and api_key not in client_id)


class FaultyDisk:
    """Writes of the accounts, which fail or block as a test configures."""

    def __init__(self, accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.moves = threading.Event()
        self.moves.set()
        self.began = 0
        self.fault: Exception = InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, "the disk is full")
        self._write = accounts.flush_audit
        self._loop = asyncio.get_running_loop()
        self._outcomes = asyncio.Queue[str]()
        monkeypatch.setattr(accounts, "flush_audit", self.write)
        monkeypatch.setattr(authentication, "_FLUSH_AFTER_S", 0.0)
        monkeypatch.setattr(authentication, "_RETRY_AFTER_S", 0.0)

    def write(self) -> None:
        """Write, or fail like a full disk; runs on a thread."""
        self.began += 1
        self._publish("began")
        assert self.moves.wait(timeout=60)
        if self.full:
            self._publish("failed")
            raise self.fault
        self._write()
        self._publish("written")

    async def wait_for(self, wanted: str) -> None:
        """Return when the next write has begun, failed or finished."""
        async with asyncio.timeout(60):
            while await self._outcomes.get() != wanted:
                pass

    def _publish(self, outcome: str) -> None:
        self._loop.call_soon_threadsafe(self._outcomes.put_nowait, outcome)


@pytest.fixture
async def disk(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """A working disk without a write delay."""
    return FaultyDisk(accounts, monkeypatch)


async def test_logins_are_written_promptly_in_batches(
    authenticator: Authenticator, accounts: Accounts, disk: FaultyDisk
) -> None:
    """Any number of logins is one transaction; then nothing runs until the next login."""
    token = TokenCredential(accounts.create_token("ada").token)
    for written in (1, 2):
        for _ in range(50):
            authenticator.authenticate(token, address=HERE)
        await disk.wait_for("written")
        await asyncio.sleep(0)
        assert disk.began == written


@pytest.mark.parametrize(
    "fault", [InferenceCenterError(ErrorCode.STORAGE_UNAVAILABLE, "the disk is full"), ValueError("a defect")]
)
async def test_login_succeeds_while_the_audit_log_fails(
    authenticator: Authenticator, accounts: Accounts, disk: FaultyDisk, fault: Exception
) -> None:
    """One warning is logged, and entries are written once the fault has passed."""
    disk.full, disk.fault = True, fault
    new = accounts.create_token("ada")
    with capture_logs() as logs:
        for _ in range(3):
            authenticator.authenticate(TokenCredential(new.token), address=HERE)
            await disk.wait_for("failed")
        disk.full = False
        await disk.wait_for("written")
    assert [(line["event"], line["log_level"]) for line in logs] == [("logins_unwritten", "warning")]
    assert lines(accounts) == [("login", "ada", new.token_id, HERE, 3, "")]


async def test_slow_disk_uses_one_thread(authenticator: Authenticator, accounts: Accounts, disk: FaultyDisk) -> None:
    """No second write begins meanwhile, logins do not wait, and newer entries are written next."""
    disk.moves.clear()
    new = accounts.create_token("ada")
    authenticator.authenticate(TokenCredential(new.token), address=HERE)
    await disk.wait_for("began")
    for _ in range(20):
        authenticator.authenticate(TokenCredential(new.token), address=HERE)
        await asyncio.sleep(0)
    assert disk.began == 1
    disk.moves.set()
    await disk.wait_for("written")
    await disk.wait_for("written")
    assert disk.began == 2
    assert lines(accounts) == [("login", "ada", new.token_id, HERE, 21, "")]
