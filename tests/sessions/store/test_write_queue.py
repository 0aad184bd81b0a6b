"""Batches from the queues of all clients, and records that are written in chunks."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.sessions.journal import SessionDeleted, SessionOpened, TokensAppended
from inferencecenter.sessions.store.archive import Archive
from inferencecenter.sessions.store.database import open_writing
from inferencecenter.sessions.store.recorder import CHUNK_BYTES, OpenedChunk, Recorder
from inferencecenter.sessions.store.store import BATCH_BYTES, SHARE_BYTES, QueuedEntry, WriteQueue, chunks_of, size_of
from tests.sessions.store.stores import kept_in, storing, until
from tests.sessions.store.values import make_history, make_turn, opened, said, said_by

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.store.recorder import Entry

MIB = 1024 * 1024


def long_history(n_bytes: int, *, n_messages: int = 40) -> History:
    """A history of so many bytes in equal messages."""
    messages = tuple(said_by("user", chr(65 + n % 26) * (n_bytes // n_messages)) for n in range(n_messages))
    return replace(make_history("Hello"), messages=messages)


def fork_of(n_bytes: int, session_id: str = "s_1", **changes: Any) -> SessionOpened:
    """A new session with a long history and long notes."""
    turns = tuple(make_turn(f"t_{n}") for n in range(4))
    record = opened(session_id, history=long_history(n_bytes), **changes)
    return replace(record, turns=turns, notes={"t_1": "n" * (n_bytes // 4), "t_2": "m" * (n_bytes // 4)})


class TurnLog:
    """The written entries and executed callbacks of each client, and the expected ones."""

    def __init__(self) -> None:
        self.lanes = WriteQueue()
        self.given: dict[str, list[str]] = {client: [] for client in "abc"}
        self.written: dict[str, list[str]] = {client: [] for client in "abc"}

    def write(self, client: str, n_bytes: int) -> None:
        """Queue an entry, named after its client and position."""
        name = f"{client}-{len(self.given[client])}"
        self.given[client].append(name)
        entry = said("x" * n_bytes, name) if n_bytes < CHUNK_BYTES else fork_of(n_bytes, name)
        self.lanes.add(client, QueuedEntry(entry, durable=False))

    def tell(self, client: str) -> None:
        """Queue a callback that checks that all entries before it are written."""
        n_before = len(self.given[client])
        self.lanes.add(client, lambda: self._check(client, n_before))

    def take(self) -> None:
        """Write the next batch."""
        batch = self.lanes.take()
        weights = [size_of(entry) for entry in batch.entries]
        assert sum(weights[:-1]) <= BATCH_BYTES
        for entry in batch.entries:
            if isinstance(entry, TokensAppended):
                self.written[entry.session_id[0]].append(entry.session_id)
            elif isinstance(entry, OpenedChunk) and entry.is_last:
                name = entry.record.config.session_id
                self.written[name[0]].append(name)
        for _, tell in batch.callbacks:
            tell()
        self.lanes.done(batch)

    def _check(self, client: str, n_before: int) -> None:
        assert len(self.written[client]) >= n_before


_SIZES = st.sampled_from([0, 10, SHARE_BYTES, 3 * CHUNK_BYTES, 2 * BATCH_BYTES])


@given(items=st.lists(st.tuples(st.sampled_from("abc"), st.none() | _SIZES), max_size=25), take_every=st.integers(1, 5))
def test_each_client_keeps_its_order_in_bounded_transactions(
    items: list[tuple[str, int | None]], take_every: int
) -> None:
    """Every entry is written once and in its client's order; callbacks follow their entries."""
    turn_log = TurnLog()
    for n, (client, n_bytes) in enumerate(items):
        if n_bytes is None:
            turn_log.tell(client)
        else:
            turn_log.write(client, n_bytes)
        if n % take_every == 0:
            turn_log.take()
    while turn_log.lanes:
        turn_log.take()
    assert turn_log.written == turn_log.given
    assert [turn_log.lanes.n_pending(client) for client in "abc"] == [0, 0, 0]


def test_small_entry_is_not_delayed_by_other_clients() -> None:
    """Ten sessions of 16 MiB are queued before it, and it waits for none of them."""
    turn_log = TurnLog()
    for _ in range(10):
        turn_log.write("a", 16 * MIB)
    turn_log.take()
    for n in range(5):
        turn_log.write("b", 10)
        turn_log.take()
        assert len(turn_log.written["b"]) == n + 1
    assert turn_log.written["a"] == []


