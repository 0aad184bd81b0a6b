"""A server for each test, and the openai package's client of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.server.harness import Running, running_server

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from anthropic import AsyncAnthropic


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests of this folder on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Running]]:
    """Return a function that starts a server with the given settings."""

    def run(**settings: Any) -> AbstractAsyncContextManager[Running]:
        return running_server(tmp_path, **settings)

    return run


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    """A server with the default limits."""
    async with running_server(tmp_path) as running:
        yield running


@pytest.fixture
async def ada(server: Running) -> AsyncIterator[AsyncOpenAI]:
    """The openai client with the token of the client ada, without retries."""
    url = f"http://127.0.0.1:{server.port}/v1"
    plain = DefaultAsyncHttpxClient(verify=False)  # no TLS, whose authorities take 50 ms to read
    async with AsyncOpenAI(base_url=url, api_key=server.token, max_retries=0, http_client=plain) as client:
        yield client


@pytest.fixture
async def claude(server: Running) -> AsyncIterator[AsyncAnthropic]:
    """The anthropic client with the token of the client ada, without retries."""
    # It takes more than a second to import, which other workers are spared.
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient  # noqa: PLC0415

    url, plain = f"http://127.0.0.1:{server.port}", DefaultAsyncHttpxClient(verify=False)
    async with AsyncAnthropic(base_url=url, auth_token=server.token, max_retries=0, http_client=plain) as client:
        yield client


@pytest.fixture
def expiries(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Return the pending token expiry callbacks; a test calls them, none runs by itself."""
    expiries: list[Callable[[], object]] = []

    class ManualDeadline:
        def __init__(self, delay_s: float, passed: Callable[[], object]) -> None:
            assert 0 < delay_s <= 3600
            self._passed = passed
            expiries.append(passed)

        def cancel(self) -> None:
            if self._passed in expiries:
                expiries.remove(self._passed)

    for module in ("api.request_context", "server.connection"):
        monkeypatch.setattr(f"inferencecenter.{module}.Deadline", ManualDeadline)
    return expiries
