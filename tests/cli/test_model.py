"""The command ``inferencecenter model`` with a hub on the loopback."""

from __future__ import annotations

import io
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from inferencecenter.cli import model as model_module
from inferencecenter.cli import output
from inferencecenter.cli.model import count, size, state
from inferencecenter.config.settings import ModelEntry, ModelSettings, Settings
from inferencecenter.models.registry import configured_files
from inferencecenter.protocol.values import ModelRoll, ModelSummary, ReplicaSummary
from tests.models.conftest import hub, offline
from tests.models.hub_stub import StubFile

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli
    from tests.models.hub_stub import StubHub

__all__ = ["hub", "offline"]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """The configured model directory, which does not exist yet."""
    monkeypatch.setenv("INFERENCECENTER_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def pulled(
    hub: StubHub, cli: Cli, models: Path, demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The demo model, pulled from a hub."""
    hub.repos["ada/tiny"] = {"tiny-Q8_0.gguf": StubFile(demo_model_path.read_bytes())}
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    result = cli.run("model", "pull", "ada/tiny:q8_0", "--json")
    assert (result.code, result.err) == (0, "")
    progress: dict[str, Any] = json.loads(result.out)
    return progress


def test_state_counts_replicas() -> None:
    """Those that are loaded, of all."""
    replicas = (ReplicaSummary(state="loaded"), ReplicaSummary(state="failed"))
    model = ModelSummary(name="twin", default=True, state="loaded", replicas=replicas)
    assert state(model) == "loaded, default, 1 of 2 replicas"
    rolling = model.model_copy(update={"roll": ModelRoll(done=1, total=2)})
    assert state(rolling) == "loaded, default, 1 of 2 replicas, 1 of 2 replaced"
    waiting = model.model_copy(update={"roll": ModelRoll(done=1, total=2, detail="Waits.")})
    assert state(waiting) == "loaded, default, 1 of 2 replicas, 1 of 2 replaced: Waits."
    failed = model.model_copy(update={"roll": ModelRoll(done=0, total=2, failed=True, detail="no memory")})
    assert state(failed) == "loaded, default, 1 of 2 replicas, change failed: no memory"


def test_pull_list_info_verify_remove(cli: Cli, models: Path, pulled: dict[str, Any]) -> None:
    """A model is listed with its source and removed again."""
    assert pulled["name"] == "tiny-Q8_0"
    assert pulled["source"] == "ada/tiny/tiny-Q8_0.gguf"
    assert pulled["fetched"]

    listed = cli.run("model", "list").out.rstrip("\n").split("\t")
    assert listed[:3] == ["tiny-Q8_0", "llama", "Q8_0"]
    assert listed[5] == "ada/tiny/tiny-Q8_0.gguf"

    (entry,) = json.loads(cli.run("model", "list", "--json").out)
    assert entry["facts"]["architecture"] == "llama"
    assert (entry["problem"], entry["setting"]) == (None, None)

    text = cli.run("model", "info", "tiny-Q8_0").out
    assert "InferenceCenter Demo" in text
    assert "ada/tiny/tiny-Q8_0.gguf" in text

    verified = cli.run("model", "verify")
    assert (verified.code, verified.out) == (0, "tiny-Q8_0: complete\n")

    assert "is already present" in cli.run("model", "pull", "ada/tiny").out
    removed = cli.run("model", "remove", "tiny-Q8_0", "--yes")
    assert (removed.code, removed.out) == (0, "Deleted tiny-Q8_0.\n")
    assert list(models.iterdir()) == []


def test_broken_model_is_listed_and_fails_verification(cli: Cli, models: Path, pulled: dict[str, Any]) -> None:
    """``list`` shows the header's problem; ``verify`` has the exit code of an unloadable model."""
    path = models / "tiny-Q8_0.gguf"
    path.write_bytes(b"GGUB" + path.read_bytes()[4:])
    assert "starts with" in cli.run("model", "list").out
    result = cli.run("model", "verify", "tiny-Q8_0")
    assert result.code == 66
    assert "broken" in result.out
    assert "SHA-256 differs" in result.out
    (verdict,) = json.loads(cli.run("model", "verify", "--json").out)
    assert len(verdict["problems"]) == 2


def test_failures_have_one_message_and_an_exit_code(
    cli: Cli, models: Path, hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown repository or model 66, no reference 64, no hub 69; no message contains the token."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    results = [
        cli.run("model", "pull", "ada/none"),
        cli.run("model", "info", "none"),
        cli.run("model", "remove", "none", "--yes"),
        cli.run("model", "pull", "tiny"),
        cli.run("model", "info", str(models / "none.gguf")),
    ]
    assert [result.code for result in results] == [66, 66, 66, 64, 66]
    assert results[0].err.startswith("model_not_found: 127.0.0.1 has no repository ada/none")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    unreachable = cli.run("model", "pull", "ada/tiny")
    assert unreachable.code == 69
    assert "hub_unreachable" in unreachable.err
    assert all("hf_secret" not in result.err + result.out for result in [*results, unreachable])
    assert ("GET", "/api/models/ada/none", None, "Bearer hf_secret") in hub.heard


def test_configured_model_is_not_removed(cli: Cli, models: Path, demo_model_path: Path, tmp_path: Path) -> None:
    """A model that is the default, has its own table or is a draft model stays, and its setting is named."""
    models.mkdir()
    for name in ("a", "b", "c"):
        shutil.copyfile(demo_model_path, models / f"{name}.gguf")
    config = tmp_path / "config.toml"
    config.write_text(f'model.path = "{models / "a.gguf"}"\n[models.b]\nslots = 2\n[models.x]\npath = "/none.gguf"\n')
    results = {name: cli.run("model", "remove", name, "--yes", "--config", str(config)) for name in ("a", "b", "c")}
    assert [result.code for result in results.values()] == [64, 64, 0]
    assert "model.path" in results["a"].err
    assert "models.b" in results["b"].err
    assert cli.run("model", "list", "--config", str(config)).out.split("\n")[0].endswith("\tmodel.path")
    by_name = Settings(models_dir=models, model=ModelSettings(name="a"))
    assert configured_files(by_name) == {models / "a.gguf": "model.name"}
    by_table = Settings(models_dir=models, model=ModelSettings(name="a"), models={"a": ModelEntry()})
    assert configured_files(by_table) == {models / "a.gguf": "models.a"}
    lora = {"lora": [{"path": str(models / "tone.gguf")}]}
    with_adapters = Settings.model_validate({"model": lora, "models": {"b": {"path": str(models / "b.gguf"), **lora}}})
    assert configured_files(with_adapters) == {models / "tone.gguf": "models.b.lora", models / "b.gguf": "models.b"}
    entries = {"b": {"path": str(models / "b.gguf"), "draft": str(models / "c.gguf")}, "d": {"draft": "b"}}
    drafting = Settings.model_validate({"models_dir": models, "engine": {"draft": "a"}, "models": entries})
    assert configured_files(drafting) == {
        models / "a.gguf": "engine.draft",
        models / "b.gguf": "models.b",
        models / "c.gguf": "models.b.draft",
    }


def test_removal_is_confirmed(cli: Cli, models: Path, pulled: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--yes`` or a confirmation the model stays."""
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    result = cli.run("model", "remove", "tiny-Q8_0")
    assert result.code == 1
    assert "Delete tiny-Q8_0" in result.err
    assert (models / "tiny-Q8_0.gguf").exists()


def test_info_accepts_a_path(cli: Cli, models: Path, demo_model_path: Path) -> None:
    """The file may be in any directory."""
    progress = json.loads(cli.run("model", "info", str(demo_model_path), "--json").out)
    assert (progress["architecture"], progress["source"]) == ("llama", None)


def test_terminal_output(
    cli: Cli, models: Path, pulled: dict[str, Any], monkeypatch: pytest.MonkeyPatch, hub: StubHub
) -> None:
    """A table shows the names of files literally, and a pull shows its progress."""
    (models / "tiny-Q8_0.gguf").rename(models / "[red]x.gguf")
    shown, progress = io.StringIO(), io.StringIO()
    for module in (output, model_module):
        monkeypatch.setattr(module, "stdout", Console(file=shown, force_terminal=True, width=120, highlight=False))
    monkeypatch.setattr(model_module, "stderr", Console(file=progress, force_terminal=True, width=120, highlight=False))
    assert cli.run("model", "list").code == 0
    assert "[red]x" in shown.getvalue()
    assert str(models) in shown.getvalue().replace("\n", "")
    hub.repos["ada/tiny"]["tiny-Q8_0.gguf"].content += b"\0"
    assert cli.run("model", "pull", "ada/tiny", "--name", "again").code == 0
    assert "ada/tiny" in progress.getvalue()


@pytest.mark.parametrize(("n_bytes", "words"), [(2**20, "1.0 MiB"), (2**30 - 1, "1024.0 MiB"), (5 * 2**29, "2.50 GiB")])
def test_sizes(n_bytes: int, words: str) -> None:
    """Sizes are in powers of 1024."""
    assert size(n_bytes) == words


def test_parameters() -> None:
    """Numbers of parameters are in millions and billions."""
    assert (count(2_560_000), count(7_615_616_512)) == ("2.6 M", "7.62 B")
