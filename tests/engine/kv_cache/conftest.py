"""Fixtures for the tests of offloaded KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.kv_cache.harness import Bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A store with both tiers."""
    return Bench(tmp_path)
