"""A connection to an MCP server through the official package. Imported only if a server is declared.

One task owns the connection from the handshake to its end, because the package's context managers must be exited by the
task that entered them; requests come from other tasks. Everything that a server sends is bounded before it is parsed,
and its errors are reduced to one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import httpx2
import orjson
from mcp import ClientSession, MCPError
from mcp import types as mcp_types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from pydantic import Field

from inferencecenter import __version__
from inferencecenter.core.errors import reason_of
from inferencecenter.mcp.gateway import ListedTool, McpLostError, McpRefusedError, McpUnreachableError, ToolResult

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from contextvars import Context
    from typing import Self

    from mcp.client._transport import TransportStreams
    from mcp.shared._stream_protocols import ReadStream, WriteStream

    from inferencecenter.config.sections import McpServerSettings
    from inferencecenter.core.tasks import TaskGroup

MAX_TOOLS: Final = 128
"""Maximum number of tools of a server, as for a turn."""
MAX_LIST_BYTES: Final = 512 * 1024
"""Maximum size of their descriptions and schemas."""
MAX_DESCRIPTION_CHARS: Final = 4096
MAX_STRUCTURE: Final = 40_000
"""Maximum number of lists, objects and fields of a message, which is parsed on the event loop."""
MAX_COMMAS: Final = 100_000
"""Maximum number of commas of a message, and so of its values, most of which can only be numbers."""
MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a message, whatever the settings: its parser holds the interpreter lock, for up to 50 ms."""
_COUNTED: Final = b"[{:,"
_NOT_COUNTED: Final = bytes(code for code in range(256) if code not in _COUNTED + b'"\r\n')
_STRING: Final = re.compile(rb'"[^"\r\n]*["\r\n]?')
_EVENT_END: Final = re.compile(rb"\n\n|\r\n\r\n")
_SEARCHED_BYTES: Final = 64 * 1024
_MAX_PARTS: Final = 1024
_MAX_PAGES: Final = 16
_MAX_REASON_CHARS: Final = 400
_ENVELOPE_BYTES: Final = 64 * 1024
_MAX_HEADERS_BYTES: Final = 16 * 1024
_SPARE_RESPONSES: Final = 16
"""Open HTTP requests of a connection beside its calls: lists, the server's event stream, and cancelled calls."""
_GET_INTERVAL_S: Final = 0.5
_MESSAGE_INTERVAL_S: Final = 0.01
_MESSAGE_BURST: Final = 200
"""Messages that answer nothing, such as the progress of a call, which a server may send beyond one each interval."""
_MAX_UNANSWERED: Final = 16
_CLOSE_S: Final = 2.0
_KILL_S: Final = 10.0
_GUARD: Final = Path(__file__).with_name("stdio_guard.py")
_INHERITED_VARIABLES: Final = ("PATH", "HOME", "LANG", "TZ", "TMPDIR")
_NOT_RUN: Final = (mcp_types.INVALID_REQUEST, mcp_types.METHOD_NOT_FOUND, mcp_types.INVALID_PARAMS)
"""JSON-RPC errors of requests that the server did not run."""

