"""Tests of ``ipc.engine_child``: interpreters that are started before the daemon knows what they will load."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from inferencecenter.ipc import engine_child
from inferencecenter.ipc.engine_child import (
    EngineChild,
    import_ahead,
    prespawned,
    receive_descriptors,
    send_descriptors,
    take,
)
from inferencecenter.ipc.engine_options import EngineOptions
from inferencecenter.ipc.messages import FromEngine, Ready
from inferencecenter.supervisor.process import EngineExit, EngineProcess
from tests import prefork


def test_descriptors_are_copied_to_the_other_process() -> None:
    """Each is another descriptor of the same file; a closed socket is an error."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with theirs:
        with ours:
            send_descriptors(ours, (reading, writing))
            copies = receive_descriptors(theirs, on_import=pytest.fail)
            assert len(copies) == 2
            assert not {reading, writing} & set(copies)
            os.write(copies[1], b"x")
            assert os.read(reading, 1) == b"x"
        with pytest.raises(ConnectionError):
            receive_descriptors(theirs)
    for fd in (reading, writing, *copies):
        os.close(fd)


def test_prespawned_process_is_used_once() -> None:
    """The engine after that gets its own interpreter."""
    with prespawned():
        (prespawned_child,) = engine_child._prespawned
        first, second = take(), take()
    try:
        assert first is prespawned_child
        assert second is not prespawned_child
    finally:
        for child in (first, second):
            child.discard()


def test_unused_or_dead_prespawned_process_is_reaped() -> None:
    """The command ended before it needed an engine, or the process was killed meanwhile."""
    with prespawned():
        (unused,) = engine_child._prespawned
    assert unused.process.returncode is not None
    with prespawned():
        (dead,) = engine_child._prespawned
        dead.process.kill()
        dead.process.wait()
        child = take()
        assert child is not dead
        child.discard()


async def test_prespawned_engine_serves() -> None:
    """It gets its heartbeat, its options and its descriptors when it is used."""
    ready = asyncio.Event()
    reading, writing = os.pipe()

    def on_message(message: FromEngine) -> None:
        if isinstance(message, Ready):
            ready.set()

    with prespawned():
        (child,) = engine_child._prespawned
        options = EngineOptions(backend="echo", parent_pid=0)
        process = await EngineProcess.spawn(options, on_message=on_message, keep_open=(writing,))
    os.close(writing)
    os.set_blocking(reading, False)
    async with asyncio.timeout(60):
        await ready.wait()
        assert process.pid == child.process.pid
        with pytest.raises(BlockingIOError):  # the engine holds the other end
            os.read(reading, 1)
        process.close()
        assert await process.gone() == EngineExit("the engine ended with status 0")
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_prespawned_engine_imports_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries are mapped before there are options; a process that has ended gets no request."""
    monkeypatch.setattr(prefork, "_PACKAGES", ())  # a fork's template may have mapped them
    with prespawned():
        (child,) = engine_child._prespawned
        import_ahead()
        maps = Path(f"/proc/{child.process.pid}/maps")
        while "libllama" not in maps.read_text():
            assert child.process.poll() is None
            time.sleep(0.01)
        child.process.kill()
        child.process.wait()
        import_ahead()


def test_failed_process_start_closes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor stays open."""
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


@pytest.mark.parametrize(
    ("chosen", "spin_count"),
    [({}, b"5000"), ({"GOMP_SPINCOUNT": "7"}, b"7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
)
def test_threads_spin_briefly_unless_the_operator_decides(
    chosen: dict[str, str], spin_count: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long spinning waits for threads that a busy neighbor keeps from running."""
    monkeypatch.setattr(prefork, "_PACKAGES", ())  # a fork's ``environ`` is that of its template
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    child = EngineChild()
    try:
        environment = Path(f"/proc/{child.process.pid}/environ")
        while not (variables := environment.read_bytes().split(b"\0"))[0]:  # exec has not finished
            time.sleep(0.01)
    finally:
        child.discard()
    found = dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)
    assert found.get(b"GOMP_SPINCOUNT") == spin_count
