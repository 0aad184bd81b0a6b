"""Packages that speak to servers like OpenAI's, unchanged, against scripted answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clients.client_programs import SDKS, ClientProgram, install, printed, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

pytestmark = [pytest.mark.extra, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("client", SDKS, ids=str)
def test_package_works_feature_by_feature(
    client: ClientProgram, daemon: Daemon, installed_clients: Path, tmp_path: Path
) -> None:
    """Its program prints the expected result of each feature: own types, streams, tool loops and errors."""
    programs = install(client, installed_clients)
    assert printed(run(client, programs, daemon, tmp_path)) == client.expected
