"""Saving KV to disk before the daemon ends, and recovering it in the next one's engine."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest

from inferencecenter.engine.kv_cache import disk
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.ipc.engine_options import KvCachePaths
from inferencecenter.ipc.messages import PrefillProgress, RetainSessions, StepOutput, Suspend, Suspended, pack_tokens
from tests.engine.harness import Engine, Front, submit
from tests.engine.process import demo_options, running

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.ipc.engine_options import EngineOptions

ENDLESS = b'{"ignore_eos":true}'
MIB = 2**20
# About a thousand tokens of the demo model.
LONG = "The name is Ana. " + "Count to ten, and then count to ten again, please. " * 56
SHORT = b'{"temperature":0,"max_tokens":8}'


def suspended(front: Front, *, park_all: bool = False) -> int:
    """Suspend an engine and return the number of saved sessions."""
    front.send(Suspend(park_all))
    front.read_until(lambda: any(isinstance(frame, Suspended) for frame in front.frames))
    return next(frame.sessions for frame in front.frames if isinstance(frame, Suspended))


def speaks(front: Front, turn_id: str, n_chars: int) -> None:
    """Read until a turn has a text of this length."""
    front.read_until(lambda: turn_id in front.events and len(front.text(turn_id)) > n_chars)


def parking(path: Path, **options: object) -> Engine:
    """Return an engine that offloads to RAM and disk, and recovers durable entries."""
    return Engine(path, disk_bytes=MIB, adopt=RecoveryMode.DURABLE, prefill_grid_tokens=16, **options)  # type: ignore[arg-type]


def test_suspend_stops_turns_silently(tmp_path: Path) -> None:
    """Running, waiting and new turns get no event; running sessions are saved, and the loop ends with its pipe."""
    engine = parking(tmp_path, quantum_tokens=1_000_000)
    names = [f"turn {number} of them" for number in range(4)]
    engine.front.send(*(submit(name, "ab", params=ENDLESS) for name in names[:2]))
    for name in names[:2]:
        speaks(engine.front, name, 20)
    engine.front.send(*(submit(name, "ab", params=ENDLESS) for name in names[2:]))
    assert suspended(engine.front) == 2
    engine.front.send(submit("late", "ab"), Suspend(), RetainSessions(()))
    engine.stop()
    assert "late" not in engine.front.events
    assert not any(engine.front.ended(name) for name in names)
    assert sum(isinstance(frame, Suspended) for frame in engine.front.frames) == 1
    assert len(list((tmp_path / "disk").iterdir())) == 2


def test_answer_resumes_in_the_next_daemon(tmp_path: Path) -> None:
    """Its KV is read from disk; of prompt and answer only the last token is prefilled."""
    engine = parking(tmp_path, slots=1)
    engine.front.send(submit("t", "a long story", session="s", params=ENDLESS))
    speaks(engine.front, "t", 30)
    suspended(engine.front)
    engine.stop()
    said = engine.front.text("t")
    following = parking(tmp_path, slots=3)
    again = submit("t", "a long story", session="s", params=ENDLESS, answer=said.encode(), shown_chars=len(said))
    again = msgspec.structs.replace(again, answer=pack_tokens(list(said.encode())))
    following.front.send(RetainSessions(("s",)), again)
    speaks(following.front, "t", 5)
    following.stop()
    assert (said + following.front.text("t")).startswith("a long story" * 3)
    assert not any(isinstance(event, PrefillProgress) for event in following.front.events["t"])
    prompt = len(following.backend.tokenize(again.pieces, first=True))
    assert following.front.events["t"][0].cached_tokens == prompt  # type: ignore[union-attr]


def test_entries_that_are_not_durable_are_not_written(tmp_path: Path) -> None:
    """A session that is not stored is neither written nor recovered."""
    engine = parking(tmp_path)
    engine.front.send(msgspec.structs.replace(submit("t", "secret words of mine"), durable=False))
    engine.front.finished("t")
    assert suspended(engine.front) == 0
    engine.stop()
    assert list((tmp_path / "disk").iterdir()) == []


def test_entries_that_are_not_durable_stay_in_ram(tmp_path: Path) -> None:
    """If the RAM tier is kept, an engine that recovers everything finds it, and no disk has it."""
    engine = parking(tmp_path)
    engine.front.send(msgspec.structs.replace(submit("t", "secret words of mine"), durable=False))
    engine.front.finished("t")
    assert suspended(engine.front, park_all=True) == 0
    engine.stop()
    assert list((tmp_path / "disk").iterdir()) == []
    following = Engine(tmp_path, disk_bytes=MIB, adopt=RecoveryMode.ALL, prefill_grid_tokens=16)
    following.front.send(msgspec.structs.replace(submit("t", "secret words of mine"), durable=False))
    assert following.front.finished("t").cached_tokens > 0
    following.stop()


def test_closed_sessions_are_dropped(tmp_path: Path) -> None:
    """``RetainSessions`` keeps the named ones and deletes the others' files."""
    engine = parking(tmp_path, slots=4)
    for name in ("one", "two", "three"):
        engine.front.send(submit(name, f"some words in {name}"))
        engine.front.finished(name)
    assert suspended(engine.front) == 3
    engine.stop()
    following = parking(tmp_path)
    following.front.send(RetainSessions(("one", "three", "never heard of")))
    following.front.read_until(
        lambda: any(isinstance(frame, StepOutput) and frame.parked_sessions == 2 for frame in following.front.frames)
    )
    following.stop()
    assert len(list((tmp_path / "disk").iterdir())) == 2


