"""The front's end of the pipe."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.channel import Channel
from inferencecenter.ipc.framing import encode, to_engine_decoder
from inferencecenter.ipc.messages import AbortTurn, FromEngine, Loading, LogLine, ReleaseSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class End:
    """A channel, what it received, and the other end of its socket."""

    def __init__(self, other: socket.socket) -> None:
        self.other = other
        self.received: list[FromEngine] = []
        self.arrived = asyncio.Event()
        self.channel: Channel

    def take(self, message: FromEngine) -> None:
        """Keep a message."""
        self.received.append(message)
        self.arrived.set()


@pytest.fixture
async def end() -> AsyncIterator[End]:
    """A channel that is open."""
    ours, theirs = socket.socketpair()
    made = End(theirs)
    made.channel = await Channel.open(ours, made.take)
    yield made
    made.channel.abort()
    theirs.close()
    await made.channel.lost()


async def test_messages_arrive_whole_and_in_order(end: End) -> None:
    """A message that comes in two parts is passed on once, after the one before it."""
    frames = encode(Loading(0.25)) + encode(LogLine("info", "x", "llama.cpp"))
    end.other.sendall(frames[:-3])
    await end.arrived.wait()
    assert end.received == [Loading(0.25)]
    end.arrived.clear()
    end.other.sendall(frames[-3:])
    await end.arrived.wait()
    assert end.received == [Loading(0.25), LogLine("info", "x", "llama.cpp")]


async def test_what_is_sent_before_closing_goes_out(end: End) -> None:
    """The other end reads everything, then the end of file; what is sent afterwards goes nowhere."""
    end.channel.send(AbortTurn("t1"))
    end.channel.send(ReleaseSession("s1"))
    end.channel.close()
    end.channel.send(AbortTurn("t2"))
    assert await end.channel.lost() == ""
    data = b""
    while chunk := end.other.recv(4096):
        data += chunk
    assert to_engine_decoder().feed(data) == [AbortTurn("t1"), ReleaseSession("s1")]


async def test_the_end_of_file_is_told_after_the_last_message(end: End) -> None:
    """What the engine said last is not lost with it."""
    end.other.sendall(encode(Loading(1.0)))
    end.other.close()
    assert await end.channel.lost() == ""
    assert end.received == [Loading(1.0)]


async def test_garbage_ends_the_channel(end: End) -> None:
    """Nothing after bytes that are no frame can be understood."""
    end.other.sendall(b"\xff" * 16)
    assert "exceeds" in await end.channel.lost()
    assert end.received == []


async def test_there_is_room_until_the_other_end_falls_behind() -> None:
    """A window's worth may wait; when it has been read there is room again, of which the owner hears."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    drained = asyncio.Event()
    channel = await Channel.open(ours, lambda _: None, on_drain=drained.set, window_bytes=100_000)
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


async def test_an_engine_that_does_not_read_counts_as_lost() -> None:
    """What waits for it is bounded."""
    ours, theirs = socket.socketpair()
    _, channel = await asyncio.get_running_loop().create_unix_connection(
        lambda: Channel(lambda _: None, max_unread_bytes=100_000), sock=ours
    )
    for _ in range(1000):
        channel.send(ReleaseSession("s" * 1000))
    assert "unread" in await channel.lost()
    theirs.close()
