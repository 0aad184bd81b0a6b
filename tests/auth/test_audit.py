"""The audit log: its entries, what they must not contain, and its growth."""

from __future__ import annotations

import random
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.auth import audit
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.audit import MAX_ROWS, MERGE_S, PRUNE_ROWS, AuditEvent, AuditLine, AuditLog, audit_entry
from inferencecenter.auth.bootstrap import ensure_admin
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any

DAY_S = 86_400.0
LOGIN = audit_entry(AuditEvent.LOGIN, client_id="ada", token_id="aabb", address="192.0.2.1")
OTHER = audit_entry(AuditEvent.LOGIN, client_id="ada", token_id="aabb", address="192.0.2.2")


class Clock:
    """Unix seconds that a test advances."""

    now_s = 1_000_000.0

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
    return tmp_path / "accounts.sqlite3"


@pytest.fixture
def accounts(path: Path, clock: Clock) -> Iterator[Accounts]:
    """Empty accounts that keep audit entries for 30 days."""
    with closing(Accounts.open(path, clock=clock, audit_days=30)) as opened:
        yield opened


def events(accounts: Accounts) -> list[tuple[AuditEvent, str | None, str | None, str]]:
    """Return event, client, token and detail of each entry."""
    return [(line.event, line.client_id, line.token_id, line.detail) for line in accounts.audit_lines(last=1000)]


def rows(path: Path) -> dict[str, int]:
    """Return the number of rows of each event."""
    with closing(sqlite3.connect(path)) as database:
        return dict(database.execute("SELECT event, count(*) FROM audit GROUP BY event").fetchall())


def test_account_changes_are_logged(accounts: Accounts) -> None:
    """Creating, changing and removing clients and creating and revoking tokens add an entry each."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal", scopes=["user", "operator"])
    accounts.ensure_client("ada", max_sessions=2, priority="normal")
    token_id = accounts.create_token("ada", name="phone").token_id
    accounts.revoke(token_id)
    accounts.remove_client("ada")
    assert events(accounts) == [
        (AuditEvent.CLIENT_CREATED, "ada", None, "scopes operator user"),
        (AuditEvent.CLIENT_CHANGED, "ada", None, "scopes user"),
        (AuditEvent.TOKEN_CREATED, "ada", token_id, "phone"),
        (AuditEvent.TOKEN_REVOKED, "ada", token_id, "phone"),
        (AuditEvent.CLIENT_REMOVED, "ada", None, ""),
    ]


def test_failed_changes_are_not_logged(accounts: Accounts) -> None:
    """Unknown tokens, unknown clients and an invalid scope add no entry."""
    accounts.revoke("0000")
    accounts.remove_client("eve")
    with pytest.raises(InferenceCenterError):
        accounts.create_token("eve")
    with pytest.raises(InferenceCenterError):
        accounts.ensure_client("eve", max_sessions=1, priority="normal", scopes=["root"])
    assert accounts.audit_lines(last=10) == []


def test_change_and_entry_are_one_transaction(accounts: Accounts) -> None:
    """A change that cannot be logged is not made."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal")
    token = accounts.create_token("ada")
    with accounts._file.transaction() as database:
        database.execute("ALTER TABLE audit RENAME TO elsewhere")
    with pytest.raises(InferenceCenterError, match="no such table"):
        accounts.revoke(token.token_id)
    with pytest.raises(InferenceCenterError, match="no such table"):
        accounts.create_token("ada")
    assert accounts.valid_tokens() == {token.token_id}


def test_bootstrap_is_logged(accounts: Accounts, tmp_path: Path) -> None:
    """The entry names the administrator and its token; later starts add none."""
    ensure_admin(accounts, tmp_path)
    ensure_admin(accounts, tmp_path)
    (token,) = accounts.list_tokens()
    (line,) = accounts.audit_lines(last=10, event=AuditEvent.FIRST_ADMIN)
    assert (line.client_id, line.token_id) == ("admin", token.token_id)


