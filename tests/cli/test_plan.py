"""Tests of ``inferencecenter doctor --plan``."""

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

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inferencecenter.hardware.placement import Device
    from tests.cli.conftest import Cli

GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 7B that is all header."""
    path = tmp_path / "7b.gguf"
    write_header(path, HEADERS["qwen2.5-7b"], name="qwen2.5-7b")
    return path


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
def test_sizes(text: str, n_bytes: int) -> None:
    """With or without the i, which makes the difference that manufacturers like."""
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "much", "3 pounds", "-3GiB", "GiB"])
def test_what_is_no_size(text: str) -> None:
    """Is refused, with how to write one."""
    with pytest.raises(typer.BadParameter, match="3GiB"):
        parse_size(text)


def test_a_7b_on_3_gib(cli: Cli, model: Path) -> None:
    """Each number with its reason, what it takes where, and what could be chosen."""
    result = cli.run("doctor", "--plan", str(model), "--vram", "3GiB", "--ram", "16GiB")
    assert result.code == 0
    for shown in (
        "14 of 29",
        "the output matrix and layers 15 to 27; the next layer needs 150 MiB",
        "224 MiB of KV per slot",
        "56 KiB per token",
        "2,769 MiB",
        "gpu.quantized_kv = true",
    ):
        assert shown in result.out


def test_as_data(cli: Cli, model: Path) -> None:
    """The same for scripts, for two GPUs."""
    result = cli.run("doctor", "--plan", str(model), "--vram", "4GiB", "--vram", "6GiB", "--json")
    found = json.loads(result.out)
    assert (found["fits"], found["n_gpu_layers"], found["split_mode"]) == (True, 29, "layer")
    assert sum(found["tensor_split"]) == 29
    assert [device["free_bytes"] for device in found["devices"]] == [4 * GIB, 6 * GIB]
    assert {reason["name"] for reason in found["reasons"]} >= {"n_gpu_layers", "slots", "n_ctx"}
    assert found["model"]["layers"] == 28


def test_settings_count(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set is kept and marked, and what then does not fit is said."""
    monkeypatch.setenv("INFERENCECENTER_ENGINE__N_GPU_LAYERS", "29")
    result = cli.run("doctor", "--plan", str(model), "--vram", "3GiB", "--json")
    found = json.loads(result.out)
    assert (found["fits"], found["n_gpu_layers"]) == (False, 29)
    assert "Does not fit" in found["advice"][0]
    assert "has 2,772 MiB" in cli.run("doctor", "--plan", str(model), "--vram", "3GiB").out


def test_a_file_that_is_no_model(cli: Cli, tmp_path: Path) -> None:
    """Ends with the code that the daemon would end with."""
    path = tmp_path / "page.gguf"
    path.write_text("<!doctype html>")
    result = cli.run("doctor", "--plan", str(path))
    assert result.code == 66
    assert "invalid_model_file" in result.err


def test_a_machine_without_a_model(cli: Cli) -> None:
    """Describing one is of no use without a plan."""
    assert cli.run("doctor", "--vram", "3GiB").code == 2


def _gpus(sizes: Sequence[int]) -> tuple[Device, ...]:
    return gpus_of([size * GIB for size in sizes])


def _found(cli: Cli) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(cli.run("doctor", "--json").out)}


@pytest.fixture
def examined(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: Path) -> Cli:
    """The usual examination, with that model."""
    monkeypatch.setattr(checks, "llama_cpp", lambda **_options: Check("llama.cpp", CheckResult.OK, "not looked at"))
    monkeypatch.setenv("INFERENCECENTER_MODEL__PATH", str(model))
    monkeypatch.setenv("INFERENCECENTER_SERVER__PORT", "0")
    return cli


def test_the_examination_plans_where_there_is_a_gpu(examined: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says nothing of plans where there is none."""
    monkeypatch.setattr(checks, "find_devices", lambda _wanted: ())
    assert "plan" not in _found(examined)
    monkeypatch.setattr(checks, "find_devices", lambda _wanted: _gpus([3]))
    plan = _found(examined)["plan"]
    assert plan["verdict"] == "ok"
    assert "n_gpu_layers: 14 of 29" in plan["detail"]
    monkeypatch.setenv("INFERENCECENTER_ENGINE__N_GPU_LAYERS", "29")
    assert _found(examined)["plan"]["verdict"] == "warning"


def test_the_examination_names_a_gpu_that_is_missing(examined: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the daemon would, which does not start then."""

    def missing(_wanted: Sequence[str]) -> tuple[Device, ...]:
        raise InferenceCenterError(ErrorCode.INVALID_CONFIG, "There is no GPU 7.", hint="0")

    monkeypatch.setattr(checks, "find_devices", missing)
    assert _found(examined)["plan"]["detail"] == "There is no GPU 7."


def test_gpus_are_shown_with_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them; and why there is none, in NVML's words."""
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
