"""Open WebUI, a web page of its own, lists models and chats through two APIs of the daemon."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.clients.client_programs import LARGE, OPEN_WEBUI, install, printed, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.harness import Daemon

pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(LARGE not in os.environ, reason=f"it installs 7 GB: set {LARGE}"),
]


def test_open_webui_chats_through_both_apis(daemon: Daemon, installed_clients: Path, tmp_path: Path) -> None:
    """One model is listed twice: by the OpenAI-compatible API, and by Ollama's."""
    programs = install(OPEN_WEBUI, installed_clients)
    assert printed(run(OPEN_WEBUI, programs, daemon, tmp_path)) == OPEN_WEBUI.expected
