"""The shared page in which the engine reports what it is doing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.ipc.heartbeat import MAX_NAME_BYTES, MAX_STEP_TURNS, MAX_WORKERS, Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = st.text("abcdefghijklmnop_0123456789", min_size=1, max_size=MAX_NAME_BYTES)

_DYING = """
import os, signal, sys
from inferencecenter.ipc.heartbeat import Heartbeat
heartbeat = Heartbeat.attach(int(sys.argv[1]))
heartbeat.tick()
with heartbeat.preparing("t_read"):
    heartbeat.step(("t_one", "t_two"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def ends() -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """The daemon's end and the engine's."""
    front = Heartbeat.create()
    engine = Heartbeat.attach(os.dup(front.fd))
    yield front, engine
    engine.close()
    front.close()


def test_progress_counter_is_shared(ends: tuple[Heartbeat, Heartbeat]) -> None:
    """Ticks and the start and end of a step change the number; preparation does not."""
    front, engine = ends
    seen = [front.ticks]
    for act in (engine.tick, lambda: engine.step(("t",)), lambda: engine.step(("t",)), lambda: engine.step(())):
        act()
        seen.append(front.ticks)
    assert len(set(seen)) == len(seen)
    with engine.preparing("t"):
        pass
    assert front.ticks == seen[-1]


@given(steps=st.lists(st.lists(NAMES, max_size=40, unique=True)))
def test_turns_of_the_step_are_listed(steps: list[list[str]]) -> None:
    """The list has exactly the turns of the running step in their order, and is empty between steps."""
    with ExitStack() as held:
        front = Heartbeat.create()
        held.callback(front.close)
        engine = Heartbeat.attach(os.dup(front.fd))
        held.callback(engine.close)
        for names in steps:
            engine.step(names)
            assert front.suspects == tuple(names)
            engine.step(())
            assert not front.suspects


def test_prepared_turns_are_listed(ends: tuple[Heartbeat, Heartbeat]) -> None:
    """A turn is listed once while its worker prepares it, after the turns of the step."""
    front, engine = ends
    with engine.preparing("t1"), engine.preparing("t2"):
        assert sorted(front.suspects) == ["t1", "t2"]
        engine.step(("t3", "t1"))
        assert front.suspects == ("t3", "t1", "t2")
        engine.step(())
    assert not front.suspects


def test_failed_worker_frees_its_entry(ends: tuple[Heartbeat, Heartbeat]) -> None:
    """Its entry can be reused."""
    front, engine = ends

    def fail() -> None:
        with engine.preparing("t"):
            raise RuntimeError(front.suspects)

    for _ in range(MAX_WORKERS + 1):
        with pytest.raises(RuntimeError, match="'t'"):
            fail()
    assert not front.suspects


def test_excess_entries_are_left_out(ends: tuple[Heartbeat, Heartbeat]) -> None:
    """More turns, workers and characters than fit do no harm."""
    front, engine = ends
    names = [f"{n:0{MAX_NAME_BYTES}}" for n in range(MAX_STEP_TURNS + 10)]
    engine.step(names)
    assert front.suspects[:MAX_STEP_TURNS] == tuple(names[:MAX_STEP_TURNS])
    assert len(front.suspects) <= MAX_STEP_TURNS + 1
    engine.step(())
    with ExitStack() as held:
        for n in range(MAX_WORKERS + 2):
            held.enter_context(engine.preparing(f"t{n}" + "x" * MAX_NAME_BYTES))
        assert len(front.suspects) == MAX_WORKERS
        assert {len(name) for name in front.suspects} == {MAX_NAME_BYTES}
    assert not front.suspects


def test_concurrent_preparation(ends: tuple[Heartbeat, Heartbeat]) -> None:
    """Each thread lists its own turn, and in the end none is listed."""
    front, engine = ends
    together = threading.Barrier(9)

    def work(name: str) -> None:
        with engine.preparing(name):
            together.wait()
            together.wait()

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    together.wait()
    named = front.suspects
    together.wait()
    for thread in threads:
        thread.join()
    assert set(named) == {f"t{n}" for n in range(8)}
    assert not front.suspects


def test_page_survives_a_killed_process() -> None:
    """A process killed in a step has listed its turns."""
    heartbeat = Heartbeat.create()
    ended = subprocess.run([sys.executable, "-c", _DYING, str(heartbeat.fd)], pass_fds=(heartbeat.fd,), check=False)
    assert ended.returncode == -9
    assert heartbeat.ticks == 2
    assert heartbeat.suspects == ("t_one", "t_two", "t_read")
    heartbeat.close()


def test_corrupted_page_is_harmless(ends: tuple[Heartbeat, Heartbeat]) -> None:
    """The daemon reads names that match no turn."""
    front, engine = ends
    size = os.fstat(front.fd).st_size
    os.pwrite(engine.fd, b"\xff" * size, 0)
    assert all("t_" not in name for name in front.suspects)
    assert front.ticks == 2**64 - 1


def test_page_size_is_sealed() -> None:
    """A shorter page would end the daemon with SIGBUS."""
    heartbeat = Heartbeat.create()
    size = os.fstat(heartbeat.fd).st_size
    for other in (0, size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(heartbeat.fd, other)
    assert fcntl.fcntl(heartbeat.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    heartbeat.close()


def test_short_file_is_refused() -> None:
    """A file that is too short is not mapped."""
    fd = os.memfd_create("short")
    with pytest.raises(ValueError, match="mmap length"):
        Heartbeat.attach(fd)
    os.close(fd)
