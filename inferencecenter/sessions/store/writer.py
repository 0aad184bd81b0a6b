"""The thread that writes: one transaction for all that has come in, again and again until it is in the file.

A commit goes to the file that was opened, wherever that is by now. So nothing is acknowledged before the path was seen
to lead to it still: a file that was deleted takes commits until it is closed, and then they are gone.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

import structlog

from inferencecenter.sessions.journal import RETRY_LATER_MS, StorageFault
from inferencecenter.sessions.store.faults import fault_of, hint_of, is_full, reason_of
from inferencecenter.sessions.store.recorder import UnwritableError, session_of
from inferencecenter.sessions.store.reserve import DiskReserve, shorten_log
from inferencecenter.sqlite_file import FileMovedError

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.sessions.store.recorder import Entry, Recorder
    from inferencecenter.sqlite_file import FileIdentity

RETRY_S: Final = 1.0
"""Seconds between attempts while the file cannot be written."""
PROBE_S: Final = 2.0
"""Seconds without anything to write after which the file is looked for all the same."""

_log = structlog.get_logger(__name__)


Tell: TypeAlias = Callable[[], None]


@dataclass(slots=True)
class Batch:
    """What is written together, and who is told then, by client; ``n_handed_over`` times something was added to it.

    ``set_aside`` are the names of sessions of which a record was left out, ``None`` where it is no session's.
    ``counts`` is how much of each client's is in it, entries that are complete with it and calls.
    ``is_written`` once it is in the file that was opened, wherever that is. ``unswept`` are the clients of which then
    something is in the file that no session holds any more.
    """

    entries: list[Entry] = field(default_factory=list)
    tells: list[tuple[str, Tell]] = field(default_factory=list)
    durable: bool = False
    n_handed_over: int = 1
    is_written: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    set_aside: list[str | None] = field(default_factory=list)
    unswept: frozenset[str] = frozenset()

    def add(self, other: Batch) -> None:
        """Take in what came later."""
        self.entries += other.entries
        self.tells += other.tells
        self.durable |= other.durable
        self.n_handed_over += other.n_handed_over
        self.counts += other.counts


@dataclass(frozen=True, slots=True)
class Stop:
    """The last that is handed over: nothing comes after it; ``clean`` if nothing is missing either."""

    clean: bool
    stopped: Callable[[], None]


class Writer:
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
        committed: Callable[[Batch], None],
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
        self._queue: SimpleQueue[Batch | Stop] = SimpleQueue()
        self._given_up = threading.Event()
        self._stop: Stop | None = None
        self.fault: StorageFault | None = None
        # A daemon thread: what is released when nobody stops it is the system's, and no exit waits for a full disk.
        self._thread = threading.Thread(target=self._run, name="session-store", daemon=True)
        self._thread.start()

    def put(self, batch: Batch | Stop) -> None:
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

    def _take(self) -> Batch:
        """Wait for a batch and return it with all that waits behind it; take note of the end if it is among them."""
        item = self._next()
        taken = item if isinstance(item, Batch) else Batch(n_handed_over=0)
        while isinstance(item, Batch):
            if self._queue.empty():
                return taken
            item = self._queue.get()
            if isinstance(item, Batch):
                taken.add(item)
        self._stop = item
        return taken

    def _next(self) -> Batch | Stop:
        """Return what comes next; while nothing does, look for the file now and then."""
        while True:
            try:
                return self._queue.get(timeout=self._probe_s)
            except Empty:
                self._try(Batch())

    def _write(self, batch: Batch) -> bool:
        """Write the batch, however often it takes; ``False`` when that was given up, and for all that comes later."""
        while not self._given_up.is_set():
            if self._try(batch):
                return True
            self._given_up.wait(self._retry_s)
        return False

    def _try(self, batch: Batch) -> bool:
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

    def _commit_somehow(self, batch: Batch) -> None:
        """Write the batch; on a full disk once more, with the room that the log has taken."""
        try:
            self._commit(batch)
        except sqlite3.OperationalError as error:
            if not is_full(error) or not shorten_log(self._database, self._reserve):
                raise
            self._commit(batch)

    def _commit(self, batch: Batch) -> None:
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
