"""The thread that writes: one transaction for all that has come in, again and again until it is in the file."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.sessions.store.recorder import UnwritableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.sessions.store.recorder import Entry, Recorder

RETRY_S: Final = 1.0
"""Seconds between attempts while the file cannot be written."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Batch:
    """What is written together, and who is told then; ``n_handed_over`` times something was added to it."""

    entries: list[Entry] = field(default_factory=list)
    tells: list[Callable[[], None]] = field(default_factory=list)
    durable: bool = False
    n_handed_over: int = 1

    def add(self, other: Batch) -> None:
        """Take in what came later."""
        self.entries += other.entries
        self.tells += other.tells
        self.durable |= other.durable
        self.n_handed_over += other.n_handed_over


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
        committed: Called on this thread with each batch that is in the file.
        retry_s: Seconds between attempts.
    """

    def __init__(
        self,
        path: Path,
        *,
        database: sqlite3.Connection,
        recorder: Recorder,
        committed: Callable[[Batch], None],
        retry_s: float,
    ) -> None:
        self._path = path
        self._database = database
        self._recorder = recorder
        self._committed = committed
        self._retry_s = retry_s
        self._queue: SimpleQueue[Batch | Stop] = SimpleQueue()
        self._given_up = threading.Event()
        self.fault: str | None = None
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
        stop: Stop | None = None
        missing = 0
        while stop is None:
            batch, stop = self._take()
            if not batch.n_handed_over:
                continue
            if self._write(batch):
                self._committed(batch)
            else:
                missing += len(batch.entries)
        self._finish(clean=stop.clean and not missing)
        if missing:
            _log.error("store_lost", path=str(self._path), records=missing, reason=self.fault)
        stop.stopped()

    def _take(self) -> tuple[Batch, Stop | None]:
        """Wait for a batch and return it with all that waits behind it, and the end if it is among them."""
        item = self._queue.get()
        taken = item if isinstance(item, Batch) else Batch(n_handed_over=0)
        while isinstance(item, Batch):
            if self._queue.empty():
                return taken, None
            item = self._queue.get()
            if isinstance(item, Batch):
                taken.add(item)
        return taken, item

    def _write(self, batch: Batch) -> bool:
        """Write the batch, however often it takes; ``False`` when that was given up, and for all that comes later."""
        while not self._given_up.is_set():
            if self._try(batch):
                return True
            self._given_up.wait(self._retry_s)
        return False

    def _try(self, batch: Batch) -> bool:
        try:
            while batch.entries:
                try:
                    self._recorder.commit(batch.entries, durable=batch.durable)
                    break
                except UnwritableError as refused:
                    _log.error("record_unwritable", record=str(refused), exc_info=refused.__cause__)
                    batch.entries = [entry for entry in batch.entries if entry is not refused.entry]
        except sqlite3.Error as error:
            self._fail(str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a defect must not end the thread that all sessions wait for
            self._fail(repr(error), defect=error)
            return False
        if self.fault is not None and batch.entries:
            self.fault = None
            _log.info("store_mended", path=str(self._path))
        return True

    def _fail(self, reason: str, *, defect: Exception | None = None) -> None:
        if self.fault is None:
            _log.error("store_fault", path=str(self._path), reason=reason, exc_info=defect)
        self.fault = f"{self._path.name} cannot be written: {reason}"

    def _finish(self, *, clean: bool) -> None:
        try:
            if clean:
                self._recorder.finish()
        except sqlite3.Error as error:
            _log.error("store_not_closed", path=str(self._path), reason=str(error))
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
