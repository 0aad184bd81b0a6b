"""The table of open sessions: lookup, limits, eviction and expiry.

Sessions are indexed by id, client and socket, so that the cost of an operation depends on the
sessions of one client or one socket, not on all of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from inferencecenter.config.settings import SessionSettings
    from inferencecenter.sessions.context import EventSink, Principal, ScheduledCall
    from inferencecenter.sessions.session import LiveSession


MAX_BATCH: Final = 100
"""Sessions handled per iteration of the event loop; the rest follows in the next."""
_MAX_TIMER_S: Final = 86_400.0
_SPARE_ENTRIES: Final = 64
MIN_TTL_S: Final = 1.0
"""Minimum idle seconds of a session: a shorter ``ttl_s`` is raised to this, which bounds the rate of expiries."""
_CLOSE_ONE: Final = (
    "Close one that is no longer needed (list_sessions shows them). A stored session is closed to make room only if"
    " the operator has set sessions.when_full to evict."
)
_WAIT: Final = "None can be archived now: wait until a turn has ended, or close one (list_sessions shows them)."
_DAY_S: Final = 86_400.0
_Key = TypeVar("_Key", str, int)


class ExpiryQueue:
    """Calls back for each key when it is due.

    A key that is put again or discarded leaves its old entry in the heap, which is skipped later. The heap is rebuilt
    when most entries are stale, so it stays within twice the number of keys.

    Args:
        monotonic: Monotonic seconds.
        call_later: Schedules a call after some seconds.
        due: Called with a key that was removed from the queue; may put it again.
    """

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], ScheduledCall],
        due: Callable[[str], None],
    ) -> None:
        self._monotonic = monotonic
        self._call_later = call_later
        self._due = due
        self._due_at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._timer: ScheduledCall | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._due_at)

    def put(self, key: str, at: float) -> None:
        """Schedule ``key`` for ``at``, replacing its earlier entry."""
        self._due_at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._due_at) + _SPARE_ENTRIES:
            self._heap = [(due_at, name) for name, due_at in self._due_at.items()]
            heapq.heapify(self._heap)
        self._arm()

    def discard(self, key: str) -> None:
        """Remove a key, if present."""
        self._due_at.pop(key, None)
        if not self._due_at:
            self._heap.clear()
            self._disarm()

    def _arm(self) -> None:
        if not self._heap:
            return
        now = self._monotonic()
        at = min(max(self._heap[0][0], now), now + _MAX_TIMER_S)
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._call_later(at - now, self._fire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        now = self._monotonic()
        for _ in range(MAX_BATCH):
            if not self._heap or self._heap[0][0] > now:
                break
            at, key = heapq.heappop(self._heap)
            if self._due_at.get(key) == at:
                del self._due_at[key]
                self._due(key)
        self._arm()


class SessionTable:
    """The open sessions, oldest first.

    Args:
        settings: Number of sessions, their expiry, and whether stored ones may be closed to make room for others.
        monotonic: Monotonic seconds.
        call_later: Schedules a call after some seconds.
        expire: Called with an expired session after its removal.
        archives: Whether stored sessions are archived to make room.
    """

    def __init__(
        self,
        settings: SessionSettings,
        *,
        archives: bool,
        monotonic: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], ScheduledCall],
        expire: Callable[[LiveSession], None],
    ) -> None:
        self._settings = settings
        self.archives = archives
        self._monotonic = monotonic
        self._expire = expire
        self._sessions: dict[str, LiveSession] = {}
        self._listed_of: defaultdict[str, dict[str, LiveSession]] = defaultdict(dict)
        # Both in the order of last use.
        self._stateless: dict[str, LiveSession] = {}
        self._stateless_of: defaultdict[str, dict[str, LiveSession]] = defaultdict(dict)
        # Keyed by ``id``; a session holds a reference to its sink, so the id stays valid.
        self._of_sink: defaultdict[int, dict[str, LiveSession]] = defaultdict(dict)
        self._expiries = ExpiryQueue(monotonic=monotonic, call_later=call_later, due=self._on_due)
        self.own_retention_days: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(tuple(self._sessions.values()))

    @property
    def session_ids(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    def get(self, session_id: str) -> LiveSession | None:
        """Return a session of any client by its id."""
        return self._sessions.get(session_id)

    def of_client(self, client_id: str) -> list[LiveSession]:
        """Return the sessions of a client, oldest first, without the stateless ones."""
        return list(self._listed_of.get(client_id, {}).values())

    def stateless_of(self, client_id: str) -> list[LiveSession]:
        """Return a client's stateless sessions, least recently used first."""
        return list(self._stateless_of.get(client_id, {}).values())

    def all_of(self, client_id: str, *, at_most: int | None = None) -> list[LiveSession]:
        """Return all sessions of a client, or some of them."""
        own = chain(self._listed_of.get(client_id, {}).values(), self._stateless_of.get(client_id, {}).values())
        return list(islice(own, at_most))

    def page(self, client_id: str, *, after: str | None, limit: int) -> tuple[list[LiveSession], bool]:
        """Return up to ``limit`` of a client's sessions after ``after``, and whether there are more.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` is not one of them.
        """
        own = self._listed_of.get(client_id, {})
        if after is not None and after not in own:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        start = 0 if after is None else list(own).index(after) + 1
        return list(islice(own.values(), start, start + limit)), len(own) > start + limit

    def count_of(self, client_id: str) -> int:
        """Return the number of a client's sessions, without the stateless ones."""
        return len(self._listed_of.get(client_id, {}))

    def attached_to(self, sink: EventSink) -> list[LiveSession]:
        """Return the sessions whose subscriber is ``sink``."""
        return list(self._of_sink.get(id(sink), {}).values())

    def get_owned(self, client: Principal, session_id: str) -> LiveSession:
        """Return a client's own session.

        Raises:
            InferenceCenterError: ``session_not_found``, also if another client owns it.
        """
        session = self._sessions.get(session_id)
        if session is None or session.config.client_id != client.client_id:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        return session

    def select_victim(self, client: Principal, *, stateless: bool, excluded: LiveSession | None) -> LiveSession | None:
        """Check the limits for a new session; return the session that gives way to it, if one is needed.

        At the daemon's limit it is the least recently used idle stateless session, one of the client first, then one of
        any client. Otherwise, and at the client's own limit, it is the client's least recently used session that can be
        archived, else its oldest idle, detached session that is not stored; where nothing is archived, a stored one
        with ``when_full`` ``evict``. At the daemon's limit a session of another client may be archived. A new stateless
        session replaces only stateless ones at the client's limit; a client may have as many of them as of the others.

        Args:
            client: The owner of the new session.
            stateless: Whether the new session is stateless.
            excluded: A session that must not be closed.

        Raises:
            InferenceCenterError: ``session_limit``.
        """
        n_own = len(self._stateless_of.get(client.client_id, {})) if stateless else self.count_of(client.client_id)
        within_own_limit = n_own < client.max_sessions
        if within_own_limit and len(self._sessions) < self._settings.max_sessions:
            return None
        victim = None
        if stateless or within_own_limit:
            victim = self._idle_stateless(client, within_own_limit=within_own_limit, excluded=excluded)
        if victim is None and not stateless:
            own = self.of_client(client.client_id)
            victim = self.least_used(client.client_id, excluded=excluded) or next(
                (each for each in own if self._may_be_evicted(each, excluded)), None
            )
        if victim is None and within_own_limit and self.archives:
            victim = next((each for each in self._sessions.values() if each.sink is None and each.is_archivable), None)
        if victim is not None:
            return victim
        if within_own_limit:
            field = "sessions.max_sessions"
            message = f"all {self._settings.max_sessions} sessions of this daemon are in use"
            hint = (
                "Try again later." if stateless else "Close one of yours that is no longer needed, or try again later."
            )
        else:
            field = "max_sessions"
            message = f"this client has {n_own} sessions of {client.max_sessions}"
            hint = "Try again later." if stateless else _WAIT if self.archives else _CLOSE_ONE
        raise InferenceCenterError(ErrorCode.SESSION_LIMIT, message, hint=hint, field=field)

    def least_used(self, client_id: str, *, excluded: LiveSession | None = None) -> LiveSession | None:
        """Return the client's least recently used session that can be archived, a detached one if there is one."""
        if not self.archives:
            return None
        own = [each for each in self.of_client(client_id) if each.is_archivable and each is not excluded]
        return min(own, key=lambda each: (each.sink is not None, -each.unused_s, -each.idle_s), default=None)

    def set_retention(self, client_id: str, days: float | None) -> None:
        """Set the retention of a client in days; ``None`` selects the default of the daemon."""
        if self.own_retention_days.get(client_id) != days:
            # Clients with the default have no entry.
            self.own_retention_days.pop(client_id, None)
            if days is not None:
                self.own_retention_days[client_id] = days
            for session in self.all_of(client_id):
                self._schedule_expiry(session)

    def add(self, session: LiveSession) -> None:
        """Add a session, regardless of the limits."""
        name, config = session.config.session_id, session.config
        self._sessions[name] = session
        if config.stateless:
            self._stateless[name] = self._stateless_of[config.client_id][name] = session
        else:
            self._listed_of[config.client_id][name] = session
        if session.sink is not None:
            self._of_sink[id(session.sink)][name] = session
        self._schedule_expiry(session)

    def remove(self, session: LiveSession) -> None:
        name, config = session.config.session_id, session.config
        del self._sessions[name]
        self._stateless.pop(name, None)
        _drop(self._stateless_of if config.stateless else self._listed_of, config.client_id, name)
        if session.sink is not None:
            _drop(self._of_sink, id(session.sink), name)
        self._expiries.discard(name)

    def touch(self, session: LiveSession) -> None:
        """Mark a stateless session as the most recently used."""
        name, config = session.config.session_id, session.config
        if config.stateless:
            for held in (self._stateless, self._stateless_of[config.client_id]):
                held[name] = held.pop(name)

    def on_sink_changed(self, session_id: str, before: EventSink | None, after: EventSink | None) -> None:
        """Update the index of subscribers; an unknown session is ignored."""
        session = self._sessions.get(session_id)
        if session is None or before is after:
            return
        if before is not None:
            _drop(self._of_sink, id(before), session_id)
        if after is not None:
            self._of_sink[id(after)][session_id] = session

    def _may_be_evicted(self, session: LiveSession, excluded: LiveSession | None) -> bool:
        is_spare = session.sink is None and _is_closable(session, excluded)
        may_be_deleted = self._settings.when_full == "evict" and not self.archives
        return is_spare and (may_be_deleted or not session.config.store)

    def _idle_stateless(
        self, client: Principal, *, within_own_limit: bool, excluded: LiveSession | None
    ) -> LiveSession | None:
        """Return the least recently used idle stateless session: the client's own, then any if ``within_own_limit``."""
        own: Iterable[LiveSession] = self._stateless_of.get(client.client_id, {}).values()
        others: Iterator[LiveSession] = iter(self._stateless.values() if within_own_limit else ())
        return next((session for session in chain(own, others) if _is_closable(session, excluded)), None)

    def _on_due(self, session_id: str) -> None:
        self._schedule_expiry(self._sessions[session_id])

    def _schedule_expiry(self, session: LiveSession) -> None:
        """Expire the session, or schedule the next check: use does not move the timer, the check does."""
        limit_s = self._idle_limit_s(session)
        if limit_s is None:
            self._expiries.discard(session.config.session_id)
            return
        left_s = limit_s - session.idle_s
        if left_s > 0:
            self._expiries.put(session.config.session_id, self._monotonic() + left_s)
        else:
            self.remove(session)
            self._expire(session)

    def _idle_limit_s(self, session: LiveSession) -> float | None:
        config = session.config
        own_days = self.own_retention_days.get(config.client_id)
        days = self._settings.retention_days if own_days is None else own_days
        ttl_s = self._settings.default_ttl_s if config.ttl_s is None else config.ttl_s
        limits_s = [limit_s for limit_s in (ttl_s, None if days is None else days * _DAY_S) if limit_s is not None]
        return max(MIN_TTL_S, min(limits_s)) if limits_s else None


def ttl_warnings(ttl_s: float | None) -> tuple[str, ...]:
    """Return a warning if ``ttl_s`` is raised to the minimum."""
    return () if ttl_s is None or ttl_s >= MIN_TTL_S else (f"ttl_s is raised to the minimum of {MIN_TTL_S:g}.",)


def _is_closable(session: LiveSession, excluded: LiveSession | None) -> bool:
    return session.state is SessionState.IDLE and not session.runs_mcp_calls and session is not excluded


def _drop(held: defaultdict[_Key, dict[str, LiveSession]], key: _Key, name: str) -> None:
    sessions = held.get(key, {})
    sessions.pop(name, None)
    if not sessions:
        held.pop(key, None)
