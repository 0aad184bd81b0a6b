"""Which sessions there are, whose they are, how many there may be, and when each expires."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.states import SessionState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from inferencecenter.sessions.client import Client
    from inferencecenter.sessions.facts import Timer
    from inferencecenter.sessions.session import Session

_DAY_S: Final = 86_400.0
_MAX_TIMER_S: Final = _DAY_S


class Roster:
    """The open sessions, oldest first.

    Args:
        max_sessions: Of all clients together.
        default_ttl_s: Idle seconds after which a session expires that sets no own; ``None`` for never.
        retention_days: Days after its last use at which a session is deleted, whatever it sets; ``None`` for never.
        call_later: Arranges for a call after some seconds.
        expire: Called with a session whose time has come, and that is no longer here.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        default_ttl_s: float | None,
        retention_days: float | None,
        call_later: Callable[[float, Callable[[], None]], Timer],
        expire: Callable[[Session], None],
    ) -> None:
        self._max_sessions = max_sessions
        self._default_ttl_s = default_ttl_s
        self._retention_days = retention_days
        self._call_later = call_later
        self._expire = expire
        self._sessions: dict[str, Session] = {}
        self._of_client: defaultdict[str, dict[str, Session]] = defaultdict(dict)
        self._expiries: dict[str, Timer] = {}
        self._own_retention_days: dict[str, float | None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def get(self, session_id: str) -> Session | None:
        """Return a session by its name, whoever has it."""
        return self._sessions.get(session_id)

    def of(self, client_id: str) -> list[Session]:
        """Return the sessions of a client, oldest first, without the stateless ones."""
        return [session for session in self.all_of(client_id) if not session.facts.stateless]

    def stateless_of(self, client_id: str) -> list[Session]:
        """Return the stateless sessions of a client, oldest first."""
        return [session for session in self.all_of(client_id) if session.facts.stateless]

    def all_of(self, client_id: str) -> list[Session]:
        """Return all sessions of a client, oldest first."""
        return list(self._of_client.get(client_id, {}).values())

    def own(self, client: Client, session_id: str) -> Session:
        """Return a client's own session.

        Raises:
            InferenceCenterError: ``session_not_found``, whether it is another's or there is none.
        """
        session = self._of_client.get(client.client_id, {}).get(session_id)
        if session is None:
            raise InferenceCenterError(ErrorCode.SESSION_NOT_FOUND)
        return session

    def make_room(self, client: Client, *, stateless: bool, keeping: Session | None) -> Session | None:
        """Make sure that a client may have another session; return the one that has to be closed for it, if any.

        It is the client's own oldest that nobody listens to and that does not answer. Where the daemon has no room, a
        stateless one goes first, whoever has it; one of them takes no other's place. A client has as many of these as
        of others at most; of its own the one that was used longest ago goes.

        Args:
            client: Who wants one.
            stateless: Whether it is a stateless one.
            keeping: A session that may not go.

        Raises:
            InferenceCenterError: ``session_limit``.
        """
        own = self.stateless_of(client.client_id) if stateless else self.of(client.client_id)
        everybodys = len(own) < client.max_sessions
        if everybodys and len(self._sessions) < self._max_sessions:
            return None
        spare = None
        if stateless or everybodys:
            spare = self._spare(client, everybodys=everybodys, keeping=keeping)
        if spare is None and not stateless:
            spare = next((session for session in own if session.sink is None and _may_go(session, keeping)), None)
        if spare is not None:
            return spare
        raise InferenceCenterError(
            ErrorCode.SESSION_LIMIT,
            f"all {self._max_sessions} sessions of this daemon are in use"
            if everybodys
            else f"this client has {len(own)} sessions of {client.max_sessions}",
            hint="Try again later." if everybodys or stateless else "Close one of them: list_sessions shows them.",
        )

    def learn_retention(self, own_days: Mapping[str, float | None]) -> None:
        """Take note of how long clients want their sessions kept, from now on; ``None`` is as the daemon says."""
        for client_id, days in own_days.items():
            if self._own_retention_days.get(client_id) != days:
                self._own_retention_days[client_id] = days
                for session in self.all_of(client_id):
                    self._watch(session)

    def add(self, session: Session) -> None:
        """Take in a session, whatever the limits."""
        self._sessions[session.facts.session_id] = session
        self._of_client[session.facts.client_id][session.facts.session_id] = session
        self._watch(session)

    def remove(self, session: Session) -> None:
        """Let a session go."""
        facts = session.facts
        del self._sessions[facts.session_id]
        own = self._of_client[facts.client_id]
        del own[facts.session_id]
        if not own:
            del self._of_client[facts.client_id]
        self._unwatch(session)

    def _spare(self, client: Client, *, everybodys: bool, keeping: Session | None) -> Session | None:
        """Return the stateless session that is missed least: of the client, or else of ``everybodys``."""
        for sessions in (self.stateless_of(client.client_id), self if everybodys else ()):
            spare = [each for each in sessions if each.facts.stateless and _may_go(each, keeping)]
            if spare:
                return max(spare, key=lambda session: session.idle_s)
        return None

    def _watch(self, session: Session) -> None:
        """Expire the session, or look again when it may be time: use does not move the timer, this does."""
        self._unwatch(session)
        limit_s = self._idle_limit_s(session)
        if limit_s is None:
            return
        left_s = limit_s - session.idle_s
        if left_s > 0:
            delay_s = min(left_s, _MAX_TIMER_S)
            self._expiries[session.facts.session_id] = self._call_later(delay_s, lambda: self._watch(session))
        else:
            self.remove(session)
            self._expire(session)

    def _unwatch(self, session: Session) -> None:
        if (expiry := self._expiries.pop(session.facts.session_id, None)) is not None:
            expiry.cancel()

    def _idle_limit_s(self, session: Session) -> float | None:
        facts = session.facts
        own_days = self._own_retention_days.get(facts.client_id)
        days = self._retention_days if own_days is None else own_days
        ttl_s = self._default_ttl_s if facts.ttl_s is None else facts.ttl_s
        limits_s = [ttl_s, None if days is None else days * _DAY_S]
        return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)


def _may_go(session: Session, keeping: Session | None) -> bool:
    return session.state is SessionState.IDLE and session is not keeping
