"""Ops for usage, and for operators and administrators: connected clients, sessions, the audit log, drain."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from inferencecenter import __version__
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.link import NodeResources
from inferencecenter.models.registry import LOCAL_NODE
from inferencecenter.protocol import events
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import (
    AccountSession,
    AccountUsage,
    AuditRecord,
    ClusterEngine,
    ClusterGpu,
    ClusterNode,
    ClusterRpcServer,
    ConnectedClient,
    HistorySeries,
    UsageDay,
    UsageLeft,
)
from inferencecenter.server.context import UsageReader
from inferencecenter.server.load_history import STEP_S
from inferencecenter.sessions.store.rows import utc_day
from inferencecenter.supervisor.nodes import machine_resources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferencecenter.api.websocket.connection import Connection
    from inferencecenter.hardware.nvml import Gpus
    from inferencecenter.protocol import requests
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.context import ServerContext
    from inferencecenter.server.hub import ClientSocket
    from inferencecenter.sessions.session import LiveSession
    from inferencecenter.sessions.store.archive import SessionLine, UsageLine
    from inferencecenter.supervisor.nodes import NodeStatus


_MIB: Final = 2**20
_DAY_S: Final = 86_400
_MOST_STEPS: Final = 360
_MAX_ACCOUNT_DAYS: Final = 4000
"""Maximum number of days of all accounts in a reply, which is encoded on the event loop: 6 ms."""


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
    context = connection.context
    since = utc_day(max(0.0, context.clock() - (request.days - 1) * _DAY_S))

    async def report() -> Event:
        # Not in the shared thread pool: one client on many sockets would occupy all threads.
        days = await context.disk_worker.run(client.client_id, partial(_days, context.read_usage, whose, since))
        left = _left(connection) if whose == client.client_id else None
        return events.UsageReport(client_id=whose, days=days, left=left)

    connection.answer_later(request, report)


def metrics_history(connection: Connection, request: requests.MetricsHistory) -> None:
    """Return load and work of the past."""
    resolution_s = request.resolution_s or STEP_S * max(1, math.ceil(request.range_s / STEP_S / _MOST_STEPS))
    if request.range_s / resolution_s > _MOST_STEPS:
        least_s = STEP_S * math.ceil(request.range_s / STEP_S / _MOST_STEPS)
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"{request.range_s} s in steps of {resolution_s} s are more than {_MOST_STEPS}",
            field="resolution_s",
            hint=f"Use at least {least_s}, or a shorter range_s.",
        )
    context, client = connection.context, connection.client
    read = partial(
        context.history.window,
        range_s=request.range_s,
        resolution_s=resolution_s,
        client_id=None if Scope.ADMIN in client.scopes else client.client_id,
        by=request.group_by,
    )

    async def report() -> Event:
        window = await context.worker.run(client.client_id, read)
        return events.HistoryReport(
            starts_at=window.start_s,
            resolution_s=resolution_s,
            columns=dict(window.columns),
            series=tuple(HistorySeries(group=name, columns=dict(columns)) for name, columns in window.series),
        )

    connection.answer_later(request, report)


def _days(read: UsageReader, whose: str, since: str) -> tuple[UsageDay, ...]:
    return tuple(map(_usage_day, read(whose, since)))


def _usage_day(line: UsageLine) -> UsageDay:
    return UsageDay(
        day=line.day,
        turns=line.turns,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        completion_tokens=line.completion_tokens,
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


def list_usage(connection: Connection, request: requests.ListUsage) -> None:
    """Reply with a page of the usage of the accounts that used the most tokens."""
    context = connection.context
    since = utc_day(max(0.0, context.clock() - (request.days - 1) * _DAY_S))
    limit = min(request.limit, max(1, _MAX_ACCOUNT_DAYS // request.days))

    def read() -> Event:
        page = context.read_usage_page(since, request.after, limit)
        days: defaultdict[str, list[UsageDay]] = defaultdict(list)
        for line in page.lines:
            days[line.client_id].append(_usage_day(line))
        accounts = tuple(AccountUsage(client_id=client_id, days=tuple(own)) for client_id, own in days.items())
        return events.UsageByAccount(
            usage_by_account=accounts,
            omitted_accounts=page.n_more,
            next=accounts[-1].client_id if page.n_more and accounts else None,
        )

    connection.answer_from_disk(request, read)


def subscribe_log(connection: Connection, request: requests.SubscribeLog) -> Event:
    connection.audit(AuditEvent.LOG_READ)
    connection.tail_log(request.level)
    return events.LogSubscribed()


def unsubscribe_log(connection: Connection, _request: requests.UnsubscribeLog) -> Event:
    connection.tail_log(None)
    return events.LogUnsubscribed()


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
    """Close the sockets of a client, and drop what the external service answered about it from the cache."""
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
    # Before closing, as the requesting socket may be one of them.
    n_closed = len(sockets) + len(participants)
    connection.send(events.Kicked(id=request.id, client_id=request.client_id, connections=n_closed))
    for each in sockets:
        each.close(CloseCode.POLICY, "an administrator closed the socket")
    for participant in participants:
        participant.close(CloseCode.POLICY, "an administrator closed the socket")


def list_all_sessions(connection: Connection, request: requests.ListAllSessions) -> Event | None:
    """Reply with a page of the live sessions at once, or of the archived ones once it is read from disk."""
    connection.audit(AuditEvent.SESSIONS_LISTED, detail=request.client_id or "")
    context, most = connection.context, request.limit
    if request.archived:
        connection.answer_from_disk(
            request,
            lambda: _archived_page(most, context.read_sessions(request.client_id, request.after, most + 1)),
        )
        return None
    found, more = context.sessions.live_sessions(request.client_id, after=request.after, limit=most)
    return events.AllSessions(all_sessions=tuple(map(_live, found)), next=found[-1].config.session_id if more else None)


def _archived_page(most: int, lines: Sequence[SessionLine]) -> Event:
    sessions = tuple(
        AccountSession(
            session_id=line.session_id,
            client_id=line.client_id,
            model=line.model,
            messages=line.messages,
            tokens=line.tokens,
            created_at=line.created_at,
            last_used_at=line.last_used_at,
            state="idle",
            archived=True,
            stored=True,
            attached=False,
        )
        for line in lines[:most]
    )
    return events.AllSessions(all_sessions=sessions, next=sessions[-1].session_id if len(lines) > most else None)


def _live(session: LiveSession) -> AccountSession:
    config, summary = session.config, session.snapshot.summary()
    return AccountSession(
        **summary.model_dump(exclude={"metadata", "mode"}),
        client_id=config.client_id,
        stored=config.store,
        attached=session.sink is not None,
    )


def purge_session(connection: Connection, request: requests.PurgeSession) -> None:
    """End and delete a session, as ``inferencecenter session purge`` does."""

    async def purge() -> Event:
        if not await connection.context.purge("session", request.session_id):
            raise InferenceCenterError(
                ErrorCode.SESSION_NOT_FOUND, field="session_id", hint="list_all_sessions lists the sessions."
            )
        connection.audit(AuditEvent.SESSION_PURGED, detail=request.session_id)
        return events.SessionPurged(session_id=request.session_id)

    connection.answer_later(request, purge)


def read_audit(connection: Connection, request: requests.ReadAudit) -> None:
    """Reply with a page of the audit log.

    Raises:
        InferenceCenterError: ``invalid_request`` for an unknown event.
    """
    if request.event is not None and request.event not in set(AuditEvent):
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST,
            f"event is {request.event!r}, which is not an event of the audit log",
            field="event",
            hint=f"One of: {', '.join(AuditEvent)}.",
        )
    most = request.limit

    def read() -> Event:
        found = connection.context.accounts.audit_lines(
            last=most + 1,
            client_id=request.client_id,
            event=None if request.event is None else AuditEvent(request.event),
            before=request.before,
        )
        lines = found[-most:][::-1]
        return events.AuditPage(
            audit_lines=tuple(AuditRecord(**{**asdict(line), "event": line.event.value}) for line in lines),
            older=lines[-1].line_id if len(found) > most else None,
            audit_events=tuple(each.value for each in AuditEvent),
        )

    connection.audit(AuditEvent.AUDIT_READ)
    connection.answer_from_disk(request, read)


def drain_node(connection: Connection, request: requests.DrainNode) -> None:
    """Begin to drain a machine, and reply with all of them."""
    connection.context.models.drain_node(request.node)
    connection.audit(AuditEvent.NODE_DRAINED, detail=request.node)
    list_nodes(connection, request)


def undrain_node(connection: Connection, request: requests.UndrainNode) -> None:
    """Use a machine again, and reply with all of them."""
    connection.context.models.undrain_node(request.node)
    connection.audit(AuditEvent.NODE_UNDRAINED, detail=request.node)
    list_nodes(connection, request)


def list_nodes(connection: Connection, request: requests.ListNodes | requests.DrainNode | requests.UndrainNode) -> None:
    """Return the machines that run engines; the memory of this one is read now."""
    context = connection.context

    async def report() -> Event:
        gpus = await context.gpus.get()
        return events.Nodes(nodes=tuple(_node(each, gpus) for each in context.models.nodes))

    connection.answer_later(request, report)


def _node(node: NodeStatus, local_gpus: Gpus) -> ClusterNode:
    known = machine_resources(local_gpus) if node.name == LOCAL_NODE else node.resources or NodeResources()
    return ClusterNode(
        name=node.name,
        address=node.address,
        state=node.state,
        drain=node.drain,
        drain_waits_for=node.drain_waits_for,
        version=__version__ if node.name == LOCAL_NODE else node.version,
        heartbeat_age_s=None if node.beat_age_s is None else round(node.beat_age_s, 2),
        sessions=node.sessions,
        engines=tuple(
            ClusterEngine(
                model=engine.model,
                replica=engine.replica,
                state=engine.status.state.value,
                detail=engine.status.description,
                load_fraction=round(engine.status.load_fraction, 2),
                running=engine.status.running,
                waiting=engine.status.waiting,
                sessions=engine.sessions,
            )
            for engine in node.engines
        ),
        rpc_servers=tuple(
            ClusterRpcServer(model=server.model, state=server.state, detail=server.detail, running=server.running)
            for server in node.rpc_servers
        ),
        ram_used_mb=None if known.ram_used_bytes is None else _mib(known.ram_used_bytes),
        ram_total_mb=None if known.ram_total_bytes is None else _mib(known.ram_total_bytes),
        gpus=tuple(
            ClusterGpu(
                name=gpu.name,
                used_mb=_mib(gpu.used_bytes),
                total_mb=_mib(gpu.total_bytes),
                utilization=gpu.utilization_percent,
                temp=gpu.temperature_c,
            )
            for gpu in known.gpus
        ),
    )


def _mib(n_bytes: int) -> float:
    return round(n_bytes / _MIB, 1)


def drain(connection: Connection, _request: requests.Drain) -> Event:
    """Acknowledge, and begin the shutdown of the daemon."""
    context = connection.context
    connection.audit(AuditEvent.DRAIN_ASKED)
    context.stop()
    return events.Draining(deadline_ms=round(context.settings.shutdown_timeout_s * 1000))