def test_earlier_offloaded_entries_are_written_to_disk(tmp_path: Path) -> None:
    """Entries in RAM are written as long as there is room, the most recently used ones first."""
    engine = parking(tmp_path, slots=1)
    for number in range(5):
        engine.front.send(submit(f"s{number}", f"some words in number {number}"))
        engine.front.finished(f"s{number}")
    assert list((tmp_path / "disk").iterdir()) == []
    assert suspended(engine.front) == 5
    engine.stop()


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_failing_disk_does_not_delay_the_suspend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """It reports no saved session, with one log line, and leaves no partial file."""

    def fail(path: Path, data: memoryview) -> None:
        path.write_bytes(bytes(data[:100]))
        raise OSError(fault, os.strerror(fault), str(path))

    monkeypatch.setattr(disk, "_write", fail)
    logged: list[str] = []
    engine = parking(tmp_path, on_log=lambda level, text: logged.append(text))
    engine.front.send(submit("one", "some words in it"), submit("two", "other words in it"))
    engine.front.wait_for("one", "two")
    assert suspended(engine.front) == 0
    engine.stop()
    assert len(logged) == 1
    assert logged[0].startswith("KV cannot be parked (disk tier)")
    assert list((tmp_path / "disk").iterdir()) == []


def test_small_disk_gets_the_most_recent_entries(tmp_path: Path) -> None:
    """Older sessions are skipped."""
    engine = Engine(tmp_path, disk_bytes=1200, adopt=RecoveryMode.ALL, slots=4, prefill_grid_tokens=16)
    for name in ("old", "newer", "newest"):
        engine.front.send(submit(name, f"{name} words"))
        engine.front.finished(name)
    count = suspended(engine.front)
    engine.stop()
    following = Engine(tmp_path, disk_bytes=1200, ram_bytes=0, adopt=RecoveryMode.ALL, prefill_grid_tokens=16)
    sizes = sum(path.stat().st_size for path in (tmp_path / "disk").iterdir())
    assert 0 < count < 3
    assert sizes <= 1200
    assert following.kv.find("client", engine.backend.tokenize(submit("newest", "newest words").pieces, first=True))
    following.stop()


def long_options(path: Path, kv: Path, **changes: object) -> EngineOptions:
    """Return options for the demo model with long slots, and both tiers."""
    changes = {
        "n_ctx": 1024,
        "n_batch": 512,
        "n_ubatch": 512,
        "kv": KvCachePaths(ram_dir=kv / "ram", ram_bytes=64 * MIB, disk_dir=kv / "disk", disk_bytes=64 * MIB),
        "kv_adopt": "durable",
    } | changes
    return demo_options(path, **changes)


