"""Tests of ``inferencecenter config``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from inferencecenter.cli.reference import documents
from inferencecenter.cli.reference.configuration import toml_value

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "test.toml"
    path.write_text(text)
    return str(path)


def test_show_names_the_origin_of_each_value(cli: Cli, tmp_path: Path) -> None:
    """File, variable and default are told apart."""
    path = _file(tmp_path, "[server]\nport = 4000\n")
    lines = cli.run("config", "show", "--config", path).out.splitlines()
    port = next(line for line in lines if "server.port" in line)
    assert "4000" in port
    assert path in port
    assert any("state_dir" in line and "INFERENCECENTER_STATE_DIR" in line for line in lines)
    assert any("engine.slots" in line and "default" in line for line in lines)


def test_show_as_json(cli: Cli, tmp_path: Path) -> None:
    """Scripts get the file and all settings."""
    path = _file(tmp_path, "[server]\nport = 4000\n")
    shown = json.loads(cli.run("config", "show", "--config", path, "--json").out)
    assert shown["file"] == path
    assert shown["settings"]["server"]["port"] == 4000
    assert shown["settings"]["model"]["name"] is None


def test_check_of_a_good_file(cli: Cli, tmp_path: Path) -> None:
    """A good file is named and exits with 0."""
    path = _file(tmp_path, "[server]\nport = 4000\n[params]\ntemperature = 0.2\n")
    result = cli.run("config", "check", path)
    assert (result.code, result.out) == (0, f"{path}: valid\n")


def test_check_tells_every_problem(cli: Cli, tmp_path: Path) -> None:
    """All wrong values are listed, on standard error or as JSON, and the exit code is 78."""
    path = _file(tmp_path, "[server]\nport = -1\nhosst = 1\n")
    result = cli.run("config", "check", path)
    assert result.code == 78
    assert "server.port is -1" in result.err
    assert "Did you mean server.host?" in result.err
    answer = json.loads(cli.run("config", "check", path, "--json").out)
    assert answer["valid"] is False
    assert [problem["field"] for problem in answer["problems"]] == ["server.port", "server.hosst"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[params]\ntemperature = 9.0\n", "params.temperature"),
        ("[params]\ntfs_z = 0.5\n", "tfs_z"),
        ("[models.phi.params]\ntemperature = 9.0\n", "models.phi.params.temperature"),
        ('[auth]\nclients_file = "/nowhere/clients.toml"\n', "/nowhere/clients.toml"),
    ],
)
def test_check_looks_deeper_than_types(cli: Cli, tmp_path: Path, text: str, told: str) -> None:
    """Parameters and the file of clients are checked as the daemon would at its start."""
    result = cli.run("config", "check", _file(tmp_path, text))
    assert result.code == 78
    assert told in result.err


def test_check_warns_of_what_has_no_effect(cli: Cli, tmp_path: Path) -> None:
    """A legal combination in which one value is idle is valid, with a warning."""
    result = cli.run("config", "check", _file(tmp_path, "[params]\ntemperature = 0.0\ntop_k = 5\n"))
    assert result.code == 0
    assert "warning: " in result.out


def test_default_is_the_annotated_file(cli: Cli) -> None:
    """What it writes is what lies in the repository."""
    assert cli.run("config", "default").out == documents()["config/inferencecenter.toml"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (1.5, "1.5"), ('a"b', '"a\\"b"'), ((), "[]"), (["a", 1], '["a", 1]'), ({"a": [1]}, "{a = [1]}")],
)
def test_values_are_written_as_toml(value: object, text: str) -> None:
    """Each kind of value has TOML's form; ``None`` has none."""
    assert toml_value(value) == text
    assert toml_value(None) is None
