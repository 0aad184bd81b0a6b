"""A browser for each module of tests, and daemons for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from playwright.async_api import async_playwright

from tests.e2e.harness import Daemon, run_daemon
from tests.web.browser import find_browser, launch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from playwright.async_api import Browser

ECHO = {
    "INFERENCECENTER_ENGINE__BACKEND": "echo",
    "INFERENCECENTER_ENGINE__ECHO_DELAY_MS": "1",
    "INFERENCECENTER_AUTH__DEFAULT_MAX_SESSIONS": "1000",
}
"""A daemon that answers with the question, a byte at a time: whatever a test wants to see streamed."""
ROOMY = {"INFERENCECENTER_AUTH__DEFAULT_MAX_SESSIONS": "1000", "INFERENCECENTER_ENGINE__RESTART_BACKOFF_MIN_S": "0.1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, shared by a module's tests, each of which has a profile of its own."""
    find_browser()
    async with async_playwright() as playwright:
        running = await launch(playwright)
        yield running
        await running.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model, shared by a module's tests."""
    with run_daemon(tmp_path_factory.mktemp("daemon") / "state", demo_model_path, **ROOMY) as running:
        yield running


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the echo backend, shared by a module's tests."""
    with run_daemon(tmp_path_factory.mktemp("echo") / "state", demo_model_path, **ECHO) as running:
        yield running
