"""Recovers sessions from a damaged file into a new one.

Rows are read directly from the pages (``sqlite_pages``), so a damaged page costs only the rows on it. The table of a
row is identified by the types of its values. Of each session the consistent part is kept: its first messages without a
gap and the turns that ended among them; its tokens only if nothing is missing, since they can be computed again. An
unfinished turn is restarted if nothing before it is missing. Shared rows are written for each session. The damaged file
is only read. Invariant: the new file has only sessions that a daemon can load, since each is loaded before it is kept.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import sqlite3
import time
from collections import defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from inferencecenter.core.sqlite_file import checkpoint, transaction
from inferencecenter.protocol.params import Params
from inferencecenter.sessions.context import SessionConfig
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.loader import SharedRows, read_one
from inferencecenter.sessions.store.rows import facts_column
from inferencecenter.sessions.store.sqlite_pages import PageFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from inferencecenter.sessions.store.sqlite_pages import StoredRow, Value

# The column with the number of shared rows of each table.
_REACHES: Final[Mapping[str, str]] = MappingProxyType(
    {"messages": "base_messages", "tokens": "base_pieces", "marks": "base_marks", "turns": "base_turns"}
)
_WHOLE: Final[Mapping[str, Value]] = MappingProxyType(
    {"base": None, "base_keys": 0, **dict.fromkeys(_REACHES.values(), 0), "archived": 0}
)
# Idempotency keys belong to the session that received them.
_NO_ANSWER: Final[Mapping[str, Value]] = MappingProxyType({"turn_key": None, "ending": None})
_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
# Settings of the full-text index (``search_index``), whose rows have the types of those that name sessions.
_SEARCH_SETTINGS: Final = frozenset({("version", 4), ("automerge", 0), ("crisismerge", 64)})


@dataclass(frozen=True, slots=True)
class _Table:
    """A table: its columns in stored order, and a pattern of the types of their values, one letter each.

    See ``_kinds``; columns that an earlier version lacks may be missing at the end.
    """

    name: str
    columns: tuple[str, ...]
    kinds: re.Pattern[str]
    has_row: bool
    defaults: tuple[Value, ...] = ()


def _table(name: str, columns: str, kinds: str, *, has_row: bool = False, defaults: tuple[Value, ...] = ()) -> _Table:
    return _Table(name, tuple(columns.split()), re.compile(kinds), has_row, defaults)


_NUMBER: Final = "[if]"
_TABLES: Final = (
    _table(
        "sessions",
        "id session_id client_id epoch seq created_at last_used_at made_by view_kept view_resumes_at facts complete"
        " base base_messages base_pieces base_marks base_turns base_keys archived n_messages n_tokens n_chars ttl_s"
        " mcp_calls",
        f"nttti{_NUMBER}{_NUMBER}tiiti?([in]i{{5}}(i{{4}}[ifn][tn]?)?)?",
        has_row=True,
        defaults=(1, None, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, None),
    ),
    _table(
        "orders",
        "session turn_id request params rank warnings submitted_at rendered_at made_by view_kept view_resumes_at model"
        " token_id note",
        f"ntttit{_NUMBER}tt[in][in]t?t?t?",
        has_row=True,
        defaults=("", "", ""),
    ),
    _table(
        "turns",
        "session n turn_id finish_reason messages prompt_tokens cached_tokens completion_tokens turn_key ending note"
        " reasoning_tokens ended_at",
        "iittiiii[tn][tn]t?i?[ifn]?",
        defaults=("", 0, None),
    ),
    _table(
        "marks",
        "session n turn_id n_before n_messages n_tokens n_chars view_kept view_resumes_at",
        "iitiiiiii",
    ),
    _table("tokens", "session n ids covered", "iibt"),
    _table("messages", "session n role content more", "iitt[tn]?", defaults=(None,)),
    _table("failures", "session seq turn_id error note", "iittt"),
    _table(
        "usage",
        "client_id token_id day turns prompt_tokens cached_tokens completion_tokens",
        "tttiiii",
    ),
    _table("presets", "client_id preset_type name body", "tttt"),
)


@dataclass(frozen=True, slots=True)
class CutSession:
    """A session of which ``messages`` were recovered and the last ``lost_messages`` were not."""

    session_id: str
    client_id: str
    messages: int
    lost_messages: int


@dataclass(frozen=True, slots=True)
class LostSession:
    """A session that was not recovered, as far as it is known; ``messages`` of it were readable."""

    session_id: str | None
    client_id: str | None
    messages: int


@dataclass(slots=True)
class SalvageReport:
    """What was recovered and what was lost.

    ``restarted`` are the sessions whose unfinished turn is restarted, ``dropped`` those whose unfinished turn is lost.
    The last messages of ``uncertain`` ones may be missing. Of those in ``reset`` only the messages were recovered; they
    have the default settings.
    """

    whole: int = 0
    cut: list[CutSession] = field(default_factory=list)
    lost: list[LostSession] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    uncertain: list[str] = field(default_factory=list)
    reset: list[str] = field(default_factory=list)
    damaged: int = 0
    """Lower bound of the pages and rows that could not be read."""
    n_saved: int = 0
    """Sessions in the new file."""


@dataclass(slots=True)
class _SalvagedRows:
    """The rows of a file: of each table by session, those of clients, and the names of both from indexes."""

    sessions: dict[int, dict[str, Value]] = field(default_factory=dict)
    of_session: dict[str, defaultdict[int, list[dict[str, Value]]]] = field(default_factory=dict)
    usage: list[tuple[Value, ...]] = field(default_factory=list)
    presets: list[tuple[Value, ...]] = field(default_factory=list)
    names: dict[int, set[str]] = field(default_factory=dict)
    incomplete: dict[int, dict[str, Value]] = field(default_factory=dict)

    def rows(self, table: str, session: int) -> list[dict[str, Value]]:
        """Return a session's rows of a table by number, including shared ones."""
        limit: float = math.inf
        first_key = _int(self._named(session).get("base_keys"))
        numbered: dict[int, dict[str, Value]] = {}
        for row, reach in self._chain(session, _REACHES.get(table)):
            limit = min(limit, reach)
            salvaged = self.of_session[table][row] if table in self.of_session else []
            for each in salvaged:
                number = _int(each.get("n", each.get("seq")))
                if number < limit:
                    others = row != session and number < first_key
                    changes = _NO_ANSWER if others and table == "turns" else {}
                    numbered.setdefault(number, {**each, "session": session, **changes})
        return [numbered[number] for number in sorted(numbered)]

    def n_shared(self, table: str, session: int) -> int:
        """Return how many rows of a table a session shares with its base."""
        return _int(self._named(session).get(_REACHES[table]))

    def is_base(self, row: int) -> bool:
        """Return whether a row is a base without a session, as far as anything of it is left."""
        if row in self.sessions:
            return False
        names = self.names.get(row, set())
        referred = any(each["base"] == row for each in (*self.sessions.values(), *self.incomplete.values()))
        return row in self.incomplete or f"b_{row}" in names or (referred and not names)

    def _chain(self, session: int, reach: str | None) -> Iterator[tuple[int, float]]:
        """Yield a session's row and its bases, each with the limit from the column ``reach``."""
        yield session, math.inf
        seen = {session}
        named = self._named(session)
        while reach is not None and (base := _int(named.get("base"))) and base not in seen:
            seen.add(base)
            yield base, _int(named[reach])
            named = self._named(base)

    def _named(self, row: int) -> dict[str, Value]:
        return self.sessions.get(row) or self.incomplete.get(row) or {}


