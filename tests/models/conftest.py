"""A hub on the loopback, and an isolated home directory."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import close_session, constants

from tests.models.hub_stub import StubHub, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Refuse connections beyond the loopback, and keep the hub library out of its directories."""
    home = tmp_path / "hf-home"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH"):
        monkeypatch.setattr(constants, name, str(home / name))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(home / "agents"))
    resolve = socket.getaddrinfo

    def only_here(host: object, *arguments: object, **named: object) -> object:
        assert host in ("127.0.0.1", "localhost"), f"a test asked for {host}"
        return resolve(host, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    # The library's client outlives a test, with its proxy settings.
    close_session()
    yield
    close_session()
    assert not home.exists(), "the hub library left something in the home directory"


@pytest.fixture
def hub(offline: None) -> Iterator[StubHub]:
    """An empty hub."""
    with serving(StubHub()) as stub:
        yield stub
