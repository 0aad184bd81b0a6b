"""Which sessions there are, whose they are, how many there may be, and when each expires.

Sessions are indexed by name, client and socket, so that no operation walks over all of them: what one costs depends on
the sessions of one client or one socket.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, TypeVar

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.expiry import ExpiryQueue
from inferencecenter.sessions.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from inferencecenter.sessions.client import Client, EventSink
    from inferencecenter.sessions.facts import Timer
    from inferencecenter.sessions.session import Session

MIN_TTL_S: Final = 1.0
"""Seconds that a session is kept at least: a shorter ``ttl_s`` counts as this, however many clients set it."""
_CLOSE_ONE: Final = (
    "Close one that is no longer needed (list_sessions shows them). A stored session is closed to make room only where"
    " the operator has set sessions.when_full to evict."
)
_DAY_S: Final = 86_400.0
_Key = TypeVar("_Key", str, int)


class Roster:
    """The open sessions, oldest first.

    Args:
        max_sessions: Of all clients together.
        default_ttl_s: Idle seconds after which a session expires that sets no own; ``None`` for never.
        retention_days: Days after its last use at which a session is deleted, whatever it sets; ``None`` for never.
        evicts_stored: Whether a stored session may be closed to make room for another.
        monotonic: Seconds that only rise.
        call_later: Arranges for a call after some seconds.
        expire: Called with a session whose time has come, and that is no longer here.
    """

    def __init__(  # noqa: PLR0913 - keyword-only
        self,
        *,
        max_sessions: int,
        default_ttl_s: float | None,
        retention_days: float | None,
        evicts_stored: bool,
        monotonic: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Timer],
        expire: Callable[[Session], None],
    ) -> None:
        self._max_sessions = max_sessions
        self._default_ttl_s = default_ttl_s
        self._retention_days = retention_days
        self._evicts_stored = evicts_stored
        self._monotonic = monotonic
        self._expire = expire
        self._sessions: dict[str, Session] = {}
        self._stored_of: defaultdict[str, dict[str, Session]] = defaultdict(dict)
        # Both in the order of their last use.
        self._stateless: dict[str, Session] = {}
        self._stateless_of: defaultdict[str, dict[str, Session]] = defaultdict(dict)
        # By ``id``: a socket lives for as long as a session refers to it.
        self._of_sink: defaultdict[int, dict[str, Session]] = defaultdict(dict)
        self._expiries = ExpiryQueue(monotonic=monotonic, call_later=call_later, due=self._look)
        self._own_retention_days: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all sessions."""
        return tuple(self._sessions)

    def get(self, session_id: str) -> Session | None:
        """Return a session by its name, whoever has it."""
        return self._sessions.get(session_id)

    def of(self, client_id: str) -> list[Session]:
        """Return the sessions of a client, oldest first, without the stateless ones."""
        return list(self._stored_of.get(client_id, {}).values())

    def stateless_of(self, client_id: str) -> list[Session]:
        """Return the stateless sessions of a client, the one used longest ago first."""
        return list(self._stateless_of.get(client_id, {}).values())

    def all_of(self, client_id: str) -> list[Session]:
        """Return all sessions of a client."""
        return self.of(client_id) + self.stateless_of(client_id)

    def page(self, client_id: str, *, after: str | None, limit: int) -> tuple[list[Session], bool]:
        """Return up to ``limit`` of a client's sessions from behind ``after`` on, and whether there are more.

        Raises:
            InferenceCenterError: ``session_not_found`` when ``after`` names none of them.
        """
        own = self._stored_of.get(client_id, {})
        if after is not None and after not in own:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        start = 0 if after is None else list(own).index(after) + 1
        return list(islice(own.values(), start, start + limit)), len(own) > start + limit

    def n_of(self, client_id: str) -> int:
        """Return how many sessions a client has, without the stateless ones."""
        return len(self._stored_of.get(client_id, {}))

    def attached_to(self, sink: EventSink) -> list[Session]:
        """Return the sessions whose events go to ``sink``."""
        return list(self._of_sink.get(id(sink), {}).values())

    def own(self, client: Client, session_id: str) -> Session:
        """Return a client's own session.

        Raises:
            InferenceCenterError: ``session_not_found``, whether it is another's or there is none.
        """
        session = self._sessions.get(session_id)
        if session is None or session.facts.client_id != client.client_id:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        return session

    def make_room(self, client: Client, *, stateless: bool, keeping: Session | None) -> Session | None:
        """Make sure that a client may have another session; return the one that has to be closed for it, if any.

        It is the client's own oldest without a socket or a running turn; one that is stored only where
        that was set. Where the daemon has no room, a stateless one of any client goes first; one of them takes no
        other's place. A client has as many of these as of others at most; of its own the one that was used longest ago
        goes.

        Args:
            client: Who wants one.
            stateless: Whether it is a stateless one.
            keeping: A session that may not go.

        Raises:
            InferenceCenterError: ``session_limit``.
        """
        n_own = len(self._stateless_of.get(client.client_id, {})) if stateless else self.n_of(client.client_id)
        everybodys = n_own < client.max_sessions
        if everybodys and len(self._sessions) < self._max_sessions:
            return None
        spare = None
        if stateless or everybodys:
            spare = self._spare(client, everybodys=everybodys, keeping=keeping)
        if spare is None and not stateless:
            spare = next((each for each in self.of(client.client_id) if self._may_be_evicted(each, keeping)), None)
        if spare is not None:
            return spare
        if everybodys:
            message = f"all {self._max_sessions} sessions of this daemon are in use"
            hint = (
                "Try again later." if stateless else "Close one of yours that is no longer needed, or try again later."
            )
        else:
            message = f"this client has {n_own} sessions of {client.max_sessions}"
            hint = "Try again later." if stateless else _CLOSE_ONE
        raise InferenceCenterError(ErrorCode.SESSION_LIMIT, message, hint=hint)

    def learn_retention(self, own_days: Mapping[str, float | None]) -> None:
        """Take note of how long clients want their sessions kept, from now on; ``None`` is as the daemon says."""
        for client_id, days in own_days.items():
            if self._own_retention_days.get(client_id) != days:
                # Most clients want what the daemon says: they take no room.
                self._own_retention_days.pop(client_id, None)
                if days is not None:
                    self._own_retention_days[client_id] = days
                for session in self.all_of(client_id):
                    self._watch(session)

    def add(self, session: Session) -> None:
        """Take in a session, whatever the limits."""
        name, facts = session.facts.session_id, session.facts
        self._sessions[name] = session
        if facts.stateless:
            self._stateless[name] = self._stateless_of[facts.client_id][name] = session
        else:
            self._stored_of[facts.client_id][name] = session
        if session.sink is not None:
            self._of_sink[id(session.sink)][name] = session
        self._watch(session)

    def remove(self, session: Session) -> None:
        """Let a session go."""
        name, facts = session.facts.session_id, session.facts
        del self._sessions[name]
        self._stateless.pop(name, None)
        _drop(self._stateless_of if facts.stateless else self._stored_of, facts.client_id, name)
        if session.sink is not None:
            _drop(self._of_sink, id(session.sink), name)
        self._expiries.discard(name)

    def used(self, session: Session) -> None:
        """Take note that a session is used now; the order in which stateless ones go depends on it."""
        name, facts = session.facts.session_id, session.facts
        if facts.stateless:
            for held in (self._stateless, self._stateless_of[facts.client_id]):
                held[name] = held.pop(name)

    def moved(self, session_id: str, before: EventSink | None, after: EventSink | None) -> None:
        """Take note that a session's events go to another socket, or to none; one that is not here does not matter."""
        session = self._sessions.get(session_id)
        if session is None or before is after:
            return
        if before is not None:
            _drop(self._of_sink, id(before), session_id)
        if after is not None:
            self._of_sink[id(after)][session_id] = session

    def _may_be_evicted(self, session: Session, keeping: Session | None) -> bool:
        is_spare = session.sink is None and _may_go(session, keeping)
        return is_spare and (self._evicts_stored or not session.facts.store)

    def _spare(self, client: Client, *, everybodys: bool, keeping: Session | None) -> Session | None:
        """Return the stateless session that is missed least: of the client, or else of ``everybodys``."""
        own: Iterable[Session] = self._stateless_of.get(client.client_id, {}).values()
        others: Iterator[Session] = iter(self._stateless.values() if everybodys else ())
        return next((session for session in chain(own, others) if _may_go(session, keeping)), None)

    def _look(self, session_id: str) -> None:
        self._watch(self._sessions[session_id])

    def _watch(self, session: Session) -> None:
        """Expire the session, or look again when it may be time: use does not move the timer, this does."""
        limit_s = self._idle_limit_s(session)
        if limit_s is None:
            self._expiries.discard(session.facts.session_id)
            return
        left_s = limit_s - session.idle_s
        if left_s > 0:
            self._expiries.put(session.facts.session_id, self._monotonic() + left_s)
        else:
            self.remove(session)
            self._expire(session)

    def _idle_limit_s(self, session: Session) -> float | None:
        facts = session.facts
        own_days = self._own_retention_days.get(facts.client_id)
        days = self._retention_days if own_days is None else own_days
        ttl_s = self._default_ttl_s if facts.ttl_s is None else facts.ttl_s
        limits_s = [limit_s for limit_s in (ttl_s, None if days is None else days * _DAY_S) if limit_s is not None]
        return max(MIN_TTL_S, min(limits_s)) if limits_s else None


def ttl_warnings(ttl_s: float | None) -> tuple[str, ...]:
    """Return a sentence for a ``ttl_s`` that counts as another."""
    return () if ttl_s is None or ttl_s >= MIN_TTL_S else (f"ttl_s counts as {MIN_TTL_S:g}: it is shorter.",)


def _may_go(session: Session, keeping: Session | None) -> bool:
    return session.state is SessionState.IDLE and session is not keeping


def _drop(held: defaultdict[_Key, dict[str, Session]], key: _Key, name: str) -> None:
    """Remove a session from one of the indices, and with the last one its entry."""
    sessions = held.get(key, {})
    sessions.pop(name, None)
    if not sessions:
        held.pop(key, None)
