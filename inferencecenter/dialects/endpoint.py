"""HTTP endpoints: one table of operations, from which routes and the OpenAPI document derive."""

from __future__ import annotations

from asyncio import sleep
from collections import defaultdict
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog
from pydantic import BaseModel
from starlette.datastructures import Headers, QueryParams
from starlette.routing import BaseRoute, Route

from inferencecenter.dialects import sse
from inferencecenter.dialects.body import BODIES_BYTES, LARGE_BYTES, BodyRoom, checked, parse, read_body
from inferencecenter.dialects.caller import Caller, GoneError, Visit, admit
from inferencecenter.dialects.cors import CrossOrigin
from inferencecenter.dialects.errors import error_body, error_headers
from inferencecenter.dialects.nowhere import Nowhere
from inferencecenter.dialects.replies import Document, Reply, Stream
from inferencecenter.errors import ErrorCode, InferenceCenterError
from inferencecenter.fair_share import FairShare
from inferencecenter.protocol.scopes import Scope
from inferencecenter.server.upgrade import check_query_length
from inferencecenter.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from inferencecenter.server.context import Context

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
"""What every operation may fail with that needs a token."""

BODY_ERRORS: Final = (ErrorCode.INVALID_JSON, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.REQUEST_TIMEOUT)
"""What every operation with a body may fail with; a body that an operation does not take is not read."""

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
"""What every operation may fail with that has something answered."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_log = structlog.get_logger(__name__)


class NoQuery(BaseModel, extra="forbid"):
    """An address without parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one method of one address does.

    Attributes:
        method: The HTTP method.
        path: The address, as ``/v1/responses/{response_id}``.
        summary: What it does, in a sentence.
        handler: Does it.
        body: What the body must be; without it there is none.
        query: What the address's parameters must be.
        answer: What the JSON answer is; without it the answer is free, or empty.
        event: What the data of a server-sent event is, where the answer can be a stream.
        errors: What it may fail with beside ``COMMON_ERRORS`` and ``BODY_ERRORS``.
        scope: What the client must hold; without it nobody is asked for a token.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    handler: Callable[[Call], Awaitable[Reply]]
    body: type[BaseModel] | None = None
    query: type[BaseModel] = NoQuery
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    errors: tuple[ErrorCode, ...] = ()
    scope: Scope | None = Scope.USER


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as its handler sees it: let in, and its body and query checked.

    ``path`` are the parameters in the address.
    """

    context: Context
    guest: Visit | None = None
    body: Any = None
    query: Any = None
    path: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    headers: Headers = field(default_factory=Headers)

    @property
    def visit(self) -> Visit:
        """Says when nobody waits for the answer any more; only where a scope is needed."""
        assert self.guest is not None, "the operation is open to everybody"
        return self.guest

    @property
    def caller(self) -> Caller:
        """Whom it is from; only where a scope is needed."""
        return self.visit.caller


def routes(context: Context, operations: Iterable[Operation]) -> list[BaseRoute]:
    """Return the routes of all operations, under the base path of the settings, and of what there is not in ``/v1``."""
    by_path: defaultdict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in operations:
        by_path[operation.path][operation.method] = operation
    base = context.settings.base_path
    bodies = FairShare(BODIES_BYTES)
    found: list[BaseRoute] = [
        Route(base + path, CrossOrigin(Endpoint(context, methods, path=path, bodies=bodies), context, methods=methods))
        for path, methods in by_path.items()
    ]
    return [*found, Nowhere(base + "/v1/")]


class Endpoint:
    """An ASGI application for one address.

    Args:
        context: The rest of the daemon.
        operations: What is done, by method.
        path: The address's pattern.
        bodies: The room for bodies, which all addresses share.
    """

    def __init__(self, context: Context, operations: Mapping[str, Operation], *, path: str, bodies: FairShare) -> None:
        self._context = context
        self._operations = operations
        self._path = path
        self._bodies = bodies
        self._tasks = TaskGroup(path)

    async def __call__(self, asgi: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answering = _Answering(send, counted=self._count)
        try:
            operation = self._operation(asgi["method"])
            await self._answer(operation, asgi, receive, answering)
        except (GoneError, ConnectionError):
            pass
        except InferenceCenterError as error:
            await answering.fail(error)
        except Exception:  # noqa: BLE001 - the border: a defect here must not be the connection's end without a word
            _log.exception("request_failed", method=asgi["method"], path=self._path)
            await answering.fail(InferenceCenterError(ErrorCode.INTERNAL))

    def _operation(self, method: str) -> Operation:
        operation = self._operations.get(method)
        if operation is None:
            allowed = ", ".join(sorted(self._operations))
            raise NotAllowedError(method, allowed=allowed)
        return operation

    async def _answer(self, operation: Operation, asgi: AsgiScope, receive: Receive, answering: _Answering) -> None:
        if operation.scope is None:
            with BodyRoom(self._bodies, "") as room:
                call = await self._call(operation, asgi, receive, None, room)
                await answering.answer(await operation.handler(call))
            return
        visit = Visit(await admit(self._context, asgi, Headers(scope=asgi), scope=operation.scope))
        room = BodyRoom(self._bodies, visit.account.client_id)
        with self._counted(visit), visit.until_expiry(self._context.clock()), room:
            try:
                call = await self._call(operation, asgi, receive, visit, room)
                leaving = self._tasks.spawn(_notice_leaving(receive, visit), name="notice_leaving")
                try:
                    await answering.answer(await operation.handler(call))
                finally:
                    leaving.cancel()
            except InferenceCenterError:
                # The request still counts among its client's, who so has no more refusals at once than requests.
                if delay_s := self._context.paces.refused(visit.account.client_id):
                    await sleep(delay_s)
                raise
            self._context.paces.accepted(visit.account.client_id)

    async def _call(
        self, operation: Operation, asgi: AsgiScope, receive: Receive, visit: Visit | None, room: BodyRoom
    ) -> Call:
        check_query_length(asgi["query_string"])
        query = checked(operation.query, dict(QueryParams(asgi["query_string"])))
        return Call(
            context=self._context,
            guest=visit,
            body=None if operation.body is None else await self._body(operation.body, asgi, receive, room),
            query=query,
            path=asgi.get("path_params", _NOTHING),
            headers=Headers(scope=asgi),
        )

    async def _body(self, kind: type[BaseModel], asgi: AsgiScope, receive: Receive, room: BodyRoom) -> BaseModel:
        """Read the body as ``kind``; a large one is read in a thread, in which clients take turns."""
        body = await read_body(receive, Headers(scope=asgi), self._context.settings, hold=room.hold)
        if len(body) < LARGE_BYTES:
            return parse(kind, body)
        return await self._context.worker.run(room.client_id, partial(parse, kind, body))

    @contextmanager
    def _counted(self, visit: Visit) -> Iterator[None]:
        hub, gauge = self._context.hub, self._context.metrics.http_requests
        hub.enter(visit)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            hub.exit(visit)

    def _count(self, status: int, error: InferenceCenterError | None) -> None:
        metrics = self._context.metrics
        metrics.http_responses.labels(self._path, str(status)).inc()
        if error is not None:
            metrics.errors.labels(error.code.value).inc()


class NotAllowedError(InferenceCenterError):
    """A method that an address does not take; ``allowed`` are those that it takes."""

    def __init__(self, method: str, *, allowed: str) -> None:
        super().__init__(ErrorCode.METHOD_NOT_ALLOWED, f"this address takes {allowed}, not {method[:16]}")
        self.allowed = allowed


class _Answering:
    """The answer to one request, as far as it is sent; ``counted`` hears its status, and the error if it is one."""

    def __init__(self, send: Send, *, counted: Callable[[int, InferenceCenterError | None], None]) -> None:
        self._send = send
        self._counted = counted
        self._streaming = False

    async def answer(self, reply: Reply) -> None:
        """Send all of an answer."""
        if isinstance(reply, Document):
            await self._whole(reply.body, reply.status, reply.headers)
            self._counted(reply.status, None)
        else:
            await self._stream(reply)

    async def fail(self, error: InferenceCenterError) -> None:
        """Send an error in place of an answer, or as the last event of a stream that has begun."""
        body = error_body(error)
        self._counted(error.spec.http_status, error)
        if self._streaming:
            await self._send({"type": "http.response.body", "body": sse.event(body), "more_body": False})
            return
        headers = error_headers(error)
        if isinstance(error, NotAllowedError):
            headers["allow"] = error.allowed
        await self._whole(body, error.spec.http_status, headers)

    async def _stream(self, reply: Stream) -> None:
        send = self._send
        async with aclosing(reply.chunks) as chunks:
            async for chunk in chunks:
                if not self._streaming:
                    self._streaming = True
                    await self._start(200, {"content-type": sse.MEDIA_TYPE, "cache-control": "no-store"})
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._counted(200, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _whole(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, headers if status == HTTPStatus.NOT_MODIFIED else {**length, **headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


async def _notice_leaving(receive: Receive, visit: Visit) -> None:
    """Wait until the peer has gone; what it still sends is not asked for."""
    while (await receive())["type"] != "http.disconnect":
        pass
    visit.end(GoneError())
