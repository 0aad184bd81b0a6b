"""WebSocket clients that stop reading, or read slowly."""

from __future__ import annotations

import asyncio
import json
import socket as sockets
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Close, Frame, Opcode

from inferencecenter.api.websocket.connection import Connection
from inferencecenter.auth.rate_limits import RefusalBackoff
from inferencecenter.server.websocket import NOT_SENT_LOW_WATER_BYTES, WebSocket
from tests.server.harness import Running, ask, close_code, receive

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    from tests.loop_clock import LoopClock

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def start_turn(server: Running, socket: ClientConnection) -> str:
    """Create a session and start a turn in it; return the turn's id."""
    await receive(socket)
    session = await ask(socket, op="create_session")
    queued = await ask(socket, op="infer", session_id=session["session_id"], prompt="hi")
    server.engine.begin(queued["turn_id"])
    return str(queued["turn_id"])


def shrink(socket: ClientConnection, *, to_bytes: int) -> None:
    """Shrink the client's kernel buffer, so that a test need not send much."""
    socket.transport.get_extra_info("socket").setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, to_bytes)


def only_websocket(server: Running) -> WebSocket:
    """Return the server's end of its only socket."""
    (found,) = [each for each in server.listener.server_state.connections if isinstance(each, WebSocket)]
    return found


async def test_socket_options(server: Running) -> None:
    """The kernel buffers little, and small frames are sent at once."""
    async with server.v1() as socket:
        await receive(socket)
        raw = only_websocket(server).transport.get_extra_info("socket")
        assert raw.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT) == NOT_SENT_LOW_WATER_BYTES
        assert raw.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY) == 1


async def test_open_socket_holds_no_headers(server: Running) -> None:
    """Headers of the upgrade, of up to 64 KB, are freed once it is accepted."""
    headers = {"Authorization": f"Bearer {server.token}", "x-large": "x" * 8_000}
    async with server.connect(additional_headers=headers, subprotocols=["inferencecenter.v1"]) as socket:
        await receive(socket)
        held = only_websocket(server)
        assert not held.request.headers
        assert not held.response.headers
        assert held.scope["headers"] == []
        assert (await ask(socket, op="ping"))["op"] == "pong"


async def test_unread_socket_is_aborted(serve: Serve) -> None:
    """Its turn continues and can be resumed; another client's stream is unaffected."""
    async with serve(outbox_bytes=2**16) as server, server.v1(max_queue=1) as stuck, server.v1() as reading:
        shrink(stuck, to_bytes=4096)
        stuck_turn = await start_turn(server, stuck)
        turn = await start_turn(server, reading)
        stuck.transport.pause_reading()
        said = 0
        while len(server.context.hub) == 2 and said < 2000:
            server.engine.say(stuck_turn, "x" * 50_000)
            server.engine.say(turn, "y")
            frame = await receive(reading)
            assert (frame["op"], frame["content"]) == ("token", "y")
            said += 1
        assert len(server.context.hub) == 1, "the socket was never given up"
        assert stuck_turn in server.engine.turns
        server.engine.finish(turn)
        assert (await receive(reading))["op"] == "end"
        stuck.transport.resume_reading()
        assert await close_code(stuck) in (None, 4408)
        overflows = server.context.metrics.registry.get_sample_value("inferencecenter_outbox_overflows_total")
        assert overflows == 1


async def test_slow_socket_loses_nothing(serve: Serve) -> None:
    """Text is merged into fewer frames, without loss or repetition."""
    async with serve() as server, server.v1(max_queue=1) as socket:
        shrink(socket, to_bytes=2**16)
        turn = await start_turn(server, socket)
        socket.transport.pause_reading()
        said = [f"{number:6d}" + "x" * 1000 for number in range(600)]
        for text in said:
            server.engine.say(turn, text)
            await asyncio.sleep(0)
        server.engine.finish(turn)
        socket.transport.resume_reading()
        contents: list[str] = []
        while (frame := await receive(socket))["op"] == "token":
            contents.append(frame["content"])
        assert "".join(contents) == "".join(said)
        assert len(contents) < len(said)


