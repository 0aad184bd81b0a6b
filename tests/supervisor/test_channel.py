"""The daemon's end of the pipe."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.ipc.channel import Channel
from inferencecenter.ipc.framing import encode, from_engine_decoder, to_engine_decoder
from inferencecenter.ipc.messages import AbortTurn, FromEngine, Loading, LogLine, ReleaseSession, ToEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class ChannelEnd:
    """A channel, what it received, and the other end of its socket."""

    def __init__(self, other: socket.socket) -> None:
        self.other = other
        self.received: list[FromEngine] = []
        self.arrived = asyncio.Event()
        self.channel: Channel[ToEngine, FromEngine]

    def on_message(self, message: FromEngine) -> None:
        """Record a message."""
        self.received.append(message)
        self.arrived.set()


async def opened(
    sock: socket.socket, on_message: Callable[[FromEngine], None], **bounds: Any
) -> Channel[ToEngine, FromEngine]:
    """Return a channel that owns a connected socket."""

    def made() -> Channel[ToEngine, FromEngine]:
        return Channel(from_engine_decoder(), on_message, **bounds)

    _, channel = await asyncio.get_running_loop().create_unix_connection(made, sock=sock)
    return channel


@pytest.fixture
async def end() -> AsyncIterator[ChannelEnd]:
    """An open channel."""
    ours, theirs = socket.socketpair()
    made = ChannelEnd(theirs)
    made.channel = await opened(ours, made.on_message)
    yield made
    made.channel.abort()
    theirs.close()
    await made.channel.lost()


async def test_partial_messages_are_reassembled_in_order(end: ChannelEnd) -> None:
    """A message in two parts is delivered once, after the one before it."""
    frames = encode(Loading(0.25)) + encode(LogLine("info", "x", "llama.cpp"))
    end.other.sendall(frames[:-3])
    await end.arrived.wait()
    assert end.received == [Loading(0.25)]
    end.arrived.clear()
    end.other.sendall(frames[-3:])
    await end.arrived.wait()
    assert end.received == [Loading(0.25), LogLine("info", "x", "llama.cpp")]


async def test_close_flushes_sent_messages(end: ChannelEnd) -> None:
    """The other end reads everything up to the end of file; later messages are dropped."""
    end.channel.send(AbortTurn("t1"))
    end.channel.send(ReleaseSession("s1"))
    end.channel.close()
    end.channel.send(AbortTurn("t2"))
    assert await end.channel.lost() == ""
    data = b""
    while chunk := end.other.recv(4096):
        data += chunk
    assert to_engine_decoder().feed(data) == [AbortTurn("t1"), ReleaseSession("s1")]


async def test_end_of_file_is_reported_after_the_last_message(end: ChannelEnd) -> None:
    """The engine's last message is not lost."""
    end.other.sendall(encode(Loading(1.0)))
    end.other.close()
    assert await end.channel.lost() == ""
    assert end.received == [Loading(1.0)]


async def test_invalid_frame_closes_the_channel(end: ChannelEnd) -> None:
    """Nothing after an invalid frame can be parsed."""
    end.other.sendall(b"\xff" * 16)
    assert "exceeds" in await end.channel.lost()
    assert end.received == []


async def test_send_window_reports_backpressure() -> None:
    """A window may wait; the owner is notified when it has been read."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    drained = asyncio.Event()
    channel = await opened(ours, lambda _: None, on_drain=drained.set, window_bytes=100_000)
    sent = 0
    while channel.has_room:
        channel.send(ReleaseSession("s" * 1000))
        sent += 1
    assert not drained.is_set()
    decoder, received = to_engine_decoder(), 0
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while received < sent:
            received += len(decoder.feed(await loop.sock_recv(theirs, 2**20)))
        await drained.wait()
    assert channel.has_room
    channel.abort()
    await channel.lost()
    theirs.close()


async def test_full_send_buffer_closes_the_channel() -> None:
    """The memory for unread messages is bounded."""
    ours, theirs = socket.socketpair()
    channel = await opened(ours, lambda _: None, max_unread_bytes=100_000)
    for _ in range(1000):
        channel.send(ReleaseSession("s" * 1000))
    assert "unread" in await channel.lost()
    theirs.close()
