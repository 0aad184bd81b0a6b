"""HTTP endpoints: a table of operations, from which routes and the OpenAPI document derive; responses; CORS."""

from __future__ import annotations

import re
from asyncio import sleep
from collections import defaultdict
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

import orjson
import structlog
from pydantic import BaseModel
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, NoMatchFound, Route

from inferencecenter.api import sse
from inferencecenter.api.body import BODIES_BYTES, LARGE_BYTES, BodyMemory, checked, parse, read_body
from inferencecenter.api.errors import OPENAI_ERRORS, ErrorFormat, error_headers
from inferencecenter.api.foreign_fields import DialectModel, FieldReport, FieldTable
from inferencecenter.api.request_context import Caller, ClientDisconnectedError, RequestContext, admit, paced
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.protocol.codec import is_slow
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server.handshake import check_query_length, origin_allowed
from inferencecenter.server.http import SCOPE_KEY

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from starlette.datastructures import URLPath
    from starlette.types import ASGIApp, Message, Receive, Send
    from starlette.types import Scope as AsgiScope

    from inferencecenter.api.request_turns import RequestTurns
    from inferencecenter.auth.audit import AuditEvent
    from inferencecenter.protocol.base import Event
    from inferencecenter.server.context import ServedModels, ServerContext
    from inferencecenter.server.http import HttpConnection


_Body = TypeVar("_Body", bound=BaseModel)
_VERSION: Final = "/v1"
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Document:
    """A serialized JSON document with its own headers; status 304 means that the client's copy is current."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: _NO_HEADERS)


@dataclass(frozen=True, slots=True)
class Stream:
    """Encoded server-sent events, or lines of JSON.

    Nothing is sent before the first chunk: until then an error has its own HTTP status. Afterwards it is the last
    event. The generator is closed when the client disconnects.
    """

    chunks: AsyncGenerator[bytes, None]
    media_type: str = sse.CONTENT_TYPE


Reply: TypeAlias = Document | Stream


class AnswerCollector(Protocol):
    """Collects the events of a request's turns, given by the index of the turn, into one document."""

    def take(self, index: int, event: Event, /) -> None:
        """Add an event."""

    def document(self) -> Mapping[str, Any]:
        """Return the document; all turns have ended."""


def stream_turns(
    turns: AbstractContextManager[RequestTurns],
    write: Callable[[int, Event], bytes],
    *,
    last: Callable[[], bytes] | None = None,
    keepalive: bytes = sse.KEEPALIVE,
    media_type: str = sse.CONTENT_TYPE,
) -> Stream:
    """Return a stream of a request's turns, which start with it: their events encoded by ``write``, then ``last``."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        with turns as running:
            async for written in running.write_events(write, keepalive=keepalive):
                yield written
            if last is not None:
                yield last()

    return Stream(chunks(), media_type)


async def collect_turns(turns: AbstractContextManager[RequestTurns], collector: AnswerCollector) -> Document:
    """Run the turns of a request and return their answers as one document.

    Raises:
        InferenceCenterError: One of them failed.
    """
    with turns as running:
        await running.take_events(collector.take)
    return document(collector.document())


def document(value: Any, *, status: int = 200) -> Document:
    """Serialize a value with ``orjson``."""
    return Document(orjson.dumps(value), status)


COMMON_ERRORS: Final = (
    ErrorCode.INVALID_REQUEST,
    ErrorCode.NOT_AUTHENTICATED,
    ErrorCode.FORBIDDEN,
    ErrorCode.RATE_LIMITED,
    ErrorCode.QUEUE_FULL,
    ErrorCode.ENGINE_UNAVAILABLE,
    ErrorCode.STORAGE_UNAVAILABLE,
    ErrorCode.INTERNAL,
)
"""Errors of every operation that requires a token."""

BODY_ERRORS: Final = (ErrorCode.INVALID_JSON, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.REQUEST_TIMEOUT)
"""Errors of every operation with a body; the body of an operation without one is not read."""

TURN_ERRORS: Final = (
    ErrorCode.SESSION_LIMIT,
    ErrorCode.SESSION_BUSY,
    ErrorCode.QUEUE_TIMEOUT,
    ErrorCode.OVERLOADED,
    ErrorCode.QUOTA_EXCEEDED,
    ErrorCode.PROMPT_TOO_LONG,
    ErrorCode.CONTEXT_FULL,
    ErrorCode.INVALID_GRAMMAR,
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.MODEL_LOADING,
    ErrorCode.ENGINE_CRASHED,
)
"""Errors of every operation that runs a turn."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_log = structlog.get_logger(__name__)


