"""A server for each test, on the daemon's event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from tests.loop_clock import LoopClock
from tests.server.harness import Running, running_server

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests of this folder on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    """The fake clock of the test's timers."""
    return LoopClock(monkeypatch)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Running]]:
    """Return a function that runs a server with other settings."""

    def run(**settings: Any) -> AbstractAsyncContextManager[Running]:
        return running_server(tmp_path, **settings)

    return run


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    """A server with the default limits."""
    async with running_server(tmp_path) as running:
        yield running
