"""All live connections and participants of the other APIs: their limits, broadcasts and the drain at shutdown."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import structlog

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol.close import CloseCode
from inferencecenter.server.connection_limits import UnauthenticatedSockets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from inferencecenter.auth.account import Account
    from inferencecenter.config.limits import AccessLimits
    from inferencecenter.config.settings import ServerSettings
    from inferencecenter.protocol.base import Event
    from inferencecenter.sessions.context import AccountLimits
    from inferencecenter.telemetry.metrics import DaemonMetrics


_MAX_TIMER_S: Final = 7 * 86_400.0


class Deadline:
    """Calls a function once at a given time, unless it is cancelled before; made and used on the event loop.

    Args:
        delay_s: Seconds until then; with a negative value it is called soon, but never immediately.
        passed: The function.
    """

    __slots__ = ("_passed", "_timer")

    def __init__(self, delay_s: float, passed: Callable[[], object]) -> None:
        self._passed = passed
        self._timer = self._arm(delay_s)

    def cancel(self) -> None:
        self._timer.cancel()

    def _arm(self, delay_s: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        # A deadline beyond the longest sensible timer is checked again when that timer ends.
        if delay_s > _MAX_TIMER_S:
            return loop.call_later(_MAX_TIMER_S, self._again, delay_s - _MAX_TIMER_S)
        return loop.call_later(max(0.0, delay_s), self._passed)

    def _again(self, delay_s: float) -> None:
        self._timer = self._arm(delay_s)


BUSY_RETRY_MS: Final = 1000
"""Retry hint when the daemon is full; when a place becomes free is unknown."""

EXPIRED: Final = "the token has expired"
"""Close reason when a token has expired."""

_MISPLACED: Final = "the token is not valid for this address"

_Each = TypeVar("_Each")

_log = structlog.get_logger(__name__)


class ClientSocket(Protocol):
    """A WebSocket of the daemon's own protocol, as the hub sees it."""

    address: str
    v1: bool

    @property
    def authenticated(self) -> bool: ...

    @property
    def client(self) -> Account:
        """The client, once it is authenticated."""

    def send(self, event: Event) -> None: ...

    def set_account_limits(self, limits: AccountLimits) -> None:
        """Set the limits of the sessions of its client."""

    def drain(self, deadline_s: float) -> None:
        """Announce the shutdown, and close once no turn is running."""

    def close(self, code: CloseCode, reason: str) -> None:
        """Close after all queued frames were sent."""

    def evict(self) -> None:
        """Close at once."""


class Participant(Protocol):
    """A client of another API: an HTTP request in progress, or a socket of the Responses API."""

    @property
    def client(self) -> Account:
        """The authenticated client."""

    @property
    def address(self) -> str:
        """Remote address."""

    def set_account_limits(self, limits: AccountLimits) -> None:
        """Set the limits of the sessions of its client."""

    def drain(self, deadline_s: float) -> None:
        """Start nothing new, and leave when the running work has ended, within ``deadline_s``."""

    def close(self, code: CloseCode, reason: str) -> None:
        """Leave soon, even with running work."""


