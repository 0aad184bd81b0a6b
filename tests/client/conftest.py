"""Fixtures of the client's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.client.peer import scripted_daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.client.peer import Start


@pytest.fixture
async def scripted() -> AsyncIterator[Start]:
    """Return a function that starts scripted daemons."""
    async with scripted_daemon() as start:
        yield start
