"""Tests of the audit log: what is in it, what never is, and how far it grows."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from inferencecenter.auth import audit
from inferencecenter.auth.accounts import Accounts
from inferencecenter.auth.audit import MAX_ROWS, PRUNE_ROWS, TOGETHER_S, AuditEvent, AuditLine, audit_entry
from inferencecenter.auth.bootstrap import ensure_admin
from inferencecenter.core.errors import InferenceCenterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

DAY_S = 86_400.0
LOGIN = audit_entry(AuditEvent.LOGIN, client_id="ada", token_id="aabb", address="192.0.2.1")
OTHER = audit_entry(AuditEvent.LOGIN, client_id="ada", token_id="aabb", address="192.0.2.2")


class Clock:
    """Unix seconds that a test moves."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A clock that stands still."""
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database is."""
    return tmp_path / "accounts.sqlite3"


@pytest.fixture
def accounts(path: Path, clock: Clock) -> Iterator[Accounts]:
    """Accounts nobody is in, whose audit log goes back 30 days."""
    with closing(Accounts.open(path, clock=clock, audit_days=30)) as opened:
        yield opened


def events(accounts: Accounts) -> list[tuple[AuditEvent, str | None, str | None, str]]:
    """Return event, client, token and detail of each line."""
    return [(line.event, line.client_id, line.token_id, line.detail) for line in accounts.audit_lines(last=1000)]


def rows(path: Path) -> dict[str, int]:
    """Return how many rows each event has."""
    with closing(sqlite3.connect(path)) as database:
        return dict(database.execute("SELECT event, count(*) FROM audit GROUP BY event").fetchall())


def test_what_is_done_to_accounts_is_in_the_log(accounts: Accounts) -> None:
    """Making, changing and removing clients and making and revoking tokens each leave a line."""
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


def test_what_was_not_done_is_not_in_the_log(accounts: Accounts) -> None:
    """Revoking nothing, removing nobody, a token for nobody and a wrong scope leave no line."""
    accounts.revoke("0000")
    accounts.remove_client("eve")
    with pytest.raises(InferenceCenterError):
        accounts.create_token("eve")
    with pytest.raises(InferenceCenterError):
        accounts.ensure_client("eve", max_sessions=1, priority="normal", scopes=["root"])
    assert accounts.audit_lines(last=10) == []


def test_an_operation_and_its_line_happen_together(accounts: Accounts) -> None:
    """What cannot be put on record is not done."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal")
    token = accounts.create_token("ada")
    with accounts._file.transaction() as database:
        database.execute("ALTER TABLE audit RENAME TO elsewhere")
    with pytest.raises(InferenceCenterError, match="no such table"):
        accounts.revoke(token.token_id)
    with pytest.raises(InferenceCenterError, match="no such table"):
        accounts.create_token("ada")
    assert accounts.valid_tokens() == {token.token_id}


def test_the_first_administrator_is_in_the_log(accounts: Accounts, tmp_path: Path) -> None:
    """The line names the client and its token; later starts add none."""
    ensure_admin(accounts, tmp_path)
    ensure_admin(accounts, tmp_path)
    (token,) = accounts.list_tokens()
    (line,) = accounts.audit_lines(last=10, event=AuditEvent.FIRST_ADMIN)
    assert (line.client_id, line.token_id) == ("admin", token.token_id)


def test_secrets_of_new_tokens_are_not_in_the_log(accounts: Accounts) -> None:
    """A line has the public id alone."""
    accounts.ensure_client("ada", max_sessions=1, priority="normal")
    secret = accounts.create_token("ada").token.split("_")[2]
    assert secret not in repr(accounts.audit_lines(last=10))


def test_others_write_lines_too(accounts: Accounts, clock: Clock) -> None:
    """``audit`` writes what other parts did, at once."""
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


def test_a_line_that_cannot_be_written_is_a_warning(accounts: Accounts) -> None:
    """What was done outside the accounts is done; the log of the daemon says that no line tells of it."""
    with accounts._file.transaction() as database:
        database.execute("DROP TABLE audit")
    with capture_logs() as logs:
        accounts.audit(AuditEvent.DAEMON_STARTED)
    assert [(line["event"], line["audit_event"]) for line in logs] == [("audit_unwritten", "daemon_started")]


def test_logins_within_a_minute_are_one_line(accounts: Accounts, clock: Clock) -> None:
    """The same client, token and address count up a line, over several writes; another address has its own."""
    began_s = clock.now_s
    for _ in range(3):
        accounts.buffer_audit(LOGIN)
        accounts.buffer_audit(LOGIN)
        accounts.flush_audit()
        clock.now_s += TOGETHER_S / 3
    accounts.buffer_audit(OTHER)
    accounts.flush_audit()
    lines = accounts.audit_lines(last=10)
    assert [(line.address, line.count) for line in lines] == [("192.0.2.1", 6), ("192.0.2.2", 1)]
    assert (lines[0].at, lines[0].last_at) == (began_s, began_s + 2 * TOGETHER_S / 3)


