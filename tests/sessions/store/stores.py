"""Stores with short timeouts, and faults of their files."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING

from inferencecenter.sessions.store.store import SessionStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from inferencecenter.sessions.journal import Journal, StoredSession

RETRY_S = 0.001
"""Seconds between attempts."""


@asynccontextmanager
async def storing(path: Path, *, patience_s: float = 60.0) -> AsyncIterator[SessionStore]:
    """A store with immediate retries, closed at the end within a time limit."""
    store = SessionStore.open(path, retry_s=RETRY_S)
    store.load()
    try:
        yield store
    finally:
        await store.close(timeout_s=patience_s)


async def settled(store: Journal) -> None:
    """Wait until everything written so far is committed."""
    safe = asyncio.Event()
    store.release(safe.set)
    async with asyncio.timeout(60):
        await safe.wait()


async def kept_in(path: Path) -> dict[str, StoredSession]:
    """The sessions that another daemon would load."""
    store = SessionStore.open(path)
    kept = {each.config.session_id: each for each in store.load()}
    await store.close()
    return kept


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process locks the file meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Another process holds a read transaction meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM sessions").fetchone()
        yield


def move(path: Path, target: Path) -> None:
    """Rename a file."""
    path.rename(target)


def put_empty(path: Path) -> None:
    """Create an empty file."""
    path.touch()


async def until(holds: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what a thread does sets no event
            await asyncio.sleep(0)


async def was_clean(path: Path) -> bool:
    """Return whether another daemon would find a clean shutdown."""
    store = SessionStore.open(path)
    await store.close()
    return store.was_clean
