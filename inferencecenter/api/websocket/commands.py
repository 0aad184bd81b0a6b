"""Ops: a table from op to handler and required scope, by which a connection executes its frames.

Handlers are plain calls that return the reply at once or arrange for it. The task that reads a socket waits only where
a handler uses ``Connection.defer`` or ``answer_later``.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import structlog

from inferencecenter.api.embedding import EmbeddingCall, EmbeddingJob, EmbeddingResult
from inferencecenter.api.websocket import accounts, administration, status
from inferencecenter.auth.audit import AuditEvent
from inferencecenter.auth.authentication import KeyCredential, TokenCredential, UnixCredential
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.ipc.messages import EmbeddingInput
from inferencecenter.protocol import events, requests
from inferencecenter.protocol.close import CloseCode
from inferencecenter.protocol.scopes import Scope
from inferencecenter.protocol.values import DocumentScore, McpServer, McpTool, PullSummary
from inferencecenter.server.states import ConnectionState
from inferencecenter.sessions.shares import check_share_links

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inferencecenter.api.embedding import Outcome
    from inferencecenter.api.websocket.connection import Connection
    from inferencecenter.auth.authentication import Credential
    from inferencecenter.mcp.gateway import ServerTool
    from inferencecenter.models.library import ModelDownload
    from inferencecenter.protocol.base import Event, Request


def auth(connection: Connection, request: requests.Auth) -> Event | None:
    """Authenticate the socket, at once unless the external service has to be queried."""
    if connection.authenticated:
        raise InferenceCenterError(
            ErrorCode.INVALID_REQUEST, "this socket is already authenticated", hint="Open another one."
        )
    credential = _credential(connection, request)
    if request.protocol is not None:
        connection.enable_v1()
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


def _credential(connection: Connection, request: requests.Auth) -> Credential:
    if request.token is not None:
        return TokenCredential(request.token)
    if request.client_id is not None:
        return KeyCredential(request.client_id, request.api_key or "")
    if connection.unix_uid is not None:
        return UnixCredential(connection.unix_uid)
    raise InferenceCenterError(ErrorCode.INVALID_REQUEST, requests.ONE_CREDENTIAL)


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
    the longer its session is. ``n_units`` is what it costs beside that, in operations.
    """

    handler: Callable[[Connection, Any], Event | None]
    scope: Scope | None = Scope.USER
    starts_work: bool = False
    in_bulk: bool = False
    is_free: bool = False
    by_size: bool = False
    n_units: int = 1


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


def _set_model(connection: Connection, request: requests.SetModel) -> Event:
    return connection.context.sessions.set_model(connection.client, request, connection)


def _get_session(connection: Connection, request: requests.GetSession) -> Event:
    return connection.context.sessions.get(connection.client, request)


def _get_image(connection: Connection, request: requests.GetImage) -> None:
    context = connection.context

    async def fetch() -> events.ImageFetched:
        image, file = await context.sessions.images.read(connection.client_id, request.digest)
        context.operations.charge(connection.client_id, n_units=0, n_chars=len(file))
        data = await context.worker.run(connection.client_id, lambda: b64encode(file).decode())
        return events.ImageFetched(**image.model_dump(exclude_none=True), data=data)

    connection.answer_later(request, fetch)


def _list_sessions(connection: Connection, request: requests.ListSessions) -> None:
    archive = connection.context.sessions.archive
    connection.answer_later(request, partial(archive.list, connection.client, request))


def _search_sessions(connection: Connection, request: requests.SearchSessions) -> None:
    context, archive = connection.context, connection.context.sessions.archive
    n_chars = archive.searched_chars(connection.client_id, request.query)
    context.operations.charge(connection.client_id, n_units=0, n_chars=n_chars)
    connection.answer_later(request, partial(archive.search, connection.client, request))


def _create_share(connection: Connection, request: requests.CreateShare) -> None:
    settings = connection.context.settings
    check_share_links(settings)

    async def create() -> Event:
        shares = connection.context.sessions.shares
        created = await shares.create(connection.client, request, max_shares=settings.max_share_links)
        connection.audit(AuditEvent.SHARE_CREATED, detail=f"{created.share.share_id} of {request.session_id}")
        return created

    connection.answer_later(request, create)


def _list_shares(connection: Connection, request: requests.ListShares) -> None:
    shares = connection.context.sessions.shares
    connection.answer_later(request, partial(shares.list, connection.client))


def _revoke_share(connection: Connection, request: requests.RevokeShare) -> None:
    async def revoke() -> Event:
        revoked = await connection.context.sessions.shares.revoke(connection.client, request)
        connection.audit(AuditEvent.SHARE_REVOKED, detail=request.share_id)
        return revoked

    connection.answer_later(request, revoke)


