"""A daemon that answers clients by tests/clients/rules.toml, and the clients' environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.clients.client_programs import OPENAI_MODEL
from tests.e2e.harness import Daemon, run_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

RULES = Path(__file__).parent / "rules.toml"


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which agents work that name files by their whole path."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, work: Path) -> Iterator[Daemon]:
    """A daemon with scripted answers."""
    rules = tmp_path_factory.mktemp("rules") / RULES.name
    rules.write_text(RULES.read_text(encoding="utf-8").replace("{work}", str(work)), encoding="utf-8")
    settings = {"BACKEND": "script", "SCRIPT": str(rules), "N_CTX": "0"}
    variables = {f"INFERENCECENTER_ENGINE__{name}": value for name, value in settings.items()}
    variables["INFERENCECENTER_MODEL__ALIASES"] = json.dumps([OPENAI_MODEL])
    with run_daemon(tmp_path_factory.mktemp("scripted") / "state", None, **variables) as running:
        yield running


@pytest.fixture(scope="session")
def installed_clients(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which clients are installed, which later runs find again."""
    if pytestconfig.cache is None:
        return tmp_path_factory.mktemp("clients")
    return pytestconfig.cache.mkdir("clients")
