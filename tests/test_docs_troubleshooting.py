"""The troubleshooting page matches the errors, ``doctor`` and the log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from inferencecenter.cli.doctor import examine
from inferencecenter.core.errors import ERRORS, ErrorCode
from tests.documentation import ROOT, read_page

if TYPE_CHECKING:
    from pathlib import Path

PAGE = read_page("docs/troubleshooting.md")


def rows(title: str, *, page: str = PAGE.source) -> list[list[str]]:
    """Return the cells of the table below a heading, without its head."""
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines, title
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def names(cell: str) -> list[str]:
    """Return the code spans."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_error_has_a_row() -> None:
    """The rows have the order of the error table."""
    assert [names(row[0]) for row in rows("Errors by code")] == [[code.value] for code in ErrorCode]


def test_exit_codes_match_the_error_table() -> None:
    """The table has the errors that end the daemon."""
    meant = {
        "78": ErrorCode.INVALID_CONFIG,
        "66": ErrorCode.INVALID_MODEL_FILE,
        "69": ErrorCode.ADDRESS_IN_USE,
        "73": ErrorCode.STORAGE_UNAVAILABLE,
    }
    said = {found for row in rows("The daemon does not start") for found in re.findall(r"with (\d+)", row[0])}
    assert said == meant.keys()
    assert [str(ERRORS[code].exit_code) for code in meant.values()] == list(meant)


def test_every_doctor_check_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check on this machine has a row."""
    config = tmp_path / "config.toml"
    config.write_text('[engine]\nbackend = "echo"\n')
    monkeypatch.setenv("INFERENCECENTER_STATE_DIR", str(tmp_path))
    explained = {name for row in rows("Where to look first") for name in names(row[0])}
    assert {check.name for check in examine(config, None)} <= explained


def test_log_events_exist() -> None:
    """Each is logged by some module."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "inferencecenter").rglob("*.py"))
    events = [name for row in rows("Log events") for name in names(row[0])]
    assert [event for event in events if f'"{event}"' not in source] == []


@pytest.mark.parametrize(
    "message",
    ["Python lacks venv", "there is no C++ compiler", "CUDA=1 needs nvcc", "VULKAN=1 needs glslc"],
    ids=lambda text: text.split()[0],
)
def test_build_messages_match_the_tools(message: str) -> None:
    """``tools/install`` or ``tools/llama`` prints each quoted message."""
    said = "".join((ROOT / "tools" / name).read_text(encoding="utf-8") for name in ("install", "llama/build.py"))
    quoted = [
        cell
        for row in rows("When the build fails", page=read_page("docs/building.md").source)
        for cell in names(row[0])
    ]
    assert message in said
    assert any(message in cell for cell in quoted)
