"""Tests of what the WebSocket protocol adds: clients that stop reading, and those that only read slowly."""

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
from tests.server.harness import Running, ask, close_code, hear

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from websockets.asyncio.client import ClientConnection

    from tests.loop_clock import LoopClock

    Serve = Callable[..., AbstractAsyncContextManager[Running]]


async def start_turn(server: Running, socket: ClientConnection) -> str:
    """Open a session and start a turn in it; returns the turn's id."""
    await hear(socket)
    session = await ask(socket, op="create_session")
    queued = await ask(socket, op="infer", session_id=session["session_id"], prompt="hi")
    server.engine.begin(queued["turn_id"])
    return str(queued["turn_id"])


def shrink(socket: ClientConnection, *, to_bytes: int) -> None:
    """Let the client's kernel take little, so that a test need not send much."""
    socket.transport.get_extra_info("socket").setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, to_bytes)


def only_websocket(server: Running) -> WebSocket:
    """Return the server's end of its one socket."""
    (found,) = [each for each in server.listener.server_state.connections if isinstance(each, WebSocket)]
    return found


async def test_sockets_are_tuned(server: Running) -> None:
    """The kernel keeps little unsent, and small frames go out at once."""
    async with server.v1() as socket:
        await hear(socket)
        raw = only_websocket(server).transport.get_extra_info("socket")
        assert raw.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT) == NOT_SENT_LOW_WATER_BYTES
        assert raw.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY) == 1


async def test_a_socket_that_stops_reading_is_aborted_and_nobody_else_notices(serve: Serve) -> None:
    """Its turn goes on for it to come back to; another client's stream does, frame by frame, all the while."""
    async with serve(outbox_bytes=2**16) as server, server.v1(max_queue=1) as stuck, server.v1() as reading:
        shrink(stuck, to_bytes=4096)
        stuck_turn = await start_turn(server, stuck)
        turn = await start_turn(server, reading)
        stuck.transport.pause_reading()
        said = 0
        while len(server.context.hub) == 2 and said < 2000:
            server.engine.say(stuck_turn, "x" * 50_000)
            server.engine.say(turn, "y")
            frame = await hear(reading)
            assert (frame["op"], frame["content"]) == ("token", "y")
            said += 1
        assert len(server.context.hub) == 1, "the socket was never given up"
        assert stuck_turn in server.engine.turns
        server.engine.finish(turn)
        assert (await hear(reading))["op"] == "end"
        stuck.transport.resume_reading()
        assert await close_code(stuck) in (None, 4408)
        overflows = server.context.metrics.registry.get_sample_value("inferencecenter_outbox_overflows_total")
        assert overflows == 1


async def test_a_socket_that_falls_behind_gets_everything_in_the_end(serve: Serve) -> None:
    """Text is joined into fewer frames, and nothing is lost or twice."""
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
        while (frame := await hear(socket))["op"] == "token":
            contents.append(frame["content"])
        assert "".join(contents) == "".join(said)
        assert len(contents) < len(said)


async def test_a_client_that_gives_no_sign_of_life_is_let_go(serve: Serve, clock: LoopClock) -> None:
    """Pings that are not answered end the connection."""
    async with serve(ping_interval_s=30, ping_timeout_s=60) as server, server.v1(ping_interval=None) as socket:
        await hear(socket)
        wire = only_websocket(server)
        socket.transport.pause_reading()
        async with asyncio.timeout(60):
            while not wire.lost.done():
                await clock.go_on(10)


async def test_a_client_that_is_heard_of_is_not_pinged_out(serve: Serve) -> None:
    """Pongs that come too late do not matter while anything else comes."""
    async with serve(ping_interval_s=1000, ping_timeout_s=3600) as server, server.v1() as socket:
        await hear(socket)
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


async def test_pongs_are_kept_from_a_client_that_does_not_read_them(server: Running) -> None:
    """A flood of pings by a client that is behind does not pile up in memory."""
    async with server.v1() as socket:
        await hear(socket)
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
        assert (await hear(socket))["code"] == "unknown_op"


UPGRADE = (
    b"GET %b HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n%b\r\n"
)


async def upgrade_refused(server: Running, path: bytes, headers: bytes = b"") -> bytes:
    """Ask for an upgrade and return the answer, after which the connection must end."""
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
async def test_an_upgrade_that_is_only_http_is_refused(server: Running, headers: bytes) -> None:
    """It is answered and closed, and does not stay as a connection that nothing counts."""
    with capture_logs() as logs:
        assert (await upgrade_refused(server, b"/ws", headers)).startswith(b"HTTP/1.1 400 ")
    assert [line for line in logs if line["log_level"] == "error"] == []