async def test_unanswered_pings_close_the_connection(serve: Serve, clock: LoopClock) -> None:
    """It closes after the ping timeout."""
    async with serve(ping_interval_s=30, ping_timeout_s=60) as server, server.v1(ping_interval=None) as socket:
        await receive(socket)
        wire = only_websocket(server)
        socket.transport.pause_reading()
        async with asyncio.timeout(60):
            while not wire.lost.done():
                await clock.go_on(10)


async def test_any_traffic_counts_as_a_pong(serve: Serve) -> None:
    """Late pongs do not matter while frames arrive."""
    async with serve(ping_interval_s=1000, ping_timeout_s=3600) as server, server.v1() as socket:
        await receive(socket)
        wire = only_websocket(server)
        socket.transport.pause_reading()
        wire.send_keepalive_ping()
        await socket.send(json.dumps({"op": "ping"}))
        while not wire._alive:  # noqa: ASYNC110 - the loop turns until the frame has arrived
            await asyncio.sleep(0)
        assert wire.pong_timer is not None
        wire.pong_timer.cancel()
        wire.keepalive_timeout()
        assert not wire.close_sent, "the frame was a sign of life"
        assert wire.pong_timer is not None
        wire.pong_timer.cancel()
        wire.keepalive_timeout()
        assert wire.close_sent, "nothing came since"


async def test_pongs_to_a_blocked_client_are_dropped(server: Running) -> None:
    """A flood of pings uses no memory."""
    async with server.v1() as socket:
        await receive(socket)
        wire = only_websocket(server)
        wire.pause_writing()
        before = wire.transport.get_write_buffer_size()
        for _ in range(100):
            await socket.ping()
        await socket.send(json.dumps({"op": "nonsense"}))
        while server.context.metrics.registry.get_sample_value("inferencecenter_frames_in_total") != 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert wire.transport.get_write_buffer_size() == before
        wire.resume_writing()
        assert (await receive(socket))["code"] == "unknown_op"


UPGRADE = (
    b"GET %b HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n%b\r\n"
)