# These loggers include URLs and message contents.
for _name in ("mcp", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class _CallResult(mcp_types.CallToolResult):
    content: Annotated[list[mcp_types.ContentBlock], Field(max_length=_MAX_PARTS, fail_fast=True)]


class _Delivery:
    """Whether a request was certainly not delivered: no connection, or a session that the server does not know.

    Its own POST is the first one of its context; answers to what the server asks while it runs follow.
    """

    posted = False
    failed = False


# Set where a request is sent; the package runs its POST in the same context.
_delivery: ContextVar[_Delivery | None] = ContextVar("_delivery", default=None)


class McpConnection:
    """One connection, opened by the first ``open`` and closed once.

    Args:
        settings: Settings of the server.
        tasks: Runs the connection's task.
        tools_changed: Called when the server announces that its list of tools changed.
    """

    def __init__(self, settings: McpServerSettings, *, tasks: TaskGroup, tools_changed: Callable[[], None]) -> None:
        self._settings = settings
        self._tools_changed = tools_changed
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._session: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._transport: _BoundedTransport | None = None
        self.is_lost = False
        """Whether no further request can succeed."""

    async def open(self) -> None:
        """Wait until the handshake is done; any number of tasks may wait.

        Raises:
            McpUnreachableError: There is no connection.
        """
        if self._task is None:
            self._task = self._tasks.spawn(self._serve(), name="connection")
        await asyncio.shield(self._session)

    async def close(self) -> None:
        """Close the connection, at first gracefully, for a limited time."""
        self.is_lost = True
        self._closing.set()
        if self._task is None:
            return
        if not self._session.done():
            self._task.cancel()
        # Ending a process has timeouts of its own; an HTTP server may never answer the request that ends its session.
        _, pending = await asyncio.wait([self._task], timeout=_KILL_S if self._settings.url is None else _CLOSE_S)
        if pending:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_KILL_S)

    async def list_tools(self) -> tuple[ListedTool, ...]:
        """Return the tools of the server, up to the limits, without those whose schema cannot be sent as JSON.

        Raises:
            McpUnreachableError: There is no connection.
            McpLostError: It was lost before the response.
            McpRefusedError: The server does not list its tools.
        """
        found: dict[str, ListedTool] = {}
        n_bytes, cursor = 0, None
        for _ in range(_MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            page = await self._request(mcp_types.ListToolsRequest(params=params), mcp_types.ListToolsResult)
            for tool in page.tools:
                listed = ListedTool(
                    tool.name, (tool.description or "")[:MAX_DESCRIPTION_CHARS], dict(tool.input_schema)
                )
                if (schema := _json(listed.parameters)) is None:
                    continue
                n_bytes += len(listed.description) + len(schema)
                if n_bytes > MAX_LIST_BYTES or len(found) >= MAX_TOOLS:
                    return tuple(found.values())
                found.setdefault(listed.name, listed)
            if (cursor := page.next_cursor) is None:
                break
        return tuple(found.values())

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool and return its result; cancellation is forwarded to the server.

        Raises:
            McpUnreachableError: There is no connection, and the tool did not run.
            McpLostError: It was lost before the response.
            McpRefusedError: The server does not run the tool.
        """
        params = mcp_types.CallToolRequestParams(name=name, arguments=dict(arguments))
        # Not ``call_tool`` of the session, which validates the result against the server's schema on this thread.
        result = await self._request(mcp_types.CallToolRequest(params=params), _CallResult)
        return ToolResult(_cut(_text_of(result), self._settings.max_result_bytes), bool(result.is_error))

    async def _request(self, request: Any, kind: Any) -> Any:
        session = await asyncio.shield(self._session)
        if self._transport is not None and self._transport.n_open >= self._settings.max_calls + _SPARE_RESPONSES:
            self.is_lost = True  # cancelled requests that the server never answered; another connection replaces it
        if self.is_lost:
            raise McpUnreachableError("the connection was lost")
        delivery = _Delivery()
        token = _delivery.set(delivery)
        try:
            return await session.send_request(request, kind)
        except MCPError as error:
            if delivery.failed:
                self.is_lost = True
                raise McpUnreachableError("the server ended the session") from error
            if error.code == mcp_types.CONNECTION_CLOSED:
                self.is_lost = True
                raise McpLostError("the connection was lost") from error
            if error.code in _NOT_RUN:
                raise McpRefusedError(_one_line(error.message)) from error
            raise McpLostError(_one_line(error.message)) from error
        except Exception as error:
            raise McpLostError("its answer is not valid") from error
        finally:
            _delivery.reset(token)

    async def _serve(self) -> None:
        """Hold the connection until it is closed or lost."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    session = await self._connect(stack)
                self._session.set_result(session)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - boundary: the package raises exception groups of any type
            if not self._session.done():
                self._fail(_reason(error))
        finally:
            self.is_lost = True
            if not self._session.done():
                self._fail("the connection was closed")

    def _fail(self, reason: str) -> None:
        self._session.set_exception(McpUnreachableError(reason))
        self._session.exception()  # possibly no task waits for it any more

    async def _connect(self, stack: AsyncExitStack) -> ClientSession:
        settings = self._settings
        max_bytes = min(settings.max_result_bytes * 4 + _ENVELOPE_BYTES + MAX_LIST_BYTES, MAX_MESSAGE_BYTES)
        if settings.url is None:
            streams = _stdio_streams(settings, max_bytes=max_bytes, on_end=self._process_ended)
            read, write = await stack.enter_async_context(streams)
        else:
            read, write = await stack.enter_async_context(await self._http_streams(stack, max_bytes))
        own = mcp_types.Implementation(name="inferencecenter", version=__version__)
        outgoing = _OutgoingMessages(write)
        incoming = _IncomingMessages(read, outgoing)
        session = await stack.enter_async_context(
            ClientSession(incoming, outgoing, client_info=own, message_handler=self._on_message)
        )
        await session.initialize()
        return session

    async def _on_message(self, message: mcp_types.ServerNotification | Exception) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._tools_changed()

    async def _http_streams(
        self, stack: AsyncExitStack, max_bytes: int
    ) -> AbstractAsyncContextManager[TransportStreams]:
        settings = self._settings
        tls = await asyncio.to_thread(_tls_context)
        self._transport = _BoundedTransport(max_bytes, tls)
        client = await stack.enter_async_context(
            httpx2.AsyncClient(
                transport=self._transport,
                headers={"User-Agent": f"inferencecenter/{__version__}", **_headers(settings)},
                timeout=httpx2.Timeout(settings.connect_timeout_s, read=None),
                trust_env=False,
            )
        )
        assert settings.url is not None, "required by the settings"
        return streamable_http_client(settings.url, http_client=client, max_sse_event_size=max_bytes)

    def _process_ended(self) -> None:
        self.is_lost = True
        self._closing.set()
        if not self._session.done():
            self._fail("the command ended")
            assert self._task is not None
            self._task.cancel()


def _headers(settings: McpServerSettings) -> dict[str, str]:
    """Return the configured headers.

    Raises:
        McpUnreachableError: The file or a variable cannot be used; the message contains no header value.
    """
    headers: dict[str, str] = {}
    for name, variable in settings.headers_env.items():
        if variable not in os.environ:
            raise McpUnreachableError(f"the environment variable {variable} is not set")
        headers[name] = os.environ[variable]
    if (path := settings.headers_file) is not None:
        try:
            with path.open(encoding="ascii") as file:
                lines = file.read(_MAX_HEADERS_BYTES).splitlines()
        except (OSError, UnicodeDecodeError):
            raise McpUnreachableError("headers_file cannot be read") from None
        for line in filter(str.strip, lines):
            name, colon, value = line.partition(":")
            if not colon or not name.strip():
                raise McpUnreachableError("headers_file has a line that is not a header")
            headers[name.strip()] = value.strip()
    return headers


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the context of all connections. Reading the certificate authorities takes up to a quarter of a second."""
    return httpx2.create_ssl_context(trust_env=False)


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Refuses compressed and recoded responses, long and dense ones; in event streams each event is bounded instead.

    The package reopens an event stream that ended as fast as the server tells it to, so GETs have a minimum interval.

    Attributes:
        n_open: Number of requests without a response that is complete.
    """

    def __init__(self, max_bytes: int, tls: ssl.SSLContext) -> None:
        super().__init__(verify=tls, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=2))
        self._max_bytes = max_bytes
        self._next_get_s = 0.0
        self.n_open = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"
        self.n_open += 1
        try:
            if request.method == "GET":
                await self._await_turn()
            response = await self._send(request)
        except BaseException:
            self.n_open -= 1
            raise
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, self._max_bytes, is_stream=is_stream, closed=self._closed)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the response is compressed")
        if (response.charset_encoding or "utf-8").lower() != "utf-8":
            await response.aclose()
            raise httpx2.ReadError("the response is not UTF-8")
        return response

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        # Only its own POST delivers a request; a GET of the same context resumes the stream of its response.
        delivery = _delivery.get() if request.method == "POST" else None
        if delivery is not None and delivery.posted:
            delivery = None
        try:
            response = await super().handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            if delivery is not None:
                delivery.failed = True
            raise
        finally:
            if delivery is not None:
                delivery.posted = True
        if delivery is not None and response.status_code == 404 and "mcp-session-id" in request.headers:
            delivery.failed = True
        return response

    async def _await_turn(self) -> None:
        now = time.monotonic()
        wait_s, self._next_get_s = self._next_get_s - now, max(now, self._next_get_s) + _GET_INTERVAL_S
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _closed(self) -> None:
        self.n_open -= 1


