"""An echo daemon and a load generator, each in its own process, shared by the tests of a module.

Such tests run on the module's event loop, which reads the processes' output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from benchmarks.daemon_process import DaemonSettings, start_daemon
from benchmarks.generator import start_generator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.daemon_process import RunningDaemon
    from benchmarks.generator import LoadGenerator

SLOTS = 4
N_CTX = 2048


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon() -> AsyncIterator[RunningDaemon]:
    """A running daemon with the echo backend."""
    settings = DaemonSettings(backend="echo", model=None, slots=SLOTS, n_ctx=N_CTX, threads=0)
    async with start_daemon(settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generator() -> AsyncIterator[LoadGenerator]:
    """A running load generator."""
    async with start_generator() as running:
        yield running
