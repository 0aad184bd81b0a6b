"""HTTP connections whose peers are slow, flood, or exceed the limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING

import h11
import pytest

from inferencecenter.server import http
from inferencecenter.server.connection_limits import ConnectionLimiter
from inferencecenter.server.handshake import MAX_QUERY_BYTES
from tests.server.harness import ask, receive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from starlette.types import Receive, Scope, Send

    from tests.loop_clock import LoopClock
    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

TIMEOUT_S = 60.0
"""Far longer than anything here takes."""
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def peer(server: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a plain connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield reader, writer
    finally:
        writer.close()


async def tick() -> None:
    """Run one iteration of the server's loop."""
    await asyncio.sleep(0)


async def head_began(server: Running) -> None:
    """Wait until the server has read part of a request."""
    wires = server.listener.server_state.connections
    while not any(wire._in_head for wire in wires if isinstance(wire, http.HttpConnection)):
        await tick()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one response with a length; return its status and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
    return int(head.split()[1]), await reader.readexactly(length)


def answering(server: Running, app: Callable[[Scope, Receive, Send], object]) -> None:
    """Serve new connections with another application."""
    config = server.listener.config
    if not config.loaded:
        config.load()
    vars(config)["loaded_app"] = app


async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Respond without reading the request's body."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"G"])
async def test_slow_request_head_gets_408(serve: Serve, clock: LoopClock, said: bytes) -> None:
    """The pace of its bytes does not matter."""
    async with serve(head_timeout_s=20) as server, peer(server) as (reader, writer):
        writer.write(said)
        await head_began(server)
        await clock.go_on(20)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert await reader.read() == b""


async def test_head_timeout_starts_at_the_first_byte(serve: Serve, clock: LoopClock) -> None:
    """Later bytes do not extend it."""
    async with serve(head_timeout_s=20) as server, peer(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        await head_began(server)
        answered = asyncio.get_running_loop().create_task(answer(reader))
        while not answered.done():
            writer.write(b"x")
            await clock.go_on(1)
        assert answered.result()[0] == 408


async def test_silent_connection_is_closed(serve: Serve) -> None:
    """It gets no response."""
    async with serve(head_timeout_s=0.05) as server, peer(server) as (reader, _):
        assert await reader.read() == b""


async def test_keep_alive_timeout(serve: Serve, clock: LoopClock) -> None:
    """Between requests the longer timeout applies."""
    async with serve(head_timeout_s=20, keep_alive_s=100) as server, peer(server) as (reader, writer):
        for _ in range(3):
            writer.write(GET)
            assert (await answer(reader))[0] == 200
            await clock.go_on(50)
            assert not reader.at_eof()
        await clock.go_on(50)
        assert await reader.read() == b""


async def test_head_timeout_applies_to_later_requests(serve: Serve, clock: LoopClock) -> None:
    """The connection is kept alive."""
    async with serve(head_timeout_s=20) as server, peer(server) as (reader, writer):
        writer.write(GET)
        await answer(reader)
        writer.write(GET[:10])
        await head_began(server)
        await clock.go_on(20)
        assert (await answer(reader))[0] == 408


async def test_head_timeout_ends_with_the_head(serve: Serve, clock: LoopClock) -> None:
    """A response may take longer."""

    async def slow(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await clock.go_on(50)
        await refuse(_scope, receive, send)

    async with serve(head_timeout_s=20) as server:
        answering(server, slow)
        async with peer(server) as (reader, writer):
            writer.write(GET)
            assert (await answer(reader))[0] == 413


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: x\r\n" * 50_000,
    ],
)
async def test_invalid_http_gets_400(server: Running, said: bytes) -> None:
    """Broken, ambiguous and huge heads get JSON, and the connection closes."""
    async with peer(server) as (reader, writer):
        writer.write(said)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
        assert await reader.read() == b""


async def test_early_response_reaches_a_sending_client(server: Running) -> None:
    """A client whose large body is unread receives the refusal, then a reset."""
    answering(server, refuse)
    async with peer(server) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 5_000_000)
        assert await answer(reader) == (413, b"no")
        assert await reader.read() == b""