@pytest.mark.parametrize("path", ["/nowhere", "/healthz", "/v1/nothing", "/ws/"])
async def test_an_upgrade_at_another_path_is_not_found(server: Running, path: str) -> None:
    """404, as for plain HTTP; the body says where to connect."""
    with pytest.raises(InvalidStatus) as caught:
        await server.connect(path)
    response = caught.value.response
    body = json.loads(response.body or b"")
    assert (response.status_code, body["code"], body["hint"]) == (404, "unknown_op", "Connect to /ws.")


async def test_refused_upgrades_are_not_logged_as_defects(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a wrong path nor a wrong token writes a line of error."""
    for path, headers in ((b"/nowhere", b""), (b"/ws", b"Authorization: Bearer x\r\n")):
        await upgrade_refused(server, path, headers)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_text_that_is_not_utf8_is_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Each such socket is closed with 1007; a line without a traceback stands for all of a minute."""
    with capture_logs() as logs:
        for _ in range(3):
            async with server.connect() as socket:
                await hear(socket)
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
async def test_what_comes_with_text_that_is_not_utf8_ends_nothing_but_its_socket(
    server: Running, caplog: pytest.LogCaptureFixture, frames: list[Frame], code: int
) -> None:
    """In the same packet: a ping is not answered on a socket that says no more, a close is answered as one."""
    async with server.connect() as socket:
        await hear(socket)
        socket.transport.write(b"".join(frame.serialize(mask=True) for frame in frames))
        assert await close_code(socket) == code
    assert caplog.records == []


async def test_a_message_of_several_frames_is_read_as_one(server: Running) -> None:
    """Also where a character is cut in two."""
    async with server.v1() as socket:
        await hear(socket)
        frame = json.dumps({"op": "ping", "id": "é"}, ensure_ascii=False).encode()
        cut = frame.index("é".encode()) + 1
        await socket.send([frame[:cut], frame[cut:]], text=True)
        assert (await hear(socket))["id"] == "é"


async def opened(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a client's socket of which a test writes the bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(UPGRADE % (b"/ws", f"Authorization: Bearer {server.token}\r\n".encode()))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return reader, writer


def masked(opcode: int, data: bytes = b"") -> bytes:
    """Return a frame as a client sends it, with a mask that changes nothing."""
    return bytes([0x80 | opcode, 0x80 | len(data)]) + bytes(4) + data


@pytest.mark.parametrize(
    "frame", [masked(1), masked(9), masked(10), masked(1, b"{}")], ids=["empty", "ping", "pong", "json"]
)
async def test_many_small_frames_are_read_in_turns(
    server: Running, monkeypatch: pytest.MonkeyPatch, frame: bytes
) -> None:
    """The event loop goes on between any two pieces, and the last frame is answered after all others."""
    sizes: list[int] = []
    read = WebSocketsSansIOProtocol.data_received

    def noting(self: WebSocketsSansIOProtocol, data: bytes) -> None:
        sizes.append(len(data))
        read(self, data)

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", noting)
    monkeypatch.setattr(RefusalBackoff, "refused", lambda _pace: 0.0)
    reader, writer = await opened(server)
    sizes.clear()
    count = 5000
    writer.write(frame * count + masked(1, b'{"op":"hello"}'))
    async with asyncio.timeout(60):
        heard = b""
        while b'"op":"hello"' not in heard:
            heard += await reader.read(2**16)
    writer.close()
    assert sum(sizes) >= count * len(frame)
    assert max(sizes) <= 8 * 1024


async def test_a_large_frame_arrives_whole(server: Running) -> None:
    """However many pieces it is read in; what follows it is answered after it."""
    async with server.v1() as socket:
        await hear(socket)
        await socket.send(json.dumps({"op": "ping", "id": "1", "padding": "x" * 900_000}))
        await socket.send(json.dumps({"op": "ping", "id": "2"}))
        answers = [await hear(socket) for _ in range(2)]
    assert [(answer["op"], answer["id"]) for answer in answers] == [("error", "1"), ("pong", "2")]


async def test_what_waits_is_bounded_while_a_command_takes_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport is not read while frames of earlier pieces wait."""
    go_on = asyncio.Event()
    receive = Connection.receive

    async def holding(self: Connection, text: str | None) -> None:
        await go_on.wait()
        await receive(self, text)

    monkeypatch.setattr(Connection, "receive", holding)
    reader, writer = await opened(server)
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