async def upgrade_refused(server: Running, path: bytes, headers: bytes = b"") -> bytes:
    """Request an upgrade and return the refusal, after which the connection must close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(60):
        writer.write(UPGRADE % (path, headers))
        heard = await reader.read()
    writer.close()
    return heard


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"X-%d: x\r\n" % number for number in range(300)),
        b"X: " + b"x" * 20_000 + b"\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ],
    ids=["many headers", "a long header", "a body", "chunks"],
)
async def test_incomplete_upgrade_is_refused(server: Running, headers: bytes) -> None:
    """The connection closes and is not leaked."""
    with capture_logs() as logs:
        assert (await upgrade_refused(server, b"/ws", headers)).startswith(b"HTTP/1.1 400 ")
    assert [line for line in logs if line["log_level"] == "error"] == []


@pytest.mark.parametrize("path", ["/nowhere", "/healthz", "/v1/nothing", "/ws/"])
async def test_upgrade_at_another_path_gets_404(server: Running, path: str) -> None:
    """The body names the path of the WebSocket."""
    with pytest.raises(InvalidStatus) as caught:
        await server.connect(path)
    response = caught.value.response
    body = json.loads(response.body or b"")
    assert (response.status_code, body["code"], body["hint"]) == (404, "unknown_op", "Connect to /ws.")


async def test_refused_upgrades_are_not_logged_as_errors(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The path or the token is wrong."""
    for path, headers in ((b"/nowhere", b""), (b"/ws", b"Authorization: Bearer x\r\n")):
        await upgrade_refused(server, path, headers)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_invalid_utf8_is_logged_once_per_minute(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Each such socket is closed with 1007, without a traceback."""
    with capture_logs() as logs:
        for _ in range(3):
            async with server.connect() as socket:
                await receive(socket)
                await socket.send(b"\xff\xfe", text=True)
                assert await close_code(socket) == 1007
    lines = [line for line in logs if line["event"] == "bad_frame"]
    assert [(line["code"], line["more"], line["log_level"]) for line in lines] == [(1007, 0, "warning")]
    assert caplog.records == []


NOT_UTF8 = Frame(Opcode.TEXT, b"\xff")
PING = Frame(Opcode.PING, b"?")
CLOSE = Frame(Opcode.CLOSE, Close(1000, "").serialize())


@pytest.mark.parametrize(
    ("frames", "code"),
    [([NOT_UTF8, PING], 1007), ([NOT_UTF8, NOT_UTF8, PING, PING], 1007), ([NOT_UTF8, CLOSE], 1000)],
    ids=["ping", "twice", "close"],
)
async def test_frames_after_invalid_utf8_are_handled(
    server: Running, caplog: pytest.LogCaptureFixture, frames: list[Frame], code: int
) -> None:
    """They are in the same packet: a ping is not answered, a close is."""
    async with server.connect() as socket:
        await receive(socket)
        socket.transport.write(b"".join(frame.serialize(mask=True) for frame in frames))
        assert await close_code(socket) == code
    assert caplog.records == []


async def test_fragmented_message_is_reassembled(server: Running) -> None:
    """A fragment may end within a character."""
    async with server.v1() as socket:
        await receive(socket)
        frame = json.dumps({"op": "ping", "id": "é"}, ensure_ascii=False).encode()
        cut = frame.index("é".encode()) + 1
        await socket.send([frame[:cut], frame[cut:]], text=True)
        assert (await receive(socket))["id"] == "é"


async def open_raw_socket(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a client's socket of which a test writes the bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(UPGRADE % (b"/ws", f"Authorization: Bearer {server.token}\r\n".encode()))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return reader, writer


def masked(opcode: int, data: bytes = b"") -> bytes:
    """Return a client frame with a mask of zeros."""
    return bytes([0x80 | opcode, 0x80 | len(data)]) + bytes(4) + data


@pytest.mark.parametrize(
    "frame", [masked(1), masked(9), masked(10), masked(1, b"{}")], ids=["empty", "ping", "pong", "json"]
)
async def test_small_frames_yield_to_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch, frame: bytes) -> None:
    """The loop runs between any two batches; frames are answered in order."""
    sizes: list[int] = []
    read = WebSocketsSansIOProtocol.data_received

    def noting(self: WebSocketsSansIOProtocol, data: bytes) -> None:
        sizes.append(len(data))
        read(self, data)

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", noting)
    monkeypatch.setattr(RefusalBackoff, "refused", lambda _pace: 0.0)
    reader, writer = await open_raw_socket(server)
    sizes.clear()
    count = 2000  # more bytes than a batch has
    writer.write(frame * count + masked(1, b'{"op":"hello"}'))
    async with asyncio.timeout(60):
        heard = b""
        while b'"op":"hello"' not in heard:
            heard += await reader.read(2**16)
    writer.close()
    assert sum(sizes) >= count * len(frame)
    assert max(sizes) <= 8 * 1024


async def test_large_frame_is_reassembled(server: Running) -> None:
    """It may arrive in any number of reads; later frames are answered after it."""
    async with server.v1() as socket:
        await receive(socket)
        await socket.send(json.dumps({"op": "ping", "id": "1", "padding": "x" * 900_000}))
        await socket.send(json.dumps({"op": "ping", "id": "2"}))
        answers = [await receive(socket) for _ in range(2)]
    assert [(answer["op"], answer["id"]) for answer in answers] == [("error", "1"), ("pong", "2")]


async def test_pending_frames_are_bounded_during_a_slow_command(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading from the transport pauses."""
    go_on = asyncio.Event()
    receive = Connection.receive

    async def holding(self: Connection, text: str | None) -> None:
        await go_on.wait()
        await receive(self, text)

    monkeypatch.setattr(Connection, "receive", holding)
    reader, writer = await open_raw_socket(server)
    writer.write(masked(1, b"{}") * 100_000)
    wire = only_websocket(server)
    while not wire.read_paused:  # noqa: ASYNC110 - a step of the loop
        await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(wire._unread) < 2**19
    assert wire.queue.qsize() <= 8 * 1024 // len(masked(1, b"{}")) + 1
    go_on.set()
    writer.close()
    del reader