def salvage(path: Path, target: Path) -> SalvageReport:
    """Recover the file at ``path`` and its WAL into a new file ``target``.

    Raises:
        OSError: The file cannot be read, or the new one cannot be created.
        sqlite3.Error: The new one cannot be written.
    """
    wal = path.with_name(f"{path.name}-wal")
    with _mapped(path) as content:
        pages = PageFile(content, wal.read_bytes() if wal.exists() else b"")
        salvaged = _sort_rows(pages.rows())
    report = SalvageReport(damaged=pages.n_damaged)
    with contextlib.closing(open_writing(target)) as database:
        with transaction(database):
            known = salvaged.sessions.keys() | salvaged.names.keys() | salvaged.of_session.get("messages", {}).keys()
            for row in sorted(known):
                if not salvaged.is_base(row):
                    _save(database, row, salvaged, report)
            database.executemany("INSERT OR IGNORE INTO usage VALUES (?, ?, ?, ?, ?, ?, ?)", salvaged.usage)
            database.executemany("INSERT OR IGNORE INTO presets VALUES (?, ?, ?, ?)", salvaged.presets)
            # Clients may have received more events: the file must not look cleanly closed.
            database.execute("UPDATE meta SET clean = 0")
        checkpoint(database)
    return report


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Map the content of a file into memory."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def _sort_rows(rows: Iterable[StoredRow]) -> _SalvagedRows:
    salvaged = _SalvagedRows()
    for row in rows:
        kinds = _kinds(row.values)
        table = next((each for each in _TABLES if _matches(each, row, kinds)), None)
        if table is not None:
            _add_row(salvaged, table, row)
        elif row.row is None and kinds == "ttiiii":
            client_id, *usage = row.values
            salvaged.usage.append((client_id, "", *usage))
        elif row.row is None and kinds == "ti" and row.values not in _SEARCH_SETTINGS:
            name, session = row.values
            salvaged.names.setdefault(_int(session), set()).add(str(name))
    return salvaged


