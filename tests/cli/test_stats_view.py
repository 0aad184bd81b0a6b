"""Rendering of the daemon's status: screens of three widths, lines, JSON, bars."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from inferencecenter.cli.stats import StatsSnapshot, as_data, bar, line, screen, sparkline
from inferencecenter.protocol.events import Metrics, Thermal
from inferencecenter.protocol.values import (
    ConnectedClient,
    EngineReadings,
    GpuReadings,
    InferenceReadings,
    ModelSummary,
    PlannedDevice,
)
from tests.plans import engine_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_GPU = dict.fromkeys(GpuReadings.model_fields)
GPU = NO_GPU | {
    "name": "NVIDIA GeForce GTX 1060 3GB",
    "temp": 71.0,
    "vram_total_mb": 3072.0,
    "vram_used_mb": 2900.0,
    "vram_free_mb": 172.0,
    "power_watts": 98.4,
    "utilization": 97.0,
    "throttling": False,
}


def busy_summary(
    *, gpu: Mapping[str, Any] = NO_GPU, engine: Mapping[str, Any] | None = None, **fields: Any
) -> StatsSnapshot:
    """Return the summary of a busy daemon."""
    work = InferenceReadings(
        active_generations=9,
        total_sessions=14,
        last_tps=23.4,
        last_ttft_ms=312.6,
        total_tokens_generated=12_345,
        queue_depth=5,
        tokens_per_s=87.6,
        slots_used=4,
        slots=8,
        parked_sessions=3,
        parked_mb=54.2,
    )
    readings = {"state": "ready", "model": "demo", "gpu_layers": 0, "restarts": 0, "rss_mb": 812.0, **(engine or {})}
    metrics = Metrics(
        timestamp=1_000.0, gpu=GpuReadings(**gpu), inference=work, engine=EngineReadings.model_validate(readings)
    )
    known: dict[str, Any] = {
        "address": "ws://box/ws",
        "version": "1.2.3",
        "metrics": metrics,
        "rates": (0.0, 40.0, 87.6),
        "status": {
            "model": {"n_ctx": 4096, "layers": 25},
            "sessions": {"connections": 6, "storage": "ok"},
            "memory": {"pressure": "easy", "memory_used_bytes": 2**31, "memory_limit_bytes": 2**33},
        },
    }
    return StatsSnapshot(**(known | fields))


def rendered(what: StatsSnapshot, *, width: int = 100) -> str:
    """Return the screen as text."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, record=True)
    console.print(screen(what, width=width))
    return console.export_text()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_screen_fits_any_width(width: int) -> None:
    """It has all important values, and no line exceeds the width."""
    text = rendered(busy_summary(gpu=GPU), width=width)
    assert all(cell_len(each) <= width for each in text.splitlines())
    words = " ".join(text.split())
    for expected in (
        "InferenceCenter 1.2.3 ws://box/ws",
        "demo · 4096 tokens of context · on the CPU",
        "ready · 812 MiB resident",
        "87.6",
        "23.4 tokens/s, the first after 313 ms",
        "4 of 8",
        "5 waiting",
        "14 open · 9 answering · 3 parked (54 MiB) · 6 connections",
        "2.0 GiB of 8.0 GiB",
        "2.8 GiB of 3.0 GiB",
        "71 °C",
        "97 % busy",
        "98 W",
    ):
        assert expected in words, expected


def test_missing_gpu_is_a_dash() -> None:
    """Its memory is not shown; a reading that a GPU lacks is a dash too."""
    text = rendered(busy_summary())
    assert "GPU        —" in text
    assert "VRAM" not in text
    fanless = " ".join(rendered(busy_summary(gpu=GPU | {"temp": None})).split())
    assert "— °C · 97 % busy · 98 W · — fan" in fanless


def test_throttling_is_shown_until_it_ends() -> None:
    """Throttling by the daemon and by the GPU are both shown."""
    hot = Thermal(state="hot", temp=91.0, action="a quarter of the slots")
    text = rendered(
        busy_summary(gpu=GPU | {"throttling": True, "throttle_reasons": ("hw_thermal",)}, heat=hot), width=160
    )
    assert "hot: a quarter of the slots" in text
    assert "throttled: hw_thermal" in text
    assert "quarter" not in rendered(busy_summary(gpu=GPU, heat=Thermal(state="cool", temp=60.0, action="no limits")))


def test_problems_are_shown() -> None:
    """A lost connection, full memory, a failing store and restarts are visible."""
    status = {
        "memory": {"pressure": "full", "memory_used_bytes": 10.0, "memory_limit_bytes": 10.0},
        "sessions": {"storage": "disk full"},
    }
    text = rendered(busy_summary(status=status, notice="connection lost, reconnecting…", engine={"restarts": 2}))
    assert "connection lost, reconnecting…" in text
    assert "· full" in text
    assert "storage is unavailable: disk full" in text
    assert "2 restarts" in text


def test_notice_does_not_change_the_layout() -> None:
    """The line of the notice exists even if it is empty."""
    assert len(rendered(busy_summary()).splitlines()) == len(
        rendered(busy_summary(notice="the daemon is about to restart…")).splitlines()
    )


def test_unprivileged_account_sees_public_values() -> None:
    """Such an account sees the values that every account may read."""
    text = rendered(busy_summary(status={"sessions": {"sessions": 1, "busy": 0, "max_sessions": 4, "storage": "ok"}}))
    assert "14 open" in text
    assert "memory" not in text
    assert "connections" not in text


