"""Tests of ``ipc.engine_child``: interpreters that are started before the daemon knows what they will load."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from inferencecenter.ipc import engine_child
from inferencecenter.ipc.engine_child import EngineChild, receive_descriptors, send_descriptors, started_ahead, take
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import FromEngine, Ready
from inferencecenter.supervisor.process import EngineExit, EngineProcess


def test_descriptors_are_copied_to_the_other_process() -> None:
    """Each is another descriptor of the same file; a closed socket is an error."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with theirs:
        with ours:
            send_descriptors(ours, (reading, writing))
            copies = receive_descriptors(theirs)
            assert len(copies) == 2
            assert not {reading, writing} & set(copies)
            os.write(copies[1], b"x")
            assert os.read(reading, 1) == b"x"
        with pytest.raises(ConnectionError):
            receive_descriptors(theirs)
    for fd in (reading, writing, *copies):
        os.close(fd)


def test_only_the_next_engine_takes_the_one_started_ahead() -> None:
    """The engine after that gets an interpreter of its own."""
    with started_ahead():
        (ahead,) = engine_child._ahead
        first, second = take(), take()
    try:
        assert first is ahead
        assert second is not ahead
    finally:
        for child in (first, second):
            child.discard()


def test_one_that_is_not_taken_or_has_died_is_reaped() -> None:
    """The command ended before it needed an engine, or the process was killed meanwhile."""
    with started_ahead():
        (unused,) = engine_child._ahead
    assert unused.process.returncode is not None
    with started_ahead():
        (dead,) = engine_child._ahead
        dead.process.kill()
        dead.process.wait()
        child = take()
        assert child is not dead
        child.discard()


async def test_an_engine_started_ahead_serves() -> None:
    """It gets its heartbeat, its options and the descriptors to keep once it is taken."""
    ready = asyncio.Event()
    reading, writing = os.pipe()

    def on_message(message: FromEngine) -> None:
        if isinstance(message, Ready):
            ready.set()

    with started_ahead():
        (ahead,) = engine_child._ahead
        options = EngineOptions(backend="echo", parent_pid=0)
        process = await EngineProcess.spawn(options, on_message=on_message, keep_open=(writing,))
    os.close(writing)
    os.set_blocking(reading, False)
    async with asyncio.timeout(60):
        await ready.wait()
        assert process.pid == ahead.process.pid
        with pytest.raises(BlockingIOError):  # the engine holds the other end
            os.read(reading, 1)
        process.close()
        assert await process.gone() == EngineExit("the engine ended with status 0")
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is closed."""
    opened: list[socket.socket] = []
    pair = socket.socketpair

    def socketpair() -> tuple[socket.socket, socket.socket]:
        opened.extend(pair())
        return opened[0], opened[1]

    monkeypatch.setattr(socket, "socketpair", socketpair)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        EngineChild()
    assert [sock.fileno() for sock in opened] == [-1, -1]
