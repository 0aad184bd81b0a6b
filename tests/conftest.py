"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import inferencecenter

_BUNDLED = Path(inferencecenter.__file__).parent / "demo" / "demo.gguf"


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The bundled demo model, or the file named by ``INFERENCECENTER_TEST_MODEL``."""
    return Path(os.environ.get("INFERENCECENTER_TEST_MODEL", _BUNDLED))