def test_several_models_are_listed() -> None:
    """Models are listed with their states; the default is marked."""
    one = ModelSummary(name="demo", default=True, state="loaded", n_ctx=4096, slots=8, size_mb=512.0)
    other = ModelSummary(name="big", default=False, state="unloaded")
    text = rendered(busy_summary(models=(one, other)))
    assert "demo *  loaded        8     4096  512 MiB" in text
    assert "big     unloaded" in text
    assert "demo *" not in rendered(busy_summary(models=(one,)))


def test_clients_are_listed_for_administrators() -> None:
    """Busy clients come first; on a narrow screen names are truncated and numbers are not."""
    calm = ConnectedClient(client_id="calm", connections=1, addresses=1, sessions=2, busy=0, tokens_today=9_000)
    busy = ConnectedClient(client_id="b" * 80, connections=3, addresses=2, sessions=5, busy=4, tokens_today=120)
    lines = rendered(busy_summary(clients=(calm, busy)), width=60).splitlines()
    assert lines[-2].split()[-4:] == ["3", "5", "4", "120"]
    assert lines[-1].split() == ["calm", "1", "2", "0", "9000"]
    assert as_data(busy_summary(clients=(calm,)))["clients"][0]["client_id"] == "calm"


def test_plan_by_gpu_is_shown_to_operators() -> None:
    """Operators see planned and measured memory; JSON has the complete plan."""
    parts = {"id": "0", "total_bytes": 2**33, "free_bytes": 2**33, "margin_bytes": 0, "kv_bytes": 2**29}
    own = parts | {"weight_bytes": 2**30, "compute_bytes": 2**28, "context_bytes": 2**28}
    devices = (
        PlannedDevice.model_validate(own | {"name": "GTX 1060", "layers": 14, "used_bytes": 2**30}),
        PlannedDevice.model_validate(own | {"name": "evil\x1b]0;", "layers": 3}),
    )
    text = rendered(busy_summary(plan=engine_plan(devices)))
    assert "plan       GTX 1060 · 14 of 29 layers · 2.0 GiB planned · 1.0 GiB taken" in text
    other = " " * 11 + "evil]0; · 3 of 29 layers · 2.0 GiB planned"
    assert other in [each.rstrip() for each in text.splitlines()]
    assert "plan" not in rendered(busy_summary(plan=engine_plan(())))
    assert as_data(busy_summary(plan=engine_plan(devices)))["plan"]["devices"][0]["layers"] == 14
    assert as_data(busy_summary())["plan"] is None


def test_names_are_escaped() -> None:
    """Escape sequences and markup are shown as plain text."""
    evil = "\x1b]0;title\x07[red]x\x9b2J"
    what = busy_summary(gpu=GPU | {"name": evil}, engine={"model": evil}, notice=evil)
    text = rendered(what, width=160)
    assert text.count("]0;title[red]x2J") == 3
    assert not set(text) & {"\x1b", "\x07", "\x9b"}


def test_without_samples_a_notice_is_shown() -> None:
    """The notice is visible before the first reading."""
    nothing = StatsSnapshot(address="ws://box/ws")
    assert "no readings yet" in rendered(nothing)
    assert line(nothing) == "no readings yet"
    assert as_data(nothing)["metrics"] is None


def test_summary_line() -> None:
    """It has state, speed, slots, queue and sessions, and memory and temperature of a GPU."""
    plain = line(busy_summary())
    assert plain[8:] == "  ready  87.6 tokens/s  4 of 8 slots  5 waiting  14 sessions  3 parked"
    assert line(busy_summary(gpu=GPU)).endswith("  VRAM 2.8 GiB of 3.0 GiB  71 °C")


def test_json_uses_protocol_names() -> None:
    """JSON has all values under the protocol's names."""
    data = json.loads(json.dumps(as_data(busy_summary(gpu=GPU, heat=Thermal(state="warm", temp=82.0, action="half")))))
    assert data["metrics"]["inference"]["queue_depth"] == 5
    assert data["metrics"]["gpu"]["temp"] == 71.0
    assert data["status"]["sessions"]["connections"] == 6
    assert data["thermal"] == {"state": "warm", "temp": 82.0, "action": "half"}


def test_sparkline() -> None:
    """Each value is a bar in eighths of the largest one; the latest is at the right, and missing ones are blank."""
    assert sparkline([0.0, 1.0, 4.0, 8.0], width=6) == "   ▁▄█"
    assert sparkline([9.0, 1.0, 2.0], width=2) == "▄█"
    assert sparkline([], width=3) == "   "


@given(st.lists(st.floats(), max_size=30), st.integers(1, 40))
def test_sparkline_has_the_given_width(values: list[float], width: int) -> None:
    """The width is kept with NaN or negative values too."""
    assert cell_len(sparkline(values, width=width)) == width


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 80))
def test_bar_is_full_only_at_the_total(used: float, total: float, width: int) -> None:
    """A bar is empty only at zero and full only at the total."""
    text = bar(used, total, width=width).plain
    assert len(text) == width
    if total > 0:
        assert ("░" not in text) == (used >= total)
        if width > 1:
            assert ("█" in text) == (used > 0)
    else:
        assert "█" not in text
