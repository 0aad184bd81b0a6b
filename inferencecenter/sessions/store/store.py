"""The durable journal: records go to a SQLite file, in one transaction per turn of the event loop.

The event loop queues records per client and submits one batch at a time to the writer thread; records that arrive
meanwhile form the next batch. Invariant: a callback passed to ``release`` runs only after
everything its client has written before is committed and the file is still at its path, so no client ever sees an event
that a restart could lose. While the file cannot be written, callbacks wait and the writer retries.

The queue (``WriteQueue``) keeps the order within a client; there is none between clients. Each transaction takes a
bounded share from every waiting client in turn, up to a bounded total. Invariant: a client's output waits for at most
one transaction of others, however much they have queued.

A session that is created with a long history is split into chunks of bounded size (``chunks_of``), for short
transactions. Invariant: its row in ``sessions`` is not ``complete`` until the last of them, so readers skip it and the
next start deletes it if the daemon was killed; no client is notified before the last chunk is committed. A fork shares
rows that exist already and is never split.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from inferencecenter.core.sqlite_file import BUSY_TIMEOUT_S, FileIdentity
from inferencecenter.sessions.history import chars_of, plain_messages
from inferencecenter.sessions.journal import (
    RETRY_LATER_MS,
    HistoryChanged,
    PresetStored,
    SessionDeleted,
    SessionOpened,
    ShareRecorded,
    StorageFault,
    TokensAppended,
    TurnEnded,
    TurnQueued,
)
from inferencecenter.sessions.store.bases import ROW_BYTES
from inferencecenter.sessions.store.database import open_file
from inferencecenter.sessions.store.loader import LoadedSession, StoreContents, archive_unused, read_all
from inferencecenter.sessions.store.reader import ArchiveReader
from inferencecenter.sessions.store.recorder import CHUNK_BYTES, OpenedChunk, Purge, Recorder, SessionReopened
from inferencecenter.sessions.store.search_index import SearchMaintenance, prepare_index
from inferencecenter.sessions.store.writer import PROBE_S, RETRY_S, Stop, StoreWriter, WriteBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from inferencecenter.protocol.values import ChatMessage
    from inferencecenter.sessions.archive import ReadSession
    from inferencecenter.sessions.history import History
    from inferencecenter.sessions.journal import Journal, Record, StoredSession
    from inferencecenter.sessions.store.recorder import Entry, PurgeKind
    from inferencecenter.sessions.store.writer import ReleaseCallback

CLOSE_TIMEOUT_S: Final = 5.0
"""Seconds that ``close`` waits for a file that cannot be written."""

_log = structlog.get_logger(__name__)


BATCH_BYTES: Final = 512 * 1024
"""Approximate limit of a transaction, which takes milliseconds; a single larger entry may exceed it."""
SHARE_BYTES: Final = 128 * 1024
"""Approximate bytes that one client contributes before the next one's turn."""
_MAX_NEW_MESSAGES: Final = 1000


def chunks_of(opened: SessionOpened) -> Iterable[Entry]:
    if opened.parent is None and _is_long(opened.history.messages, opened.notes.values()):
        return _chunks_of_opened(opened)
    return (opened,)


def size_of(entry: Entry) -> int:
    """Return the approximate bytes that an entry writes; of a history only the new part counts."""
    match entry:
        case TokensAppended():
            content = len(entry.tokens) + len(entry.text)
        case OpenedChunk():
            content = CHUNK_BYTES
        case SessionOpened(parent=None):
            content = sum(map(_message_size, entry.history.messages))
        case TurnEnded(history=history):
            content = _size_from(history, history.turns[-1].n_before if history.turns else 0)
        case HistoryChanged(history=history):
            content = _size_from(history, history.turns[-1].n_messages if history.turns else 0)
        case TurnQueued(spec=spec):
            content = len(spec.request.prompt or "") + sum(
                map(_message_size, plain_messages(spec.request.messages or ()))
            )
        case PresetStored(preset=preset):
            content = len(preset.text or preset.system or "")
        case ShareRecorded(messages=messages):
            content = sum(map(_message_size, messages))
        case SessionDeleted(n_chars=n_chars):
            content = min(n_chars, CHUNK_BYTES)
        case _:
            content = 0
    return ROW_BYTES + content


def _is_long(messages: Iterable[ChatMessage], notes: Iterable[str]) -> bool:
    total = 0
    for weight in chain(map(_message_size, messages), map(len, notes)):
        total += weight
        if total > CHUNK_BYTES:
            return True
    return False