@dataclass(frozen=True)
class LongSession:
    """A session of a thousand tokens that an engine saved to disk, and its answer to another question."""

    disk: Path
    history: bytes
    said: str
    prompt_tokens: int


@pytest.fixture(scope="module")
def long_session(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LongSession:
    """A session whose engine has ended."""
    kv = tmp_path_factory.mktemp("long")
    with running(long_options(demo_model_path, kv)) as child:
        child.front.send(submit("one", LONG, session="s", params=SHORT))
        history = child.front.history("one")
        child.front.send(submit("two", "Count to ten.", session="s", tokens=history, params=SHORT))
        end = child.front.finished("two")
        assert child.suspend() == 1
        return LongSession(kv / "disk", history, child.front.text("two"), end.prompt_tokens)


@pytest.mark.parametrize("slots", [4, 2, 7])
def test_long_session_is_restored_in_the_next_process(
    demo_model_path: Path, tmp_path: Path, long_session: LongSession, slots: int
) -> None:
    """Its KV comes from disk, into any number of slots, and only new text is prefilled; the answer is the same."""
    assert long_session.prompt_tokens > 950
    shutil.copytree(long_session.disk, tmp_path / "disk")
    with running(long_options(demo_model_path, tmp_path, slots=slots)) as child:
        child.front.send(RetainSessions(("s",)))
        child.front.send(submit("two", "Count to ten.", session="s", tokens=long_session.history, params=SHORT))
        end = child.front.finished("two")
        assert child.front.text("two") == long_session.said
        assert not any(isinstance(event, PrefillProgress) for event in child.front.events["two"])
        assert child.log == []
    assert end.prompt_tokens == long_session.prompt_tokens
    assert end.cached_tokens == end.prompt_tokens - 1


@pytest.mark.slow
def test_kv_of_another_model_is_dropped(demo_model_path: Path, tmp_path: Path) -> None:
    """Other KV types are another model: one log line, the tokens are prefilled, and the turn is answered."""
    options = long_options(demo_model_path, tmp_path)
    with running(options) as child:
        for name in ("one", "two"):
            child.front.send(submit(name, LONG, params=SHORT))
            child.front.finished(name)
        assert child.suspend() == 2
    with running(options.replace(kv_type_k="q8_0")) as child:
        child.front.send(submit("one", LONG, params=SHORT))
        assert child.front.finished("one").cached_tokens == 0
        (line,) = child.log
    assert line.startswith("parked KV of an earlier engine is dropped: it belongs to another model or version (")


TURNS = [
    msgspec.structs.replace(submit(name, LONG[:600], params=SHORT), client_id=name, durable=name != "private")
    for name in ("stored", "private", "other")
]
"""Of three clients, who share nothing."""


@pytest.fixture(scope="module")
def left_by_a_kill(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The KV of an engine that was killed after ``TURNS``, of which the last has the only slot."""
    kv = tmp_path_factory.mktemp("killed")
    with running(long_options(demo_model_path, kv, kv_adopt="all", slots=1)) as child:
        for turn in TURNS:
            child.front.send(turn)
            child.front.finished(turn.turn_id)
        child.process.kill()
    return kv


@pytest.mark.parametrize("adopt", ["none", "durable", "all"])
def test_recovered_entries_are_the_requested_ones(
    demo_model_path: Path, tmp_path: Path, left_by_a_kill: Path, adopt: str
) -> None:
    """An engine recovers none, the durable ones, or all entries of a killed engine."""
    kv = shutil.copytree(left_by_a_kill, tmp_path / "kv")
    with running(long_options(demo_model_path, kv, kv_adopt=adopt, slots=1)) as child:
        for turn in TURNS[:2]:
            child.front.send(turn)
        cached = [child.front.finished(turn.turn_id).cached_tokens > 0 for turn in TURNS[:2]]
    assert cached == {"none": [False, False], "durable": [True, False], "all": [True, True]}[adopt]
