"""An idle engine saves its slots once, then sleeps until the next message."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.ipc.messages import EngineLimits, KvRamLimit, ReleaseSession, StepOutput, Suspend, Suspended
from tests.engine.harness import TIMEOUT_S, Engine, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from inferencecenter.engine.inbox import Command

TEXT = "some words that take more than a cell of the grid"


class Watched(Engine):
    """An engine that records its waits for messages and their timeouts."""

    def __init__(self, kv: Path, **options: float) -> None:
        super().__init__(kv, prefill_grid_tokens=16, quiet_s=0.01, **options)  # type: ignore[arg-type]
        self.waits: list[float | None] = []
        self.asleep = threading.Event()
        self._get = self._inbox.get
        setattr(self._inbox, "get", self._wait)  # noqa: B010 - mypy takes the plain assignment for a mistake

    def _wait(self, *, timeout_s: float | None) -> Command | None:
        self.waits.append(timeout_s)
        if timeout_s is None:
            self.asleep.set()
        command = self._get(timeout_s=timeout_s)
        if timeout_s is None:
            self.asleep.clear()
        return command

    def rests(self) -> list[float | None]:
        """Wait until it is idle; return its waits since the last call."""
        assert self.asleep.wait(TIMEOUT_S)
        waits, self.waits = self.waits, []
        return waits

    def parked(self) -> set[str]:
        """Return the sessions with offloaded KV; to be called while it is idle."""
        return {entry.key for entry in self.kv._tiers.index}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Engines that are stopped at the end."""
    engines: list[Watched] = []

    def make(**options: float) -> Watched:
        engines.append(Watched(tmp_path, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


def ask(engine: Engine, session: str, *, durable: bool = True, tokens: bytes = b"") -> str:
    """Run a turn to its end and return its id."""
    turn = msgspec.structs.replace(
        submit(f"{session} {len(tokens)}", f"{session} says {TEXT}", session=session), durable=durable
    )
    engine.front.send(msgspec.structs.replace(turn, tokens=tokens))
    engine.front.finished(turn.turn_id)
    return turn.turn_id


def test_idle_checkpoint_saves_once(watched: Callable[..., Watched]) -> None:
    """It runs after one short idle wait, also with two sessions, and updates the gauges."""
    engine = watched()
    engine.front.send(submit("one", f"one says {TEXT}"), submit("two", f"two says {TEXT}"))
    engine.front.wait_for("one", "two")
    engine.front.read_until(
        lambda: any(isinstance(f, StepOutput) and f.parked_sessions == 2 for f in engine.front.frames)
    )
    assert [wait for wait in engine.rests() if wait != 1.0][-2:] == [0.01, None]
    assert engine.parked() == {"one", "two"}
    assert engine.asleep.is_set()
    assert engine.waits == []


def test_each_checkpoint_replaces_the_last(watched: Callable[..., Watched]) -> None:
    """The next turn continues in its slot, from which nothing was taken."""
    engine = watched()
    turn_id = ask(engine, "s")
    engine.rests()
    history = engine.front.history(turn_id)
    again = ask(engine, "s", tokens=history)
    end = engine.front.finished(again)
    assert end.cached_tokens >= len(history) // 4 - 1
    engine.rests()
    (entry,) = engine.kv._tiers.index
    assert entry.tokens.startswith(history[: 4 * end.cached_tokens])
    assert entry.n_tokens > len(history) // 4


def test_next_engine_uses_the_checkpoint(tmp_path: Path) -> None:
    """It prefills only the last token, although the first engine had no time to suspend."""
    engine = Watched(tmp_path)
    turn_id = ask(engine, "s")
    engine.rests()
    history = engine.front.history(turn_id)
    following = Engine(tmp_path, adopt=RecoveryMode.DURABLE, prefill_grid_tokens=16)
    again = ask(following, "s", tokens=history)
    assert following.front.finished(again).cached_tokens >= len(history) // 4 - 1
    following.stop()
    engine.stop()


def test_unstored_sessions_are_not_checkpointed(watched: Callable[..., Watched]) -> None:
    """They do not even wake the loop."""
    engine = watched()
    ask(engine, "s", durable=False)
    assert 0.01 not in engine.rests()
    assert engine.parked() == set()


def test_no_checkpoint_without_offload(watched: Callable[..., Watched]) -> None:
    """There is no store to save to."""
    engine = watched(ram_bytes=0)
    ask(engine, "s")
    assert 0.01 not in engine.rests()
    assert engine.parked() == set()


def test_full_store_evicts_nothing_for_a_checkpoint(watched: Callable[..., Watched]) -> None:
    """Offloaded entries stay, and a checkpoint without room is not made."""
    engine = watched(ram_bytes=4096, slots=1)
    ask(engine, "s")
    engine.rests()
    before = engine.parked()
    ask(engine, "other")
    assert 0.01 not in engine.rests()
    assert engine.parked() == before


def test_no_checkpoint_under_memory_pressure(watched: Callable[..., Watched]) -> None:
    """Checkpoints are evicted too, and created again when memory is available."""
    engine = watched()
    ask(engine, "s")
    engine.front.read_until(lambda: gauges(engine).parked_sessions == 1)
    engine.front.send(KvRamLimit(0))
    engine.front.read_until(lambda: gauges(engine).parked_sessions == 0)
    ask(engine, "t")
    assert engine.rests()[-1] is None
    assert engine.parked() == set()
    engine.front.send(KvRamLimit(None))
    engine.front.read_until(lambda: gauges(engine).parked_sessions == 2)
    engine.rests()
    assert engine.parked() == {"s", "t"}


def test_no_checkpoint_while_paused(watched: Callable[..., Watched]) -> None:
    """A machine that is too hot can cool; the checkpoint is made afterwards."""
    engine = watched()
    pause = EngineLimits(active_slots=2, prefill_share=1.0, lowest_class=2, pause_ms=1)
    engine.front.send(pause)
    ask(engine, "s")
    assert 0.01 not in engine.rests()
    engine.front.send(msgspec.structs.replace(pause, pause_ms=0))
    engine.front.read_until(lambda: gauges(engine).parked_sessions == 1)


def test_messages_are_handled_between_slots(watched: Callable[..., Watched]) -> None:
    """A turn that arrives while one slot is saved does not wait for the next."""
    engine = watched(slots=3)
    saving, saved = threading.Event(), threading.Event()
    save = engine.backend.save

    def slow(slot: int, buffer: memoryview) -> int:
        saving.set()
        assert saved.wait(TIMEOUT_S)
        return save(slot, buffer)

    engine.backend.decoding.clear()
    engine.tell(submit("one", f"one says {TEXT}"), submit("two", f"two says {TEXT}"))
    setattr(engine.backend, "save", slow)  # noqa: B010
    engine.backend.decoding.set()
    engine.front.wait_for("one", "two")
    assert saving.wait(TIMEOUT_S)
    engine.backend.entered.clear()
    engine.backend.decoding.clear()
    engine.tell(submit("three", f"three says {TEXT}"))
    saved.set()
    assert engine.backend.entered.wait(TIMEOUT_S)
    assert len(engine.parked()) == 1
    engine.backend.decoding.set()
    engine.front.wait_for("three")
    engine.rests()
    assert engine.parked() == {"one", "two", "three"}


def test_closed_session_is_not_checkpointed(watched: Callable[..., Watched]) -> None:
    """An existing copy of its KV is dropped."""
    engine = watched()
    ask(engine, "s")
    engine.front.read_until(lambda: gauges(engine).parked_sessions == 1)
    engine.front.send(ReleaseSession("s"))
    engine.front.read_until(lambda: gauges(engine).parked_sessions == 0)
    engine.rests()
    assert engine.parked() == set()


def test_suspended_engine_makes_no_checkpoint(watched: Callable[..., Watched]) -> None:
    """Everything has been saved."""
    engine = watched(disk_bytes=2**20)
    ask(engine, "s")
    engine.rests()
    engine.front.send(Suspend())
    engine.front.read_until(lambda: isinstance(engine.front.frames[-1], Suspended))
    assert 0.01 not in engine.rests()
    assert engine.front.frames[-1] == Suspended(1)


def gauges(engine: Engine) -> StepOutput:
    """Return the last frame with gauges."""
    return next(frame for frame in reversed(engine.front.frames) if isinstance(frame, StepOutput))
