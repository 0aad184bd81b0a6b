"""A connection by the official package, to its own server and to a hostile one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import pytest
from mcp import types as mcp_types
from mcp.shared.message import SessionMessage

from inferencecenter.config.sections import McpServerSettings
from inferencecenter.core.tasks import TaskGroup
from inferencecenter.mcp.connection import (
    _MESSAGE_BURST,
    _MESSAGE_INTERVAL_S,
    MAX_COMMAS,
    MAX_MESSAGE_BYTES,
    MAX_STRUCTURE,
    MAX_TOOLS,
    DensityMeter,
    McpConnection,
    _BoundedStream,
    _IncomingMessages,
    _OutgoingMessages,
    _tls_context,
)
from inferencecenter.mcp.gateway import McpLostError, McpRefusedError, McpUnreachableError
from tests.mcp.serving import CONNECT_TIMEOUT_S, CallFile, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real server."""
    with serve(CallFile(tmp_path_factory.mktemp("mcp") / "calls")) as (_, port):
        yield port


@asynccontextmanager
async def connected(
    port: int, *, tools_changed: Callable[[], None] = lambda: None, **settings: Any
) -> AsyncIterator[McpConnection]:
    """A connection to a server on this machine, closed at the end."""
    tasks, values = TaskGroup("test"), {"connect_timeout_s": CONNECT_TIMEOUT_S, **settings}
    server = McpServerSettings(url=f"http://127.0.0.1:{port}/mcp", **values)
    connection = McpConnection(server, tasks=tasks, tools_changed=tools_changed)
    try:
        yield connection
    finally:
        await connection.close()
        await tasks.cancel()


Answer = tuple[int, dict[str, str], bytes]


@asynccontextmanager
async def scripted_server(answer: Callable[[dict[str, Any], dict[str, str]], Answer]) -> AsyncIterator[int]:
    """A server that answers each POST as a test says, by its body and headers."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            method, *lines = head.decode().splitlines()
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            status, extra, content = (
                (405, {}, b"") if not method.startswith("POST") else answer(json.loads(body), headers)
            )
            fields = {"Content-Length": str(len(content)), "Content-Type": "application/json"} | extra
            block = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            writer.write(f"HTTP/1.1 {status} Whatever\r\n{block}\r\n".encode() + content)
            await writer.drain()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def reply(request: dict[str, Any], result: dict[str, Any]) -> Answer:
    """The answer with a result."""
    return 200, {}, json.dumps({"jsonrpc": "2.0", "id": request.get("id"), "result": result}).encode()


def ordinary(request: dict[str, Any]) -> Answer:
    """Arbitrary responses to the handshake."""
    if request["method"] == "initialize":
        info = {"name": "stub", "version": "1"}
        return reply(request, {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info})
    return 202, {}, b""


async def test_tools_of_a_real_server_run(port: int) -> None:
    """The connection lists tools, gets a result as text, and reports the error of a tool."""
    async with connected(port) as connection:
        await connection.open()
        assert "get_weather" in [tool.name for tool in await connection.list_tools()]
        result = await connection.call_tool("get_weather", {"city": "Oslo"})
        assert (result.text, result.is_error) == ("-3 °C in Oslo", False)
        assert (await connection.call_tool("fail", {})).is_error


async def test_certificate_authorities_are_read_outside_the_event_loop(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a quarter of a second of CPU on a slow processor."""
    threads = []

    def context(**_: object) -> ssl.SSLContext:
        threads.append(threading.current_thread())
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    monkeypatch.setattr(httpx2, "create_ssl_context", context)
    _tls_context.cache_clear()
    async with connected(port) as connection:
        await connection.open()
    _tls_context.cache_clear()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_changed_tools_are_announced(port: int) -> None:
    """The server's notification is passed on, and the next list has the new tool."""
    changed = asyncio.Event()
    async with connected(port, tools_changed=changed.set) as connection:
        await connection.open()
        before = {tool.name for tool in await connection.list_tools()}
        assert not changed.is_set()
        await connection.call_tool("grow", {"name": "grown"})
        await changed.wait()
        assert {tool.name for tool in await connection.list_tools()} - before == {"grown"}


