"""The report scenario: the row of Markdown, by hand and with a daemon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import Machine
from benchmarks.results import Metric, Point, Report, Side
from benchmarks.scenarios import report
from inferencecenter.hardware.placement import MIB
from inferencecenter.protocol.values import EnginePlan, PlannedDevice, PlannedHost
from tests.benchmarks.test_cli import call
from tests.benchmarks.test_compare import OURS

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
MACHINE = Machine(cpu="Fast | CPU", usable_cores=4, memory_bytes=8, gpu=None, kernel="6", python="3")


def planned(*devices: PlannedDevice) -> EnginePlan:
    """Return a plan of 20 of 29 layers."""
    return EnginePlan(
        fits=True,
        layers=29,
        n_gpu_layers=20 if devices else 0,
        split_mode="none",
        slots=1,
        n_ctx=512,
        n_batch=512,
        n_ubatch=512,
        kv_type_k="f16",
        kv_type_v="f16",
        flash_attention=True,
        n_threads=4,
        devices=devices,
        host=PlannedHost(weight_bytes=0, kv_bytes=0, compute_bytes=0, expert_layers=0),
        reasons=(),
        advice=(),
    )


def device(**changes: Any) -> PlannedDevice:
    """Return a GPU on which 1000 MiB are planned."""
    values: dict[str, Any] = {
        "id": "GPU0",
        "name": "GTX 1060",
        "total_bytes": 3072 * MIB,
        "free_bytes": 3000 * MIB,
        "margin_bytes": 0,
        "layers": 20,
        "weight_bytes": 600 * MIB,
        "kv_bytes": 60 * MIB,
        "compute_bytes": 40 * MIB,
        "context_bytes": 300 * MIB,
    }
    return PlannedDevice(**values | changes)


def row(plan: EnginePlan, *metrics: Metric) -> list[str]:
    """Return the cells of the row of one repetition."""
    found = Report("report", (Side(replace(OURS, model="demo"), None),), (Point((), ((metrics,),)),))
    return report.row(MACHINE, plan, found).strip("| ").split(" | ")


def test_row_of_one_gpu() -> None:
    """Every column has its cell; a bar within a name would begin another."""
    figures = (
        Metric("prefill", "tok/s", 1234.5, "higher"),
        Metric("decode only", "tok/s", 12.345, "higher"),
        Metric("TTFT reading p50", "ms", 99.94, "lower"),
    )
    cells = row(planned(device(used_bytes=1010 * MIB)), *figures)
    assert len(cells) == len(report.COLUMNS)
    assert cells == [
        "Fast / CPU, 4 cores",
        "GTX 1060",
        "3,072",
        "demo",
        "20 of 29",
        "1,000",
        "1,010",
        "1,234",
        "12.3",
        "99.9",
    ]


def test_row_of_two_gpus_and_unknown_figures() -> None:
    """Each GPU has its own memory; what was not measured is a question mark."""
    cells = row(planned(device(used_bytes=900 * MIB), device(name="GTX 1080", total_bytes=8192 * MIB)))
    assert cells[1:3] == ["GTX 1060 + GTX 1080", "3,072 + 8,192"]
    assert cells[5:] == ["1,000 + 1,000", "900 + ?", "?", "?", "?"]


def test_row_without_gpu() -> None:
    """GPU memory in use is empty."""
    assert row(planned())[1:7] == ["none", "0", "demo", "0 of 29", "0", "0"]


def test_page_has_the_columns() -> None:
    """A row can be copied into its table."""
    assert "| " + " | ".join(report.COLUMNS) + " |" in PAGE.read_text().splitlines()


def test_row_is_printed_on_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It follows the table, at any width of the terminal."""
    options = ("--threads", "1", "--prompt-tokens", "32", "--max-tokens", "8", "--repeat", "1")
    assert call(monkeypatch, "report", *options) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.count(" | ") == len(report.COLUMNS) - 1
    assert last.endswith(" |")