def _embed(connection: Connection, request: requests.EmbedTexts) -> None:
    call = EmbeddingCall(
        model=request.model,
        inputs=tuple(map(EmbeddingInput, request.texts)),
        dimensions=request.dimensions,
        priority=request.priority,
    )

    def reply(result: EmbeddingResult) -> Event:
        return events.Embeddings(
            id=request.id,
            model=result.model,
            dimensions=result.dimensions,
            vectors=tuple(result.base64()),
            prompt_tokens=result.n_tokens,
        )

    _start_embedding(connection, request, call, reply)


def _rerank(connection: Connection, request: requests.RerankDocuments) -> None:
    call = EmbeddingCall(
        model=request.model,
        inputs=tuple(map(EmbeddingInput, request.documents)),
        query=request.query,
        priority=request.priority,
    )

    def reply(result: EmbeddingResult) -> Event:
        best = [DocumentScore(index=index, relevance_score=score) for index, score in result.ranking(request.top_n)]
        return events.DocumentScores(
            id=request.id, model=result.model, results=tuple(best), prompt_tokens=result.n_tokens
        )

    _start_embedding(connection, request, call, reply)


def _start_embedding(
    connection: Connection, request: Request, call: EmbeddingCall, reply: Callable[[EmbeddingResult], Event]
) -> None:
    """Start a request for vectors or scores, whose result is the answer of a later time."""
    connection.check_embeddings()

    def end(outcome: Outcome) -> None:
        connection.embedding_ended(job)
        match outcome:
            case EmbeddingResult():
                connection.replay((reply(outcome),))
            case InferenceCenterError():
                connection.fail(outcome, request_id=request.id, op=request.op)
            case None:
                pass  # the socket is closed

    job = EmbeddingJob(connection.context, connection.client, call, on_end=end)
    connection.embedding_started(job)


def _list_mcp_tools(connection: Connection, request: requests.ListMcpTools) -> None:
    client, mcp = connection.client, connection.context.mcp

    def end(found: dict[str, tuple[ServerTool, ...] | str]) -> None:
        servers = tuple(_described(server, tools) for server, tools in found.items())
        connection.replay((events.McpTools(id=request.id, mcp_servers=servers),))

    mcp.list_later(request.server, client_id=client.client_id, scopes=client.scopes, on_end=end)


def _described(server: str, tools: tuple[ServerTool, ...] | str) -> McpServer:
    if isinstance(tools, str):
        return McpServer(server=server, mcp_tools=(), detail=tools)
    listed = tuple(
        McpTool(name=each.name, description=each.description, parameters=each.parameters, approval=each.approval)
        for each in tools
    )
    return McpServer(server=server, mcp_tools=listed)


def _call_mcp_tool(connection: Connection, request: requests.CallMcpTool) -> None:
    context, client = connection.context, connection.client
    call = context.sessions.pending_call(client, request.session_id, request.call_id)
    tool = request.tool or (call.name if call is not None else "")
    reservation = context.mcp.reserve_call(
        request.server,
        tool,
        client_id=client.client_id,
        scopes=client.scopes,
        on_start=partial(connection.audit, AuditEvent.MCP_TOOL_CALLED, detail=f"{request.server}/{tool}"),
    )
    context.sessions.call_mcp_tool(client, request, connection, reservation)


def _list_presets(connection: Connection, _request: requests.ListPresets) -> Event:
    return connection.context.sessions.presets.list(connection.client)


def _save_preset(connection: Connection, request: requests.SavePreset) -> Event:
    return connection.context.sessions.presets.save(connection.client, request.preset, connection)


def _delete_preset(connection: Connection, request: requests.DeletePreset) -> Event:
    presets = connection.context.sessions.presets
    return presets.delete(connection.client, request.preset_type, request.name, connection)


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


def _pull_model(connection: Connection, request: requests.PullModel) -> Event:
    download = connection.context.downloads.start(request.reference, connection.client_id)
    connection.audit(AuditEvent.MODEL_PULLED, detail=request.reference)
    return events.Pull(pull=_described_pull(download))


def _list_pulls(connection: Connection, _request: requests.ListPulls) -> Event:
    return events.Pulls(pulls=tuple(map(_described_pull, connection.context.downloads)))


def _cancel_pull(connection: Connection, request: requests.CancelPull) -> Event:
    download = connection.context.downloads.cancel(request.reference)
    connection.audit(AuditEvent.PULL_CANCELLED, detail=request.reference)
    return events.Pull(pull=_described_pull(download))


def _described_pull(download: ModelDownload) -> PullSummary:
    progress, error = download.progress, download.error
    return PullSummary(
        reference=download.reference,
        phase=download.phase,
        requested_by=download.client_id,
        model=download.model,
        file=None if progress is None else progress.file,
        done_bytes=0 if progress is None else progress.done_bytes,
        total_bytes=0 if progress is None else progress.total_bytes,
        detail="" if error is None else f"{error.message}. {error.hint}" if error.hint else error.message,
    )