@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"])
async def test_unread_body_does_not_hold_the_connection(
    clock: LoopClock, server: Running, monkeypatch: pytest.MonkeyPatch, headers: bytes
) -> None:
    """A peer that keeps sending after its response is reset."""
    monkeypatch.setattr(http, "LINGER_S", 30.0)
    answering(server, refuse)
    async with peer(server) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n" + headers + b"\r\nx")
        assert (await answer(reader))[0] == 413
        with contextlib.suppress(ConnectionError):
            while len(server.listener.limiter):
                writer.write(b"x")
                await writer.drain()
                await clock.go_on(1)
    assert len(server.listener.limiter) == 0


def endless(server: Running) -> Callable[[Scope, Receive, Send], object]:
    """Return an application that responds until the client disconnects."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while len(server.listener.limiter):
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})

    return app


async def test_unread_response_is_reset(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reset after a time without progress."""
    monkeypatch.setattr(http, "STALL_S", 0.1)
    answering(server, endless(server))
    async with peer(server) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(GET)
        while not server.listener.server_state.tasks:
            await tick()
        (task,) = server.listener.server_state.tasks
        await asyncio.wait([task])
        assert len(server.listener.limiter) == 0
        assert not reader.at_eof()


async def test_slow_reader_is_kept(clock: LoopClock, server: Running) -> None:
    """Any progress between two checks extends the time."""
    answering(server, endless(server))
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    with plain:
        await loop.sock_connect(plain, ("127.0.0.1", server.port))
        await loop.sock_sendall(plain, GET)
        while not server.listener.server_state.connections:
            await tick()
        (wire,) = server.listener.server_state.connections
        for _ in range(16):
            unsent_bytes = wire.transport.get_write_buffer_size()
            while wire.transport.get_write_buffer_size() == unsent_bytes:
                assert await loop.sock_recv(plain, 1024)
                await tick()
            await clock.go_on(http.STALL_S / 4)
        assert len(server.listener.limiter) == 1


async def test_idle_connection_is_evicted_at_the_limit(serve: Serve) -> None:
    """The one idle longest is closed, and the new one is served."""
    async with serve(max_connections=2) as server, peer(server) as (first, _), peer(server) as (_, second):
        second.write(GET)
        async with peer(server) as (reader, writer):
            assert await first.read() == b""
            writer.write(GET)
            assert (await answer(reader))[0] == 200
            assert (len(server.listener.limiter), server.listener.limiter.n_waiting) == (2, 2)


async def test_busy_server_refuses_with_503(serve: Serve) -> None:
    """Running requests continue."""
    finish = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await finish.wait()
        await refuse(scope, receive, send)

    async with serve(max_connections=1) as server:
        answering(server, waiting)
        async with peer(server) as (busy, writer):
            writer.write(GET)
            while not server.listener.server_state.tasks:
                await tick()
            async with peer(server) as (reader, _):
                status, body = await answer(reader)
                assert (status, json.loads(body)["error"]["code"]) == (503, "queue_full")
            finish.set()
            assert (await answer(busy))[0] == 413


async def test_websockets_do_not_count_as_http_connections(serve: Serve, clock: LoopClock) -> None:
    """Neither timer nor eviction applies to them."""
    async with serve(max_connections=1, head_timeout_s=10) as server, server.v1() as client:
        await receive(client)
        assert len(server.listener.limiter) == 0
        assert (await server.http("/healthz"))[0] == 200
        await clock.go_on(15)
        assert (await ask(client, op="ping"))["op"] == "pong"


