"""A front, the stub engine, and cleanup of engines that a test leaves running."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.harness import Front
from tests.supervisor.conftest import stopped, stub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["front", "stopped", "stub"]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    """A front whose hosts run the stub."""
    front = await Front.open(tmp_path)
    yield front
    front.starter.clean_up()
    front.files.close()
    await front.listener.close()
    await front.proxy.close()
