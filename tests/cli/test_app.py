"""Tests of the command line as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter import __version__
from inferencecenter.errors import ERRORS, ErrorCode

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


def test_version(cli: Cli) -> None:
    """``--version`` prints the package's version."""
    assert cli.run("--version").out == f"inferencecenter {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["chat"],
        ["token", "create"],
        ["token", "list"],
        ["token", "revoke"],
        ["session", "list"],
        ["session", "export"],
        ["session", "purge"],
        ["usage"],
        ["backup"],
        ["audit"],
        ["config", "show"],
        ["doctor"],
    ],
)
def test_every_command_explains_itself(cli: Cli, command: list[str]) -> None:
    """``--help`` says what a command does and lists its options."""
    result = cli.run(*command, "--help")
    assert result.code == 0
    assert "Usage:" in result.out
    assert "--config" in result.out


def test_an_unknown_command_is_an_error(cli: Cli) -> None:
    """A mistyped command exits with 2 and names itself."""
    result = cli.run("sevre")
    assert result.code == 2
    assert "sevre" in result.err


def test_a_known_failure_is_one_message_and_its_exit_code(cli: Cli) -> None:
    """Code, message and hint go to standard error; nothing goes to standard output and there is no traceback."""
    result = cli.run("serve", "--config", "/nowhere/inferencecenter.toml")
    assert result.code == ERRORS[ErrorCode.INVALID_CONFIG].exit_code == 78
    assert result.out == ""
    assert result.err.startswith("invalid_config: /nowhere/inferencecenter.toml: cannot be read: No such file")
    assert "\nhint: " in result.err
    assert "Traceback" not in result.err
