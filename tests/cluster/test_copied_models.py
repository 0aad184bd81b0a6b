"""Real models on a machine that lacks their files."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import inferencecenter
from inferencecenter.core.errors import ErrorCode
from inferencecenter.ipc.port import EngineState
from tests.cluster.harness import Front
from tests.supervisor.harness import TIMEOUT_S, ObservedSupervisor, end_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("stopped")]
DISTANT_HOST = "tests.cluster.distant_host"
DEMO = Path(inferencecenter.__file__).parent / "demo"


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    """A front whose hosts lack its files."""
    front = await Front.open(tmp_path)
    front.starter.module = DISTANT_HOST
    yield front
    front.starter.clean_up()
    front.files.close()
    await front.listener.close()
    await front.proxy.close()


def watch(front: Front, **options: object) -> ObservedSupervisor:
    """Start a supervisor of the demo model with its projector."""
    base: dict[str, object] = {
        "backend": "llama",
        "model_path": str(DEMO / "demo.gguf"),
        "mmproj_path": str(DEMO / "mmproj-demo.gguf"),
        "n_ctx": 512,
    }
    watched = ObservedSupervisor(launcher=front.launcher, **(base | options))  # type: ignore[arg-type]
    watched.supervisor.start()
    return watched


def copies(front: Front, host: int = 0) -> list[str]:
    """Return the copies on the machine of a host."""
    directory = front.state_dir / "node" / str(host) / "copies"
    return sorted(path.name for path in directory.glob("*/*") if not path.name.startswith("."))


async def test_model_and_projector_are_copied(front: Front) -> None:
    """Turns run there; the progress was shown, and the next engine copies nothing."""
    shown: list[str] = []
    watched = watch(front)
    watched.supervisor.subscribe(lambda status: shown.append(status.copying))
    await watched.until(EngineState.READY)
    assert copies(front) == ["demo.gguf", "mmproj-demo.gguf"]
    assert any(text.startswith("copying demo.gguf to its machine: ") for text in shown)
    assert watched.supervisor.status.copying == ""
    turn = watched.submit("t", "hello")
    await end_of(turn)
    assert turn.tokens
    await watched.supervisor.stop()


async def test_host_killed_while_it_copies(front: Front) -> None:
    """The next host of the machine continues with what is there."""
    front.starter.shares_directory = True
    front.files._pacer._bytes_per_s = 2**20
    watched = watch(front)
    began = asyncio.Event()
    watched.supervisor.subscribe(lambda status: began.set() if status.copying else None)
    await asyncio.wait_for(began.wait(), TIMEOUT_S)
    front.starter.signal(signal.SIGKILL)
    await watched.until(EngineState.BACKOFF)
    part = next((front.state_dir / "node" / "0" / "copies").glob("*/.demo.gguf.part"))
    size, inode = part.stat().st_size, part.stat().st_ino
    assert size > 0
    front.files._pacer._bytes_per_s = 0
    await watched.until(EngineState.READY)
    copy = part.with_name("demo.gguf")
    assert copy.stat().st_ino == inode
    assert copy.read_bytes() == (DEMO / "demo.gguf").read_bytes()
    await watched.supervisor.stop()


async def test_lost_link_does_not_end_the_copy(front: Front) -> None:
    """The same host goes on with it when it has connected again."""
    front.files._pacer._bytes_per_s = 2**20
    watched = watch(front)
    began = asyncio.Event()
    watched.supervisor.subscribe(lambda status: began.set() if status.copying else None)
    await asyncio.wait_for(began.wait(), TIMEOUT_S)
    front.proxy.cut()
    await watched.until(EngineState.BACKOFF)
    await watched.until(EngineState.READY)
    assert len(front.starter.tickets) == 1
    assert copies(front) == ["demo.gguf", "mmproj-demo.gguf"]
    await watched.supervisor.stop()


async def test_stop_ends_a_copy(front: Front) -> None:
    """The host ends at once, and what it has stays for the next one."""
    front.files._pacer._bytes_per_s = 2**18
    watched = watch(front)
    began = asyncio.Event()
    watched.supervisor.subscribe(lambda status: began.set() if status.copying else None)
    await asyncio.wait_for(began.wait(), TIMEOUT_S)
    await watched.supervisor.stop()
    await front.starter.ended()
    assert copies(front) == []


async def test_model_without_space_fails_to_load(front: Front, tmp_path: Path) -> None:
    """With the reason; the sparse file is larger than any disk here."""
    path = tmp_path / "huge.gguf"
    path.touch()
    os.truncate(path, 2**43)
    watched = watch(front, model_path=str(path), mmproj_path="")
    await watched.until(EngineState.FAILED)
    failure = watched.supervisor.load_failure
    assert failure is not None
    assert failure.code is ErrorCode.STORAGE_UNAVAILABLE
    assert "has no space for huge.gguf" in failure.message
    await watched.supervisor.stop()
