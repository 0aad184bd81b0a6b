"""Tests of what is kept of how far plans were off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.hardware.vram_calibration import VramCalibration

if TYPE_CHECKING:
    from pathlib import Path


def test_what_is_put_is_there_at_the_next_start(tmp_path: Path) -> None:
    """By model and GPU; the last measurement counts."""
    path = tmp_path / "plan.json"
    corrections = VramCalibration(path)
    assert corrections.extra_bytes("model", "gpu") == 0
    corrections.put("model", "gpu", estimated_bytes=1000, used_bytes=1200)
    corrections.put("model", "gpu", estimated_bytes=1000, used_bytes=900)
    corrections.put("model", "other", estimated_bytes=1000, used_bytes=1001)
    again = VramCalibration(path)
    assert again.extra_bytes("model", "gpu") == -100
    assert again.extra_bytes("model", "other") == 1
    assert again.extra_bytes("another", "gpu") == 0


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    """The file does not grow with every model that was ever tried."""
    corrections = VramCalibration(tmp_path / "plan.json")
    for number in range(300):
        corrections.put(f"model{number}", "gpu", estimated_bytes=0, used_bytes=number)
    again = VramCalibration(tmp_path / "plan.json")
    assert again.extra_bytes("model43", "gpu") == 0
    assert again.extra_bytes("model44", "gpu") == 44
    assert again.extra_bytes("model299", "gpu") == 299


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"model gpu": {"extra_bytes": "much"}}',
        b'{"model gpu": {"extra_bytes": 5, "estimated_bytes": 0, "used_bytes": 1e400}}',
        b'{"model gpu": {"extra_bytes": %s, "estimated_bytes": 0, "used_bytes": 5}}' % (b"9" * 5000),
        b'{"model gpu": {"extra_bytes": 4611686018427387904, "estimated_bytes": 0, "used_bytes": 5}}',
        b'{"model gpu": {"extra_bytes": 5, "estimated_bytes": -1, "used_bytes": 5}}',
        b'{"\xff": {}}',
        b"[" * 100_000,
        b" " * 2**21,
    ],
    ids=range(11),
)
def test_a_damaged_file_costs_exactness_only(tmp_path: Path, content: bytes) -> None:
    """It is logged, counts as empty, and is written anew."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        corrections = VramCalibration(path)
    assert [line["event"] for line in logs] == ["corrections_unreadable"]
    corrections.put("model", "gpu", estimated_bytes=0, used_bytes=5)
    assert VramCalibration(path).extra_bytes("model", "gpu") == 5


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Is logged; this daemon still knows what it measured."""
    corrections = VramCalibration(tmp_path / "missing" / "plan.json")
    with capture_logs() as logs:
        corrections.put("model", "gpu", estimated_bytes=0, used_bytes=5)
    assert [line["event"] for line in logs] == ["corrections_not_written"]
    assert corrections.extra_bytes("model", "gpu") == 5


def test_a_gpu_whose_name_is_no_text_is_not_written(tmp_path: Path) -> None:
    """It is logged; the others are kept."""
    corrections = VramCalibration(tmp_path / "plan.json")
    with capture_logs() as logs:
        corrections.put("model", "\ud800", estimated_bytes=0, used_bytes=5)
    assert [line["event"] for line in logs] == ["corrections_not_written"]
    assert corrections.extra_bytes("model", "\ud800") == 5