class DensityMeter:
    """Counts what a message has outside of its strings, part by part as it arrives.

    A server chooses the size of the parts, so none is searched twice, and none before the message could be dense. No
    string of JSON contains a line break, so each line starts outside of strings: the other lines of an event cannot
    make its data look like the content of a string.
    """

    def __init__(self) -> None:
        self._unsearched = bytearray()
        # Exact for what was searched; the rest counts as if it had no strings.
        self._n_structure = self._n_commas = 0
        self._found_structure = self._found_commas = 0
        self._in_string = self._is_escaped = False
        self.is_dense = False
        """Whether the message has more than ``MAX_STRUCTURE`` lists, objects and fields, or ``MAX_COMMAS`` commas."""

    def add(self, part: bytes) -> None:
        """Count the next part of the message."""
        self._unsearched += part
        self._n_structure += _n_structure(part)
        self._n_commas += part.count(b",")
        if self._n_structure > MAX_STRUCTURE or self._n_commas > MAX_COMMAS:
            self._search()

    def _search(self) -> None:
        text = bytes(self._unsearched[1:] if self._is_escaped else self._unsearched)
        self._unsearched.clear()
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._is_escaped = text.endswith(b"\\")
        marks = text.translate(None, _NOT_COUNTED)
        # Strings without a counted character are adjacent quotes.
        marks = (b'"' + marks if self._in_string else marks).replace(b'""', b"")
        last_line = marks[max(marks.rfind(b"\n"), marks.rfind(b"\r")) + 1 :]
        self._in_string = last_line.count(b'"') % 2 == 1
        if marks.count(b'"') > 2 * (MAX_STRUCTURE + MAX_COMMAS + 1):
            self.is_dense = True
            return
        outside = _STRING.sub(b"", marks)
        self._n_structure = self._found_structure = self._found_structure + _n_structure(outside)
        self._n_commas = self._found_commas = self._found_commas + outside.count(b",")
        self.is_dense = self._n_structure > MAX_STRUCTURE or self._n_commas > MAX_COMMAS