def _add_row(salvaged: _SalvagedRows, table: _Table, row: StoredRow) -> None:
    n_missing = len(table.columns) - len(row.values)
    values = (*row.values, *table.defaults[len(table.defaults) - n_missing :]) if n_missing else row.values
    if table.name == "usage":
        salvaged.usage.append(values)
        return
    if table.name == "presets":
        salvaged.presets.append(values)
        return
    named = dict(zip(table.columns, values, strict=True))
    if table.name == "sessions":
        if named["complete"]:
            salvaged.sessions[_int(row.row)] = named
        else:
            salvaged.incomplete[_int(row.row)] = named
        return
    session = _int(row.row if table.has_row else named["session"])
    salvaged.of_session.setdefault(table.name, defaultdict(list))[session].append(named)


def _matches(table: _Table, row: StoredRow, kinds: str) -> bool:
    if table.has_row != (row.row is not None) or not table.kinds.fullmatch(kinds):
        return False
    return table.name != "messages" or row.values[2] in _ROLES


def _kinds(values: Sequence[Value]) -> str:
    """Return one letter per value: null, integer, float, text or blob."""
    letters = {type(None): "n", int: "i", float: "f", str: "t", bytes: "b"}
    return "".join(letters[type(value)] for value in values)


def _save(database: sqlite3.Connection, row: int, salvaged: _SalvagedRows, report: SalvageReport) -> None:
    """Write a session, complete if possible, else its consistent part."""
    messages = _unbroken(salvaged.rows("messages", row), first=0)
    stored = salvaged.sessions.get(row)
    config = stored or _rebuilt(row, salvaged)
    if config is None:
        name = next((name for name in salvaged.names.get(row, ()) if name.startswith("s_")), None)
        report.lost.append(LostSession(name, None, len(messages)))
        return
    name, client_id = _text(config["session_id"]), _text(config["client_id"])
    n_lost = max(0, _n_messages(row, salvaged) - len(messages))
    is_uncertain = not n_lost and _may_lack_messages(row, salvaged)
    for is_whole in (False,) if n_lost or is_uncertain or stored is None else (True, False):
        if _try_write(database, row, _session_rows(row, salvaged, config, messages, is_whole=is_whole)):
            break
    else:
        report.lost.append(LostSession(name, client_id, len(messages)))
        return
    report.n_saved += 1
    report.whole += not n_lost and not is_uncertain and stored is not None
    if n_lost:
        report.cut.append(CutSession(name, client_id, len(messages), n_lost))
    if is_uncertain:
        report.uncertain.append(name)
    if stored is None:
        report.reset.append(name)
    if salvaged.rows("orders", row):
        (report.restarted if is_whole else report.dropped).append(name)


def _may_lack_messages(row: int, salvaged: _SalvagedRows) -> bool:
    """Return whether there are tokens of turns without rows, whose messages may be missing too."""
    if any(len(salvaged.rows(table, row)) < salvaged.n_shared(table, row) for table in ("marks", "turns")):
        return True
    n_tokens, _ = _lengths(salvaged.rows("tokens", row))
    n_covered = [_int(mark["n_tokens"]) for mark in salvaged.rows("marks", row)]
    if any(n_covered):
        return n_tokens > max(n_covered)
    return n_tokens > 0 and not salvaged.rows("turns", row)


def _n_messages(row: int, salvaged: _SalvagedRows) -> int:
    """Return how many messages a session had, by any of its rows."""
    numbers = [salvaged.n_shared("messages", row)]
    numbers += [_int(each["n"]) + 1 for each in salvaged.rows("messages", row)]
    numbers += [_int(each["messages"]) for each in salvaged.rows("turns", row)]
    numbers += [_int(each["n_messages"]) for each in salvaged.rows("marks", row)]
    return max(numbers)


