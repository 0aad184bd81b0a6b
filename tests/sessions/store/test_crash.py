"""A process that is killed while it writes: every event that was sent is in the file."""

from __future__ import annotations

import multiprocessing
import random
from typing import TYPE_CHECKING

import pytest

from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.store.crashing import (
    ENDED,
    SESSIONS,
    WORDS,
    answer,
    history,
    write_until_killed,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from inferencecenter.sessions.journal import StoredSession

RUNS = 20


def _run(path: Path, n_events: int) -> dict[int, tuple[int, int]]:
    """Run a writing process, kill it after so many events, and return the last event of each session."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([write_until_killed.__module__])
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=write_until_killed, args=(str(path), writing))
    process.start()
    writing.close()
    last: dict[int, tuple[int, int]] = {}
    try:
        for _ in range(n_events):
            _receive(reading, last)
    finally:
        process.kill()
        process.join()
    # What was shown before the kill and not read yet.
    try:
        while True:
            _receive(reading, last)
    except EOFError:
        return last
    finally:
        reading.close()
        process.close()


def _receive(reading: Connection, last: dict[int, tuple[int, int]]) -> None:
    assert reading.poll(30), "the process says nothing"
    session, turn, n_words = reading.recv()
    last[session] = (turn + 1, 0) if n_words == ENDED else (turn, n_words)


def _standing(session: int, kept: StoredSession) -> tuple[int, int]:
    """Return the finished turns of a session and the words of the next one, checking all of them."""
    n_turns = len(kept.turns)
    assert kept.history == history(session, n_turns)
    if kept.pending_turn is None:
        return n_turns, 0
    said = kept.pending_turn.text
    (n_words,) = [n for n in range(WORDS + 1) if answer(session, n_turns, n) == said]
    assert kept.seq == n_turns * 10 + n_words
    assert len(kept.pending_turn.tokens) == 4 * len(said)
    assert kept.pending_turn.spec.turn_id == f"t_{n_turns}"
    return n_turns, n_words


@pytest.mark.parametrize("run", range(RUNS))
async def test_published_text_is_stored(path: Path, run: int) -> None:
    """Whenever the process is killed, every session is at its last sent event or later."""
    shown = _run(path, random.Random(run).randrange(SESSIONS, 400))
    store = SessionStore.open(path)
    assert store.fault is None
    assert not store.was_clean
    kept = {each.config.session_id: each for each in store.load()}
    await store.close()
    assert set(shown) <= set(range(SESSIONS))
    for session, last in shown.items():
        assert _standing(session, kept[f"s_{session}"]) >= last