def test_entries_have_no_token_secret(accounts: Accounts) -> None:
    """They contain the public id."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal")
    secret = accounts.create_token("ada").token.split("_")[2]
    assert secret not in repr(accounts.audit_lines(last=10))


def test_other_components_write_entries(accounts: Accounts, clock: Clock) -> None:
    """``audit`` writes at once."""
    accounts.audit(AuditEvent.SESSION_PURGED, client_id="ada", detail="session s1")
    assert accounts.audit_lines(last=1) == [
        AuditLine(
            at=clock.now_s,
            last_at=clock.now_s,
            count=1,
            event=AuditEvent.SESSION_PURGED,
            client_id="ada",
            token_id=None,
            address=None,
            detail="session s1",
        )
    ]


def test_failed_audit_write_is_a_warning(accounts: Accounts) -> None:
    """The operation outside the accounts is done, and the daemon's log reports the missing entry."""
    with accounts._file.transaction() as database:
        database.execute("DROP TABLE audit")
    with capture_logs() as logs:
        accounts.audit(AuditEvent.DAEMON_STARTED)
    assert [(line["event"], line["audit_event"]) for line in logs] == [("audit_unwritten", "daemon_started")]


def test_logins_within_a_minute_share_an_entry(accounts: Accounts, clock: Clock) -> None:
    """The same client, token and address increment a count over several writes; another address has its own."""
    began_s = clock.now_s
    for _ in range(3):
        accounts.buffer_audit(LOGIN)
        accounts.buffer_audit(LOGIN)
        accounts.flush_audit()
        clock.now_s += MERGE_S / 3
    accounts.buffer_audit(OTHER)
    accounts.flush_audit()
    lines = accounts.audit_lines(last=10)
    assert [(line.address, line.count) for line in lines] == [("192.0.2.1", 6), ("192.0.2.2", 1)]
    assert (lines[0].at, lines[0].last_at) == (began_s, began_s + 2 * MERGE_S / 3)


@pytest.mark.parametrize("step_s", [MERGE_S + 1, -MERGE_S - 1])
def test_new_entry_begins_after_a_minute(accounts: Accounts, clock: Clock, step_s: float) -> None:
    """The same holds if the clock was set back."""
    accounts.buffer_audit(LOGIN)
    accounts.flush_audit()
    clock.now_s += step_s
    accounts.buffer_audit(LOGIN)
    accounts.flush_audit()
    assert [line.count for line in accounts.audit_lines(last=10)] == [1, 1]


def test_operations_are_not_merged(accounts: Accounts) -> None:
    """Two purges at one time are two entries."""
    for _ in range(2):
        accounts.audit(AuditEvent.SESSION_PURGED, client_id="ada")
    assert len(accounts.audit_lines(last=10)) == 2


def test_closing_writes_buffered_entries(path: Path, clock: Clock) -> None:
    """No buffered login is lost."""
    with closing(Accounts.open(path, clock=clock)) as accounts:
        accounts.buffer_audit(LOGIN)
    assert rows(path) == {"login": 1}


def test_failed_write_is_retried(accounts: Accounts, clock: Clock) -> None:
    """Logins during the failure are written later once each, with their times."""
    accounts.buffer_audit(LOGIN)
    with accounts._file.transaction() as database:
        database.execute("ALTER TABLE audit RENAME TO elsewhere")
    with pytest.raises(InferenceCenterError, match="no such table"):
        accounts.flush_audit()
    with accounts._file.transaction() as database:
        database.execute("ALTER TABLE elsewhere RENAME TO audit")
    began_s = clock.now_s
    clock.now_s += 5
    accounts.buffer_audit(LOGIN)
    (line,) = accounts.audit_lines(last=10)
    assert (line.at, line.last_at, line.count) == (began_s, began_s + 5, 2)


def test_close_with_a_failing_file_is_a_warning(path: Path, clock: Clock) -> None:
    """A daemon on a full disk still stops."""
    accounts = Accounts.open(path, clock=clock)
    accounts.buffer_audit(LOGIN)
    with accounts._file.transaction() as database:
        database.execute("DROP TABLE audit")
    with capture_logs() as logs:
        accounts.close()
    assert [line["event"] for line in logs] == ["logins_unwritten"]


