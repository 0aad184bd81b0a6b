"""One daemon on the echo backend for each module of faults; it is started again when a test has ended it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.harness import CROWDED, ECHO, Site, site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Iterator[Site]:
    """Where the module's daemon runs."""
    settings = {"INFERENCECENTER_ENGINE__HANG_TIMEOUT_S": "1"}
    with site(tmp_path_factory.mktemp("echo"), demo_model_path, **ECHO, **CROWDED, **settings) as found:
        yield found


@pytest.fixture
def echo(sites: Site) -> Site:
    """A daemon with no traps set: echo on two slots, with turns of eight tokens in each."""
    sites.ensure()
    return sites