def _chunks_of_opened(record: SessionOpened) -> Iterator[OpenedChunk]:
    total, is_first = 0, True
    for n, message in enumerate(record.history.messages, 1):
        total += _message_size(message)
        if total >= CHUNK_BYTES:
            yield OpenedChunk(record, n, 0, is_first=is_first)
            total, is_first = 0, False
    n_messages = len(record.history.messages)
    for n, turn in enumerate(record.turns, 1):
        total += ROW_BYTES + len(record.notes.get(turn.turn_id, ""))
        if total >= CHUNK_BYTES:
            yield OpenedChunk(record, n_messages, n, is_first=is_first)
            total, is_first = 0, False
    yield OpenedChunk(record, n_messages, len(record.turns), is_first=is_first, is_last=True)


def _message_size(message: ChatMessage) -> int:
    return ROW_BYTES + chars_of(message)


def _size_from(history: History, start: int) -> int:
    new = history.messages[max(start, len(history.messages) - _MAX_NEW_MESSAGES) :]
    return sum(map(_message_size, new))


class QueuedEntry(NamedTuple):
    """An entry to write; ``durable`` if it has to survive a power failure."""

    entry: Entry
    durable: bool


@dataclass(slots=True)
class _ClientQueue:
    """The queue of one client; ``parts`` are the remaining chunks of the entry that is being written."""

    items: deque[QueuedEntry | ReleaseCallback] = field(default_factory=deque)
    parts: deque[Entry] = field(default_factory=deque)
    durable: bool = False


class WriteQueue:
    """The queues of all clients, drained round-robin."""

    def __init__(self) -> None:
        self._queues: dict[str, _ClientQueue] = {}
        self._n_pending: Counter[str] = Counter()
        self._unswept: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._queues or self._unswept)

    def add(self, client_id: str, item: QueuedEntry | ReleaseCallback) -> None:
        """Queue an entry of a client, or a callback that follows its entries."""
        queue = self._queues.get(client_id)
        if queue is None:
            queue = self._queues[client_id] = _ClientQueue()
        queue.items.append(item)
        self._n_pending[client_id] += 1

    def add_after(self, client_id: str, callback: ReleaseCallback) -> bool:
        """Queue a callback behind what is pending of a client; return ``False`` if nothing is."""
        if client_id not in self._n_pending and client_id not in self._unswept:
            return False
        self.add(client_id, callback)
        return True

    def n_pending(self, client_id: str) -> int:
        """Return the number of a client's entries and callbacks that are queued or in flight, or being deleted."""
        return self._n_pending.get(client_id, 0) + (client_id in self._unswept)

    def take(self) -> WriteBatch:
        """Return the next batch; clients with pending deletions are skipped."""
        batch = WriteBatch()
        left = BATCH_BYTES
        while left > 0 and (ready := [client_id for client_id in self._queues if client_id not in self._unswept]):
            for client_id in ready:
                left -= self._move(client_id, batch, min(SHARE_BYTES, left))
                if left <= 0:
                    break
        return batch

    def take_all(self) -> WriteBatch:
        batch = WriteBatch()
        for client_id in tuple(self._queues):
            while client_id in self._queues:
                self._move(client_id, batch, BATCH_BYTES)
        return batch

    def requeue_callbacks(self, batch: WriteBatch, unswept: Collection[str]) -> None:
        """Put the callbacks of clients with pending deletions back to the front of their queues."""
        self._unswept = frozenset(unswept)
        for client_id, callback in reversed(batch.callbacks):
            if client_id in self._unswept:
                self._queues.setdefault(client_id, _ClientQueue()).items.appendleft(callback)
                batch.counts[client_id] -= 1
        batch.callbacks = [each for each in batch.callbacks if each[0] not in self._unswept]

    def done(self, batch: WriteBatch) -> None:
        """Mark a batch as completed."""
        for client_id, count in batch.counts.items():
            self._n_pending[client_id] -= count
            if not self._n_pending[client_id]:
                del self._n_pending[client_id]

    def _move(self, client_id: str, batch: WriteBatch, share: int) -> int:
        """Move up to ``share`` bytes from a client's queue to a batch and return the bytes moved.

        A client with more queued goes to the end of the line.
        """
        queue = self._queues.pop(client_id)
        weight = 0
        while queue.items or queue.parts:
            if not queue.parts:
                item = queue.items[0]
                if isinstance(item, QueuedEntry):
                    if weight >= share:
                        break
                    entry = item.entry
                    queue.parts.extend(chunks_of(entry) if isinstance(entry, SessionOpened) else (entry,))
                    queue.durable = item.durable
                else:
                    # All entries before this callback are in this transaction or an earlier one.
                    batch.callbacks.append((client_id, item))
                    batch.counts[client_id] += 1
                queue.items.popleft()
                continue
            if weight >= share:
                break
            part = queue.parts.popleft()
            batch.entries.append(part)
            batch.durable |= queue.durable
            batch.counts[client_id] += not queue.parts
            weight += size_of(part)
        if queue.items or queue.parts:
            self._queues[client_id] = queue
        return weight


