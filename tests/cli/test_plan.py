"""The command ``inferencecenter doctor --plan``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import typer

from benchmarks.header import HEADERS, write_header
from inferencecenter.cli import checks
from inferencecenter.cli.checks import Check, CheckResult
from inferencecenter.cli.doctor import gpus_of, parse_size
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.nvml import GpuReading, Gpus
from tests.embedding_models import write_embedding_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inferencecenter.hardware.placement import Device
    from tests.cli.conftest import Cli

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the header of a 7B model."""
    path = tmp_path_factory.mktemp("model") / "7b.gguf"
    write_header(path, HEADERS["qwen2.5-7b"], name="qwen2.5-7b")
    return path


def test_plan_of_an_embedding_model_is_for_its_longest_text(tmp_path: Path, cli: Cli) -> None:
    """It has one sequence, as long as the model was trained for, which is computed in one batch."""
    write_embedding_model(tmp_path / "bert.gguf")
    figures = json.loads(cli.run("doctor", "--plan", str(tmp_path / "bert.gguf"), "--json").out)
    assert (figures["slots"], figures["n_ctx"], figures["n_ubatch"]) == (1, 128, 512)
    reasons = {reason["name"]: reason for reason in figures["reasons"]}
    assert "trained for 128" in reasons["n_ctx"]["why"]
    assert not any(reason["explicit"] for reason in reasons.values())


