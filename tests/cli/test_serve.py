"""The command ``inferencecenter serve``."""

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
    from inferencecenter.first_engine import FirstEngine
    from tests.cli.conftest import Cli

TOKEN = "ic_0123_4567"


@pytest.fixture(autouse=True)
def restored_logs() -> Iterator[None]:
    """Restore the loggers after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def stub_daemon(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Record the settings of a stub daemon that announces itself and stops."""
    seen: list[Settings] = []

    def serve(
        settings: Settings,
        *,
        announce: Callable[[Announcement], None],
        reload_settings: Callable[[], Settings],
        first_engine: FirstEngine | None,
    ) -> int:
        assert first_engine is not None
        assert first_engine.spec.engine.backend == settings.engine.backend
        assert reload_settings() == settings
        seen.append(settings)
        first = len(seen) == 1
        announce(Announcement(address="http://127.0.0.1:1/", admin_token=TOKEN if first else None, model="demo"))
        return 0

    monkeypatch.setattr(daemon, "serve", serve)
    return seen


def test_options_override_settings(cli: Cli, stub_daemon: list[Settings], tmp_path: Path) -> None:
    """Each option overrides its setting."""
    arguments = ["--host", "0.0.0.0", "--port", "4000", "--backend", "echo", "--slots", "2", "--n-ctx", "512"]
    result = cli.run(
        "serve", *arguments, "--n-gpu-layers", "3", "--log-level", "debug", "--state-dir", str(tmp_path / "here")
    )
    assert result.code == 0, result.err
    (settings,) = stub_daemon
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 4000)
    assert (settings.engine.backend, settings.engine.slots, settings.engine.n_ctx) == ("echo", 2, 512)
    assert (settings.engine.n_gpu_layers, settings.log.level) == (3, "debug")
    assert settings.state_dir == tmp_path / "here"


def test_script_is_an_option_of_its_backend(cli: Cli, stub_daemon: list[Settings], tmp_path: Path) -> None:
    """The backend needs its file, and the file its backend."""
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\nreply = { text = "Hello." }\n')
    assert cli.run("serve", "--backend", "script", "--script", str(rules)).code == 0
    assert stub_daemon[0].engine.script == rules
    assert "needs script, a file of rules" in cli.run("serve", "--backend", "script").err


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes standard output a terminal, to be called in the test after pytest's capturing."""
    return lambda: monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


@pytest.mark.usefixtures("stub_daemon")
def test_token_is_shown_on_the_first_run_only(cli: Cli, state_dir: Path, on_terminal: Callable[[], None]) -> None:
    """A terminal shows address and model each time, and the token once with its file."""
    on_terminal()
    first, second = cli.run("serve").out, cli.run("serve").out
    for text in (first, second):
        assert "http://127.0.0.1:1/" in text
        assert "demo" in text
    assert TOKEN in first
    assert str(state_dir / "admin.token") in first
    assert TOKEN not in second


@pytest.mark.usefixtures("stub_daemon")
def test_first_link_signs_in(cli: Cli, on_terminal: Callable[[], None]) -> None:
    """The token is in its fragment on one line; later links have none."""
    on_terminal()
    first, second = (cli.run("serve").out.splitlines()[-1] for _ in range(2))
    assert first == f"Web      http://127.0.0.1:1/#token={TOKEN}"
    assert second == "Web      http://127.0.0.1:1/"


@pytest.mark.usefixtures("stub_daemon")
@pytest.mark.parametrize("forced", [False, True])
def test_redirected_output_has_no_token(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, state_dir: Path, *, forced: bool
) -> None:
    """A file, pipe or container log gets the token's path, also with forced colors."""
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(stdout, "_force_terminal", True)
    text = cli.run("serve").out
    assert TOKEN not in text
    assert f"Token in {state_dir / 'admin.token'}" in (text if not forced else Text.from_ansi(text).plain)


def test_without_the_page_no_link_is_shown(
    cli: Cli, stub_daemon: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``server.web`` off no link is printed."""
    monkeypatch.setenv("INFERENCECENTER_SERVER__WEB", "false")
    assert "Web " not in cli.run("serve").out
    assert stub_daemon[0].server.web is False


@pytest.mark.parametrize(
    ("address", "link"),
    [
        ("http://0.0.0.0:3000/", "http://127.0.0.1:3000/#token=t"),
        ("https://[::]:3000/inference/", "https://[::1]:3000/inference/#token=t"),
        ("http://box.example:80/", "http://box.example:80/#token=t"),
    ],
)
def test_link_has_a_usable_address(address: str, link: str) -> None:
    """A browser cannot open the wildcard address."""
    assert web_link(address, "t") == link


@pytest.mark.parametrize("option", [["--port", "70000"], ["--slots", "1000"], ["--log-level", "loud"]])
def test_invalid_option_starts_nothing(cli: Cli, stub_daemon: list[Settings], option: list[str]) -> None:
    """Values are validated like settings."""
    result = cli.run("serve", *option)
    assert result.code == 78
    assert "command line" in result.err
    assert stub_daemon == []


def test_start_failure_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's error becomes a message and its exit code."""

    def serve(_settings: Settings, **_options: object) -> int:
        raise InferenceCenterError(ErrorCode.ADDRESS_IN_USE, "127.0.0.1:3000 is in use")

    monkeypatch.setattr(daemon, "serve", serve)
    result = cli.run("serve")
    assert result.code == 69
    assert "address_in_use: 127.0.0.1:3000 is in use" in result.err
