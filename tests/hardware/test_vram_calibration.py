"""The stored corrections of VRAM estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.hardware.vram_calibration import VramCalibration

if TYPE_CHECKING:
    from pathlib import Path


def test_measurement_survives_a_restart(tmp_path: Path) -> None:
    """It is stored by model and GPU; the latest measurement counts."""
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


def test_oldest_entries_are_evicted(tmp_path: Path) -> None:
    """The file does not grow with every model."""
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
def test_damaged_file_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    """It is logged and rewritten."""
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with capture_logs() as logs:
        corrections = VramCalibration(path)
    assert [line["event"] for line in logs] == ["corrections_unreadable"]
    corrections.put("model", "gpu", estimated_bytes=0, used_bytes=5)
    assert VramCalibration(path).extra_bytes("model", "gpu") == 5


def test_unwritable_file_is_logged(tmp_path: Path) -> None:
    """This daemon still uses its measurements."""
    corrections = VramCalibration(tmp_path / "missing" / "plan.json")
    with capture_logs() as logs:
        corrections.put("model", "gpu", estimated_bytes=0, used_bytes=5)
    assert [line["event"] for line in logs] == ["corrections_not_written"]
    assert corrections.extra_bytes("model", "gpu") == 5


def test_gpu_with_invalid_name_is_not_stored(tmp_path: Path) -> None:
    """It is logged; the others are stored."""
    corrections = VramCalibration(tmp_path / "plan.json")
    with capture_logs() as logs:
        corrections.put("model", "\ud800", estimated_bytes=0, used_bytes=5)
    assert [line["event"] for line in logs] == ["corrections_not_written"]
    assert corrections.extra_bytes("model", "\ud800") == 5