def _session_rows(
    row: int, salvaged: _SalvagedRows, session: dict[str, Value], messages: list[dict[str, Value]], *, is_whole: bool
) -> dict[str, list[dict[str, Value]]]:
    """Return the rows of a session for the new file, by table."""
    turns = salvaged.rows("turns", row)
    turns = _unbroken(turns, first=_int(turns[0]["n"])) if turns else []
    marks = _unbroken(salvaged.rows("marks", row), first=0)
    tokens = _unbroken(salvaged.rows("tokens", row), first=0)
    n_tokens, n_chars = _lengths(tokens)
    fits = all(_int(mark["n_tokens"]) <= n_tokens and _int(mark["n_chars"]) <= n_chars for mark in marks)
    n_pieces = max(len(salvaged.rows("tokens", row)), salvaged.n_shared("tokens", row))
    if not is_whole or not fits or len(tokens) < n_pieces:
        session = {**session, "made_by": ""}
        tokens = []
        marks = [{**mark, "n_tokens": 0, "n_chars": 0} for mark in marks]
    if not is_whole:
        n_kept = len(messages)
        session = {**session, "view_kept": 0, "view_resumes_at": 0}
        turns = [turn for turn in turns if _int(turn["messages"]) <= n_kept]
        marks = [{**mark, "view_kept": 0, "view_resumes_at": 0} for mark in marks if _int(mark["n_messages"]) <= n_kept]
    orders = [{**order, "session": row} for order in salvaged.rows("orders", row)[:1]] if is_whole else []
    return {
        "sessions": [{**session, **_WHOLE, "id": row}],
        "messages": messages,
        "turns": turns,
        "marks": marks,
        "tokens": tokens,
        "orders": orders,
        "failures": salvaged.rows("failures", row) if is_whole else [],
    }


def _try_write(database: sqlite3.Connection, row: int, tables: Mapping[str, list[dict[str, Value]]]) -> bool:
    """Write the rows of a session, and roll back if they are not a session that a daemon can load."""
    database.execute("SAVEPOINT session")
    try:
        for table, rows in tables.items():
            for each in rows:
                marks = ", ".join("?" * len(each))
                database.execute(f"INSERT INTO {table} ({', '.join(each)}) VALUES ({marks})", tuple(each.values()))  # noqa: S608
        read_one(database, row, {}, SharedRows(database))
    except Exception:  # noqa: BLE001 - rows of a damaged file can raise anything
        database.execute("ROLLBACK TO session")
        return False
    finally:
        database.execute("RELEASE session")
    return True


def _rebuilt(row: int, salvaged: _SalvagedRows) -> dict[str, Value] | None:
    """Return a new session row for messages of which only names in the indexes are left."""
    names = sorted(salvaged.names.get(row, ()), key=lambda name: name.startswith("s_"))
    if len(names) != 2 or not names[1].startswith("s_"):
        return None
    now = time.time()
    config = SessionConfig(
        session_id=names[1],
        epoch=f"e_salvaged_{row}",
        client_id=names[0],
        mode="chat",
        chosen_model=None,
        model="",
        n_ctx=0,
        params=Params(),
        chosen=frozenset(),
        priority="normal",
        on_full="shift",
        on_disconnect="detach",
        store=True,
        ttl_s=None,
        metadata={},
        created_at=now,
    )
    return {
        "session_id": config.session_id,
        "client_id": config.client_id,
        "epoch": config.epoch,
        "seq": 0,
        "created_at": now,
        "last_used_at": now,
        "made_by": "",
        "view_kept": 0,
        "view_resumes_at": 0,
        "facts": facts_column(config),
    }


def _unbroken(rows: list[dict[str, Value]], *, first: int) -> list[dict[str, Value]]:
    """Return the first rows whose numbers count up from ``first``."""
    kept: list[dict[str, Value]] = []
    for row in rows:
        if row["n"] != first + len(kept):
            break
        kept.append(row)
    return kept


def _lengths(tokens: list[dict[str, Value]]) -> tuple[int, int]:
    """Return the number of tokens and of characters that they cover."""
    ids = sum(len(each["ids"]) for each in tokens if isinstance(each["ids"], bytes))
    return ids // 4, sum(len(_text(each["covered"])) for each in tokens)


def _int(value: Value) -> int:
    return value if isinstance(value, int) else 0


def _text(value: Value) -> str:
    return value if isinstance(value, str) else ""
