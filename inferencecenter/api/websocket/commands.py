"""Ops: a table from op to handler and required scope, by which a connection executes its frames.

Handlers are plain calls that return the reply at once or arrange for it. The task that reads a socket waits only where
a handler uses ``Connection.defer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import structlog

from inferencecenter.api.embedding import EmbeddingCall, EmbeddingJob, EmbeddingResult
from inferencecenter.api.websocket import administration, status
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.auth.authentication import KeyCredential, TokenCredential
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import EmbeddingInput
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server.states import ConnectionState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from inferencecenter.api.embedding import Outcome
    from inferencecenter.api.websocket.connection import Connection
    from inferencecenter.auth.authentication import Credential
    from inferencecenter.protocol.base import Event, Request


def auth(connection: Connection, request: requests.Auth) -> Event | None:
    """Authenticate the socket, at once unless the external service has to be queried."""
    if connection.authenticated:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "this socket is already authenticated", hint="Open another one."
        )
    if request.protocol is not None:
        connection.enable_v1()
    credential = (
        TokenCredential(request.token)
        if request.token is not None
        else KeyCredential(request.client_id or "", request.api_key or "")
    )
    authenticator = connection.context.authenticator
    if authenticator.needs_external(credential):
        connection.defer(partial(_authenticate, connection, request, credential))
        return None
    try:
        connection.authenticate(authenticator.authenticate(credential, address=connection.address))
    except InferenceCenterError as error:
        if error.code not in (ErrorCode.NOT_AUTHENTICATED, ErrorCode.RATE_LIMITED):
            raise
        _refuse(connection, request, error)
        return None
    return connection.auth_success()


async def _authenticate(connection: Connection, request: requests.Auth, credential: Credential) -> None:
    try:
        account = await connection.context.authenticator.authenticate_anywhere(credential, address=connection.address)
        # The socket or the daemon may have ended meanwhile.
        if connection.state is not ConnectionState.CONNECTED:
            return
        connection.authenticate(account)
    except InferenceCenterError as error:
        if error.code in (ErrorCode.NOT_AUTHENTICATED, ErrorCode.RATE_LIMITED):
            _refuse(connection, request, error)
        else:
            connection.fail(error, request_id=request.id)
    except Exception:  # noqa: BLE001 - boundary: a defect must not close the socket
        _log.exception("command_failed", op=request.op)
        connection.fail(InferenceCenterError(ErrorCode.INTERNAL), request_id=request.id)
    else:
        connection.send(connection.auth_success().model_copy(update={"id": request.id}))


def _refuse(connection: Connection, request: requests.Auth, error: InferenceCenterError) -> None:
    connection.send(events.AuthFailed(id=request.id, reason=error.message, retry_after_ms=error.retry_after_ms))
    if error.code is ErrorCode.RATE_LIMITED:
        connection.close(CloseCode.TOO_MANY, error.message)


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """An op. ``scope`` is the one that the client needs; ``None`` allows unauthenticated sockets.

    ``starts_work`` marks ops that a draining connection refuses. ``in_bulk`` marks those whose reply may exceed the
    limit of bytes queued for a slow reader: a socket runs them one at a time, each once the peer has read the last
    reply. An op that ``is_free`` is charged as an operation only if it is refused; one charged ``by_size`` costs more
    the longer its session is.
    """

    handler: Callable[[Connection, Any], Event | None]
    scope: Scope | None = Scope.USER
    starts_work: bool = False
    in_bulk: bool = False
    is_free: bool = False
    by_size: bool = False


def _hello(connection: Connection, request: requests.Hello) -> Event:
    if request.protocol is not None:
        connection.enable_v1()
    return connection.hello()


def _create_session(connection: Connection, request: requests.CreateSession) -> Event:
    if request.on_disconnect is None:
        request = request.model_copy(update={"on_disconnect": "detach" if connection.v1 else "close"})
    return connection.context.sessions.create(connection.client, request, connection)


def _infer(connection: Connection, request: requests.Infer) -> None:
    if request.traceparent is None and connection.traceparent is not None:
        request = request.model_copy(update={"traceparent": connection.traceparent})
    connection.context.sessions.infer(connection.client, request, connection)


def _abort(connection: Connection, request: requests.Abort) -> Event | None:
    connection.context.sessions.abort(connection.client, request)
    return None if connection.v1 else events.AbortStatus(session_id=request.session_id, status="aborted")


def _close_session(connection: Connection, request: requests.CloseSession) -> Event:
    return connection.context.sessions.close(connection.client, request, connection)


def _resume_session(connection: Connection, request: requests.ResumeSession) -> None:
    connection.context.sessions.resume(connection.client, request, connection)


def _append(connection: Connection, request: requests.Append) -> None:
    connection.context.sessions.append(connection.client, request, connection)


def _fork_session(connection: Connection, request: requests.ForkSession) -> Event:
    return connection.context.sessions.fork(connection.client, request, connection)


def _rewind_session(connection: Connection, request: requests.RewindSession) -> None:
    connection.context.sessions.rewind(connection.client, request, connection)


def _set_metadata(connection: Connection, request: requests.SetMetadata) -> Event:
    return connection.context.sessions.set_metadata(connection.client, request, connection)


def _get_session(connection: Connection, request: requests.GetSession) -> Event:
    return connection.context.sessions.get(connection.client, request)


def _list_sessions(connection: Connection, request: requests.ListSessions) -> None:
    archive = connection.context.sessions.archive
    connection.defer(partial(_answer_later, connection, request, partial(archive.list, connection.client, request)))


async def _answer_later(connection: Connection, request: Request, work: Callable[[], Awaitable[Event]]) -> None:
    """Answer a request that reads the store, before the next frame is read."""
    try:
        answer = await work()
    except InferenceCenterError as error:
        connection.fail(error, request_id=request.id, op=request.op)
    except Exception:  # noqa: BLE001 - boundary: a defect must not close the socket
        _log.exception("command_failed", op=request.op)
        connection.fail(InferenceCenterError(ErrorCode.INTERNAL), request_id=request.id, op=request.op)
    else:
        reply = answer.model_copy(update={"id": request.id})
        journal = connection.context.sessions.journal_for(request, connection.client_id)
        journal.release(lambda: connection.replay((reply,)))


def _embed(connection: Connection, request: requests.EmbedTexts) -> None:
    connection.check_embeddings()
    call = EmbeddingCall(
        model=request.model,
        inputs=tuple(map(EmbeddingInput, request.texts)),
        dimensions=request.dimensions,
        priority=request.priority,
    )

    def end(outcome: Outcome) -> None:
        connection.embedding_ended(job)
        match outcome:
            case EmbeddingResult():
                embeddings = events.Embeddings(
                    id=request.id,
                    model=outcome.model,
                    dimensions=outcome.dimensions,
                    vectors=tuple(outcome.base64()),
                    prompt_tokens=outcome.n_tokens,
                )
                connection.replay((embeddings,))
            case InferenceCenterError():
                connection.fail(outcome, request_id=request.id, op=request.op)
            case None:
                pass  # the socket is closed

    job = EmbeddingJob(connection.context, connection.client, call, on_end=end)
    connection.embedding_started(job)


def _list_models(connection: Connection, _request: requests.ListModels) -> Event:
    return events.Models(models=connection.context.models_for(connection.client))


def _load_model(connection: Connection, request: requests.LoadModel) -> None:
    def publish(swap: events.Swap) -> None:
        connection.send(swap.model_copy(update={"id": request.id}))

    models = connection.context.models
    models.rescan()
    models.swap(request.name, publish)
    connection.audit(AuditEvent.MODEL_SWAPPED, detail=request.name)


def _unload_model(connection: Connection, request: requests.UnloadModel) -> Event:
    connection.context.models.unload(request.name)
    connection.audit(AuditEvent.MODEL_UNLOADED, detail=request.name)
    return events.ModelUnloaded(model=request.name)


def _metrics(connection: Connection, request: requests.Metrics) -> None:
    connection.context.feed.once(connection, request_id=request.id)


def _subscribe_metrics(connection: Connection, request: requests.SubscribeMetrics) -> Event:
    connection.context.feed.subscribe(connection, interval_ms=request.interval_ms)
    return events.MetricsSubscribed(interval_ms=request.interval_ms)


def _unsubscribe_metrics(connection: Connection, _request: requests.UnsubscribeMetrics) -> Event:
    connection.context.feed.unsubscribe(connection)
    return events.MetricsUnsubscribed()


def _status(connection: Connection, request: requests.Status) -> Event:
    context = connection.context
    plan = None
    if Scope.OPERATOR in connection.client.scopes:
        plan = context.models.plan if request.type == "model" else None
        values = status.daemon_status(
            request.type,
            engine=context.models.status,
            totals=context.sessions.totals(),
            connections=len(context.hub),
            fault=context.sessions.fault,
            pressure=context.pressure(),
        )
    else:
        page = context.sessions.list(connection.client, requests.ListSessions(op="list_sessions", limit=1000))
        values = status.client_status(
            request.type,
            client=connection.client,
            sessions=page.sessions,
            engine=context.models.status,
            storable=context.sessions.fault is None,
        )
    return events.Status(type=request.type, values=values, plan=plan)


def _ping(_connection: Connection, _request: requests.Ping) -> Event:
    return events.Pong()


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "hello": Command(_hello, scope=None),
        "auth": Command(auth, scope=None),
        "create_session": Command(_create_session, starts_work=True),
        "infer": Command(_infer, starts_work=True, is_free=True),
        "abort": Command(_abort, is_free=True),
        "close_session": Command(_close_session),
        "resume_session": Command(_resume_session, in_bulk=True, by_size=True),
        "append": Command(_append),
        "fork_session": Command(_fork_session, starts_work=True, by_size=True),
        "rewind_session": Command(_rewind_session),
        "set_metadata": Command(_set_metadata),
        "get_session": Command(_get_session, in_bulk=True, by_size=True),
        "list_sessions": Command(_list_sessions, in_bulk=True),
        "embed": Command(_embed, starts_work=True, in_bulk=True, is_free=True),
        "list_models": Command(_list_models),
        "load_model": Command(_load_model, scope=Scope.OPERATOR),
        "unload_model": Command(_unload_model, scope=Scope.OPERATOR),
        "metrics": Command(_metrics),
        "subscribe_metrics": Command(_subscribe_metrics),
        "unsubscribe_metrics": Command(_unsubscribe_metrics),
        "status": Command(_status),
        "usage": Command(administration.usage, in_bulk=True),
        "list_clients": Command(administration.list_clients, scope=Scope.ADMIN),
        "kick": Command(administration.kick, scope=Scope.ADMIN),
        "drain": Command(administration.drain, scope=Scope.OPERATOR),
        "ping": Command(_ping),
    }
)