async def test_operators_headers_are_sent_and_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They come from the file and the environment; the file is read for each connection."""
    seen: list[dict[str, str]] = []

    def answer(request: dict[str, Any], headers: dict[str, str]) -> Answer:
        seen.append(headers)
        return ordinary(request)

    file = tmp_path / "headers"
    file.write_text("Authorization: Bearer s3cret\n\nX-Two: b\n")
    monkeypatch.setenv("TEST_KEY", "k3y")
    caplog.set_level(logging.DEBUG)
    async with scripted_server(answer) as port:
        async with connected(port, headers_file=file, headers_env={"X-Key": "TEST_KEY"}) as connection:
            await connection.open()
        assert {(each["authorization"], each["x-two"], each["x-key"]) for each in seen} == {
            ("Bearer s3cret", "b", "k3y")
        }
        assert "s3cret" not in caplog.text
        assert "k3y" not in caplog.text
        file.write_text("nonsense s3cret")
        async with connected(port, headers_file=file) as connection:
            with pytest.raises(McpUnreachableError, match=r"^headers_file has a line that is not a header$"):
                await connection.open()
        async with connected(port, headers_env={"X-Key": "TEST_MISSING"}) as connection:
            with pytest.raises(McpUnreachableError, match="TEST_MISSING is not set"):
                await connection.open()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {}, b""), "error response"),
        ((200, {}, b"{"), "Failed to parse"),
        ((200, {"Content-Type": "text/html"}, b"<html>"), "content type"),
        ((302, {"Location": "http://127.0.0.2/"}, b""), "not followed"),
        ((200, {"Content-Encoding": "gzip"}, b"x"), "no connection"),
        ((200, {}, b" " * 4_000_000), "too long|Failed to parse"),
    ],
)
async def test_handshake_fails_with_a_short_reason(answer: Answer, message: str) -> None:
    """Any invalid response to the handshake gives a short reason."""
    async with scripted_server(lambda _request, _headers: answer) as port, connected(port) as connection:
        with pytest.raises(McpUnreachableError, match=message) as caught:
            await connection.open()
        assert "\n" not in str(caught.value)
        assert connection.is_lost


async def test_silent_server_times_out() -> None:
    """The handshake fails after the configured timeout."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    async with server, connected(server.sockets[0].getsockname()[1], connect_timeout_s=0.1) as connection:
        with pytest.raises(McpUnreachableError, match="did not answer in time"):
            await connection.open()


async def test_list_of_tools_is_bounded() -> None:
    """The list is limited by number and size, across pages too."""
    n_pages = 0

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        nonlocal n_pages
        if request["method"] != "tools/list":
            return ordinary(request)
        n_pages += 1
        tools = [{"name": f"t{n_pages}-{n}", "inputSchema": {"type": "object"}} for n in range(20)]
        return reply(request, {"tools": tools, "nextCursor": "more"})

    async with scripted_server(answer) as port, connected(port) as connection:
        await connection.open()
        assert len(await connection.list_tools()) == MAX_TOOLS
        assert n_pages == 7


@pytest.mark.parametrize(("code", "error"), [(-32602, McpRefusedError), (-32603, McpLostError), (-1, McpLostError)])
async def test_only_a_refusal_says_that_a_tool_did_not_run(code: int, error: type[Exception]) -> None:
    """Other errors may occur after the tool took effect, so the outcome is unknown."""

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        if request["method"] != "tools/call":
            return ordinary(request)
        body = {"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": "two\nlines"}}
        return 200, {}, json.dumps(body).encode()

    async with scripted_server(answer) as port, connected(port) as connection:
        await connection.open()
        with pytest.raises(error, match="two lines"):
            await connection.call_tool("x", {})


async def test_forgotten_session_was_not_delivered() -> None:
    """404 for a session means that nothing ran; without a session it says nothing."""

    def answer(request: dict[str, Any], headers: dict[str, str]) -> Answer:
        if request["method"] == "tools/call":
            return 404, {}, b""
        status, fields, body = ordinary(request)
        return status, fields | {"Mcp-Session-Id": "1"} if "mcp-session-id" not in headers else fields, body

    async with scripted_server(answer) as port, connected(port) as connection:
        await connection.open()
        with pytest.raises(McpUnreachableError):
            await connection.call_tool("x", {})
        assert connection.is_lost