class _BoundedStream(httpx2.AsyncByteStream):
    """A response of which each message is bounded: the whole body, or an event."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, max_bytes: int, *, is_stream: bool, closed: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._is_stream = is_stream
        self._closed: Callable[[], None] | None = closed
        self._n_bytes = 0
        self._density = DensityMeter()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        last_bytes = b""
        async for chunk in self._stream:
            added = 0
            if self._is_stream:
                # The end of an event may be divided between chunks.
                n_before, joined = len(last_bytes), last_bytes + chunk
                for end in _EVENT_END.finditer(joined):
                    if end.end() > n_before:
                        self._add(chunk[added : end.end() - n_before])
                        added = end.end() - n_before
                        self._n_bytes, self._density = 0, DensityMeter()
                last_bytes = joined[-3:]
            self._add(chunk[added:])
            yield chunk

    def _add(self, part: bytes) -> None:
        self._n_bytes += len(part)
        self._density.add(part)
        if self._n_bytes > self._max_bytes or self._density.is_dense:
            raise httpx2.StreamError("the response is too long")

    async def aclose(self) -> None:
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()
        await self._stream.aclose()


class _OutgoingMessages:
    """The messages to a server; counts the server's requests without an answer.

    Each of them is a task of the package until its answer is sent, which a server that reads nothing prevents.
    """

    def __init__(self, messages: WriteStream[SessionMessage]) -> None:
        self._messages = messages
        self._n_unanswered = 0

    def expect_answer(self) -> bool:
        """Count a request of the server; ``False`` if too many have no answer."""
        if self._n_unanswered >= _MAX_UNANSWERED:
            return False
        self._n_unanswered += 1
        return True

    async def send(self, item: SessionMessage, /) -> None:
        await self._messages.send(item)
        if isinstance(item.message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError):
            self._n_unanswered -= 1

    async def aclose(self) -> None:
        await self._messages.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _IncomingMessages:
    """The messages of a server, of which those that answer nothing are paced and, if they are requests, bounded.

    A server that sends them without end would otherwise take a large part of the event loop, and all memory.
    """

    def __init__(self, messages: ReadStream[SessionMessage | Exception], outgoing: _OutgoingMessages) -> None:
        self._messages = messages
        self._outgoing = outgoing
        self._next_s = 0.0

    @property
    def last_context(self) -> Context | None:
        """The context of the last message's sender, if the transport has it."""
        return getattr(self._messages, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        while True:
            item = await self._messages.receive()
            if isinstance(item, SessionMessage):
                if isinstance(item.message, mcp_types.JSONRPCRequest | mcp_types.JSONRPCNotification):
                    await self._pace()
                if isinstance(item.message, mcp_types.JSONRPCRequest) and not self._outgoing.expect_answer():
                    continue
            return item

    async def _pace(self) -> None:
        now = time.monotonic()
        self._next_s = max(now - _MESSAGE_BURST * _MESSAGE_INTERVAL_S, self._next_s) + _MESSAGE_INTERVAL_S
        if self._next_s > now:
            await asyncio.sleep(self._next_s - now)

    async def aclose(self) -> None:
        await self._messages.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@asynccontextmanager
async def _stdio_streams(
    settings: McpServerSettings, *, max_bytes: int, on_end: Callable[[], None]
) -> AsyncIterator[TransportStreams]:
    """Run a server in its own process group and exchange lines with it; ``on_end`` is called when its output ends.

    It replaces the package's transport, which does not limit lines and whose processes outlive a killed daemon.
    """
    assert settings.command is not None, "required by the settings"
    lifeline, lifeline_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_GUARD), str(lifeline), str((settings.memory_mib or 0) * 2**20)),
            *(settings.command, *settings.args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(settings),
            cwd=settings.directory,
            pass_fds=(lifeline,),
            start_new_session=True,
            limit=max_bytes,
        )
    except BaseException:
        os.close(lifeline_end)
        raise
    finally:
        os.close(lifeline)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    arrived, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_send, outgoing = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        with contextlib.suppress(ValueError, ConnectionError, anyio.BrokenResourceError):
            async with arrived:
                while line := await stdout.readline():  # an overlong, dense or invalid line ends the connection
                    if await _is_dense(line):
                        break
                    message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                    await arrived.send(SessionMessage(message))
        on_end()

    async def write() -> None:
        with contextlib.suppress(ConnectionError):
            async for each in outgoing:
                stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    try:
        async with anyio.create_task_group() as tasks, arrived, received, to_send, outgoing:
            tasks.start_soon(read)
            tasks.start_soon(write)
            try:
                yield received, to_send
            finally:
                stdin.close()  # the signal to exit
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_S / 2):
                        await process.wait()
                tasks.cancel_scope.cancel()
    finally:
        os.close(lifeline_end)
        await asyncio.shield(_wait_ended(process, stdout))