def test_other_processes_read_and_write_entries(accounts: Accounts, path: Path, clock: Clock) -> None:
    """The daemon's entries are visible to the command line and vice versa."""
    accounts.audit(AuditEvent.DAEMON_STARTED)
    with closing(Accounts.open(path, clock=clock)) as command_line:
        command_line.ensure_client("ada", max_sessions=1, priority="normal")
        assert len(command_line.audit_lines(last=10)) == 2
    assert len(accounts.audit_lines(last=10)) == 2


def test_reader_sees_entries_that_another_thread_writes(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The periodic write may have drained the buffer, but not committed yet."""
    drained, released = threading.Event(), threading.Event()
    write_tallies = AuditLog.write_tallies

    def write_slowly(*arguments: Any, **options: Any) -> None:
        drained.set()
        released.wait()
        write_tallies(*arguments, **options)

    monkeypatch.setattr(AuditLog, "write_tallies", write_slowly)
    accounts.buffer_audit(LOGIN)
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(accounts.flush_audit)
        drained.wait()
        reading = threads.submit(events, accounts)
        wait([reading], timeout=0.3)  # without the lock it ends here, and sees nothing
        released.set()
        writing.result()
        assert reading.result() == [(AuditEvent.LOGIN, "ada", "aabb", "")]


def test_last_entries_are_filtered_by_client_and_event(accounts: Accounts, clock: Clock) -> None:
    """Filters apply before the limit, and the newest is last."""
    for number, client_id in enumerate(["ada", "bob", "ada", "ada"]):
        clock.now_s += 1
        accounts.audit(AuditEvent.SESSION_PURGED, client_id=client_id, detail=str(number))
    accounts.audit(AuditEvent.DAEMON_STOPPED)

    def details(last: int, **filters: str) -> list[str]:
        event = AuditEvent.SESSION_PURGED if "event" in filters else None
        return [line.detail for line in accounts.audit_lines(last=last, client_id=filters.get("client"), event=event)]

    assert details(2, client="ada") == ["2", "3"]
    assert details(9, client="bob", event="purged") == ["1"]
    assert details(1) == [""]
    assert details(3, event="purged") == ["1", "2", "3"]
    assert details(9, client="' OR 1 --") == []


def test_expired_entries_are_hidden_and_pruned(accounts: Accounts, path: Path, clock: Clock) -> None:
    """They are not read any more, and the next write after an hour deletes them."""
    accounts.audit(AuditEvent.DAEMON_STARTED)
    clock.now_s += 30 * DAY_S + 1
    assert accounts.audit_lines(last=10) == []
    assert rows(path) == {"daemon_started": 1}
    accounts.audit(AuditEvent.DAEMON_STOPPED)
    assert rows(path) == {"daemon_stopped": 1}


def test_without_audit_days_entries_do_not_expire(path: Path, clock: Clock) -> None:
    """A command that does not know the setting deletes nothing by age."""
    with closing(Accounts.open(path, clock=clock)) as accounts:
        accounts.audit(AuditEvent.DAEMON_STARTED)
        clock.now_s += 10_000 * DAY_S
        accounts.audit(AuditEvent.DAEMON_STOPPED)
        assert len(accounts.audit_lines(last=10)) == 2


def test_total_rows_are_bounded() -> None:
    """Each event has its share, which exceeds its write batch; logins have more, and keep it as events are added."""
    assert sum(MAX_ROWS.values()) == 2 * 20_000 + 4_000 * (len(AuditEvent) - 2)
    assert set(MAX_ROWS) == set(AuditEvent)
    assert min(MAX_ROWS.values()) > PRUNE_ROWS


def test_flood_evicts_only_entries_of_its_event(
    accounts: Accounts, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals stay within their share, the newest are kept, and a revocation is still there."""
    monkeypatch.setattr(audit, "MAX_ROWS", dict.fromkeys(AuditEvent, 1_500))
    accounts.audit(AuditEvent.TOKEN_REVOKED, client_id="ada")
    for number in range(5_000):
        clock.now_s += 0.001
        accounts.buffer_audit(audit_entry(AuditEvent.LOGIN_REFUSED, address=f"address {number}"))
        if number % 300 == 299:
            accounts.flush_audit()
            assert rows(path)["login_refused"] <= 1_500
    accounts.flush_audit()
    assert rows(path)["token_revoked"] == 1
    assert 500 <= rows(path)["login_refused"] <= 1_500
    lines = accounts.audit_lines(last=10_000, event=AuditEvent.LOGIN_REFUSED)
    assert [line.address for line in lines[-2:]] == ["address 4998", "address 4999"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters() | st.sampled_from(["\x1b", "\n", "\udc80", "\u202e"]), max_size=400),
    event=st.sampled_from(AuditEvent),
)
def test_untrusted_text_is_recorded_safely(accounts: Accounts, text: str, event: AuditEvent) -> None:
    """It is truncated and has no terminal control characters."""
    noted = audit_entry(event, client_id=text, token_id=text, address=text, detail=text)
    accounts.buffer_audit(noted)
    # One row, also if an earlier example produced the same entry within the minute.
    (line,) = [line for line in accounts.audit_lines(last=1000, event=event) if line.detail == noted.detail]
    shown = [line.client_id, line.token_id, line.address, line.detail]
    assert len(set(shown)) == 1
    assert line.detail.isprintable()
    assert len(line.detail) == min(len(text), 256)
    if text.isprintable():
        assert line.detail == text[:256]


