"""One daemon on the demo model for all end-to-end tests that need no settings and do no harm to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Daemon]:
    """A daemon on the demo model; a test finds sessions of others on it, and what they left in its slots."""
    state_dir = tmp_path_factory.mktemp("daemon") / "state"
    with run_daemon(state_dir, demo_model_path, INFERENCECENTER_SERVER__SHARE_LINKS="true") as running:
        yield running
