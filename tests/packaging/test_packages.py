"""The virtual environment is created and filled by uv as pip is configured, else by pip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools import packages
from tools.packages import UnknownOptionError, bundled_pip, create, find_uv, install, parse_options, uv_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Runner:
    """Records commands; those with a word of ``failing`` fail, and installing into a folder makes uv's program."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.commands: list[str] = []
        self.variables: list[Mapping[str, str]] = []
        self.lines: list[str] = []

    def __call__(self, command: Sequence[str], variables: Mapping[str, str]) -> bool:
        """Run a command."""
        self.commands.append(" ".join(command))
        self.variables.append(variables)
        failed = any(word in command for word in self.failing)
        if "--target" in command and not failed:
            from_pip = Path(command[command.index("--target") + 1], "bin", "uv")
            from_pip.parent.mkdir(parents=True)
            from_pip.touch()
        return not failed

    def install(self, extras: str, cache: Path, **options: str) -> bool:
        """Install with these options of pip."""
        return install(extras, cache=cache, options=options, run=self, report=self.lines.append)


def test_options_are_those_of_pip_install() -> None:
    """The environment precedes the section of the command, which precedes that for all commands."""
    listed = """\
global.index-url='https://a/simple'
global.cert='/a.pem'
global.timeout='5'
install.index-url='https://b/simple'
download.no-index='true'
:env:.cert='/c.pem'
:env:.find-links='/w1\\n/w2'
"""
    assert parse_options(listed) == {
        "index-url": "https://b/simple",
        "cert": "/c.pem",
        "timeout": "5",
        "find-links": "/w1\n/w2",
    }


@pytest.mark.parametrize(
    ("option", "value", "arguments", "variables"),
    [
        ("index-url", "https://me:pw@a/simple", ["--default-index=https://me:pw@a/simple"], {}),
        ("extra-index-url", "https://a\nfile:///b", ["--index=https://a", "--index=file:///b"], {}),
        ("find-links", "/a /b", ["--find-links=/a", "--find-links=/b"], {}),
        ("constraint", "/c.txt", ["--constraints=/c.txt"], {}),
        ("trusted-host", "a b:1", ["--allow-insecure-host=a", "--allow-insecure-host=b:1"], {}),
        ("no-index", "1", ["--no-index"], {}),
        ("no-index", "false", [], {}),
        ("cert", "/a.pem", [], {"SSL_CERT_FILE": "/a.pem"}),
        ("proxy", "http://p:1", [], {"HTTP_PROXY": "http://p:1", "HTTPS_PROXY": "http://p:1"}),
        ("no-color", "true", [], {}),
    ],
)
def test_option_is_passed_on(option: str, value: str, arguments: list[str], variables: dict[str, str]) -> None:
    """Indexes and files as arguments, certificates and proxies in the environment."""
    always, given = ["--index-strategy", "unsafe-best-match"], {"UV_SYSTEM_CERTS": "1"}
    assert uv_options({option: value}) == (always + arguments, given | variables)


def test_unknown_option_is_refused() -> None:
    """So that none is ignored."""
    with pytest.raises(UnknownOptionError, match="require-hashes"):
        uv_options({"cert": "/a.pem", "require-hashes": "true"})


def test_uv_installs(tmp_path: Path) -> None:
    """It is installed into the cache once, and gets pip's options."""
    first, second = Runner(), Runner()
    assert first.install("server", tmp_path, cert="/a.pem", **{"index-url": "https://a"})
    assert second.install("server", tmp_path)
    assert [command.split()[1:3] for command in first.commands] == [["-m", "pip"], ["pip", "install"]]
    assert "--default-index=https://a" in first.commands[1]
    assert first.variables[1]["SSL_CERT_FILE"] == "/a.pem"
    assert [command.split()[1:3] for command in second.commands] == [["pip", "install"]]
    assert second.commands[0].endswith("--editable .[server]")
    assert first.lines == second.lines == []


@pytest.mark.parametrize(
    ("failing", "options", "reason"),
    [
        ("--target", {}, "cannot be installed"),
        ("--compile-bytecode", {}, "uv failed"),
        ("", {"require-hashes": "1"}, "the option require-hashes"),
    ],
)
def test_pip_installs_otherwise(tmp_path: Path, failing: str, options: dict[str, str], reason: str) -> None:
    """The reason is in the log."""
    runner = Runner(failing)
    assert runner.install("server", tmp_path, **options)
    assert [reason in line for line in runner.lines] == [True]
    assert runner.commands[-1] == " ".join([*packages.PIP, "install", "--editable", ".[server]"])


def test_development_has_a_new_pip(tmp_path: Path) -> None:
    """Python 3.11's resolver finds no solution for its packages."""
    runner = Runner("--target")
    assert runner.install("server,dev", tmp_path)
    assert "--upgrade pip>=25.1" in runner.commands[-2]


def test_failure_of_pip_is_reported(tmp_path: Path) -> None:
    """Nothing is left to try."""
    assert not Runner("--target", "--editable").install("server", tmp_path)


def test_uv_of_another_installation_is_used(tmp_path: Path) -> None:
    """It came while this one was downloaded."""

    def run(command: Sequence[str], variables: Mapping[str, str]) -> bool:
        assert find_uv(tmp_path, Runner())
        return Runner()(command, variables)

    assert find_uv(tmp_path, run) == find_uv(tmp_path, Runner("--target"))


def test_created_environment_has_pip(tmp_path: Path) -> None:
    """As a module, from the wheel that Python brings."""
    create(tmp_path / "venv")
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pip", "--version"], check=True, capture_output=True, text=True
    )
    assert str(tmp_path) in done.stdout
    assert bundled_pip() is not None
    assert (tmp_path / "venv/bin/python").resolve() == Path(sys.executable).resolve()
