"""Tests of ``inferencecenter serve``."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest
import structlog
from rich.text import Text

from inferencecenter import daemon
from inferencecenter.cli.output import stdout
from inferencecenter.cli.serve import web_link
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.daemon import Announcement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from inferencecenter.config.settings import Settings
    from tests.cli.conftest import Cli

TOKEN = "ic_0123_4567"


@pytest.fixture(autouse=True)
def restored_logs() -> Iterator[None]:
    """Leave the loggers of other tests as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings the daemon was started with; it announces itself and ends."""
    seen: list[Settings] = []

    def serve(
        settings: Settings, *, announce: Callable[[Announcement], None], reload_settings: Callable[[], Settings]
    ) -> int:
        assert reload_settings() == settings
        seen.append(settings)
        first = len(seen) == 1
        announce(Announcement(address="http://127.0.0.1:1/", admin_token=TOKEN if first else None, model="demo"))
        return 0

    monkeypatch.setattr(daemon, "serve", serve)
    return seen


def test_options_reach_the_settings(cli: Cli, served: list[Settings], tmp_path: Path) -> None:
    """Each option overrides its setting."""
    arguments = ["--host", "0.0.0.0", "--port", "4000", "--backend", "echo", "--slots", "2", "--n-ctx", "512"]
    result = cli.run(
        "serve", *arguments, "--n-gpu-layers", "3", "--log-level", "debug", "--state-dir", str(tmp_path / "here")
    )
    assert result.code == 0, result.err
    (settings,) = served
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 4000)
    assert (settings.engine.backend, settings.engine.slots, settings.engine.n_ctx) == ("echo", 2, 512)
    assert (settings.engine.n_gpu_layers, settings.log.level) == (3, "debug")
    assert settings.state_dir == tmp_path / "here"


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes standard output a terminal; to be called when the test runs, behind pytest's capturing."""
    return lambda: monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


@pytest.mark.usefixtures("served")
def test_the_token_is_shown_on_the_first_run_only(cli: Cli, state_dir: Path, on_terminal: Callable[[], None]) -> None:
    """A terminal is shown address and model each time; the token once, with the file it is in."""
    on_terminal()
    first, second = cli.run("serve").out, cli.run("serve").out
    for text in (first, second):
        assert "http://127.0.0.1:1/" in text
        assert "demo" in text
    assert TOKEN in first
    assert str(state_dir / "admin.token") in first
    assert TOKEN not in second


@pytest.mark.usefixtures("served")
def test_the_first_link_to_the_page_signs_in(cli: Cli, on_terminal: Callable[[], None]) -> None:
    """The token is in its fragment, in one piece on a line of its own; later links have none."""
    on_terminal()
    first, second = (cli.run("serve").out.splitlines()[-1] for _ in range(2))
    assert first == f"Web      http://127.0.0.1:1/#token={TOKEN}"
    assert second == "Web      http://127.0.0.1:1/"


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("forced", [False, True])
def test_redirected_output_gets_no_token(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, state_dir: Path, *, forced: bool
) -> None:
    """A file, a pipe or a container's log is told the token's file, also where colours are forced."""
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(stdout, "_force_terminal", True)
    text = cli.run("serve").out
    assert TOKEN not in text
    assert f"Token in {state_dir / 'admin.token'}" in (text if not forced else Text.from_ansi(text).plain)


def test_without_the_page_no_link_is_shown(cli: Cli, served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to open."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__WEB", "false")
    assert "Web " not in cli.run("serve").out
    assert served[0].server.web is False


@pytest.mark.parametrize(
    ("address", "link"),
    [
        ("http://0.0.0.0:3000/", "http://127.0.0.1:3000/#token=t"),
        ("https://[::]:3000/inference/", "https://[::1]:3000/inference/#token=t"),
        ("http://box.example:80/", "http://box.example:80/#token=t"),
    ],
)
def test_a_link_leads_somewhere(address: str, link: str) -> None:
    """The wildcard address cannot be opened in a browser."""
    assert web_link(address, "t") == link


@pytest.mark.parametrize("option", [["--port", "70000"], ["--slots", "1000"], ["--log-level", "loud"]])
def test_a_wrong_option_starts_nothing(cli: Cli, served: list[Settings], option: list[str]) -> None:
    """Values are checked as everywhere else."""
    result = cli.run("serve", *option)
    assert result.code == 78
    assert "command line" in result.err
    assert served == []


def test_what_keeps_the_daemon_from_running_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's own refusal becomes a message and its exit code."""

    def serve(_settings: Settings, **_options: object) -> int:
        raise InferenceCenterError(ErrorCode.ADDRESS_IN_USE, "127.0.0.1:3000 is in use")

    monkeypatch.setattr(daemon, "serve", serve)
    result = cli.run("serve")
    assert result.code == 69
    assert "address_in_use: 127.0.0.1:3000 is in use" in result.err