STEPS: Mapping[str, float] = {"second": 1.0, "minute": 61.0, "back": -3600.0}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([LOGIN, OTHER, *STEPS, "write", "fail", "another process"]), max_size=30))
def test_every_login_is_counted_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[audit.AuditEntry | str]
) -> None:
    """With any clock and any failed writes the counts add up, and an entry covers at most a minute."""
    clock, notes = Clock(), 0
    path = tmp_path_factory.mktemp("audit") / "accounts.sqlite3"
    accounts = Accounts.open(path, clock=clock)
    for step in steps:
        if isinstance(step, audit.AuditEntry):
            accounts.buffer_audit(step)
            notes += 1
        elif step == "write":
            accounts.flush_audit()
        elif step == "fail":
            _fail_to_write(accounts)
        elif step == "another process":
            accounts.close()
            accounts = Accounts.open(path, clock=clock)
        else:
            clock.now_s += STEPS[step]
            if abs(STEPS[step]) > MERGE_S:
                accounts.flush_audit()
    with closing(accounts):
        lines = accounts.audit_lines(last=1000)
    assert sum(line.count for line in lines) == notes
    assert all(0 <= line.last_at - line.at <= MERGE_S + 30 for line in lines)


def _fail_to_write(accounts: Accounts) -> None:
    with accounts._file.transaction() as database:
        database.execute("ALTER TABLE audit RENAME TO elsewhere")
    try:
        accounts.flush_audit()
    except InferenceCenterError:
        pass
    finally:
        with accounts._file.transaction() as database:
            database.execute("ALTER TABLE elsewhere RENAME TO audit")


def test_entries_are_read_in_order_of_time(accounts: Accounts, clock: Clock) -> None:
    """A login buffered before a revocation and written after it is read before it."""
    accounts.buffer_audit(LOGIN)
    clock.now_s += 0.5
    accounts.audit(AuditEvent.TOKEN_REVOKED, client_id="ada")
    assert [line.event for line in accounts.audit_lines(last=10)] == [AuditEvent.LOGIN, AuditEvent.TOKEN_REVOKED]


@pytest.mark.slow
def test_file_size_is_bounded_under_a_flood(accounts: Accounts, path: Path, clock: Clock) -> None:
    """A hundred thousand refusals with the longest claims leave a file of a few dozen MB."""
    letters = random.Random(5)
    for number in range(100_000):
        clock.now_s += 0.001
        claim = "".join(letters.choices("abcdefghij", k=64))
        accounts.buffer_audit(audit_entry(AuditEvent.LOGIN_REFUSED, client_id=claim, address=f"2001:db8::{number:x}"))
        if number % 2_000 == 0:
            accounts.flush_audit()
    accounts.flush_audit()
    assert rows(path)["login_refused"] <= MAX_ROWS[AuditEvent.LOGIN_REFUSED]
    assert path.stat().st_size < 30e6
