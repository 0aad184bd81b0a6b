"""An engine with a limit of offloaded KV: memory is released at once, and answers are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from inferencecenter.ipc.engine_options import KvCachePaths
from inferencecenter.ipc.messages import KvRamLimit, StepOutput, Submit
from tests.engine.harness import Engine, Front, submit
from tests.engine.process import demo_options, running

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
SHORT = b'{"temperature":0,"max_tokens":8}'
QUESTION = "My name is Ana and I live in Oslo. Count from one to ten, please. " * 3


def last_step(front: Front) -> StepOutput:
    """Return the last frame with gauges."""
    return next(frame for frame in reversed(front.frames) if isinstance(frame, StepOutput))


def parked(front: Front) -> bool:
    """Return whether KV is offloaded in RAM now."""
    return last_step(front).parked_ram_bytes > 0


def parked_until(front: Front, *, in_ram: bool) -> StepOutput:
    """Read until KV is, or is not, offloaded in RAM."""
    front.read_until(lambda: parked(front) is in_ram)
    return last_step(front)


def of_client(client_id: str, turn: Submit) -> Submit:
    """Return a turn of a client that shares no KV with others."""
    return msgspec.structs.replace(turn, client_id=client_id)


def test_eviction_of_offloaded_sessions_keeps_answers(tmp_path: Path) -> None:
    """Their tokens are prefilled again; after the limit is lifted KV is kept again."""
    engine = Engine(tmp_path, slots=1, prefill_grid_tokens=16)
    front = engine.front
    for name in ("one", "two", "three"):
        front.send(of_client(name, submit(name, f"some words in session {name}")))
        front.finished(name)
    assert parked_until(front, in_ram=True).parked_sessions == 2
    front.send(KvRamLimit(0))
    assert parked_until(front, in_ram=False).parked_sessions == 0
    assert list((tmp_path / "ram").iterdir()) == []
    front.send(of_client("one", submit("again", "more", session="one", tokens=front.history("one"))))
    assert front.finished("again").cached_tokens == 0
    assert front.text("again") == "more"
    assert last_step(front).parked_ram_bytes == 0
    last = submit("last", "more words", session="two", tokens=front.history("two"))
    front.send(KvRamLimit(None), of_client("two", last))
    front.finished("last")
    assert parked_until(front, in_ram=True).parked_sessions == 1
    engine.stop()


def test_eviction_does_not_interrupt_running_turns(tmp_path: Path) -> None:
    """A turn whose offloaded KV was evicted is prefilled again; without offload no slot is preempted."""
    engine = Engine(tmp_path, slots=1, prefill_grid_tokens=16, quantum_tokens=8)
    texts = {name: f"{name} says " + "abcdefghij " * 12 for name in ("ada", "bob")}
    engine.front.send(*(submit(name, text) for name, text in texts.items()))
    engine.front.read_until(lambda: texts.keys() <= engine.front.events.keys() and parked(engine.front))
    engine.front.send(KvRamLimit(0))
    preempted = [engine.front.finished(name).preempted for name in texts]
    assert sum(preempted) > 0
    assert {name: engine.front.text(name) for name in texts} == texts
    engine.stop()


def test_demo_model_answers_are_unchanged(demo_model_path: Path, tmp_path: Path) -> None:
    """With real KV, in a real process, the answers equal those without eviction."""
    options = demo_options(
        demo_model_path,
        slots=1,
        n_ctx=512,
        kv=KvCachePaths(ram_dir=tmp_path, ram_bytes=64 * MIB),
        prefill_grid_tokens=16,
    )
    said = {}
    for limit in (None, 0):
        with running(options) as child:
            front = child.front
            front.send(submit("one", QUESTION, session="ana", params=SHORT))
            history = front.history("one")
            front.send(of_client("bob", submit("other", "Hello!", params=SHORT)))
            front.finished("other")
            assert parked_until(front, in_ram=True).parked_sessions >= 1
            front.send(
                KvRamLimit(limit), submit("two", "What is my name?", session="ana", tokens=history, params=SHORT)
            )
            end = front.finished("two")
            assert (end.cached_tokens > 0) is (limit is None)
            assert child.log == []
            said[limit] = front.text("two")
        for path in tmp_path.iterdir():
            path.unlink()
    assert said[None] == said[0] != ""