async def test_tool_with_large_numbers_is_left_out() -> None:
    """JSON of clients has no integers of more than 64 bits; a result may have them."""

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        if request["method"] == "tools/call":
            return reply(request, {"content": [], "structuredContent": {"n": 2**70}})
        schemas = {"large": {"maximum": 2**70}, "small": {"maximum": 1}}
        tools = [{"name": name, "inputSchema": {"type": "object", **schema}} for name, schema in schemas.items()]
        return reply(request, {"tools": tools}) if request["method"] == "tools/list" else ordinary(request)

    async with scripted_server(answer) as port, connected(port) as connection:
        await connection.open()
        assert [tool.name for tool in await connection.list_tools()] == ["small"]
        assert json.loads((await connection.call_tool("small", {})).text) == {"n": 2**70}


@asynccontextmanager
async def hanging_server() -> AsyncIterator[tuple[int, Counter[str]]]:
    """A server whose calls never end, and whose event streams end at once; yields its port and counts requests.

    The call ``asks`` sends a ping, and loses its connection when the answer was refused with 404.
    """
    seen: Counter[str] = Counter()
    ended, refused = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
            n_bytes = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
            request = json.loads(await reader.readexactly(n_bytes) or b"{}")
            seen[request.get("method", head.partition(" ")[0])] += 1
            fields = {"Mcp-Session-Id": "1", "Content-Type": "application/json"}
            if head.startswith("get"):
                status, content = 200, b"retry: 0\nid: 1\ndata:\n\n"
                fields["Content-Type"] = "text/event-stream"
            elif request.get("method") == "tools/call":
                if request["params"]["name"] == "asks":
                    ping = json.dumps({"jsonrpc": "2.0", "id": 99, "method": "ping"})
                    writer.write(f"HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\n\r\ndata: {ping}\n\n".encode())
                    await refused.wait()
                    await asyncio.sleep(0.2)  # the client reads the refusal
                    return
                await ended.wait()
                return
            elif "result" in request:
                status, content = 404, b""
                refused.set()
            else:
                status, _, content = ordinary({"method": "", **request})
            block = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            writer.write(f"HTTP/1.1 {status} x\r\n{block}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], seen
    finally:
        ended.set()
        server.close()


async def test_refused_answer_to_the_server_says_nothing_about_the_call() -> None:
    """A call that was delivered is not taken for one that was not, as it would be sent again."""
    async with hanging_server() as (port, seen), connected(port) as connection:
        await connection.open()
        with pytest.raises(McpLostError):
            await connection.call_tool("asks", {})
        assert seen["tools/call"] == 1


async def test_calls_that_never_end_do_not_take_all_descriptors() -> None:
    """The package keeps the request of a cancelled call open; with many of them the connection is replaced."""
    async with hanging_server() as (port, seen), connected(port, max_calls=2) as connection:
        await connection.open()
        for n in range(1, 30):
            calling = asyncio.ensure_future(connection.call_tool("x", {}))  # noqa: TID251 - it is awaited below
            while seen["tools/call"] < n and not calling.done():  # noqa: ASYNC110 - the server counts
                await asyncio.sleep(0.001)
            calling.cancel()
            await asyncio.wait([calling])
            if connection.is_lost:
                break
        with pytest.raises(McpUnreachableError):
            await connection.call_tool("x", {})
        assert 2 < seen["tools/call"] <= 18


async def test_event_stream_is_reopened_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits before it opens the stream again, although the server asks for no delay."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def record(delay_s: float) -> None:
        waits.append(delay_s)
        await sleep(0)

    async with hanging_server() as (port, seen), connected(port) as connection:
        await connection.open()
        monkeypatch.setattr(asyncio, "sleep", record)
        while seen["get"] < 4:
            await sleep(0.001)
        assert len([wait_s for wait_s in waits if wait_s > 0]) >= 3


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("n_parts", "is_read"), [(1000, True), (1100, False), (30_000, False)])
async def test_number_of_parts_is_bounded(is_stream: bool, n_parts: int, is_read: bool) -> None:
    """A short message may take long to parse, which happens on the event loop; marks in texts do not count."""
    seen: list[int] = []

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        if request["method"] != "tools/call":
            return ordinary(request)
        content = [{"type": "text", "text": ""}] * (n_parts - 1) + [{"type": "text", "text": '{"[":1}' * 20_000}]
        status, fields, body = reply(request, {"content": content})
        seen.append(n_parts)
        if not is_stream:
            return status, fields, body
        return status, {"Content-Type": "text/event-stream"}, b"data: " + body + b"\n\n"

    async with scripted_server(answer) as port, connected(port) as connection:
        await connection.open()
        if is_read:
            assert (await connection.call_tool("x", {})).text.count("[") > 5000
        else:
            with pytest.raises(McpLostError):
                await connection.call_tool("x", {})
        assert seen == [n_parts]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b'{"a":' * 30_000, True),
        (b"[" * (MAX_STRUCTURE + 1), True),
        (b"[" * MAX_STRUCTURE, False),
        (b'["' + b"{" * 100_000 + b'"]', False),
        (b'["' + b'\\"{:' * 100_000 + b'"]', False),
        (b'["' + b"\\\\" * 100_000 + b'",' + b"[" * 50_000, True),
        (b"[" + b"1," * (MAX_COMMAS + 1), True),
        (b"[" + b'"\\",[",\n' * MAX_COMMAS, False),
        (b'id: "\r\ndata: ' + b"[" * 50_000, True),
        (b'id: "\rdata: ' + b"[" * 50_000, True),
    ],
)
def test_structure_is_counted_outside_of_strings(message: bytes, expected: bool) -> None:
    """Brackets and commas within strings do not count, wherever a server divides the message."""
    for size in (len(message), 50_001, 7):
        meter = DensityMeter()
        for at in range(0, len(message), size):
            meter.add(message[at : at + size])
            if meter.is_dense:
                break
        assert meter.is_dense is expected