async def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    """52 requests in one write are answered, and an incomplete one is answered once its end arrives."""
    async with peer(server) as (reader, writer):
        writer.write(GET + b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n" + GET * 50 + GET[:-2])
        statuses = [(await answer(reader))[0] for _ in range(52)]
        assert statuses == [200, 404, *[200] * 50]
        writer.write(b"\r\n")
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    ("version", "lengths"),
    [
        (b"1.1", b"Transfer-Encoding: chunked\r\nContent-Length: 50\r\n"),
        (b"1.1", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
        (b"1.0", b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n"),
        (b"1.1", b"Content-Length: 5\r\nContent-Length: 50\r\n"),
    ],
)
async def test_ambiguous_length_is_refused(server: Running, version: bytes, lengths: bytes) -> None:
    """Bytes after the request are not parsed."""
    async with peer(server) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/%b\r\nHost: x\r\n%b\r\n0\r\n\r\n" % (version, lengths) + GET)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
        assert await reader.read() == b""


async def test_chunked_body_is_accepted(server: Running) -> None:
    """The connection continues after it."""
    async with peer(server) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET)
        assert [(await answer(reader))[0] for _ in range(2)] == [404, 200]


def chunked(*chunks: bytes) -> bytes:
    """Return a request with a body of these chunks."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET[:-2] + b"a:b\r\n" * http.MAX_HEADERS + b"\r\n",
        GET[:-2] + b"a:b\r\n" * http.MAX_HEADERS,
        GET[:-2].replace(b"\r\n", b"\n") + b"a:b\n" * http.MAX_HEADERS + b"\n",
        GET[:-2] + b"a: " + b"b" * http.MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
    ids=["whole", "begun", "bare line feeds", "bytes"],
)
async def test_too_many_headers_are_refused_before_parsing(
    server: Running, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes
) -> None:
    """A head with too many fields is refused whether or not it is complete."""
    monkeypatch.setattr("h11._connection.Connection._extract_next_receive_event", pytest.fail)
    async with peer(server) as (reader, writer):
        writer.write(request_bytes)
        status, body = await answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")


async def test_many_tiny_chunks_are_refused(server: Running) -> None:
    """A few small chunks and any large ones are accepted."""
    few, large = [b"x"] * http.SMALL_CHUNKS, [b"x" * http.SMALL_CHUNK_BYTES] * (2 * http.SMALL_CHUNKS)
    async with peer(server) as (reader, writer):
        for chunks in (few, large):
            writer.write(chunked(*chunks))
            assert (await answer(reader))[0] == 404
    read: list[int] = []

    async def reading(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            read.append(len(message["body"]))

    answering(server, reading)
    async with peer(server) as (reader, writer):
        writer.write(chunked(*few * 20))
        assert (await answer(reader))[0] == 400
    assert sum(read) <= http.SMALL_CHUNKS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/nowhere"])
async def test_invalid_body_is_not_logged_as_an_error(
    server: Running, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """The application sees a disconnect, and nothing follows the refusal."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    async with peer(server) as (reader, writer):
        writer.write(head.encode() + b"2\r\n{}\r\nno chunk\r\n")
        assert (await answer(reader))[0] == 400
        assert await reader.read() == b""
    while server.listener.server_state.tasks:
        await tick()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/metrics", "/openapi.json", "/v1/models"])
async def test_long_query_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """It is refused before authentication."""
    monkeypatch.setattr("starlette.datastructures.parse_qsl", pytest.fail)
    status, _, body = await server.http(f"{path}?{'a&' * MAX_QUERY_BYTES}")
    assert status == 400
    assert b"bytes of parameters" in body


def test_closed_connections_are_not_tracked() -> None:
    """Connections that were refused or have closed are neither idle nor counted."""

    class Unclosable:
        """A connection that must not be closed."""

        def evict(self) -> None:
            raise AssertionError

    limiter: ConnectionLimiter[Unclosable] = ConnectionLimiter(1)
    first, second = Unclosable(), Unclosable()
    assert limiter.admit(first)
    assert not limiter.admit(second)
    limiter.mark_idle(second)
    assert (len(limiter), limiter.n_waiting) == (1, 0)
    limiter.leave(first)
    limiter.leave(second)
    assert (len(limiter), limiter.admit(second)) == (0, True)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("length", [None, 3])
def test_chunks_are_those_of_h11(method: str, version: str, length: int | None) -> None:
    """They are framed here only while the library would frame them, and with the same bytes."""
    connection = http._StrictHttp(h11.SERVER)
    request = f"{method} / HTTP/{version}\r\nhost: x\r\n\r\n".encode()
    connection.receive_data(request)
    connection.next_event()
    connection.next_event()
    assert connection.chunk(b"ab") is None
    connection.send(h11.Response(status_code=200, headers=[] if length is None else [(b"content-length", b"3")]))
    is_chunked = (method, version, length) == ("GET", "1.1", None)
    for piece in (b"", b"ab", b"c") if method == "GET" else (b"",):
        written = connection.send(h11.Data(data=piece))
        assert connection.chunk(piece) == (written if is_chunked and piece else None)
    assert (connection.chunk(b"d") is not None) == is_chunked
    connection.send(h11.EndOfMessage())
    assert connection.chunk(b"d") is None
    if connection.their_state is h11.DONE and connection.our_state is h11.DONE:
        connection.start_next_cycle()
        connection.receive_data(request)
        connection.next_event()
        assert connection.chunk(b"d") is None