async def test_one_clients_forks_do_not_hold_back_other_clients_output(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client's output waits for the running transaction and its own only."""
    commits: list[int] = []
    commit = Recorder.commit

    def counted(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
        commit(self, entries, durable=durable)
        commits.append(len(entries))

    monkeypatch.setattr(Recorder, "commit", counted)
    async with storing(path) as store:
        ada, bob = store.of_client("ada"), store.of_client("bob")
        bob.write(opened("s_bob", client_id="bob"), flush=True)
        told: list[str] = []
        for n in range(4):
            ada.write(fork_of(4 * MIB, f"s_{n}"), flush=True)
        ada.release(lambda: told.append("ada"))
        await until(lambda: bool(commits))
        for n in range(5):
            before = len(commits)
            bob.write(said("x", "s_bob", seq=n + 2), flush=False)
            bob.release(lambda: told.append("bob"))
            await until(lambda n=n: len(told) == n + 1)  # type: ignore[misc]
            assert len(commits) - before <= 3
        assert told == ["bob"] * 5
        await until(lambda: "ada" in told)
    kept = await kept_in(path)
    assert set(kept) == {"s_bob", "s_0", "s_1", "s_2", "s_3"}


@pytest.fixture
def recorder(path: Path) -> Recorder:
    """The recorder of a new file."""
    return Recorder(open_writing(path), {})


def _sessions(path: Path) -> list[str]:
    with Archive.open(path) as archive:
        return [line.session_id for line in archive.sessions()]


async def test_split_session_appears_with_its_last_part(path: Path, recorder: Recorder) -> None:
    """It is invisible until the last chunk, then equals a session written by one record."""
    record = fork_of(2 * MIB)
    parts = list(chunks_of(record))
    assert len(parts) > 2 * MIB // CHUNK_BYTES
    for part in parts:
        assert _sessions(path) == []
        recorder.commit([part], durable=False)
    kept = (await kept_in(path))["s_1"]
    assert (kept.history, kept.turns, kept.notes) == (record.history, record.turns, record.notes)


@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
async def test_incomplete_split_session_is_deleted_at_start(path: Path, recorder: Recorder, *, begins: bool) -> None:
    """After a kill at any chunk, nothing of the unacknowledged session stays."""
    record = fork_of(2 * MIB)
    other = opened("s_2")
    if begins:
        recorder.commit([other], durable=False)
        for part in list(chunks_of(record))[:-1]:
            recorder.commit([part], durable=False)
            assert _sessions(path) == ["s_2"]
    else:
        recorder.commit([other, record], durable=False)
        recorder.commit([SessionDeleted(session_id="s_1")], durable=False)
        for _ in range(4):
            assert recorder.unswept == {"ada"}
            assert _sessions(path) == ["s_2"]
            recorder.commit([], durable=False)
    assert set(await kept_in(path)) == {"s_2"}
    with closing(sqlite3.connect(path)) as database:
        for table in ("messages", "tokens", "turns"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table


async def test_long_session_is_deleted_in_parts_before_the_reply(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients wait for one step of the deletion, not for all of them."""
    n_left: list[int] = []
    commit = Recorder.commit

    def counted(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
        commit(self, entries, durable=durable)
        with closing(sqlite3.connect(path)) as database:
            n_left.extend(database.execute("SELECT count(*) FROM messages").fetchone())

    async with storing(path) as store:
        ada, bob = store.of_client("ada"), store.of_client("bob")
        bob.write(opened("s_bob", client_id="bob"), flush=True)
        ada.write(fork_of(4 * MIB), flush=True)
        told: list[str] = []
        ada.release(lambda: told.append("ada"))
        await until(lambda: bool(told))
        monkeypatch.setattr(Recorder, "commit", counted)
        ada.write(SessionDeleted(session_id="s_1", n_chars=4 * MIB), flush=True)
        ada.release(lambda: told.append(f"gone, {n_left[-1]} left"))
        ada.write(opened("s_2"), flush=True)
        ada.release(lambda: told.append("next"))
        await until(lambda: bool(n_left))
        bob.write(said("x", "s_bob"), flush=False)
        bob.release(lambda: told.append("bob"))
        await until(lambda: len(told) == 4)
    assert told == ["ada", "bob", "gone, 0 left", "next"]
    assert len(n_left) > 2 * MIB // CHUNK_BYTES
    assert max(before - after for before, after in itertools.pairwise(n_left)) <= 3
    assert set(await kept_in(path)) == {"s_bob", "s_2"}


async def test_close_completes_deletions(path: Path) -> None:
    """The client's callbacks run first, in order."""
    async with storing(path) as store:
        ada = store.of_client("ada")
        ada.write(fork_of(4 * MIB), flush=True)
        told: list[str] = []
        ada.write(SessionDeleted(session_id="s_1", n_chars=4 * MIB), flush=True)
        ada.release(lambda: told.append("gone"))
        ada.release(lambda: told.append("next"))
    assert told == ["gone", "next"]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM messages").fetchone() == (0,)
        assert database.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
