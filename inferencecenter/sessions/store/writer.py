"""The writer thread, which owns the database connection.

It commits one batch per transaction and retries until the batch is in the file. A commit goes to the file that was
opened, even if that was moved or deleted since. Invariant: a batch is acknowledged only after its commit and a check
that the path still leads to that file.

A full disk can prevent the checkpoint that would free the WAL, since the file itself has no room to grow.
``DiskReserve`` therefore allocates that room in advance and gives it up for the duration of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from inferencecenter.core.sqlite_file import MAX_WAL_BYTES, FileMovedError, checkpoint
from inferencecenter.sessions.journal import RETRY_LATER_MS, StorageFault, TokensAppended
from inferencecenter.sessions.store.database import fault_of, hint_of, is_full, reason_of
from inferencecenter.sessions.store.recorder import Purge, UnwritableError, session_of
from inferencecenter.sessions.store.search_index import PAUSE_S

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.core.sqlite_file import FileIdentity
    from inferencecenter.sessions.store.recorder import Entry, Recorder
    from inferencecenter.sessions.store.search_index import SearchMaintenance


RESERVE_BYTES: Final = MAX_WAL_BYTES
"""The size at which the WAL is checkpointed."""
_LEAST_BYTES: Final = 64 * 1024


class DiskReserve:
    """An unnamed file that allocates up to ``RESERVE_BYTES`` in ``directory``.

    The system frees it with the process. It is empty on a full file system or one without preallocation.
    """

    def __init__(self, directory: Path) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        self.fill()

    def fill(self) -> None:
        """Allocate the space again."""
        n_bytes = RESERVE_BYTES
        while self._file is not None and n_bytes >= _LEAST_BYTES:
            try:
                os.posix_fallocate(self._file, 0, n_bytes)
            except OSError:
                # A failed attempt may have allocated a part.
                self.release()
                n_bytes //= 2
            else:
                return

    def release(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Free the space for good."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


RETRY_S: Final = 1.0
"""Seconds between retries while the file cannot be written."""
PROBE_S: Final = 2.0
"""Idle seconds after which the file is checked without a write."""

_log = structlog.get_logger(__name__)


ReleaseCallback: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class WriteBatch:
    """Entries that are written in one transaction, and the callbacks that follow, with their clients.

    ``n_batches`` counts the batches merged into this one. ``skipped`` are the sessions of records that were left
    out, ``None`` for a record without one. ``counts`` are the entries completed and the callbacks, by client.
    ``is_written`` is set once the batch is committed to the opened file, wherever that is. ``unswept`` are the clients
    with detached rows that are still to be deleted.
    """

    entries: list[Entry] = field(default_factory=list)
    callbacks: list[tuple[str, ReleaseCallback]] = field(default_factory=list)
    durable: bool = False
    n_batches: int = 1
    is_written: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    skipped: list[str | None] = field(default_factory=list)
    unswept: frozenset[str] = frozenset()

    def add(self, other: WriteBatch) -> None:
        """Merge a later batch."""
        self.entries += other.entries
        self.callbacks += other.callbacks
        self.durable |= other.durable
        self.n_batches += other.n_batches
        self.counts += other.counts


@dataclass(frozen=True, slots=True)
class Stop:
    """The last item of the queue; ``clean`` if nothing is missing."""

    clean: bool
    stopped: Callable[[], None]


class StoreWriter:
    """The thread that owns the database.

    Args:
        path: Path of the file, for the log and the disk reserve.
        database: The connection of ``recorder``.
        recorder: Writes the entries.
        search: Maintains the full-text index, if there is one.
        identity: Identity of the opened file.
        committed: Called on this thread with each committed batch.
        fault_changed: Called on this thread when ``fault`` changes.
        retry_s: Seconds between retries.
        probe_s: Seconds between checks of an idle file.

    Attributes:
        put: Queues a batch or the stop.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        path: Path,
        *,
        database: sqlite3.Connection,
        recorder: Recorder,
        search: SearchMaintenance | None,
        identity: FileIdentity,
        committed: Callable[[WriteBatch], None],
        fault_changed: Callable[[], None],
        retry_s: float,
        probe_s: float,
    ) -> None:
        self._path = path
        self._database = database
        self._recorder = recorder
        self._search = search
        self._identity = identity
        self._committed = committed
        self._fault_changed = fault_changed
        self._retry_s = retry_s
        self._probe_s = probe_s
        self._reserve = DiskReserve(path.parent)
        self._queue: SimpleQueue[WriteBatch | Stop] = SimpleQueue()
        self.put: Callable[[WriteBatch | Stop], None] = self._queue.put
        self._abandoned = threading.Event()
        self._stop: Stop | None = None
        self.fault: StorageFault | None = None
        # A daemon thread: without a ``Stop`` the system frees its resources, and no exit waits for a full disk.
        self._thread = threading.Thread(target=self._run, name="session-store", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Stop retrying."""
        self._abandoned.set()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - boundary of the thread: its end must be logged
            _log.critical("store_writer_died", path=str(self._path), exc_info=error)
            self._set_fault(StorageFault(f"{self._path.name} cannot be written: an internal error", RETRY_LATER_MS))
        stop = self._stop or self._await_stop()
        stop.stopped()

    def _work(self) -> None:
        missing = 0
        while self._stop is None:
            batch = self._next_batch()
            if not batch.n_batches:
                continue
            if self._write(batch):
                self._committed(batch)
            else:
                missing += len(batch.entries)
        self._finish(clean=self._stop.clean and not missing)
        if missing:
            reason = self.fault.message if self.fault is not None else None
            _log.error("store_lost", path=str(self._path), records=missing, reason=reason)

    def _await_stop(self) -> Stop:
        while not isinstance(item := self._queue.get(), Stop):
            pass
        return item

    def _next_batch(self) -> WriteBatch:
        """Wait for a batch and merge all queued ones into it; remember a ``Stop`` among them."""
        item = self._next()
        taken = item if isinstance(item, WriteBatch) else WriteBatch(n_batches=0)
        while isinstance(item, WriteBatch):
            if self._queue.empty():
                return taken
            item = self._queue.get()
            if isinstance(item, WriteBatch):
                taken.add(item)
        self._stop = item
        return taken

    def _next(self) -> WriteBatch | Stop:
        """Return the next item; maintain the index and check the file while there is none."""
        search = self._search
        if search is not None and search.is_overdue and self.fault is None:
            search.step()
        while True:
            is_due = search is not None and search.is_due and self.fault is None
            try:
                return self._queue.get(timeout=PAUSE_S if is_due else self._probe_s)
            except Empty:
                if search is not None and is_due:
                    search.step()
                else:
                    self._try(WriteBatch())

    def _write(self, batch: WriteBatch) -> bool:
        """Write the batch with retries; ``False`` once writing was abandoned."""
        while not self._abandoned.is_set():
            if self._try(batch):
                return True
            self._abandoned.wait(self._retry_s)
        return False

    def _try(self, batch: WriteBatch) -> bool:
        try:
            if self.fault is not None:
                self._identity.check()
            if not batch.is_written:
                self._commit_or_checkpoint(batch)
                batch.is_written = True
            self._identity.check()
        except Exception as error:  # noqa: BLE001 - a defect must not end the thread that all sessions depend on
            self._fail(error)
            return False
        if self.fault is not None:
            self._set_fault(None)
            _log.info("store_mended", path=str(self._path))
        return True

    def _commit_or_checkpoint(self, batch: WriteBatch) -> None:
        """Write the batch; if the disk is full, checkpoint the WAL and try once more."""
        try:
            self._commit(batch)
        except sqlite3.OperationalError as error:
            if not is_full(error) or not self._checkpoint():
                raise
            self._commit(batch)

    def _checkpoint(self) -> bool:
        """Checkpoint with the reserve's space; ``False`` if that is not enough, or another process is reading."""
        self._reserve.release()
        try:
            return checkpoint(self._database)
        except sqlite3.OperationalError:
            return False
        finally:
            self._reserve.fill()

    def _commit(self, batch: WriteBatch) -> None:
        while batch.entries or self._recorder.unswept:
            try:
                self._recorder.commit(batch.entries, durable=batch.durable)
                if self._search is not None and not all(isinstance(each, TokensAppended) for each in batch.entries):
                    self._search.note_changes(is_purge=any(isinstance(each, Purge) for each in batch.entries))
                break
            except UnwritableError as refused:
                session_id = session_of(refused.entry)
                _log.error("record_unwritable", record=str(refused), session=session_id, exc_info=refused.__cause__)
                batch.skipped.append(session_id)
                batch.entries = [entry for entry in batch.entries if entry is not refused.entry]
        batch.unswept = self._recorder.unswept

    def _fail(self, error: Exception) -> None:
        if self.fault is None:
            is_defect = not isinstance(error, (sqlite3.Error, FileMovedError))
            reason, hint = (repr(error), None) if is_defect else (reason_of(error), hint_of(error))
            _log.error(
                "store_fault", path=str(self._path), reason=reason, hint=hint, exc_info=error if is_defect else None
            )
        self._set_fault(fault_of(error, name=self._path.name))

    def _set_fault(self, fault: StorageFault | None) -> None:
        before, self.fault = self.fault, fault
        if fault != before:
            self._fault_changed()

    def _finish(self, *, clean: bool) -> None:
        try:
            if clean:
                self._recorder.finish()
        except sqlite3.Error as error:
            _log.error("store_not_closed", path=str(self._path), reason=str(error))
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        self._reserve.close()
