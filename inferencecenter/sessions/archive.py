"""Archived sessions: stored, not in memory, and loaded on use.

A live session is in the table and counts against the client's ``max_sessions``; an archived one is only in the store. A
client's least recently used session is archived when another needs its place, and every request that names an archived
session loads it first. Loads run on a thread that clients share in turn, and one at a time for each client, after
everything the client has written is committed. Invariant: a session is live or archived, never both, and no change
between the two loses or deletes anything.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_worker import FairWorker
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol import events
from inferencecenter.protocol.values import SessionResult, SessionSummary, SessionUsage, TextHit, TextRange
from inferencecenter.sessions.journal import SessionDeleted, ShareDeleted
from inferencecenter.sessions.search import search_terms
from inferencecenter.sessions.session import LiveSession
from inferencecenter.sessions.table import MAX_BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferencecenter.protocol.requests import ListSessions, SearchSessions
    from inferencecenter.sessions.context import EventSink, Principal, ScheduledCall, SessionConfig, SessionServices
    from inferencecenter.sessions.event_log import SessionNotifier
    from inferencecenter.sessions.journal import Journal, SessionArchived, StoredSession
    from inferencecenter.sessions.search import SearchHit, SearchResult, SearchTerm
    from inferencecenter.sessions.table import SessionTable


SessionOrder: TypeAlias = Literal["oldest", "recent"]
"""By creation, or by last use with the latest first."""
ROW_CHARS: Final = 4096
"""What each archived session counts beside its text."""
EXPIRY_INTERVAL_S: Final = 60.0
"""Seconds between looks for archived sessions whose idle limit is over."""
MAX_RETAINED: Final = 1000
"""Archived sessions whose KV a new engine keeps on disk, the latest."""
MAX_SINKS: Final = 10_000
"""Archived sessions whose subscriber is kept, the latest."""
_NEARLY: Final = 0.9
_MAX_READS: Final = 4
_SEARCHED_CHARS: Final = 128
"""Characters that are searched for a word in the time in which one is read."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ArchiveSize:
    """The number of archived sessions of a client, and the characters of their texts."""

    n_sessions: int = 0
    n_chars: int = 0

    @property
    def counted_chars(self) -> int:
        """Number of characters that counts against the limit of the archive."""
        return self.n_chars + ROW_CHARS * self.n_sessions

    def plus(self, n_chars: int) -> ArchiveSize:
        """Return the size with a session of ``n_chars`` added."""
        return ArchiveSize(self.n_sessions + 1, self.n_chars + n_chars)

    def less(self, n_chars: int) -> ArchiveSize:
        """Return the size with a session of ``n_chars`` removed."""
        return ArchiveSize(max(0, self.n_sessions - 1), max(0, self.n_chars - n_chars))


@dataclass(frozen=True, slots=True)
class ArchivedSession:
    """An archived session in a listing; ``last_used_at`` is in Unix seconds."""

    config: SessionConfig
    n_messages: int
    n_tokens: int
    n_chars: int
    last_used_at: float
    ttl_s: float | None


class ReadSession(Protocol):
    """An archived session that was read."""

    @property
    def session(self) -> StoredSession: ...


class ArchiveStore(Protocol):
    """Storage of archived sessions. All methods but ``reopen`` block; one thread calls ``search``, another the rest."""

    def read(self, client_id: str, session_id: str) -> ReadSession | None: ...

    def reopen(self, read_session: ReadSession) -> None:
        """Record that a session is live again, before its further records. Called on the event loop."""

    def page(
        self, client_id: str, *, order: SessionOrder, after: tuple[float, str] | None, limit: int
    ) -> tuple[ArchivedSession, ...]:
        """Return up to ``limit`` archived sessions of a client after a position: a time and a session id."""

    def search(
        self, client_id: str, terms: Sequence[SearchTerm], *, after: tuple[float, str] | None, limit: int
    ) -> SearchResult | None:
        """Return up to ``limit`` stored sessions of a client, live or archived, that contain all terms.

        ``None`` if the texts are not indexed.
        """

    def created_at(self, client_id: str, session_id: str) -> float | None:
        """Return when an archived session of a client was created."""

    def find_tagged(self, client_id: str, name: str, prefix: str) -> tuple[str, ...]:
        """Return the archived sessions of a client whose entry ``name`` of the metadata begins with ``prefix``."""

    def owner(self, session_id: str) -> tuple[str, int] | None:
        """Return the client and the characters of an archived session."""

    def sizes(self) -> dict[str, ArchiveSize]:
        """Return the size of each client's archive."""

    def least_used(self, client_id: str, limit: int) -> list[tuple[str, int]]:
        """Return the ids and characters of a client's archived sessions used least recently."""

    def due(
        self,
        now: float,
        *,
        default_ttl_s: float | None,
        own_days: Mapping[str, float],
        default_days: float | None,
        limit: int,
    ) -> list[tuple[str, str, int]]:
        """Return expired archived sessions: their ids, clients and characters."""

    def expired_shares(self, now: float, limit: int) -> tuple[tuple[str, str], ...]:
        """Return the ids and the clients of shares that have expired, in Unix seconds."""

    def recent(self, limit: int) -> tuple[tuple[str, str], ...]:
        """Return the ids and the clients of the most recently used archived sessions."""