async def _wait_ended(process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
    """Wait until a killed process is gone and its pipe is closed, which happens at the end of its output.

    A process that has left the group may keep the pipe open, so the wait has a timeout.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            while await stdout.read(_ENVELOPE_BYTES):
                pass
            await process.wait()


def _environment(settings: McpServerSettings) -> dict[str, str]:
    names = (*_INHERITED_VARIABLES, *settings.env_passed)
    own = {name: value.get_secret_value() for name, value in settings.env.items()}
    return {name: os.environ[name] for name in names if name in os.environ} | own


async def _is_dense(message: bytes) -> bool:
    """Return whether a whole message is dense; other tasks run meanwhile."""
    meter = DensityMeter()
    for at in range(0, len(message), _SEARCHED_BYTES):
        meter.add(message[at : at + _SEARCHED_BYTES])
        if meter.is_dense:
            return True
        await asyncio.sleep(0)
    return False


def _n_structure(text: bytes) -> int:
    return sum(map(text.count, (b"[", b"{", b":")))


def _json(value: object) -> bytes | None:
    """Return a value as JSON; ``None`` if clients cannot be sent it: it has an integer of more than 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return None


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Return a result as text for the model: its text parts, and one line in place of each other part."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        found = _json(result.structured_content)
        return json.dumps(result.structured_content, ensure_ascii=False) if found is None else found.decode()
    return "\n".join(parts)


def _part(block: mcp_types.ContentBlock) -> str:
    match block:
        case mcp_types.TextContent():
            return block.text
        case mcp_types.ImageContent() | mcp_types.AudioContent():
            return f"[{block.type}: {_one_line(block.mime_type)}, {len(block.data) * 3 // 4} bytes]"
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents(text=text)):
            return text
        case mcp_types.EmbeddedResource():
            return f"[resource: {_one_line(str(block.resource.uri))}]"
        case _:
            return f"[resource: {_one_line(str(block.uri))}]"


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return f"{encoded[:max_bytes].decode(errors='ignore')}\n[cut: {max_bytes} of {len(encoded)} bytes]"


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_REASON_CHARS])


def _reason(error: BaseException) -> str:
    """Return the reason of a failed connection, without addresses and headers."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case McpUnreachableError():
            return str(error)
        case TimeoutError() | httpx2.TimeoutException():
            return "it did not answer in time"
        case httpx2.TransportError():
            return f"no connection ({type(error).__name__})"
        case MCPError():
            return _one_line(error.message)
        case _:
            return reason_of(error).partition(":")[0] if isinstance(error, Exception) else "it was stopped"
