"""The writer thread and its queue: one transaction for all that has come in, retried until it is in the file.

A commit goes to the file that was opened, wherever that is by now. So nothing is acknowledged before the path was seen
to lead to it still: a file that was deleted takes commits until it is closed, and then they are gone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from inferencecenter.core.sqlite_file import MAX_LOG_BYTES, FileMovedError
from inferencecenter.sessions.journal import RETRY_LATER_MS, StorageFault
from inferencecenter.sessions.store.chunking import parts_of, weight_of
from inferencecenter.sessions.store.database import fault_of, hint_of, is_full, reason_of
from inferencecenter.sessions.store.recorder import UnwritableError, session_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from inferencecenter.core.sqlite_file import FileIdentity
    from inferencecenter.sessions.store.recorder import Entry, Recorder


# Room on the disk for the one thing that makes room: writing the log back into the file.
#
# On a full disk the log holds committed pages, and the file has no room to take them: the log cannot become shorter,
# and nothing can be written, though both hold the same conversations. So some room is taken beforehand, and given up
# for the time of a checkpoint.

RESERVE_BYTES: Final = MAX_LOG_BYTES
"""As much as the log grows to before it is written back."""
_LEAST_BYTES: Final = 64 * 1024


class DiskReserve:
    """A file without a name that takes room in ``directory``, as much as there is up to ``RESERVE_BYTES``.

    It goes with the process. On a file system without room, or that gives none beforehand, it is empty.
    """

    def __init__(self, directory: Path) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        self.fill()

    def fill(self) -> None:
        """Take the room again."""
        n_bytes = RESERVE_BYTES
        while self._file is not None and n_bytes >= _LEAST_BYTES:
            try:
                os.posix_fallocate(self._file, 0, n_bytes)
            except OSError:
                # What a failed attempt has taken is part of what there is.
                self.release()
                n_bytes //= 2
            else:
                return

    def release(self) -> None:
        """Give the room up."""
        if self._file is not None:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Give the room up for good."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def shorten_log(database: sqlite3.Connection, reserve: DiskReserve) -> bool:
    """Write the log of a file back and empty it; ``False`` if there is no room for that, or another program reads."""
    reserve.release()
    try:
        return bool(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
    except sqlite3.OperationalError:
        return False
    finally:
        reserve.fill()


RETRY_S: Final = 1.0
"""Seconds between attempts while the file cannot be written."""
PROBE_S: Final = 2.0
"""Seconds without anything to write after which the file is looked for all the same."""

_log = structlog.get_logger(__name__)


ReleaseCallback: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class WriteBatch:
    """What is written together, and who is told then, by client; ``n_handed_over`` times something was added to it.

    ``set_aside`` are the names of sessions of which a record was left out, ``None`` where it is no session's.
    ``counts`` is how much of each client's is in it, entries that are complete with it and calls.
    ``is_written`` once it is in the file that was opened, wherever that is. ``unswept`` are the clients of which then
    something is in the file that no session holds any more.
    """

    entries: list[Entry] = field(default_factory=list)
    callbacks: list[tuple[str, ReleaseCallback]] = field(default_factory=list)
    durable: bool = False
    n_handed_over: int = 1
    is_written: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    set_aside: list[str | None] = field(default_factory=list)
    unswept: frozenset[str] = frozenset()

    def add(self, other: WriteBatch) -> None:
        """Take in what came later."""
        self.entries += other.entries
        self.callbacks += other.callbacks
        self.durable |= other.durable
        self.n_handed_over += other.n_handed_over
        self.counts += other.counts


@dataclass(frozen=True, slots=True)
class Stop:
    """The last that is handed over: nothing comes after it; ``clean`` if nothing is missing either."""

    clean: bool
    stopped: Callable[[], None]


class StoreWriter:
    """Owns the file from its start on.

    Args:
        path: For the log.
        database: What ``recorder`` writes through.
        recorder: Writes.
        identity: Which file that is.
        committed: Called on this thread with each batch that is in the file.
        fault_changed: Called on this thread when ``fault`` has changed.
        retry_s: Seconds between attempts.
        probe_s: Seconds between looks at a file that nothing is written to.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        path: Path,
        *,
        database: sqlite3.Connection,
        recorder: Recorder,
        identity: FileIdentity,
        committed: Callable[[WriteBatch], None],
        fault_changed: Callable[[], None],
        retry_s: float,
        probe_s: float = PROBE_S,
    ) -> None:
        self._path = path
        self._database = database
        self._recorder = recorder
        self._identity = identity
        self._committed = committed
        self._fault_changed = fault_changed
        self._retry_s = retry_s
        self._probe_s = probe_s
        self._reserve = DiskReserve(path.parent)
        self._queue: SimpleQueue[WriteBatch | Stop] = SimpleQueue()
        self._given_up = threading.Event()
        self._stop: Stop | None = None
        self.fault: StorageFault | None = None
        # A daemon thread: what is released when nobody stops it is the system's, and no exit waits for a full disk.
        self._thread = threading.Thread(target=self._run, name="session-store", daemon=True)
        self._thread.start()

    def put(self, batch: WriteBatch | Stop) -> None:
        """Hand over what is written next."""
        self._queue.put(batch)

    def give_up(self) -> None:
        """Stop trying."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the border of the thread: it must not end without a word
            _log.critical("store_writer_died", path=str(self._path), exc_info=error)
            self._set_fault(StorageFault(f"{self._path.name} cannot be written: an internal error", RETRY_LATER_MS))
        stop = self._stop or self._await_stop()
        stop.stopped()

    def _work(self) -> None:
        """Write until the end, and close the file."""
        missing = 0
        while self._stop is None:
            batch = self._take()
            if not batch.n_handed_over:
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

    def _take(self) -> WriteBatch:
        """Wait for a batch and return it with all that waits behind it; take note of the end if it is among them."""
        item = self._next()
        taken = item if isinstance(item, WriteBatch) else WriteBatch(n_handed_over=0)
        while isinstance(item, WriteBatch):
            if self._queue.empty():
                return taken
            item = self._queue.get()
            if isinstance(item, WriteBatch):
                taken.add(item)
        self._stop = item
        return taken

    def _next(self) -> WriteBatch | Stop:
        """Return what comes next; while nothing does, look for the file now and then."""
        while True:
            try:
                return self._queue.get(timeout=self._probe_s)
            except Empty:
                self._try(WriteBatch())

    def _write(self, batch: WriteBatch) -> bool:
        """Write the batch, however often it takes; ``False`` when that was given up, and for all that comes later."""
        while not self._given_up.is_set():
            if self._try(batch):
                return True
            self._given_up.wait(self._retry_s)
        return False

    def _try(self, batch: WriteBatch) -> bool:
        try:
            if self.fault is not None:
                self._identity.check()
            if not batch.is_written:
                self._commit_somehow(batch)
                batch.is_written = True
            self._identity.check()
        except (sqlite3.Error, FileMovedError) as error:
            self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - a defect must not end the thread that all sessions wait for
            self._fail(error, defect=error)
            return False
        if self.fault is not None:
            self._set_fault(None)
            _log.info("store_mended", path=str(self._path))
        return True

    def _commit_somehow(self, batch: WriteBatch) -> None:
        """Write the batch; on a full disk once more, with the room that the log has taken."""
        try:
            self._commit(batch)
        except sqlite3.OperationalError as error:
            if not is_full(error) or not shorten_log(self._database, self._reserve):
                raise
            self._commit(batch)

    def _commit(self, batch: WriteBatch) -> None:
        while batch.entries or self._recorder.unswept:
            try:
                self._recorder.commit(batch.entries, durable=batch.durable)
                break
            except UnwritableError as refused:
                session_id = session_of(refused.entry)
                _log.error("record_unwritable", record=str(refused), session=session_id, exc_info=refused.__cause__)
                batch.set_aside.append(session_id)
                batch.entries = [entry for entry in batch.entries if entry is not refused.entry]
        batch.unswept = self._recorder.unswept

    def _fail(self, error: Exception, *, defect: Exception | None = None) -> None:
        if self.fault is None:
            reason, hint = (reason_of(error), hint_of(error)) if defect is None else (repr(error), None)
            _log.error("store_fault", path=str(self._path), reason=reason, hint=hint, exc_info=defect)
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


# What waits to be written, by client, and what of it the next transaction takes.
#
# A transaction takes from each client that has something waiting in turn, a bounded share at a time and bounded in all.
# So the text that one client is about to be shown is behind one transaction at most, however much another client has
# waiting. Usually all that waits fits into one. Within a client all keeps its order; between clients there is none.

BATCH_BYTES: Final = 512 * 1024
"""About what a transaction writes at most, some milliseconds; one entry that is larger is in one all the same."""
SHARE_BYTES: Final = 128 * 1024
"""About what a client gives to it before the others have given as much."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    entry: Entry
    durable: bool


