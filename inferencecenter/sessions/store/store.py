"""The durable journal: records go to a SQLite file, in one transaction per turn of the event loop.

The event loop queues records per client (``writer.WriteQueue``) and submits one batch at a time to the writer thread;
records that arrive meanwhile form the next batch. Invariant: a callback passed to ``release`` runs only after
everything its client has written before is committed and the file is still at its path, so no client ever sees an event
that a restart could lose. While the file cannot be written, callbacks wait and the writer retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

import structlog

from inferencecenter.core.sqlite_file import BUSY_TIMEOUT_S, FileIdentity
from inferencecenter.sessions.journal import RETRY_LATER_MS, StorageFault
from inferencecenter.sessions.store.database import open_file
from inferencecenter.sessions.store.loader import StoreContents, read_all
from inferencecenter.sessions.store.recorder import Purge, Recorder
from inferencecenter.sessions.store.writer import PROBE_S, RETRY_S, QueuedEntry, Stop, StoreWriter, WriteQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.sessions.journal import Journal, Record, StoredSession
    from inferencecenter.sessions.store.recorder import Entry, PurgeKind
    from inferencecenter.sessions.store.writer import WriteBatch

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that ``close`` waits for a file that cannot be written."""

_log = structlog.get_logger(__name__)


class SessionStore:
    """Sessions on disk; implements ``Journal``. Except for ``open``, methods run on the event loop and never block.

    A file that is permanently not writable has a ``fault`` from the start: its readable sessions are loaded, nothing is
    written, and nothing is held back.
    """

    def __init__(
        self,
        path: Path,
        *,
        database: sqlite3.Connection | None,
        fault: StorageFault | None,
        retry_s: float = RETRY_S,
        probe_s: float = PROBE_S,
    ) -> None:
        contents = read_all(database) if database is not None else StoreContents([], {})
        for name, reason in contents.unreadable.items():
            _log.error("session_unreadable", session=name, reason=reason)
        self._kept = [each.session for each in contents.found]
        self._fault = fault
        self._queue = WriteQueue()
        self._is_scheduled = False
        self._is_writing = False
        self._incomplete: set[str] = set()
        self.n_skipped = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fault_listener: tuple[asyncio.AbstractEventLoop, Callable[[StorageFault | None], None]] | None = None
        self._writer: StoreWriter | None = None
        self.identity: FileIdentity | None = None
        self.was_clean = database is None or _is_clean(database)
        if database is not None and fault is None:
            recorder = Recorder(database, {each.session.config.session_id: each.location for each in contents.found})
            _sweep(recorder)
            self.identity = FileIdentity.of(path)
            self._writer = StoreWriter(
                path,
                database=database,
                recorder=recorder,
                identity=self.identity,
                committed=self._committed,
                fault_changed=self._fault_changed,
                retry_s=retry_s,
                probe_s=probe_s,
            )
        elif database is not None:
            database.close()

    @classmethod
    def open(cls, path: Path, *, retry_s: float = RETRY_S, probe_s: float = PROBE_S) -> SessionStore:
        """Open or create the file at ``path``, private to its owner, and load it. Blocks; call before the loop runs.

        Args:
            path: The SQLite file.
            retry_s: Seconds between retries while it cannot be written.
            probe_s: Seconds between checks of an idle file.

        Raises:
            InferenceCenterError: ``storage_unavailable`` for a file of a newer version, or one that another program
                locks. Any other fault does not raise: see ``fault``.
        """
        file = open_file(path)
        return cls(path, database=file.database, fault=file.fault, retry_s=retry_s, probe_s=probe_s)

    def load(self) -> list[StoredSession]:
        """Return all sessions as of ``open``, oldest first; once."""
        kept, self._kept = self._kept, []
        return kept

    @property
    def fault(self) -> StorageFault | None:
        """Why nothing can be written at the moment; ``None`` if writing works."""
        return self._fault or (self._writer.fault if self._writer is not None else None)

    def watch(self, listener: Callable[[StorageFault | None], None]) -> None:
        """Call ``listener`` on the event loop whenever ``fault`` changes."""
        self._fault_listener = (asyncio.get_running_loop(), listener)

    def of_client(self, client_id: str) -> Journal:
        """Return the journal of a client, whose records and callbacks wait for no other client."""
        return _ClientJournal(self, client_id)

    def write(self, record: Record, *, flush: bool) -> None:
        """Queue a record that belongs to no client; see ``Journal``."""
        self.add("", record, durable=flush)

    def add(self, client_id: str, entry: Entry, *, durable: bool) -> None:
        """Queue an entry after all earlier ones of the client."""
        if self._writer is not None:
            self._queue.add(client_id, QueuedEntry(entry, durable))
            self._schedule()

    def purge(self, kind: PurgeKind, name: str) -> None:
        """Delete everything that the file holds of a session, or of a client and its sessions.

        This includes sessions that could not be loaded. An open session must be released by its owner first.
        """
        self.add(name if kind == "client" else "", Purge(kind, name), durable=True)

    def release(self, callback: Callable[[], None], *, client_id: str = "") -> None:
        """Call ``callback`` once all earlier records of the client are safe; see ``Journal``."""
        if not self._queue.n_pending(client_id):
            callback()
        else:
            self._queue.add(client_id, callback)
            self._schedule()

    @property
    def n_pending(self) -> int:
        """Number of queued records and callbacks that belong to no client."""
        return self.n_pending_of("")

    def is_incomplete(self, session_id: str) -> bool:
        """Return whether a record of this session was left out."""
        return session_id in self._incomplete

    def n_pending_of(self, client_id: str) -> int:
        """Return the number of queued records and callbacks of a client."""
        return self._queue.n_pending(client_id)

    async def close(self, *, clean: bool = True, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is queued, run the callbacks, and close the file; later records are not written.

        Args:
            clean: Whether the sessions shut down cleanly: every event that was sent was written.
            timeout_s: Seconds after which unwritten records are abandoned; the shutdown is then not clean.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if self._queue:
            writer.put(self._queue.take_all())
        self._fault = writer.fault or StorageFault("the store is closed", RETRY_LATER_MS)
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()

        def notify_stopped() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopped.set)

        writer.put(Stop(clean, notify_stopped))
        try:
            async with asyncio.timeout(timeout_s):
                await stopped.wait()
        except TimeoutError:
            writer.abandon()
            # A running SQLite call cannot be interrupted, only waited for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * BUSY_TIMEOUT_S):
                    await stopped.wait()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._submit_batch)

    def _submit_batch(self) -> None:
        """Submit the next batch; only one is in flight, so that waiting clients share the next one."""
        self._is_scheduled = False
        if self._writer is not None and self._queue and not self._is_writing:
            self._is_writing = True
            self._writer.put(self._queue.take())

    def _committed(self, batch: WriteBatch) -> None:
        """Schedule the callbacks of a batch. Called on the writer thread."""
        assert self._loop is not None, "a batch was submitted on a loop"
        # After the loop is closed there is nothing to notify.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run_callbacks, batch)

    def _fault_changed(self) -> None:
        """Schedule the fault listener. Called on the writer thread."""
        if self._fault_listener is not None:
            loop, listener = self._fault_listener
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: listener(self.fault))

    def _run_callbacks(self, batch: WriteBatch) -> None:
        self.n_skipped += len(batch.skipped)
        self._incomplete.update(name for name in batch.skipped if name is not None)
        # While closing, nothing is held: pending deletions finish before the file is closed.
        self._queue.requeue_callbacks(batch, batch.unswept if self._writer is not None else ())
        for _, callback in batch.callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - a failing callback must not block the others
                _log.exception("release_failed")
        self._queue.done(batch)
        self._is_writing = False
        if self._queue:
            self._schedule()