@pytest.mark.parametrize("step_s", [TOGETHER_S + 1, -TOGETHER_S - 1])
def test_after_a_minute_a_new_line_begins(accounts: Accounts, clock: Clock, step_s: float) -> None:
    """Also when the clock was set back."""
    accounts.buffer_audit(LOGIN)
    accounts.flush_audit()
    clock.now_s += step_s
    accounts.buffer_audit(LOGIN)
    accounts.flush_audit()
    assert [line.count for line in accounts.audit_lines(last=10)] == [1, 1]


def test_an_operation_is_never_counted_onto_another(accounts: Accounts) -> None:
    """Two purges at one time are two lines."""
    for _ in range(2):
        accounts.audit(AuditEvent.SESSION_PURGED, client_id="ada")
    assert len(accounts.audit_lines(last=10)) == 2


def test_what_was_noted_is_written_at_the_end(path: Path, clock: Clock) -> None:
    """Closing leaves no login behind."""
    with closing(Accounts.open(path, clock=clock)) as accounts:
        accounts.buffer_audit(LOGIN)
    assert rows(path) == {"login": 1}


def test_a_write_that_fails_is_made_up_for(accounts: Accounts, clock: Clock) -> None:
    """Logins noted while the file could not be written are written later, with their times, each once."""
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


def test_closing_with_a_file_that_fails_is_a_warning(path: Path, clock: Clock) -> None:
    """A daemon on a full disk ends all the same."""
    accounts = Accounts.open(path, clock=clock)
    accounts.buffer_audit(LOGIN)
    with accounts._file.transaction() as database:
        database.execute("DROP TABLE audit")
    with capture_logs() as logs:
        accounts.close()
    assert [line["event"] for line in logs] == ["logins_unwritten"]


def test_another_process_reads_along(accounts: Accounts, path: Path, clock: Clock) -> None:
    """What the daemon wrote is there for the command line, and the other way round."""
    accounts.audit(AuditEvent.DAEMON_STARTED)
    with closing(Accounts.open(path, clock=clock)) as command_line:
        command_line.ensure_client("ada", max_sessions=1, priority="normal")
        assert len(command_line.audit_lines(last=10)) == 2
    assert len(accounts.audit_lines(last=10)) == 2


def test_the_last_lines_by_client_and_event(accounts: Accounts, clock: Clock) -> None:
    """Filters apply before the number, and the newest is last."""
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


def test_old_lines_are_not_shown_and_go_in_passing(accounts: Accounts, path: Path, clock: Clock) -> None:
    """A line older than the days to keep is not read any more, and the next write after an hour removes it."""
    accounts.audit(AuditEvent.DAEMON_STARTED)
    clock.now_s += 30 * DAY_S + 1
    assert accounts.audit_lines(last=10) == []
    assert rows(path) == {"daemon_started": 1}
    accounts.audit(AuditEvent.DAEMON_STOPPED)
    assert rows(path) == {"daemon_stopped": 1}


def test_without_a_limit_nothing_is_too_old(path: Path, clock: Clock) -> None:
    """A command that does not know the setting removes nothing for its age."""
    with closing(Accounts.open(path, clock=clock)) as accounts:
        accounts.audit(AuditEvent.DAEMON_STARTED)
        clock.now_s += 10_000 * DAY_S
        accounts.audit(AuditEvent.DAEMON_STOPPED)
        assert len(accounts.audit_lines(last=10)) == 2


def test_there_are_a_hundred_thousand_rows_at_most() -> None:
    """The shares of the events add up to the bound, and each is larger than what may be there for a while."""
    assert sum(MAX_ROWS.values()) == 100_000
    assert set(MAX_ROWS) == set(AuditEvent)
    assert min(MAX_ROWS.values()) > PRUNE_ROWS


def test_a_flood_drives_out_nothing_but_its_own_kind(
    accounts: Accounts, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals from ever new addresses stay within their share, the newest stay, and a revocation is still there."""
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
def test_any_text_can_be_recorded_and_shown(accounts: Accounts, text: str, event: AuditEvent) -> None:
    """What comes from outside is cut, and has nothing in it that a terminal would obey."""
    noted = audit_entry(event, client_id=text, token_id=text, address=text, detail=text)
    accounts.buffer_audit(noted)
    # One row, also where an earlier example came to the same within the minute.
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
    """Whatever the clock does and whichever writes fail, the counts add up, and lines last a minute."""
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
            if abs(STEPS[step]) > TOGETHER_S:
                accounts.flush_audit()
    with closing(accounts):
        lines = accounts.audit_lines(last=1000)
    assert sum(line.count for line in lines) == notes
    assert all(0 <= line.last_at - line.at <= TOGETHER_S + 30 for line in lines)


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


def test_lines_written_later_stand_where_they_happened(accounts: Accounts, clock: Clock) -> None:
    """A login noted before a revocation and written after it is read before it."""
    accounts.buffer_audit(LOGIN)
    clock.now_s += 0.5
    accounts.audit(AuditEvent.TOKEN_REVOKED, client_id="ada")
    assert [line.event for line in accounts.audit_lines(last=10)] == [AuditEvent.LOGIN, AuditEvent.TOKEN_REVOKED]


@pytest.mark.slow
def test_the_file_stays_small_under_a_flood(accounts: Accounts, path: Path, clock: Clock) -> None:
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