def _remove_model(connection: Connection, request: requests.RemoveModel) -> None:
    async def remove() -> Event:
        context = connection.context
        context.models.rescan()
        name = await context.remove_model(request.name, client_id=connection.client_id)
        connection.audit(AuditEvent.MODEL_REMOVED, detail=name)
        return events.ModelRemoved(model=name)

    connection.answer_later(request, remove)


def _metrics(connection: Connection, request: requests.Metrics) -> None:
    connection.context.feed.once(connection, request_id=request.id)


def _subscribe_metrics(connection: Connection, request: requests.SubscribeMetrics) -> Event:
    connection.context.feed.subscribe(connection, interval_ms=request.interval_ms)
    return events.MetricsSubscribed(interval_ms=request.interval_ms)


def _unsubscribe_metrics(connection: Connection, _request: requests.UnsubscribeMetrics) -> Event:
    connection.context.feed.unsubscribe(connection)
    return events.MetricsUnsubscribed()


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
        "set_model": Command(_set_model),
        "get_session": Command(_get_session, in_bulk=True, by_size=True),
        "get_image": Command(_get_image, in_bulk=True),
        "list_sessions": Command(_list_sessions, in_bulk=True),
        "search_sessions": Command(_search_sessions, in_bulk=True, n_units=10),
        "create_share": Command(_create_share, by_size=True),
        "list_shares": Command(_list_shares, in_bulk=True),
        "revoke_share": Command(_revoke_share),
        "embed": Command(_embed, starts_work=True, in_bulk=True, is_free=True),
        "list_mcp_tools": Command(_list_mcp_tools, in_bulk=True),
        "call_mcp_tool": Command(_call_mcp_tool, starts_work=True),
        "rerank": Command(_rerank, starts_work=True, in_bulk=True, is_free=True),
        "list_presets": Command(_list_presets, in_bulk=True),
        "save_preset": Command(_save_preset),
        "delete_preset": Command(_delete_preset),
        "list_models": Command(_list_models),
        "load_model": Command(_load_model, scope=Scope.OPERATOR),
        "unload_model": Command(_unload_model, scope=Scope.OPERATOR),
        "pull_model": Command(_pull_model, scope=Scope.OPERATOR, starts_work=True),
        "list_pulls": Command(_list_pulls, scope=Scope.OPERATOR),
        "cancel_pull": Command(_cancel_pull, scope=Scope.OPERATOR),
        "remove_model": Command(_remove_model, scope=Scope.OPERATOR),
        "metrics": Command(_metrics),
        "subscribe_metrics": Command(_subscribe_metrics),
        "unsubscribe_metrics": Command(_unsubscribe_metrics),
        "metrics_history": Command(administration.metrics_history, in_bulk=True),
        "status": Command(status.status),
        "usage": Command(administration.usage, in_bulk=True),
        "list_usage": Command(administration.list_usage, scope=Scope.OPERATOR, in_bulk=True),
        "subscribe_log": Command(administration.subscribe_log, scope=Scope.ADMIN),
        "unsubscribe_log": Command(administration.unsubscribe_log, scope=Scope.ADMIN),
        "list_clients": Command(administration.list_clients, scope=Scope.ADMIN),
        "kick": Command(administration.kick, scope=Scope.ADMIN),
        "list_accounts": Command(accounts.list_accounts, scope=Scope.ADMIN, in_bulk=True),
        "create_account": Command(accounts.create_account, scope=Scope.ADMIN),
        "change_account": Command(accounts.change_account, scope=Scope.ADMIN),
        "get_account": Command(accounts.get_account, scope=Scope.ADMIN),
        "delete_account": Command(accounts.delete_account, scope=Scope.ADMIN),
        "list_tokens": Command(accounts.list_tokens, scope=Scope.ADMIN, in_bulk=True),
        "create_token": Command(accounts.create_token, scope=Scope.ADMIN),
        "change_token": Command(accounts.change_token, scope=Scope.ADMIN),
        "rotate_token": Command(accounts.rotate_token, scope=Scope.ADMIN),
        "revoke_token": Command(accounts.revoke_token, scope=Scope.ADMIN),
        "list_all_sessions": Command(administration.list_all_sessions, scope=Scope.ADMIN, in_bulk=True),
        "purge_session": Command(administration.purge_session, scope=Scope.ADMIN),
        "read_audit": Command(administration.read_audit, scope=Scope.ADMIN, in_bulk=True),
        "list_nodes": Command(administration.list_nodes, scope=Scope.OPERATOR),
        "drain_node": Command(administration.drain_node, scope=Scope.ADMIN),
        "undrain_node": Command(administration.undrain_node, scope=Scope.ADMIN),
        "drain": Command(administration.drain, scope=Scope.OPERATOR),
        "ping": Command(_ping),
    }
)
