"""A process that writes sessions until it is killed, and reports what it would have sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferencecenter.sessions.journal import TurnQueued
from inferencecenter.sessions.store.store import SessionStore
from tests.sessions.store.values import CLOCK, ended, make_history, make_order, make_turn, opened, said, said_by

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from inferencecenter.sessions.history import History

SESSIONS: Final = 4
WORDS: Final = 6
ENDED: Final = -1
"""Stands for all words and the end."""


def word(session: int, turn: int, n: int) -> str:
    """The ``n``-th word of a turn."""
    return f"{session}.{turn}.{n} "


def answer(session: int, turn: int, n_words: int = WORDS) -> str:
    """The first words of a turn."""
    return "".join(word(session, turn, n) for n in range(n_words))


def history(session: int, n_turns: int) -> History:
    """The history after so many turns."""
    spelled = make_history("".join(answer(session, turn) for turn in range(n_turns)))
    return replace(spelled, messages=tuple(said_by("assistant", answer(session, turn)) for turn in range(n_turns)))


def write_until_killed(path: str, shown: Connection) -> None:
    """Run turns in all sessions concurrently, and report session, turn and words of each released event."""
    asyncio.run(_write(Path(path), shown))


async def _write(path: Path, shown: Connection) -> None:
    store = SessionStore.open(path)
    for session in range(SESSIONS):
        store.write(opened(f"s_{session}"), flush=True)
    turn = 0
    while True:
        for session in range(SESSIONS):
            order = TurnQueued(
                session_id=f"s_{session}", seq=turn * 10, last_used_at=CLOCK, spec=make_order(f"t_{turn}")
            )
            store.write(order, flush=True)
        for n in range(WORDS):
            for session in range(SESSIONS):
                text = word(session, turn, n)
                store.write(said(text, f"s_{session}", seq=turn * 10 + n + 1), flush=False)
                _show(store, shown, (session, turn, n + 1))
            await asyncio.sleep(0)
        turn += 1
        for session in range(SESSIONS):
            record = ended(f"s_{session}", history=history(session, turn), turn=make_turn(f"t_{turn - 1}"))
            store.write(replace(record, seq=turn * 10 - 1), flush=True)
            _show(store, shown, (session, turn - 1, ENDED))
        # So that no more is under way than a few frames.
        safe = asyncio.Event()
        store.release(safe.set)
        await safe.wait()


def _show(store: SessionStore, shown: Connection, event: tuple[int, int, int]) -> None:
    store.release(lambda: shown.send(event))