class NoQuery(DialectModel):
    """An empty query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        method: The HTTP method.
        path: The path, such as ``/v1/responses/{response_id}``.
        summary: Summary in one sentence.
        handler: The handler.
        body: Model of the body; ``None`` without a body.
        query: Model of the query.
        answer: Model of the JSON response; ``None`` if it is of no fixed form, or empty.
        event: Model of the data of server-sent events, if the response can be a stream.
        errors: Errors in addition to ``COMMON_ERRORS`` and ``BODY_ERRORS``.
        charged: Whether a POST counts as an operation of the client, as other methods do; one that runs a turn has
            limits of its own.
        scope: Scope that the client needs; ``None`` needs no token.
        fields: Table of the foreign dialect that the operation speaks; ``None`` refuses unknown fields.
        error_format: How errors are written.
        media_type: Media type of a stream.
        local_account: Whether a program on this machine needs no token if ``server.ollama_account`` is set.
    """

    method: Literal["GET", "HEAD", "POST", "DELETE"]
    path: str
    summary: str
    handler: Callable[[Call], Awaitable[Reply]]
    body: type[BaseModel] | None = None
    query: type[BaseModel] = NoQuery
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    errors: tuple[ErrorCode, ...] = ()
    charged: bool = False
    scope: Scope | None = Scope.USER
    fields: FieldTable | None = None
    error_format: ErrorFormat = OPENAI_ERRORS
    media_type: str = sse.CONTENT_TYPE
    local_account: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An admitted request for its handler, with validated body and query.

    ``path`` has the path parameters. ``report`` has the fields of a foreign dialect that have no effect. ``memory`` is
    that of the body.
    """

    context: ServerContext
    report: FieldReport | None = None
    admitted: RequestContext | None = None
    memory: BodyMemory | None = None
    body: Any = None
    query: Any = None
    path: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    headers: Headers = field(default_factory=Headers)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the request so far; until the response begins, they are its ``X-Warning`` header too."""
        return [] if self.report is None else self.report.warnings

    def audit(self, event: AuditEvent, detail: str) -> None:
        """Record an action of the caller in the audit log."""
        self.context.audit(self.caller.client, self.caller.address, event, detail)

    def hold_result(self, size: int) -> None:
        """Count a large result, before it is computed, until the client has read it; see ``BodyMemory``."""
        assert self.memory is not None, "the call is that of a request"
        self.memory.hold_result(size)

    @property
    def request_context(self) -> RequestContext:
        """Signals the client's disconnection; only with a scope."""
        assert self.admitted is not None, "the operation requires no token"
        return self.admitted

    @property
    def caller(self) -> Caller:
        """The authenticated caller; only with a scope."""
        return self.request_context.caller


def routes(context: ServerContext, operations: Iterable[Operation]) -> list[BaseRoute]:
    """Return the routes of all operations below the configured base path, and of unknown paths in ``/v1``.

    Operations in ``/v1`` have a second path without it, for clients whose base URL lacks it.
    """
    by_path: defaultdict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in operations:
        by_path[operation.path][operation.method] = operation
    base = context.settings.base_path
    bodies = FairShare(BODIES_BYTES)
    found: list[BaseRoute] = []
    for path, methods in by_path.items():
        app = CrossOrigin(Endpoint(context, methods, path=path, bodies=bodies), context, methods=methods)
        short = path.removeprefix(_VERSION)
        found += [Route(base + each, app) for each in (path, *([] if short in by_path else [short]))]
    return [*found, NotFoundRoute(f"{base}{_VERSION}/")]


LATEST: Final = ":latest"
"""The tag of Ollama that names the same model as no tag."""


