"""The durable journal: when callbacks run, and what happens while the file cannot be written."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.sessions.journal import RETRY_LATER_MS, SessionDeleted, StorageFault
from inferencecenter.sessions.store.recorder import Recorder
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.store.stores import (
    RETRY_S,
    kept_in,
    locked,
    move,
    put_empty,
    reading,
    settled,
    storing,
    until,
    was_clean,
)
from tests.sessions.store.values import ended, make_history, opened, ordered, said

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from inferencecenter.sessions.store.recorder import Entry


async def test_release_follows_the_commit(path: Path) -> None:
    """When a callback runs, another connection can already read the record."""
    found: list[int] = []

    def look() -> None:
        with closing(sqlite3.connect(path)) as other:
            found.append(other.execute("SELECT count(*) FROM said").fetchone()[0])

    async with storing(path) as store:
        for record in (opened(), ordered(), said("a"), said("b")):
            store.write(record, flush=False)
        store.release(look)
        assert found == []
        await until(lambda: bool(found))
        store.write(said("c"), flush=False)
        store.release(look)
        await until(lambda: len(found) > 1)
    assert found == [2, 3]


async def test_release_without_writes_is_immediate(path: Path) -> None:
    """A callback runs at once at the start, and after everything is committed."""
    async with storing(path) as store:
        told: list[str] = []
        store.release(lambda: told.append("first"))
        assert told == ["first"]
        store.write(opened(), flush=True)
        await settled(store)
        await asyncio.sleep(0)
        store.release(lambda: told.append("second"))
        assert told == ["first", "second"]


async def test_callbacks_run_in_order(path: Path) -> None:
    """Callbacks run in order, including those without own records and those queued by callbacks."""
    async with storing(path) as store:
        told: list[int] = []

        def tell_again() -> None:
            told.append(1)
            store.release(lambda: told.append(3))

        store.write(opened(), flush=True)
        store.release(lambda: told.append(0))
        await asyncio.sleep(0)
        store.release(tell_again)
        store.write(ordered(), flush=True)
        store.release(lambda: told.append(2))
        await until(lambda: len(told) == 4)
        assert told == [0, 1, 2, 3]


async def test_one_turn_of_the_loop_is_one_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one record is flushed, all are; plain output is not."""
    commits: list[tuple[int, bool]] = []
    commit = Recorder.commit

    def observed(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
        commits.append((len(entries), durable))
        commit(self, entries, durable=durable)

    monkeypatch.setattr(Recorder, "commit", observed)
    async with storing(path) as store:
        store.write(opened(), flush=True)
        store.write(opened("s_2"), flush=False)
        await settled(store)
        for word in ("a", "b", "c"):
            store.write(said(word), flush=False)
        await settled(store)
    assert commits == [(2, True), (3, False)]


async def test_entries_during_a_commit_share_a_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slow disk, records are batched."""
    sizes: list[int] = []
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)
        commit = Recorder.commit

        def observed(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
            commit(self, entries, durable=durable)
            sizes.append(len(entries))

        monkeypatch.setattr(Recorder, "commit", observed)
        with locked(path):
            store.write(said("a"), flush=False)
            await until(lambda: store.fault is not None)
            for word in ("b", "c", "d"):
                store.write(said(word), flush=False)
                await asyncio.sleep(0)
        await settled(store)
    assert sizes == [1, 3]


async def test_failing_callback_does_not_block_the_others(path: Path) -> None:
    """A failing callback is logged, and the others run."""
    async with storing(path) as store:
        store.write(opened(), flush=True)
        with capture_logs() as logs:
            store.release([].pop)
            await settled(store)
        assert [line["event"] for line in logs] == ["release_failed"]


async def test_locked_file_delays_callbacks(path: Path) -> None:
    """The fault is reported and logged once; when the lock ends everything is written in order."""
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)
        assert store.fault is None
        told: list[str] = []
        with capture_logs() as logs:
            with locked(path):
                for word in ("a", "b", "c"):
                    store.write(said(word), flush=False)
                    store.release(lambda word=word: told.append(word))  # type: ignore[misc]
                    await until(lambda: store.fault is not None)
                assert store.fault == StorageFault("sessions.sqlite3 cannot be written: another program holds it")
                assert told == []
            await settled(store)
        assert told == ["a", "b", "c"]
        assert store.fault is None
        assert [line["event"] for line in logs] == ["store_fault", "store_mended"]


def _fill_up(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def test_full_disk_loses_no_records(small_disk: Callable[[int], Path]) -> None:
    """Records wait until there is room, and earlier ones can be read."""
    directory = small_disk(4096)
    path = directory / "sessions.sqlite3"
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)
        ballast = directory / "ballast"
        with pytest.raises(OSError, match="No space left"):
            _fill_up(ballast)
        told: list[int] = []
        store.write(ended(text="x" * 100_000), flush=True)
        store.release(lambda: told.append(1))
        await until(lambda: store.fault is not None)
        assert store.fault == StorageFault("sessions.sqlite3 cannot be written: the disk is full")
        store.write(opened("s_2"), flush=True)
        store.release(lambda: told.append(2))
        ballast.unlink()
        await until(lambda: len(told) == 2)
        assert told == [1, 2]
        assert store.fault is None
    kept = await kept_in(path)
    assert kept["s_1"].history == make_history("x" * 100_000)
    assert set(kept) == {"s_1", "s_2"}


async def test_checkpoint_frees_a_disk_filled_by_the_log(small_disk: Callable[[int], Path]) -> None:
    """The WAL grows while another process reads, and shrinks by itself afterwards."""
    path = small_disk(3072) / "sessions.sqlite3"
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)
        told: list[int] = []
        n_written = 0
        with reading(path):
            while store.fault is None:
                await until(lambda: store.fault is not None or store.n_pending < 100)
                store.write(opened("s_2", history=make_history("x" * 3000)), flush=False)
                store.write(SessionDeleted(session_id="s_2"), flush=False)
                store.release(lambda: told.append(1))
                n_written += 1
            assert store.fault.message == "sessions.sqlite3 cannot be written: the disk is full"
        await until(lambda: len(told) == n_written)
        assert store.fault is None
    assert set(await kept_in(path)) == {"s_1"}


async def test_write_ahead_log_does_not_fill_a_small_disk(small_disk: Callable[[int], Path]) -> None:
    """Any amount can be written if the live data fits."""
    path = small_disk(3072) / "sessions.sqlite3"
    async with storing(path) as store:
        for _ in range(60):
            store.write(opened("s_2", history=make_history("x" * 3000)), flush=False)
            await settled(store)
            store.write(SessionDeleted(session_id="s_2"), flush=False)
            await settled(store)
            assert store.fault is None


async def test_unwritable_record_affects_no_other(path: Path) -> None:
    """The defect is logged with the record, and callbacks run."""
    async with storing(path) as store:
        with capture_logs() as logs:
            for record in (opened(), ordered(), said("a"), said("b", "s_unknown"), said("c")):
                store.write(record, flush=False)
            await settled(store)
        assert [(line["event"], line["record"], line["session"]) for line in logs] == [
            ("record_unwritable", "TokensAppended", "s_unknown")
        ]
        assert (store.n_skipped, store.is_incomplete("s_unknown"), store.is_incomplete("s_1")) == (1, True, False)
        assert store.fault is None
    pending_turn = (await kept_in(path))["s_1"].pending_turn
    assert pending_turn is not None
    assert pending_turn.text == "ac"


async def test_writer_error_is_a_fault_until_a_retry_succeeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread continues to retry, and callbacks run once it succeeds."""
    commit = Recorder.commit
    attempts: list[int] = []

    def defective(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
        attempts.append(len(entries))
        if len(attempts) < 3:
            raise RuntimeError("a defect")
        commit(self, entries, durable=durable)

    monkeypatch.setattr(Recorder, "commit", defective)
    async with storing(path) as store:
        with capture_logs() as logs:
            store.write(opened(), flush=True)
            await settled(store)
        assert attempts == [1, 1, 1]
        assert [line["event"] for line in logs] == ["store_fault", "store_mended"]


async def test_deleted_file_holds_back_callbacks(path: Path) -> None:
    """Commits to a deleted file are not acknowledged until it is back in its place."""
    elsewhere = path.with_name("elsewhere")
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)
        move(path, elsewhere)
        told: list[int] = []
        with capture_logs() as logs:
            store.write(opened("s_2"), flush=True)
            store.release(lambda: told.append(1))
            await until(lambda: store.fault is not None)
            assert store.fault == StorageFault(
                "sessions.sqlite3 cannot be written: it was deleted or moved", RETRY_LATER_MS
            )
            assert told == []
            move(elsewhere, path)
            await settled(store)
        assert told == [1]
        assert store.fault is None
        assert [line["event"] for line in logs] == ["store_fault", "store_mended"]
    assert set(await kept_in(path)) == {"s_1", "s_2"}


async def test_file_deleted_during_a_commit_is_detected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is not repeated when the file is back."""
    elsewhere = path.with_name("elsewhere")
    commit = Recorder.commit
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)

        def observed(self: Recorder, entries: Sequence[Entry], *, durable: bool) -> None:
            commit(self, entries, durable=durable)
            move(path, elsewhere)

        monkeypatch.setattr(Recorder, "commit", observed)
        told: list[int] = []
        store.write(said("a"), flush=True)
        store.release(lambda: told.append(1))
        await until(lambda: store.fault is not None)
        assert told == []
        move(elsewhere, path)
        await until(lambda: told == [1])
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM said").fetchone() == (1,)


async def test_replaced_file_is_detected_while_idle(path: Path) -> None:
    """The listener is notified when the fault appears and when it ends."""
    store = SessionStore.open(path, retry_s=RETRY_S, probe_s=RETRY_S)
    faults: list[StorageFault | None] = []
    store.watch(faults.append)
    store.write(opened(), flush=True)
    await settled(store)
    move(path, path.with_name("elsewhere"))
    put_empty(path)
    replaced = StorageFault("sessions.sqlite3 cannot be written: it was replaced by another file", RETRY_LATER_MS)
    await until(lambda: replaced in faults)
    move(path.with_name("elsewhere"), path)
    await until(lambda: faults[-1] is None)
    assert store.fault is None
    await store.close()


async def test_dead_writer_thread_is_a_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception outside all handlers ends the thread: it is logged, no callback runs, and closing does not wait."""
    store = SessionStore.open(path)
    faults: list[StorageFault | None] = []
    store.watch(faults.append)

    def dying(_self: Recorder, _entries: Sequence[Entry], *, durable: bool) -> None:
        raise SystemExit(durable)

    monkeypatch.setattr(Recorder, "commit", dying)
    told: list[int] = []
    with capture_logs() as logs:
        for _ in range(2):
            store.write(opened(), flush=True)
            store.release(lambda: told.append(1))
            await until(lambda: bool(faults))
    assert [line["event"] for line in logs] == ["store_writer_died"]
    fault = StorageFault("sessions.sqlite3 cannot be written: an internal error", RETRY_LATER_MS)
    assert (faults, store.fault) == ([fault], fault)
    await store.close()
    assert told == []


async def test_close_flushes_and_notifies(path: Path) -> None:
    """Closing runs all callbacks; afterwards nothing is written and the fault states the reason."""
    store = SessionStore.open(path)
    store.load()
    told: list[int] = []
    store.write(opened(), flush=True)
    store.release(lambda: told.append(1))
    await store.close()
    assert told == [1]
    assert store.fault == StorageFault("the store is closed", RETRY_LATER_MS)
    store.write(SessionDeleted(session_id="s_1"), flush=True)
    await store.close()
    assert set(await kept_in(path)) == {"s_1"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_clean_stop_is_recorded(path: Path) -> None:
    """A new file, a cleanly closed one, and one without writes since are clean."""
    for _ in range(2):
        store = SessionStore.open(path)
        assert store.was_clean
        await store.close()
    store = SessionStore.open(path)
    store.write(opened(), flush=True)
    await store.close()
    assert await was_clean(path)


async def test_unclean_stop_is_detected(path: Path) -> None:
    """An unclean shutdown, and a missing close, are detected."""
    store = SessionStore.open(path)
    store.write(opened(), flush=True)
    await store.close(clean=False)
    store = SessionStore.open(path)
    assert not store.was_clean
    store.write(opened("s_2"), flush=True)
    await settled(store)
    assert not await was_clean(path)
    await store.close()
    assert await was_clean(path)


async def test_unwritten_entries_make_the_stop_unclean(path: Path) -> None:
    """Closing ends, logs the number of lost records, and runs no callback."""
    store = SessionStore.open(path, retry_s=RETRY_S)
    store.load()
    store.write(opened(), flush=True)
    await settled(store)
    told: list[int] = []
    with capture_logs() as logs:
        with locked(path):
            store.write(said("a"), flush=False)
            store.release(lambda: told.append(1))
            await until(lambda: store.fault is not None)
            store.write(said("b"), flush=False)
            await store.close(timeout_s=0.02)
        assert [(line["event"], line.get("records")) for line in logs] == [("store_fault", None), ("store_lost", 2)]
    assert told == []
    assert store.fault == StorageFault("sessions.sqlite3 cannot be written: another program holds it")
    assert not await was_clean(path)


async def test_files_are_private(path: Path) -> None:
    """The file, its WAL and its directory are private to the owner, also if they were not before."""
    path.parent.mkdir(mode=0o700)
    os.close(os.open(path, os.O_CREAT, 0o644))
    async with storing(path) as store:
        store.write(opened(), flush=True)
        await settled(store)
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
        assert len(list(path.parent.iterdir())) == 3


async def test_purge_deletes_sessions_that_are_not_open(path: Path) -> None:
    """A purge also deletes sessions that could not be loaded."""
    async with storing(path) as store:
        store.write(opened(), flush=True)
        store.write(opened("s_2", client_id="bob"), flush=True)
        store.write(opened("s_3"), flush=True)
        await settled(store)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("UPDATE sessions SET facts = 'x' WHERE session_id = 's_1'")
    async with storing(path) as store:
        store.purge("client", "ada")
        await settled(store)
        store.purge("session", "s_2")
        await settled(store)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM sessions").fetchone() == (0,)


def test_closed_loop_is_no_error(path: Path) -> None:
    """The records are written although the event loop is closed."""

    async def write() -> SessionStore:
        store = SessionStore.open(path)
        store.write(opened(), flush=True)
        await asyncio.sleep(0)
        store.write(opened("s_2"), flush=True)
        await asyncio.sleep(0)
        return store

    store = asyncio.run(write())
    assert store.fault is None
    asyncio.run(store.close())
    assert set(asyncio.run(kept_in(path))) == {"s_1", "s_2"}