class SessionStore:
    """Sessions on disk; implements ``Journal``. Except for ``open``, methods run on the event loop and never block.

    A file that is permanently not writable has a ``fault`` from the start: its readable sessions are loaded, nothing is
    written, and nothing is held back.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        path: Path,
        *,
        database: sqlite3.Connection | None,
        fault: StorageFault | None,
        search: bool = True,
        retry_s: float = RETRY_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self.was_clean = database is None or _is_clean(database)
        has_index = False
        if database is not None and fault is None:
            _archive_unused(database, clean=self.was_clean)
            has_index = _prepare_index(database, is_wanted=search)
        contents = read_all(database) if database is not None else StoreContents([], {})
        self.reader = _StoreReader(self, path)
        for name, reason in contents.unreadable.items():
            _log.error("session_unreadable", session=name, reason=reason)
        self.presets = contents.presets
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
        if database is not None and fault is None:
            recorder = Recorder(database, {each.session.config.session_id: each.location for each in contents.found})
            _sweep(recorder)
            self.identity = FileIdentity.of(path)
            self._writer = StoreWriter(
                path,
                database=database,
                recorder=recorder,
                search=SearchMaintenance(database) if has_index else None,
                identity=self.identity,
                committed=self._committed,
                fault_changed=self._fault_changed,
                retry_s=retry_s,
                probe_s=probe_s,
            )
        elif database is not None:
            database.close()

    @classmethod
    def open(
        cls, path: Path, *, search: bool = True, retry_s: float = RETRY_S, probe_s: float = PROBE_S
    ) -> SessionStore:
        """Open or create the file at ``path``, private to its owner, and load it. Blocks; call before the loop runs.

        Args:
            path: The SQLite file.
            search: Whether texts are indexed; if not, an existing index is deleted.
            retry_s: Seconds between retries while it cannot be written.
            probe_s: Seconds between checks of an idle file.

        Raises:
            InferenceCenterError: ``storage_unavailable`` for a file of a newer version, or one that another program
                locks. Any other fault does not raise: see ``fault``.
        """
        file = open_file(path)
        return cls(path, database=file.database, fault=file.fault, search=search, retry_s=retry_s, probe_s=probe_s)

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
            if not self._is_scheduled:
                self._schedule()

    def purge(self, kind: PurgeKind, name: str, *, client_id: str = "") -> None:
        """Delete everything that the file holds of a session, or of a client and its sessions.

        This includes sessions that could not be loaded. An open session must be released by its owner first. The
        ``client_id`` of a session, where it is known, puts the deletion in order with the client's records.
        """
        self.add(name if kind == "client" else client_id, Purge(kind, name), durable=True)

    def release(self, callback: Callable[[], None], *, client_id: str = "") -> None:
        """Call ``callback`` once all earlier records of the client are safe; see ``Journal``."""
        if not self._queue.add_after(client_id, callback):
            callback()
        elif not self._is_scheduled:
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
        self.reader.close()
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
        if self._queue and not self._is_scheduled:
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


class _StoreReader(ArchiveReader):
    """Reads archived sessions, and records those that are live again; implements ``SessionReader``."""

    def __init__(self, store: SessionStore, path: Path) -> None:
        super().__init__(path)
        self._store = store

    def reopen(self, read_session: ReadSession) -> None:
        assert isinstance(read_session, LoadedSession), "it was read here"
        config = read_session.session.config
        self._store.add(config.client_id, SessionReopened(config.session_id, read_session.location), durable=False)


def _archive_unused(database: sqlite3.Connection, *, clean: bool) -> None:
    try:
        archive_unused(database, clean=clean)
    except sqlite3.Error as error:
        # All are loaded then; the next start tries again.
        _log.warning("unused_sessions_not_archived", reason=str(error))


def _prepare_index(database: sqlite3.Connection, *, is_wanted: bool) -> bool:
    try:
        return prepare_index(database, is_wanted=is_wanted)
    except sqlite3.Error as error:
        # Nothing was changed; the next start tries again.
        _log.warning("search_index_not_prepared", reason=str(error))
        return False


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