@dataclass(slots=True)
class _Lane:
    """What one client has waiting; ``parts`` are what is left of an entry that has begun to be written."""

    items: deque[_Waiting | ReleaseCallback] = field(default_factory=deque)
    parts: deque[Entry] = field(default_factory=deque)
    durable: bool = False


class WriteQueue:
    """The queues of all clients."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._n_pending: Counter[str] = Counter()
        self._unswept: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._lanes or self._unswept)

    def write(self, client_id: str, entry: Entry, *, durable: bool) -> None:
        """Have an entry written after all others of the client."""
        self._add(client_id, _Waiting(entry, durable))

    def call_after(self, client_id: str, callback: ReleaseCallback) -> None:
        """Have ``callback`` called after all that the client has waiting is written."""
        self._add(client_id, callback)

    def n_pending(self, client_id: str) -> int:
        """Return how much of a client waits or is being written or deleted: entries, and calls."""
        return self._n_pending.get(client_id, 0) + (client_id in self._unswept)

    def take(self) -> WriteBatch:
        """Return what the next transaction takes; nothing of clients of which something has yet to be deleted."""
        batch = WriteBatch()
        left = BATCH_BYTES
        while left > 0 and (ready := [client_id for client_id in self._lanes if client_id not in self._unswept]):
            for client_id in ready:
                left -= self._give(client_id, batch, min(SHARE_BYTES, left))
                if left <= 0:
                    break
        return batch

    def take_all(self) -> WriteBatch:
        """Return everything that waits."""
        batch = WriteBatch()
        for client_id in tuple(self._lanes):
            while client_id in self._lanes:
                self._give(client_id, batch, BATCH_BYTES)
        return batch

    def hold(self, batch: WriteBatch, unswept: Collection[str]) -> None:
        """Have a batch that is written not tell those clients of which something has yet to be deleted.

        What would be told comes first of what waits then.
        """
        self._unswept = frozenset(unswept)
        for client_id, callback in reversed(batch.callbacks):
            if client_id in self._unswept:
                self._lanes.setdefault(client_id, _Lane()).items.appendleft(callback)
                batch.counts[client_id] -= 1
        batch.callbacks = [each for each in batch.callbacks if each[0] not in self._unswept]

    def done(self, batch: WriteBatch) -> None:
        """Take note that a batch was written and told."""
        for client_id, count in batch.counts.items():
            self._n_pending[client_id] -= count
            if not self._n_pending[client_id]:
                del self._n_pending[client_id]

    def _add(self, client_id: str, item: _Waiting | ReleaseCallback) -> None:
        self._lanes.setdefault(client_id, _Lane()).items.append(item)
        self._n_pending[client_id] += 1

    def _give(self, client_id: str, batch: WriteBatch, share: int) -> int:
        """Move from a client's queue to a batch until its share is used up, and return what that weighs.

        A client that has more waiting is the last of the line then.
        """
        lane = self._lanes.pop(client_id)
        weight = 0
        while lane.items or lane.parts:
            if not lane.parts:
                item = lane.items[0]
                if isinstance(item, _Waiting):
                    if weight >= share:
                        break
                    lane.parts.extend(parts_of(item.entry))
                    lane.durable = item.durable
                else:
                    # All that this call waits for is in this transaction, or in one before.
                    batch.callbacks.append((client_id, item))
                    batch.counts[client_id] += 1
                lane.items.popleft()
                continue
            if weight >= share:
                break
            part = lane.parts.popleft()
            batch.entries.append(part)
            batch.durable |= lane.durable
            batch.counts[client_id] += not lane.parts
            weight += weight_of(part)
        if lane.items or lane.parts:
            self._lanes[client_id] = lane
        return weight
