"""The command line, isolated from this machine's settings."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from inferencecenter.cli import main, output
from inferencecenter.config import loader
from tests.client.peer import scripted_daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.client.peer import Start


@pytest.fixture
async def scripted() -> AsyncIterator[Start]:
    """Return a function that starts scripted daemons."""
    async with scripted_daemon() as start:
        yield start


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    code: int
    out: str
    err: str


class Cli:
    """Runs commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: str) -> Result:
        """Run a command to its end."""
        self._monkeypatch.setattr(sys, "argv", ["inferencecenter", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        written = self._capsys.readouterr()
        code = ended.value.code
        return Result(code if isinstance(code, int) else 0, written.out, written.err)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A state directory that does not exist yet."""
    return tmp_path / "state"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, state_dir: Path) -> Cli:
    """The command line with its own state directory and without this machine's settings."""
    for name in list(os.environ):
        if name.startswith("INFERENCECENTER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("INFERENCECENTER_STATE_DIR", str(state_dir))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg-data"))
    monkeypatch.setenv("COLUMNS", "200")
    for console in (output.stdout, output.stderr):
        # A console takes its width from COLUMNS once, when the first test of a process imports it.
        monkeypatch.setattr(console, "_width", None)
    monkeypatch.setattr(loader, "SYSTEM_CONFIG", tmp_path / "etc" / "inferencecenter.toml")
    return Cli(monkeypatch, capsys)
