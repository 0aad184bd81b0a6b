"""``Reattach``: another connection to the front continues with the engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.messages import (
    PromptSegment,
    Ready,
    Reattach,
    Started,
    Tokenized,
    TokenizeRequest,
)
from tests.engine.harness import Engine, submit

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDLESS = b'{"ignore_eos":true}'


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine of two slots with one worker."""
    engine = Engine(worker_threads=1)
    yield engine
    engine.stop()


def reattach(engine: Engine) -> None:
    """Send ``Reattach``, and drop everything up to the reply."""
    engine.front.send(Reattach())
    engine.front.read_until(lambda: any(isinstance(frame, Ready) for frame in engine.front.frames))
    engine.front.frames.clear()
    engine.front.events.clear()


def test_turns_are_dropped_silently(engine: Engine) -> None:
    """Running and waiting ones have no event after ``Ready``; their names may be used again, and slots are free."""
    turns = [submit(f"t{number}", "ab", params=ENDLESS) for number in range(4)]
    engine.front.send(*turns)
    engine.front.read_until(lambda: len(engine.front.text("t0")) > 3)
    reattach(engine)
    engine.front.send(submit("t0", "again"), submit("t3", "others"))
    engine.front.wait_for("t0", "t3")
    assert engine.front.text("t0") == "again"
    assert set(engine.front.events) == {"t0", "t3"}


def test_kv_stays_in_its_slot(engine: Engine) -> None:
    """The next turn of the session computes only what is new."""
    engine.front.send(submit("first", "a" * 300, session="s", params=ENDLESS))
    engine.front.read_until(lambda: len(engine.front.text("first")) > 3)
    (started,) = [event for event in engine.front.events["first"] if isinstance(event, Started)]
    reattach(engine)
    engine.front.send(submit("second", "b", session="s", tokens=started.tokens))
    engine.front.finished("second")
    (resumed,) = [event for event in engine.front.events["second"] if isinstance(event, Started)]
    assert resumed.cached_tokens == len(started.tokens) // 4


def test_pending_lookups_are_not_answered(engine: Engine) -> None:
    """One with the same number, sent later, has its own answer."""
    engine.backend.tokenizing["slow"] = threading.Event()
    pieces = (PromptSegment(""), PromptSegment("slow"))
    engine.front.send(TokenizeRequest(1, pieces, first=False), TokenizeRequest(2, pieces, first=False))
    reattach(engine)
    engine.backend.tokenizing["slow"].set()
    engine.front.send(TokenizeRequest(1, (PromptSegment("xy"),), first=False))
    engine.front.read_until(lambda: any(isinstance(frame, Tokenized) for frame in engine.front.frames))
    engine.front.send(submit("t", "last"))
    engine.front.finished("t")
    answers = [frame for frame in engine.front.frames if isinstance(frame, Tokenized)]
    assert [(each.lookup_id, len(each.tokens)) for each in answers] == [(1, 8)]