def known_name(models: ServedModels, name: str) -> str:
    """Return the daemon's name of a model, which may be called by an alias and with a tag; an unknown name as it is."""
    for each in (name, name.removesuffix(LATEST)):
        if (known := models.aliases.get(each, each)) in models.names:
            return known
    return name


def with_known_model(context: ServerContext, body: _Body, report: FieldReport) -> _Body:
    """Return a request of a foreign dialect with the daemon's name of its model.

    Aliases and tags are replaced; an unknown name is removed if ``server.unknown_models`` allows it.
    """
    name = getattr(body, "model", None)
    if not isinstance(name, str):
        return body
    models = context.models
    known = known_name(models, name)
    if known not in models.names and context.settings.unknown_models == "default":
        report.add("model", f"model has no effect: there is no model {name[:64]!r}, and the default answers")
        is_required = type(body).model_fields["model"].is_required()
        return body.model_copy(update={"model": models.default if is_required else None})
    return body if known == name else body.model_copy(update={"model": known})


class Endpoint:
    """An ASGI application for one path.

    Args:
        context: The rest of the daemon.
        operations: Operations by method.
        path: Pattern of the path.
        bodies: Memory for bodies, shared by all paths.
    """

    def __init__(
        self, context: ServerContext, operations: Mapping[str, Operation], *, path: str, bodies: FairShare
    ) -> None:
        self._context = context
        self._operations = operations
        self._path = path
        self._bodies = bodies
        self._tasks = TaskGroup(path)

    async def __call__(self, asgi: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        errors = next(iter(self._operations.values())).error_format
        connection: HttpConnection | None = asgi.get("state", {}).get(SCOPE_KEY)
        write_chunk = None if connection is None else connection.write_chunk
        writer = _ResponseWriter(send, write_chunk=write_chunk, counted=self._count, errors=errors)
        try:
            operation = self._operation(asgi["method"])
            await self._answer(operation, asgi, receive, writer)
        except (ClientDisconnectedError, ConnectionError):
            pass
        except InferenceCenterError as error:
            await writer.fail(error)
        except Exception:  # noqa: BLE001 - boundary: a defect must not close the connection without a response
            _log.exception("request_failed", method=asgi["method"], path=self._path)
            await writer.fail(InferenceCenterError(ErrorCode.INTERNAL))

    def _operation(self, method: str) -> Operation:
        operation = self._operations.get(method)
        if operation is None:
            allowed = ", ".join(sorted(self._operations))
            raise MethodNotAllowedError(method, allowed=allowed)
        return operation

    async def _answer(self, operation: Operation, asgi: AsgiScope, receive: Receive, writer: _ResponseWriter) -> None:
        if operation.scope is None:
            with BodyMemory(self._bodies, "") as memory:
                call = await self._call(operation, asgi, receive, None, memory)
                writer.warnings = call.warnings
                await writer.answer(await operation.handler(call))
            return
        context = self._context
        local_account = context.settings.ollama_account if operation.local_account else None
        caller = await admit(context, asgi, scope=operation.scope, local_account=local_account)
        request_context = RequestContext(caller, asgi.get("state", {}).get(SCOPE_KEY))
        client_id = request_context.client.client_id
        memory = BodyMemory(self._bodies, client_id)
        with self._counted(request_context), request_context.until_expiry(context.clock()), memory:
            async with paced(context, client_id):
                if operation.charged or operation.method != "POST":
                    context.operations.charge(client_id)
                    await sleep(context.operation_delay_s(client_id))
                call = await self._call(operation, asgi, receive, request_context, memory)
                request_context.check_open()
                writer.warnings = call.warnings
                leaving = self._tasks.spawn(_wait_disconnected(receive, request_context), name="notice_leaving")
                try:
                    await writer.answer(await operation.handler(call))
                finally:
                    leaving.cancel()
                    if call.report is not None:
                        context.metrics.count_fields(call.report.table.dialect, call.report.labels)

    async def _call(
        self,
        operation: Operation,
        asgi: AsgiScope,
        receive: Receive,
        request_context: RequestContext | None,
        memory: BodyMemory,
    ) -> Call:
        check_query_length(asgi["query_string"])
        report = None
        if operation.fields is not None:
            report = FieldReport(operation.fields, strict=self._context.settings.strict_dialects)
        query = checked(operation.query, dict(QueryParams(asgi["query_string"])), context=report)
        body = None
        if operation.body is not None:
            body = await self._body(partial(parse, operation.body, context=report), asgi, receive, memory)
            if report is not None:
                body = with_known_model(self._context, body, report)
        return Call(
            context=self._context,
            report=report,
            admitted=request_context,
            memory=memory,
            body=body,
            query=query,
            path=asgi.get("path_params", _NOTHING),
            headers=Headers(scope=asgi),
        )

    async def _body(
        self, parsed: Callable[[bytes], BaseModel], asgi: AsgiScope, receive: Receive, memory: BodyMemory
    ) -> BaseModel:
        """Read and parse the body; if that takes long, in a thread, round-robin over clients."""
        body = await read_body(receive, Headers(scope=asgi), self._context.settings, hold=memory.hold)
        if not is_slow(body):
            return parsed(body)
        return await self._context.worker.run(memory.client_id, partial(parsed, body))

    @contextmanager
    def _counted(self, request_context: RequestContext) -> Iterator[None]:
        hub, gauge = self._context.hub, self._context.metrics.http_requests
        hub.enter(request_context)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            hub.exit(request_context)

    def _count(self, status: int, error: InferenceCenterError | None) -> None:
        metrics = self._context.metrics
        metrics.http_responses.labels(self._path, str(status)).inc()
        if error is not None:
            metrics.errors.labels(error.code.value).inc()


class MethodNotAllowedError(InferenceCenterError):
    """An unsupported method; ``allowed`` are the supported ones."""

    def __init__(self, method: str, *, allowed: str) -> None:
        super().__init__(ErrorCode.METHOD_NOT_ALLOWED, f"this path supports {allowed}, not {method[:16]}")
        self.allowed = allowed


class _ResponseWriter:
    """The response to one request; ``counted`` is called with its status, and with the error if there is one.

    ``write_chunk`` writes a part of a stream and returns whether it could; otherwise use ``send``. ``warnings`` are
    sent as a header with the response's start.
    """

    def __init__(
        self,
        send: Send,
        *,
        write_chunk: Callable[[bytes], bool] | None,
        counted: Callable[[int, InferenceCenterError | None], None],
        errors: ErrorFormat,
    ) -> None:
        self.warnings: list[str] = []
        self._send = send
        self._write_chunk = write_chunk
        self._counted = counted
        self._errors = errors
        self._streaming = False

    async def answer(self, reply: Reply) -> None:
        if isinstance(reply, Document):
            await self._whole(reply.body, reply.status, reply.headers)
            self._counted(reply.status, None)
        else:
            await self._stream(reply)

    async def fail(self, error: InferenceCenterError) -> None:
        """Send an error as the response, or as the last event of a stream."""
        body, status = self._errors.body(error), self._errors.status(error)
        self._counted(status, error)
        if self._streaming:
            await self._send({"type": "http.response.body", "body": self._errors.last(body), "more_body": False})
            return
        headers = error_headers(error)
        if isinstance(error, MethodNotAllowedError):
            headers["allow"] = error.allowed
        await self._whole(body, status, headers)

    async def _stream(self, reply: Stream) -> None:
        send, write_chunk = self._send, self._write_chunk
        async with aclosing(reply.chunks) as chunks:
            async for chunk in chunks:
                if not self._streaming:
                    self._streaming = True
                    content_type = f"{reply.media_type}; charset=utf-8"
                    await self._start(200, {"content-type": content_type, "cache-control": "no-store"})
                if write_chunk is None or not write_chunk(chunk):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._counted(200, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, headers if status == HTTPStatus.NOT_MODIFIED else {**length, **headers})
        if len(body) >= LARGE_BYTES:
            # The next message waits until the client has read nearly all: until then the request counts.
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        if self.warnings:
            headers = {**headers, "x-warning": _header_text("; ".join(self.warnings))}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


def _header_text(text: str) -> str:
    """Return a text, part of which may be a client's, as the value of a header, which has no spaces at its ends."""
    return _NO_HEADER_TEXT.sub("?", text)[:_MAX_WARNING_CHARS].strip()


async def _wait_disconnected(receive: Receive, request_context: RequestContext) -> None:
    """Wait until the client has disconnected; further data is ignored."""
    while (await receive())["type"] != "http.disconnect":
        pass
    request_context.end(ClientDisconnectedError())


_SHOWN_CHARS: Final = 100
_MAX_WARNING_CHARS: Final = 2000
_NO_HEADER_TEXT: Final = re.compile(r"[^\x20-\x7e]")


class NotFoundRoute(BaseRoute):
    """Route of all unknown paths below ``prefix``; a pattern would not match paths with line breaks."""

    def __init__(self, prefix: str, *, errors: ErrorFormat = OPENAI_ERRORS) -> None:
        self._prefix = prefix
        self._errors = errors

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        """Match any HTTP request below the prefix."""
        below = scope["type"] == "http" and scope["path"].startswith(self._prefix)
        return (Match.FULL if below else Match.NONE), {}

    def url_path_for(self, name: str, /, **_: Any) -> URLPath:
        """Match nothing."""
        raise NoMatchFound(name, {})

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Respond with 404."""
        error = InferenceCenterError(
            ErrorCode.UNKNOWN_OP,
            f"no such path: {scope['path'][:_SHOWN_CHARS]}",
            hint="/openapi.json lists all paths.",
        )
        answer = Response(
            self._errors.body(error),
            status_code=self._errors.status(error),
            headers=error_headers(error),
            media_type="application/json",
        )
        await answer(scope, receive, send)


# Cross-origin requests (CORS).
#
# Pages of origins that may connect may also read responses. Credentials are tokens in ``Authorization``, which a page
# has to set itself; there are no cookies. So a response allows the requesting origin, never all of them, and never
# allows credentials.

_PREFLIGHT_S: Final = 600
_READABLE: Final = "retry-after, retry-after-ms, x-should-retry, x-warning"
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_MOST_HEADERS: Final = 64


class CrossOrigin:
    """An ASGI application that adds CORS to that of one path.

    Args:
        app: The application.
        context: The rest of the daemon.
        methods: Supported methods.
    """

    def __init__(self, app: ASGIApp, context: ServerContext, *, methods: Iterable[str]) -> None:
        self._app = app
        self._context = context
        self._methods = ", ".join(sorted(methods))

    async def __call__(self, asgi: AsgiScope, receive: Receive, send: Send) -> None:
        """Respond to a preflight request, or pass the request on and add CORS headers for its origin."""
        headers = Headers(scope=asgi)
        origin = headers.get("origin")
        if origin is None or not self._allows(origin, asgi, headers):
            await self._app(asgi, receive, send)
        elif asgi["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(send, origin, headers.get("access-control-request-headers", ""))
        else:
            await self._app(asgi, receive, _readable_for(origin, send))

    def _allows(self, origin: str, asgi: AsgiScope, headers: Headers) -> bool:
        caller = self._context.proxies.peer_info(asgi["client"][0] if asgi["client"] else "", headers)
        return origin_allowed(origin, caller.host, self._context.settings.allowed_origins)

    async def _preflight(self, send: Send, origin: str, requested_headers: str) -> None:
        names = [name.strip() for name in requested_headers.split(",")[:_MOST_HEADERS]]
        headers = {
            **_origin_headers(origin),
            "access-control-allow-methods": self._methods,
            "access-control-allow-headers": ", ".join(name for name in names if _HEADER_NAME.fullmatch(name)),
            "access-control-max-age": str(_PREFLIGHT_S),
        }
        await send({"type": "http.response.start", "status": 204, "headers": _encoded(headers)})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _readable_for(origin: str, send: Send) -> Send:
    """Return a ``send`` that lets pages of an origin read the response."""
    added = _encoded({**_origin_headers(origin), "access-control-expose-headers": _READABLE})

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


def _origin_headers(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
