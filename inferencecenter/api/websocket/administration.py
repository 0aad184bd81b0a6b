"""Ops for usage, and for operators and administrators: connected clients, kick, drain."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from inferencecenter.auth.audit import AuditEvent
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.protocol import events
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import ConnectedClient, UsageDay, UsageLeft
from inferencecenter.server.context import UsageReader
from inferencecenter.sessions.store.rows import utc_day

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.api.websocket.connection import Connection
    from inferencecenter.protocol import requests
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.hub import ClientSocket


_DAY_S: Final = 86_400


def usage(connection: Connection, request: requests.Usage) -> None:
    """Return a client's usage."""
    client = connection.client
    whose = request.client_id or client.client_id
    if whose != client.client_id and Scope.OPERATOR not in client.scopes:
        raise InferenceCenterError(
            ErrorCode.FORBIDDEN,
            f"the usage of others requires the scope {Scope.OPERATOR}",
            field="client_id",
            hint="Omit it for your own usage.",
        )
    connection.defer(partial(_report, connection, request, whose))


async def _report(connection: Connection, request: requests.Usage, whose: str) -> None:
    context = connection.context
    since = utc_day(max(0.0, context.clock() - (request.days - 1) * _DAY_S))
    try:
        # Not in the shared thread pool: one client on many sockets would occupy all threads.
        days = await context.disk_worker.run(
            connection.client.client_id, partial(_days, context.read_usage, whose, since)
        )
    except InferenceCenterError as error:
        connection.fail(error, request_id=request.id)
        return
    left = _left(connection) if whose == connection.client.client_id else None
    connection.replay((events.UsageReport(id=request.id, client_id=whose, days=days, left=left),))


def _days(read: UsageReader, whose: str, since: str) -> tuple[UsageDay, ...]:
    return tuple(
        UsageDay(
            day=line.day,
            turns=line.turns,
            prompt_tokens=line.prompt_tokens,
            cached_tokens=line.cached_tokens,
            completion_tokens=line.completion_tokens,
        )
        for line in read(whose, since)
    )


def _left(connection: Connection) -> UsageLeft:
    context, client = connection.context, connection.client
    quota = context.quotas.of(client.client_id, client.token_id)
    return UsageLeft(
        tokens_today=quota.used_today,
        day_ends_in_ms=max(0, quota.day_ends_ms - round(context.clock() * 1000)),
        turns=quota.running,
        requests_left=quota.requests_left,
        minute_tokens_left=quota.minute_tokens_left,
        day_tokens_left=quota.day_tokens_left,
    )


def list_clients(connection: Connection, _request: requests.ListClients) -> Event:
    connection.audit(AuditEvent.CLIENTS_LISTED)
    clients = connection.context.hub.clients().items()
    return events.Clients(
        clients=tuple(_described(connection.context, client_id, sockets) for client_id, sockets in clients)
    )


def _described(context: ServerContext, client_id: str, sockets: Sequence[ClientSocket]) -> ConnectedClient:
    sessions, busy = context.sessions.session_counts(client_id)
    return ConnectedClient(
        client_id=client_id,
        connections=len(sockets),
        addresses=len({each.address for each in sockets}),
        sessions=sessions,
        busy=busy,
        tokens_today=context.quotas.used_today(client_id),
    )


def kick(connection: Connection, request: requests.Kick) -> None:
    """Close the sockets of a client, and drop the cached answers of the external service about it."""
    context = connection.context
    sockets, participants = context.hub.of_client(request.client_id), context.hub.participants_of(request.client_id)
    if not sockets and not participants:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"client_id is {request.client_id!r}, which has no open socket",
            field="client_id",
            hint="list_clients lists connected clients.",
        )
    connection.audit(AuditEvent.CLIENT_KICKED, detail=request.client_id)
    context.authenticator.forget(request.client_id)
    # First, as the requesting socket may be one of them.
    n_closed = len(sockets) + len(participants)
    connection.send(events.Kicked(id=request.id, client_id=request.client_id, connections=n_closed))
    for each in sockets:
        each.close(CloseCode.POLICY, "an administrator closed the socket")
    for participant in participants:
        participant.close(CloseCode.POLICY, "an administrator closed the socket")


def drain(connection: Connection, _request: requests.Drain) -> Event:
    """Acknowledge, and begin the shutdown of the daemon."""
    context = connection.context
    connection.audit(AuditEvent.DRAIN_ASKED)
    context.stop()
    return events.Draining(deadline_ms=round(context.settings.shutdown_timeout_s * 1000))