class SessionArchive:
    """Moves sessions between memory and the store, and counts what clients have archived.

    Args:
        store: Storage of archived sessions; ``None`` if none are archived.
        journal: Orders reads after earlier writes.
        services: The services of the daemon.
        table: The live sessions.
        notifier: Notifies a client's other sockets of changes of its sessions.
        make_room: Makes room for a session with so many characters, or raises ``session_limit`` or ``quota_exceeded``.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        store: ArchiveStore | None,
        *,
        journal: Journal,
        services: SessionServices,
        table: SessionTable,
        notifier: SessionNotifier,
        make_room: Callable[[Principal, int], None],
    ) -> None:
        self._store = store
        self._journal = journal
        self._services = services
        self._table = table
        self._notifier = notifier
        self._make_room = make_room
        self._worker = FairWorker("archive")
        self._search_worker = FairWorker("search")
        self._sizes: dict[str, ArchiveSize] = {}
        self._own_mib: dict[str, int] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._kv_owners: OrderedDict[str, str] = OrderedDict()
        self._sinks: OrderedDict[str, EventSink] = OrderedDict()
        self._tasks = TaskGroup("archive")
        self._timer: ScheduledCall | None = None
        self._n_removals = 0
        self._started_at = services.clock() - services.monotonic()
        self.n_archived = 0
        self.n_loaded = 0

    def open(self) -> None:
        """Count what is archived, and begin to expire it. Blocks; called once, before there are clients."""
        if self._store is None:
            return
        try:
            self._sizes = self._store.sizes()
            recent = self._store.recent(MAX_RETAINED)
        except InferenceCenterError:  # logged where it is read: a file that cannot be read has no archive
            return
        self._kv_owners.update(reversed(recent))
        self._expire_later()

    @property
    def n_sessions(self) -> int:
        """Number of archived sessions of all clients."""
        return sum(size.n_sessions for size in self._sizes.values())

    def size_of(self, client_id: str) -> ArchiveSize:
        return self._sizes.get(client_id, ArchiveSize())

    @property
    def kv_owners(self) -> tuple[str, ...]:
        """The archived sessions whose KV a new engine keeps."""
        return tuple(self._kv_owners)

    def add(self, client_id: str, archived: SessionArchived, sink: EventSink | None) -> None:
        """Count a session that was archived, and keep its subscriber."""
        if sink is not None:
            self._sinks[archived.session_id] = sink
            if len(self._sinks) > MAX_SINKS:
                self._sinks.popitem(last=False)
        self._sizes[client_id] = self.size_of(client_id).plus(archived.n_chars)
        self._kv_owners[archived.session_id] = client_id
        if len(self._kv_owners) > MAX_RETAINED:
            self._kv_owners.popitem(last=False)
        self.n_archived += 1
        if self._services.settings.when_full == "evict" and self._is_nearly_full(client_id):
            self._tasks.spawn(self._evict(client_id), name="eviction")

    def detach(self, sink: EventSink) -> None:
        """Forget a socket that is closed."""
        for session_id in [each for each, held in self._sinks.items() if held is sink]:
            del self._sinks[session_id]

    def usage(self, client: Principal) -> SessionUsage:
        """Return how much of its limits a client uses."""
        size = self.size_of(client.client_id)
        own_days = self._table.own_retention_days.get(client.client_id)
        return SessionUsage(
            live=self._table.count_of(client.client_id),
            max_sessions=client.max_sessions,
            archived=size.n_sessions,
            stored_chars=self._stored_chars(client.client_id),
            max_stored_chars=self._max_chars(client.client_id),
            retention_days=self._services.settings.retention_days if own_days is None else own_days,
        )

    def searched_chars(self, client_id: str, query: str) -> int:
        """Return the characters that a search costs: those of all texts for each word or phrase.

        Raises:
            InferenceCenterError: ``invalid_request`` for too many words.
        """
        return len(search_terms(query)) * self._stored_chars(client_id) // _SEARCHED_CHARS

    def check_new(self, client_id: str) -> tuple[str, ...]:
        """Refuse another stored session of a client whose archive is full; return warnings before that.

        Raises:
            InferenceCenterError: ``quota_exceeded``.
        """
        held, most = self._stored_chars(client_id), self._max_chars(client_id)
        if held >= most:
            raise InferenceCenterError(
                ErrorCode.QUOTA_EXCEEDED,
                f"this client stores {held} characters in {self.size_of(client_id).n_sessions} archived sessions and"
                f" those in use; {most} are allowed",
                field="store",
                hint="Delete sessions that are no longer needed (close_session; list_sessions shows them), or have the"
                " operator raise archive_mib of the account, or sessions.archive_mib for all. A session with store"
                " false can be opened meanwhile.",
            )
        if not self._is_nearly_full(client_id):
            return ()
        return (f"Stored sessions hold {100 * held // most} % of what archive_mib allows; none is deleted.",)

    async def load(self, client: Principal, session_id: str, *, closing: bool = False) -> bool:
        """Load an archived session of a client; return whether one was loaded.

        Nothing happens for an id that is live or unknown. A session to be closed needs no room.

        Raises:
            InferenceCenterError: ``session_limit``, ``quota_exceeded`` or ``storage_unavailable``.
        """
        client_id = client.client_id
        store = self._store
        if store is None or not self.size_of(client_id).n_sessions or self._table.get(session_id) is not None:
            return False
        lock = self._locks.setdefault(client_id, asyncio.Lock())  # held here: the table forgets it otherwise
        async with lock:
            for _ in range(_MAX_READS):
                if self._table.get(session_id) is not None:
                    return False
                n_removals = self._n_removals
                found = await self.run(client_id, partial(store.read, client_id, session_id))
                if found is None:
                    return False
                # A purge or an expiry meanwhile may have deleted it.
                if n_removals == self._n_removals:
                    self._open(store, client, found, closing=closing)
                    return True
        raise InferenceCenterError(ErrorCode.OVERLOADED, "stored sessions are being deleted", retry_after_ms=1000)

    async def find_tagged(self, client: Principal, name: str, prefix: str) -> tuple[str, ...]:
        """Return the archived sessions of a client whose entry ``name`` of the metadata begins with ``prefix``."""
        if self._store is None or not self.size_of(client.client_id).n_sessions:
            return ()
        return await self.run(client.client_id, partial(self._store.find_tagged, client.client_id, name, prefix))

    async def list(self, client: Principal, request: ListSessions) -> events.Sessions:
        """Return a page of the client's own sessions, live and archived.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` names none of them, ``invalid_request`` when it
                is no cursor of this order, or ``storage_unavailable``.
        """
        client_id, before, stored = client.client_id, self._summaries(client.client_id), {}
        after = await self._position(client, request)
        if self._store is not None and self.size_of(client_id).n_sessions:
            page = partial(self._store.page, client_id, order=request.order, after=after, limit=request.limit + 1)
            stored = {each.config.session_id: self._summary(each) for each in await self.run(client_id, page)}
        # What was archived or loaded meanwhile is in one of the three.
        merged = before | stored | self._summaries(client_id)
        is_recent = request.order == "recent"
        keys = {
            (each.last_used_at if is_recent else each.created_at, each.session_id): each for each in merged.values()
        }
        following = sorted(keys, reverse=is_recent)
        if after is not None:
            following = [key for key in following if (key < after if is_recent else key > after)]
        shown = [keys[key] for key in following[: request.limit]]
        cursor = None
        if len(following) > request.limit:
            last = shown[-1]
            cursor = f"{last.last_used_at!r}:{last.session_id}" if is_recent else last.session_id
        return events.Sessions(sessions=tuple(shown), next=cursor, session_usage=self.usage(client))

    async def search(self, client: Principal, request: SearchSessions) -> events.SessionsFound:
        """Return a page of the client's own stored sessions that match a query, live and archived.

        Raises:
            InferenceCenterError: ``invalid_request`` for too many words or hits, or an ``after`` that is no cursor,
                ``unknown_op`` without an index, or ``storage_unavailable``.
        """
        client_id, terms = client.client_id, search_terms(request.query)
        after = None if request.after is None else _time_cursor(request.after)
        found: SearchResult | None = None
        before = self._summaries(client_id)
        if self._store is not None:
            await self.committed(client_id)
            search = partial(self._store.search, client_id, terms, after=after, limit=request.limit)
            found = await self._search_worker.run(client_id, search)
        if found is None:
            raise InferenceCenterError(
                ErrorCode.UNKNOWN_OP,
                "this daemon does not search the texts of sessions",
                hint="The operator can switch it on with sessions.search; list_sessions has the titles.",
            )
        # A live session that is in neither was archived and loaded, or closed, meanwhile.
        live = before | self._summaries(client_id)
        results: list[SessionResult] = []
        for each in found.found:
            session_id = each.session.config.session_id
            summary = self._summary(each.session) if each.is_archived else live.get(session_id)
            if summary is not None:
                results.append(SessionResult(session=summary, hits=tuple(map(_text_hit, each.hits))))
        last = found.found[-1].session if found.has_more else None
        return events.SessionsFound(
            results=tuple(results),
            next=None if last is None else f"{last.last_used_at!r}:{last.config.session_id}",
            indexed=found.indexed,
        )

    async def purged(self, kind: Literal["session", "client"], name: str) -> str | None:
        """Note that a session, or all of a client, is about to be deleted from the store; engines drop their KV.

        Returns:
            The client, if the session was archived before; it may have been loaded meanwhile.

        Raises:
            InferenceCenterError: ``storage_unavailable``.
        """
        owner: str | None = name
        if kind == "client":
            self._sizes.pop(name, None)
            for session_id in [each for each, client_id in self._kv_owners.items() if client_id == name]:
                self._forget(session_id)
        else:
            owner = await self._purged_session(name)
        self._n_removals += 1
        return owner

    async def _purged_session(self, session_id: str) -> str | None:
        if self._store is None:
            return None
        if (recent := self._kv_owners.get(session_id)) is not None:
            await self.committed(recent)  # that it is archived may not be in the file yet
        found = await self._worker.run("", partial(self._store.owner, session_id))
        if found is None:
            return None
        owner, n_chars = found
        if self._table.get(session_id) is None:
            self._removed(owner, n_chars)
            self._forget(session_id)
        return owner

    def _open(self, store: ArchiveStore, client: Principal, read_session: ReadSession, *, closing: bool) -> None:
        stored = read_session.session
        n_chars = stored.history.size.n_chars + sum(map(len, stored.notes.values()))
        if not closing:
            self._make_room(client, n_chars)
        store.reopen(read_session)
        # It gets `session_detached` when another socket resumes the session.
        sink = self._sinks.pop(stored.config.session_id, None)
        self._kv_owners.pop(stored.config.session_id, None)
        self._removed(client.client_id, n_chars)
        self.n_loaded += 1
        self._table.add(LiveSession.restored(stored, stored.config, services=self._services, sink=sink))

    def _forget(self, session_id: str) -> None:
        """Drop the KV and the subscriber of an archived session that is deleted."""
        self._kv_owners.pop(session_id, None)
        self._sinks.pop(session_id, None)
        self._services.models.release(session_id)

    def _removed(self, client_id: str, n_chars: int) -> None:
        size = self.size_of(client_id).less(n_chars)
        self._sizes[client_id] = size
        if not size.n_sessions:
            del self._sizes[client_id]

    def set_limit(self, client_id: str, mib: int | None) -> None:
        """Set the Mi characters that a client may store; ``None`` selects the default of the daemon."""
        if mib is None:
            self._own_mib.pop(client_id, None)
        else:
            self._own_mib[client_id] = mib

    def _max_chars(self, client_id: str) -> int:
        return self._own_mib.get(client_id, self._services.settings.archive_mib) * 1024 * 1024

    def _is_nearly_full(self, client_id: str) -> bool:
        return self._stored_chars(client_id) >= _NEARLY * self._max_chars(client_id)

    def _stored_chars(self, client_id: str) -> int:
        return self.size_of(client_id).counted_chars + self._services.text_quota.of(client_id)

    async def _position(self, client: Principal, request: ListSessions) -> tuple[float, str] | None:
        """Return the time and the id after which a page begins."""
        if request.after is None:
            return None
        if request.order == "recent":
            return _time_cursor(request.after)
        if self._store is None or self._table.get(request.after) is not None:
            created_at: float | None = self._table.get_owned(client, request.after).config.created_at
        else:
            lookup = partial(self._store.created_at, client.client_id, request.after)
            created_at = await self.run(client.client_id, lookup)
        if created_at is None:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        return created_at, request.after

    def _summaries(self, client_id: str) -> dict[str, SessionSummary]:
        return {each.config.session_id: each.snapshot.summary() for each in self._table.of_client(client_id)}

    def _summary(self, archived: ArchivedSession) -> SessionSummary:
        config = archived.config
        return SessionSummary(
            session_id=config.session_id,
            state="idle",
            mode=config.mode,
            model=self._services.models.name(config.chosen_model),
            messages=archived.n_messages,
            tokens=archived.n_tokens,
            created_at=config.created_at,
            last_used_at=archived.last_used_at,
            metadata=config.metadata,
            archived=True,
        )

    async def run(self, client_id: str, work: Callable[[], _Result]) -> _Result:
        """Read, after everything that the client has written is committed.

        Raises:
            InferenceCenterError: ``storage_unavailable``, also while the store cannot write what has to come first.
        """
        await self.committed(client_id)
        return await self._worker.run(client_id, work)

    async def committed(self, client_id: str) -> None:
        """Wait until everything that the client has written is committed.

        Raises:
            InferenceCenterError: ``storage_unavailable`` while the store cannot write.
        """
        journal = self._journal.of_client(client_id)
        if journal.fault is not None and journal.n_pending:
            raise InferenceCenterError(
                ErrorCode.STORAGE_UNAVAILABLE, journal.fault.message, retry_after_ms=journal.fault.retry_after_ms
            )
        if journal.n_pending:
            committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            journal.release(lambda: None if committed.done() else committed.set_result(None))
            await committed

    def _expire_later(self) -> None:
        def expire() -> None:
            self._tasks.spawn(self._expire_in_turn(), name="expiry")

        self._timer = self._services.call_later(EXPIRY_INTERVAL_S, expire)

    async def _expire_in_turn(self) -> None:
        self._expire_later()
        while await self.expire() == MAX_BATCH:
            pass
        while await self.expire_shares() == MAX_BATCH:
            pass

    async def close(self) -> None:
        """Stop expiring."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel()

    async def settled(self) -> None:
        """Wait until what was begun is done."""
        await self._tasks.join()

    async def expire(self) -> int:
        """Delete up to ``MAX_BATCH`` archived sessions whose idle limit is over; return their number."""
        if self._store is None or self._journal.fault is not None or not self._sizes:
            return 0
        settings = self._services.settings
        # As with live sessions a change of the clock while the daemon runs expires nothing.
        due = partial(
            self._store.due,
            self._started_at + self._services.monotonic(),
            default_ttl_s=settings.default_ttl_s,
            own_days=self._table.own_retention_days,
            default_days=settings.retention_days,
            limit=MAX_BATCH,
        )
        found = await self._worker.run("", due)
        for session_id, client_id, n_chars in found:
            self._delete(client_id, session_id, n_chars)
        return len(found)

    async def expire_shares(self) -> int:
        """Delete up to ``MAX_BATCH`` shares that have expired; return their number."""
        if self._store is None or self._journal.fault is not None:
            return 0
        found = await self._worker.run("", partial(self._store.expired_shares, self._services.clock(), MAX_BATCH))
        for share_id, client_id in found:
            self._journal.of_client(client_id).write(ShareDeleted(share_id=share_id, client_id=client_id), flush=False)
        for client_id in {client_id for _, client_id in found}:
            await self.committed(client_id)
        return len(found)

    async def _evict(self, client_id: str) -> None:
        """Delete the least recently used archived sessions of a client until its archive is no longer nearly full."""
        assert self._store is not None, "sessions are archived"
        for session_id, n_chars in await self.run(client_id, partial(self._store.least_used, client_id, MAX_BATCH)):
            if self._journal.fault is not None or not self._is_nearly_full(client_id):
                break
            self._delete(client_id, session_id, n_chars)

    def _delete(self, client_id: str, session_id: str, n_chars: int) -> None:
        if self._table.get(session_id) is not None:  # loaded meanwhile
            return
        self._n_removals += 1
        self._removed(client_id, n_chars)
        self._forget(session_id)
        journal = self._journal.of_client(client_id)
        journal.write(SessionDeleted(session_id=session_id, n_chars=n_chars), flush=True)
        self._notifier.notify_deleted(session_id, client_id, journal=journal)


def _time_cursor(after: str) -> tuple[float, str]:
    """Return the time and the session id of a cursor by last use.

    Raises:
        InferenceCenterError: ``invalid_request``.
    """
    time, _, session_id = after.partition(":")
    try:
        return float(time), session_id
    except ValueError:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            "after is not a cursor of this order",
            field="after",
            hint="Pass `next` of the previous page, with the same order.",
        ) from None


def _text_hit(hit: SearchHit) -> TextHit:
    return TextHit(
        snippet=hit.snippet,
        marks=tuple(TextRange(start=start, end=end) for start, end in hit.marks),
        message_index=hit.message_index,
        role=hit.role,
        turn_id=hit.turn_id,
    )