class ConnectionHub:
    """The live connections, and the participants, which count towards the same limits.

    Unauthenticated sockets are counted separately and never displace a client.

    Args:
        settings: Maximum numbers of connections, to which sockets and participants count alike.
        on_authenticated: Called with the address of a socket that authenticates after its upgrade.
        metrics: Where they are counted.
    """

    def __init__(
        self, settings: ServerSettings, *, on_authenticated: Callable[[str], object], metrics: DaemonMetrics
    ) -> None:
        self._max_connections = settings.max_connections
        self._max_per_client = settings.max_connections_per_client
        self._unauthenticated: UnauthenticatedSockets[ClientSocket] = UnauthenticatedSockets(
            most=settings.max_unauthenticated, most_per_address=settings.max_unauthenticated_per_address
        )
        self._on_authenticated = on_authenticated
        self._metrics = metrics
        self._connections: set[ClientSocket] = set()
        self._participants: set[Participant] = set()
        self._per_client: Counter[str] = Counter()
        self._n_of_clients = 0
        self._of_client: defaultdict[str, set[ClientSocket]] = defaultdict(set)
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def full(self) -> bool:
        """Whether the limit of all clients together is reached."""
        return self._n_of_clients >= self._max_connections

    def add(self, connection: ClientSocket) -> None:
        """Add a socket; beyond the limit of unauthenticated ones, the oldest of them is closed."""
        self._connections.add(connection)
        self._metrics.connections.inc()
        self._empty.clear()
        if connection.authenticated:
            return
        evicted = self._unauthenticated.admit(connection, address=connection.address)
        self._count_unauthenticated()
        if evicted is not None:
            self._metrics.evicted_connections.inc()
            evicted.evict()

    def remove(self, connection: ClientSocket) -> None:
        self._connections.discard(connection)
        self._unauthenticated.discard(connection)
        self._count_unauthenticated()
        self._metrics.connections.dec()
        self._look_if_empty()

    def enter(self, participant: Participant) -> None:
        """Add a participant.

        Raises:
            InferenceCenterError: ``engine_unavailable`` while the daemon stops, ``queue_full`` when there is no room,
                ``rate_limited`` when its client has too many.
        """
        self.check_open()
        self.join(participant.client.client_id)
        self._participants.add(participant)
        self._empty.clear()

    def exit(self, participant: Participant) -> None:
        self._participants.discard(participant)
        self.leave(participant.client.client_id)
        self._look_if_empty()

    def check_open(self) -> None:
        """Refuse new connections while the daemon stops or is full.

        Raises:
            InferenceCenterError: ``engine_unavailable`` or ``queue_full``.
        """
        if self.draining:
            raise InferenceCenterError(ErrorCode.ENGINE_UNAVAILABLE, "the daemon is about to stop")
        self._check_full()

    def _check_full(self) -> None:
        if self.full:
            raise InferenceCenterError(
                ErrorCode.QUEUE_FULL,
                "the daemon has too many connections",
                retry_after_ms=BUSY_RETRY_MS,
            )

    def check_room(self, client_id: str) -> None:
        """Refuse a client that has reached its limit of sockets.

        Raises:
            InferenceCenterError: ``rate_limited``.
        """
        if self._per_client[client_id] >= self._max_per_client:
            raise InferenceCenterError(
                ErrorCode.RATE_LIMITED,
                f"this client has {self._max_per_client} connections, as many as it may have",
                hint="Close one; one connection carries any number of sessions.",
                retry_after_ms=BUSY_RETRY_MS,
            )

    def join(self, client_id: str, connection: ClientSocket | None = None) -> None:
        """Count a socket of a client, or a participant, which is ``None``.

        Raises:
            InferenceCenterError: ``rate_limited`` when it has too many, ``queue_full`` when all clients together have.
        """
        self._check_full()
        self.check_room(client_id)
        self._per_client[client_id] += 1
        self._n_of_clients += 1
        if connection is not None:
            if self._unauthenticated.discard(connection):
                self._on_authenticated(connection.address)
            self._count_unauthenticated()
            self._of_client[client_id].add(connection)

    def leave(self, client_id: str, connection: ClientSocket | None = None) -> None:
        """Stop counting a socket of a client, or a participant, which is ``None``."""
        self._per_client[client_id] -= 1
        self._n_of_clients -= 1
        if not self._per_client[client_id]:
            del self._per_client[client_id]
        if connection is not None:
            self._of_client[client_id].discard(connection)
            if not self._of_client[client_id]:
                del self._of_client[client_id]

    def broadcast(self, event: Event) -> None:
        """Send an event to every authenticated socket."""
        _each((each for each in self._connections if each.authenticated), lambda each: each.send(event))

    def notify_client(self, client_id: str, event: Event, excluded: tuple[object, ...]) -> None:
        """Send an event to the sockets of a client, except those excluded and those of the first protocol."""
        recipients = [
            each for each in self.of_client(client_id) if each.v1 and not any(each is one for one in excluded)
        ]
        _each(recipients, lambda each: each.send(event))

    def close_revoked(self, living_tokens: frozenset[str]) -> None:
        """Close the sockets whose token is not among ``living_tokens``."""
        tokens = [each for each in self._members() if each.client.token_id]
        revoked = [each for each in tokens if each.client.token_id not in living_tokens]
        _close(revoked, CloseCode.NOT_AUTHENTICATED, "the token was revoked")

    def close_changed_users(self, account_of: Callable[[Account], Account | None]) -> None:
        """Close the sockets that were authenticated by user id, where the account is gone or has other rights.

        Args:
            account_of: Returns the present account, given the one of the socket.
        """
        users = [each for each in self._members() if each.client.unix_uid is not None]
        accounts = {each.client.unix_uid: each.client for each in users}
        current = {uid: account_of(account) for uid, account in accounts.items()}
        changed = [each for each in users if _rights(each.client) != _rights(current[each.client.unix_uid])]
        _close(changed, CloseCode.NOT_AUTHENTICATED, "the account of this user was deleted or changed")

    def set_account_limits(self, limits: Mapping[str, AccountLimits]) -> None:
        """Set the limits of the sessions of clients with tokens, by client id."""
        for each in self._members():
            if _has_stored_account(each.client) and (own := limits.get(each.client.client_id)) is not None:
                each.set_account_limits(own)

    def close_clients(self, client_ids: Collection[str]) -> None:
        """Close the sockets of these clients that authenticated with an API key, which may have changed."""
        keys = [each for each in self._members() if not each.client.token_id]
        changed = [each for each in keys if each.client.client_id in client_ids]
        _close(changed, CloseCode.NOT_AUTHENTICATED, "the client's API key or limits have changed")

    def close_outdated(self, client_id: str, scopes: Collection[str], priority: str) -> None:
        """Close the sockets of a client that authenticated by a token with other scopes or another priority."""
        members = (
            each for each in self._members() if each.client.client_id == client_id and _has_stored_account(each.client)
        )
        outdated = [each for each in members if (each.client.scopes, each.client.priority) != (scopes, priority)]
        _close(outdated, CloseCode.RESTART, "the client's scopes or priority have changed")

    def of_client(self, client_id: str) -> list[ClientSocket]:
        return list(self._of_client.get(client_id, ()))

    @property
    def participants(self) -> frozenset[Participant]:
        return frozenset(self._participants)

    def participants_of(self, client_id: str) -> list[Participant]:
        return [each for each in self._participants if each.client.client_id == client_id]

    def tokens_in_use(self) -> set[tuple[str, str]]:
        """Return the client and token ids of all sockets and participants; an API key has the empty token id."""
        return {(each.client.client_id, each.client.token_id) for each in self._members()}

    def clients(self) -> dict[str, list[ClientSocket]]:
        """Return the sockets of each connected client, by client id."""
        return {client_id: list(sockets) for client_id, sockets in sorted(self._of_client.items())}

    def close_disallowed(self, limits_of: Callable[[str, str], AccessLimits]) -> None:
        """Close the sockets from addresses that their tokens no longer allow.

        Args:
            limits_of: Returns the limits of a token, given the ids of its client and of the token.
        """
        misplaced = [
            each
            for each in self._members()
            if not limits_of(each.client.client_id, each.client.token_id).allows_address(each.address)
        ]
        _close(misplaced, CloseCode.NOT_AUTHENTICATED, _MISPLACED)

    async def drain(self, deadline_s: float) -> None:
        """Announce the shutdown to all clients and wait until they have left, at most ``deadline_s``.

        A socket or participant leaves when its running turns have ended; at the deadline it is closed regardless.
        """
        self.draining = True
        _each([*self._connections, *self._participants], lambda each: each.drain(deadline_s))
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("drain_deadline", connections=len(self._connections), guests=len(self._participants))
            _close([*self._connections, *self._participants], CloseCode.RESTART, "the daemon stops")

    def _members(self) -> list[Participant]:
        """Return the authenticated sockets and the participants."""
        return [*(each for each in self._connections if each.authenticated), *self._participants]

    def _count_unauthenticated(self) -> None:
        self._metrics.unauthenticated_connections.set(len(self._unauthenticated))

    def _look_if_empty(self) -> None:
        if not self._connections and not self._participants:
            self._empty.set()


def _has_stored_account(account: Account) -> bool:
    """Return whether a socket was authenticated by a token or a user id, whose account may change while it is open."""
    return bool(account.token_id) or account.unix_uid is not None


def _rights(account: Account | None) -> tuple[object, ...]:
    return () if account is None else (account.client_id, account.scopes, account.priority)


def _close(members: Iterable[Participant], code: CloseCode, reason: str) -> None:
    _each(members, lambda each: each.close(code, reason))


def _each(them: Iterable[_Each], do: Callable[[_Each], None]) -> None:
    """Apply a function to each; an exception for one does not affect the others."""
    for one in tuple(them):
        try:
            do(one)
        except Exception:  # noqa: BLE001 - boundary between one connection and all others
            _log.exception("connection_failed", connection=repr(one))
