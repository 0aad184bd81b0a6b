"""The ollama package's client of a test's server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from ollama import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.harness import Running


@pytest.fixture
async def client(server: Running) -> AsyncIterator[AsyncClient]:
    """The ollama client with the token of the client ada."""
    async with client_of(server, server.token) as connected:
        yield connected


@asynccontextmanager
async def client_of(server: Running, token: str) -> AsyncIterator[AsyncClient]:
    """Connect an ollama client with a token."""
    connected = AsyncClient(host=f"http://127.0.0.1:{server.port}", headers={"Authorization": f"Bearer {token}"})
    try:
        yield connected
    finally:
        await connected._client.aclose()