class _ClientJournal:
    """One client's view of the store; implements ``Journal``."""

    def __init__(self, store: SessionStore, client_id: str) -> None:
        self._store = store
        self._client_id = client_id

    @property
    def fault(self) -> StorageFault | None:
        return self._store.fault

    @property
    def n_pending(self) -> int:
        return self._store.n_pending_of(self._client_id)

    @property
    def n_skipped(self) -> int:
        return self._store.n_skipped

    def is_incomplete(self, session_id: str) -> bool:
        return self._store.is_incomplete(session_id)

    def of_client(self, client_id: str) -> Journal:
        return self._store.of_client(client_id)

    def write(self, record: Record, *, flush: bool) -> None:
        self._store.add(self._client_id, record, durable=flush)

    def release(self, callback: Callable[[], None]) -> None:
        self._store.release(callback, client_id=self._client_id)


def _sweep(recorder: Recorder) -> None:
    try:
        recorder.sweep()
    except sqlite3.Error as error:
        # Readers skip these rows; the next start tries again.
        _log.warning("incomplete_sessions_left", reason=str(error))


def _is_clean(database: sqlite3.Connection) -> bool:
    try:
        return bool(database.execute("SELECT clean FROM meta").fetchone() == (1,))
    except sqlite3.Error:
        return False