async def read_chunks(chunks: Iterable[bytes], *, is_stream: bool) -> int:
    """Read a response of these chunks and return how many passed."""

    class Chunks(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for each in chunks:
                yield each

    bounded = _BoundedStream(Chunks(), 1_000_000, is_stream=is_stream, closed=lambda: None)
    return len([each async for each in bounded])


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_part_of_a_message_is_searched_twice(monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    """The bytes that are searched are at most those of the message, also if it arrives byte by byte."""
    searched: list[int] = []
    search = DensityMeter._search

    def record(meter: DensityMeter) -> None:
        searched.append(len(meter._unsearched))
        search(meter)

    monkeypatch.setattr(DensityMeter, "_search", record)
    message = b'"' + b":" * (MAX_STRUCTURE + 4000) + b'"'
    assert await read_chunks((bytes([each]) for each in message), is_stream=is_stream) == len(message)
    assert MAX_STRUCTURE < sum(searched) <= len(message)
    with pytest.raises(httpx2.StreamError):
        await read_chunks([b"["] * (MAX_STRUCTURE + 4000), is_stream=is_stream)


async def test_each_event_is_bounded_alone_and_before_it_is_parsed() -> None:
    """A dense event is refused wherever it ends; two short events in one chunk are not counted together."""
    dense, half = b"data: " + b"[" * (MAX_STRUCTURE + 1), b"data: " + b"[" * (MAX_STRUCTURE // 2 + 1)
    for chunks in ([dense + b"\n\n"], [b"data: 1\n\n" + dense + b"\n\n"], [half, half]):
        with pytest.raises(httpx2.StreamError):
            await read_chunks(chunks, is_stream=True)
    for chunks in ([half + b"\n\n" + half], [half + b"\n", b"\n" + half], [half + b"\r\n\r", b"\n" + half]):
        assert await read_chunks(chunks, is_stream=True) == len(chunks)
    with pytest.raises(httpx2.StreamError):
        await read_chunks([half + b"\n\n" + half], is_stream=False)


async def test_size_of_a_message_is_bounded_whatever_the_settings() -> None:
    """With the largest `max_result_bytes` a message of 8 MiB is read and a longer one is refused."""
    n_chars = 0

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        if request["method"] != "tools/call":
            return ordinary(request)
        return reply(request, {"content": [{"type": "text", "text": "x" * n_chars}]})

    async with scripted_server(answer) as port, connected(port, max_result_bytes=2**22) as connection:
        await connection.open()
        n_chars = MAX_MESSAGE_BYTES - 1000
        assert "cut: 4194304 of" in (await connection.call_tool("x", {})).text[-100:]
        n_chars = MAX_MESSAGE_BYTES
        with pytest.raises(McpLostError):
            await connection.call_tool("x", {})


async def test_text_in_another_encoding_is_refused() -> None:
    """A response in UTF-16 fails the handshake, because structure is counted in bytes of UTF-8."""

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        status, fields, body = ordinary(request)
        text = f"data: {body.decode()}\n\n"
        return status, fields | {"Content-Type": "text/event-stream; charset=utf-16"}, text.encode("utf-16")

    async with scripted_server(answer) as port, connected(port) as connection:
        with pytest.raises(McpUnreachableError, match="no connection"):
            await connection.open()


async def test_parts_that_are_no_text_are_named() -> None:
    """Images are replaced by a line of text."""
    content = [
        {"type": "text", "text": "one"},
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        {"type": "resource_link", "uri": "file:///x", "name": "x"},
        {"type": "resource", "resource": {"uri": "file:///y", "text": "inside"}},
    ]

    def answer(request: dict[str, Any], _headers: dict[str, str]) -> Answer:
        return reply(request, {"content": content}) if request["method"] == "tools/call" else ordinary(request)

    async with scripted_server(answer) as port, connected(port) as connection:
        await connection.open()
        result = await connection.call_tool("x", {})
        assert result.text == "one\n[image: image/png, 3 bytes]\n[resource: file:///x]\ninside"


def ping(n: int) -> SessionMessage:
    """A request of a server."""
    return SessionMessage(mcp_types.JSONRPCRequest(jsonrpc="2.0", id=n, method="ping"))


async def test_requests_of_a_server_that_reads_no_answers_are_bounded() -> None:
    """Each is a task of the package until its answer is sent, so that more of them are dropped."""
    from_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](64)
    outgoing, _to_server = anyio.create_memory_object_stream[SessionMessage](1)
    answers = _OutgoingMessages(outgoing)
    async with from_server, _to_server, _IncomingMessages(incoming, answers) as messages, answers:
        for n in range(20):
            from_server.send_nowait(ping(n))
        answer = SessionMessage(mcp_types.JSONRPCResponse(jsonrpc="2.0", id=0, result={}))
        from_server.send_nowait(answer)  # a message that is no request passes
        assert [await messages.receive() for _ in range(17)] == [*map(ping, range(16)), answer]
        await answers.send(answer)
        for n in range(20, 22):
            from_server.send_nowait(ping(n))
        from_server.close()
        assert [item async for item in messages] == [ping(20)]


async def test_messages_of_a_server_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a burst each further message waits for an interval; results are not delayed."""
    delays = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    from_server, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](1000)
    outgoing, _to_server = anyio.create_memory_object_stream[SessionMessage](0)
    answers = _OutgoingMessages(outgoing)
    async with from_server, _to_server, _IncomingMessages(incoming, answers) as messages, answers:
        notification = SessionMessage(mcp_types.JSONRPCNotification(jsonrpc="2.0", method="notifications/message"))
        for _ in range(_MESSAGE_BURST + 2):
            from_server.send_nowait(notification)
            await messages.receive()
        from_server.send_nowait(SessionMessage(mcp_types.JSONRPCResponse(jsonrpc="2.0", id=0, result={})))
        await messages.receive()
    assert delays == pytest.approx([_MESSAGE_INTERVAL_S, 2 * _MESSAGE_INTERVAL_S])
