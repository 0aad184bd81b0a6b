"""Server fixtures of `tests/server`."""

from __future__ import annotations

from tests.server.conftest import clock, pytest_asyncio_loop_factories, serve, server

__all__ = ["clock", "pytest_asyncio_loop_factories", "serve", "server"]
