"""The command ``inferencecenter config``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from inferencecenter.cli.config_reference import toml_value
from tools.reference.pages import text_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "test.toml"
    path.write_text(text)
    return str(path)


def test_show_names_the_source_of_each_value(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is the file, a variable or the default."""
    monkeypatch.setenv("COLUMNS", "300")  # the path is long
    path = _file(tmp_path, "[server]\nport = 4000\n")
    lines = cli.run("config", "show", "--config", path).out.splitlines()
    port = next(line for line in lines if "server.port" in line)
    assert "4000" in port
    assert path in port
    assert any("state_dir" in line and "INFERENCECENTER_STATE_DIR" in line for line in lines)
    assert any("engine.slots" in line and "default" in line for line in lines)


def test_show_as_json(cli: Cli, tmp_path: Path) -> None:
    """The output has the file and all settings."""
    path = _file(tmp_path, "[server]\nport = 4000\n")
    output = json.loads(cli.run("config", "show", "--config", path, "--json").out)
    assert output["file"] == path
    assert output["settings"]["server"]["port"] == 4000
    assert output["settings"]["model"]["name"] is None


def test_check_accepts_a_valid_file(cli: Cli, tmp_path: Path) -> None:
    """The file is named, and the exit code is 0."""
    path = _file(tmp_path, "[server]\nport = 4000\n[params]\ntemperature = 0.2\n")
    result = cli.run("config", "check", path)
    assert (result.code, result.out) == (0, f"{path}: valid\n")


def test_check_reports_every_problem(cli: Cli, tmp_path: Path) -> None:
    """All problems are written to standard error or as JSON, with exit code 78."""
    path = _file(tmp_path, "[server]\nport = -1\nhosst = 1\n")
    result = cli.run("config", "check", path)
    assert result.code == 78
    assert "server.port is -1" in result.err
    assert "Did you mean server.host?" in result.err
    answer = json.loads(cli.run("config", "check", path, "--json").out)
    assert answer["valid"] is False
    assert [problem["field"] for problem in answer["problems"]] == ["server.port", "server.hosst"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[params]\ntemperature = 9.0\n", "params.temperature"),
        ("[params]\ntfs_z = 0.5\n", "tfs_z"),
        ("[models.phi.params]\ntemperature = 9.0\n", "models.phi.params.temperature"),
        ('[model]\nname = "absent"\n', "'absent', which does not exist"),
        ('[model]\nname = "a"\nlora = [{path = "/a"}]\n[models.a]\n', "model.lora has no effect"),
        ("[models.a]\nkeep_alive_s = -0.5\n", "models.a: sleep_after_s must be above 0"),
        ('[auth]\nclients_file = "/nowhere/clients.toml"\n', "/nowhere/clients.toml"),
    ],
)
def test_check_validates_referenced_content(cli: Cli, tmp_path: Path, text: str, words: str) -> None:
    """Invalid parameters, models and clients files are refused as at the daemon's start."""
    result = cli.run("config", "check", _file(tmp_path, text))
    assert result.code == 78
    assert words in result.err


@pytest.mark.parametrize(
    "text",
    [
        '[model]\npath = "{missing}"\n',
        '[model]\nlora = [{{path = "{missing}"}}]\n',
        '[model]\nname = "phi"\n[models.phi]\npath = "{missing}"\n',
    ],
)
def test_check_refuses_a_missing_default_model(cli: Cli, tmp_path: Path, text: str) -> None:
    """The daemon would not start; a backend without files needs none."""
    missing = tmp_path / "missing.gguf"
    config = text.format(missing=missing)
    result = cli.run("config", "check", _file(tmp_path, config))
    assert result.code == 78
    assert f"{missing}: does not exist" in result.err
    assert cli.run("config", "check", _file(tmp_path, config + '[engine]\nbackend = "echo"\n')).code == 0


def test_check_warns_of_ineffective_settings(cli: Cli, tmp_path: Path) -> None:
    """A valid combination in which one value has no effect gives a warning."""
    result = cli.run("config", "check", _file(tmp_path, "[params]\ntemperature = 0.0\ntop_k = 5\n"))
    assert result.code == 0
    assert "warning: " in result.out


def test_check_reports_all_content_problems(cli: Cli, tmp_path: Path) -> None:
    """One run reports problems of parameters, models and clients.toml."""
    text = '[model]\nname = "absent"\n[models.a.params]\ntop_k = -5\n[auth]\nclients_file = "/nowhere"\n'
    answer = json.loads(cli.run("config", "check", _file(tmp_path, text), "--json").out)
    parameter, model, clients = answer["problems"]
    assert (parameter["field"], model["field"]) == ("models.a.params.top_k", "model.name")
    assert "/nowhere" in clients["message"]


def test_check_warns_of_missing_files(cli: Cli, tmp_path: Path) -> None:
    """They may be pulled later or be on another machine; a backend without files needs none."""
    text = (
        f'models_dir = "{tmp_path}"\n[models.phi]\nlora = [{{path = "/nowhere/lora.gguf"}}]\n'
        "[models.phi.params]\ntemperature = 0.0\ntop_k = 5\n"
    )
    (tmp_path / "My Model.gguf").write_bytes(b"GGUF")
    result = cli.run("config", "check", _file(tmp_path, text))
    assert result.code == 0
    warnings = [line for line in result.out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 4
    assert "warning: models.phi: top_k has no effect" in warnings[0]
    assert "'My Model'" in warnings[1]
    assert f"'phi' needs {tmp_path / 'phi.gguf'}: does not exist" in warnings[2]
    assert "'phi' needs /nowhere/lora.gguf: does not exist" in warnings[3]
    assert "not there" not in cli.run("config", "check", _file(tmp_path, text + '[engine]\nbackend = "echo"\n')).out


def test_default_prints_the_annotated_file(cli: Cli) -> None:
    """It equals the file in the repository."""
    assert cli.run("config", "default").out == text_of("config/inferencecenter.toml")


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (1.5, "1.5"), ('a"b', '"a\\"b"'), ((), "[]"), (["a", 1], '["a", 1]'), ({"a": [1]}, "{a = [1]}")],
)
def test_values_are_written_as_toml(value: object, text: str) -> None:
    """Each type has its TOML form; ``None`` has none."""
    assert toml_value(value) == text
    assert toml_value(None) is None
