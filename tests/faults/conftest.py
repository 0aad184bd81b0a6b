"""One daemon on the echo backend per module, restarted when a test has ended it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.harness import ECHO, FEW_SLOTS, DaemonHarness, daemon_harness

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[DaemonHarness]:
    """The module's daemon."""
    settings = {"INFERENCECENTER_ENGINE__HANG_TIMEOUT_S": "1"}
    with daemon_harness(tmp_path_factory.mktemp("echo"), demo_model_path, **ECHO, **FEW_SLOTS, **settings) as found:
        yield found


@pytest.fixture
def echo(module_daemon: DaemonHarness) -> DaemonHarness:
    """A daemon without faults: echo on two slots, with quanta of eight tokens."""
    module_daemon.ensure()
    return module_daemon