def test_plan_of_a_replica(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two replicas has one of two GPUs, or half of the only one."""
    path = tmp_path / "config.toml"
    path.write_text(f'[models.twin]\npath = "{model}"\nreplicas = 2\n')
    monkeypatch.setenv("INFERENCECENTER_CONFIG", str(path))
    plan = ("doctor", "--plan", str(model), "--ram", "16GiB", "--json")
    own = json.loads(cli.run(*plan, "--vram", "8GiB", "--vram", "8GiB").out)
    assert [device["free_bytes"] for device in own["devices"]] == [8 * GIB]
    half = json.loads(cli.run(*plan, "--vram", "8GiB").out)
    assert [device["free_bytes"] for device in half["devices"]] == [4 * GIB]
    assert half["host"]["available_bytes"] == 8 * GIB


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("3GiB", 3 * GIB),
        ("3G", 3 * GIB),
        ("3gib", 3 * GIB),
        ("3GB", 3_000_000_000),
        ("2900 MiB", 2900 * 2**20),
        ("1.5GiB", 3 * GIB // 2),
        ("512", 512),
        ("512B", 512),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_parsed(text: str, n_bytes: int) -> None:
    """The i selects powers of 1024, its absence powers of 1000."""
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "much", "3 pounds", "-3GiB", "GiB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    """The message has the syntax."""
    with pytest.raises(typer.BadParameter, match="3GiB"):
        parse_size(text)


def test_plan_of_a_7b_model_on_3_gib(cli: Cli, model: Path) -> None:
    """Each number has its reason, its cost and its alternatives."""
    result = cli.run("doctor", "--plan", str(model), "--vram", "3GiB", "--ram", "16GiB")
    assert result.code == 0
    for expected in (
        "14 of 29",
        "the output matrix and layers 15 to 27; the next layer needs 150 MiB",
        "224 MiB of KV per slot",
        "56 KiB per token",
        "2,769 MiB",
        "gpu.quantized_kv = true",
    ):
        assert expected in result.out


def test_plan_as_json(cli: Cli, model: Path) -> None:
    """The plan for two GPUs is JSON."""
    result = cli.run("doctor", "--plan", str(model), "--vram", "4GiB", "--vram", "6GiB", "--json")
    found = json.loads(result.out)
    assert (found["fits"], found["n_gpu_layers"], found["split_mode"]) == (True, 29, "layer")
    assert sum(found["tensor_split"]) == 29
    assert [device["free_bytes"] for device in found["devices"]] == [4 * GIB, 6 * GIB]
    assert {reason["name"] for reason in found["reasons"]} >= {"n_gpu_layers", "slots", "n_ctx"}
    assert found["model"]["layers"] == 28


def test_configured_values_are_kept(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are marked, and a resulting excess is reported."""
    monkeypatch.setenv("INFERENCECENTER_ENGINE__N_GPU_LAYERS", "29")
    result = cli.run("doctor", "--plan", str(model), "--vram", "3GiB", "--json")
    found = json.loads(result.out)
    assert (found["fits"], found["n_gpu_layers"]) == (False, 29)
    assert "Does not fit" in found["advice"][0]
    assert "has 2,772 MiB" in cli.run("doctor", "--plan", str(model), "--vram", "3GiB").out


def test_draft_model_is_in_the_plan(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set for all engines, or for the registered model."""
    draft = tmp_path / "1b.gguf"
    write_header(draft, HEADERS["llama3.2-1b"], name="small")
    arguments = ("doctor", "--plan", str(model), "--vram", "24GiB", "--json")
    plain = json.loads(cli.run(*arguments).out)
    monkeypatch.setenv("INFERENCECENTER_ENGINE__DRAFT", str(draft))
    found = json.loads(cli.run(*arguments).out)
    assert {reason["name"]: reason["value"] for reason in found["reasons"]}["draft"].startswith("small")
    assert found["devices"][0]["weight_bytes"] > plain["devices"][0]["weight_bytes"]
    monkeypatch.setenv("INFERENCECENTER_MODELS", json.dumps({"big": {"path": str(model), "draft": ""}}))
    assert json.loads(cli.run(*arguments).out)["devices"] == plain["devices"]


def test_invalid_model_file_has_the_daemons_exit_code(cli: Cli, tmp_path: Path) -> None:
    """The exit code is 66, as at a start of the daemon."""
    path = tmp_path / "page.gguf"
    path.write_text("<!doctype html>")
    result = cli.run("doctor", "--plan", str(path))
    assert result.code == 66
    assert "invalid_model_file" in result.err


def test_machine_options_require_a_model(cli: Cli) -> None:
    """A description of a machine is useless without a plan."""
    assert cli.run("doctor", "--vram", "3GiB").code == 2


def _gpus(sizes: Sequence[int]) -> tuple[Device, ...]:
    return gpus_of([size * GIB for size in sizes])


def _found(cli: Cli) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(cli.run("doctor", "--json").out)}


@pytest.fixture
def examined(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path) -> Cli:
    """The usual checks with that model."""
    monkeypatch.setattr(checks, "llama_cpp", lambda **_options: Check("llama.cpp", CheckResult.OK, "not looked at"))
    monkeypatch.setenv("INFERENCECENTER_MODEL__PATH", str(model))
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "0")
    return cli


def test_doctor_includes_a_plan_with_a_gpu(examined: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it has none."""
    monkeypatch.setattr(checks, "find_devices", lambda _wanted, _rpc_servers: ())
    assert "plan" not in _found(examined)
    monkeypatch.setattr(checks, "find_devices", lambda _wanted, _rpc_servers: _gpus([3]))
    plan = _found(examined)["plan"]
    assert plan["verdict"] == "ok"
    assert "n_gpu_layers: 14 of 29" in plan["detail"]
    monkeypatch.setenv("INFERENCECENTER_ENGINE__N_GPU_LAYERS", "29")
    assert _found(examined)["plan"]["verdict"] == "warning"


def test_doctor_reports_a_missing_gpu(examined: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configured GPU that is missing is an error, as at the daemon's start."""

    def missing(_wanted: Sequence[str], _rpc_servers: Sequence[str]) -> tuple[Device, ...]:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.", hint="0")

    monkeypatch.setattr(checks, "find_devices", missing)
    assert _found(examined)["plan"]["detail"] == "There is no GPU 7."


def test_gpus_are_listed_with_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU is listed; without one, NVML's reason is shown."""
    reading = GpuReading(
        name="GTX 1060", vram_total_bytes=3 * 10**9, vram_used_bytes=10**8, compute_capability=(6, 1), mig=True
    )
    monkeypatch.setattr(checks, "read_gpus", lambda: Gpus((reading, GpuReading(name="Other")), driver_version="580.1"))
    check = checks.gpu()
    assert check.verdict is CheckResult.OK
    assert check.detail == (
        "GTX 1060, 100 of 3000 MB of memory in use, compute capability 6.1, partitioned by MIG; "
        "Other, 0 of 0 MB of memory in use; driver 580.1"
    )
    monkeypatch.setattr(checks, "read_gpus", lambda: Gpus(problem="Driver/library version mismatch"))
    assert "version mismatch" in checks.gpu().detail
