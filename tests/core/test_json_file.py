"""Small JSON files of the state directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from inferencecenter.core.json_file import JsonFile
from inferencecenter.core.private_file import write_private

if TYPE_CHECKING:
    from pathlib import Path


def test_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Other users cannot read the file, and nothing else is left."""
    file = JsonFile(tmp_path / "a.json", dict[str, int], name="numbers")
    assert file.read() is None
    for value in ({"a": 1}, {"b": 2}):
        file.write(value)
        assert file.read() == value
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_damaged_file_is_logged_and_has_no_value(tmp_path: Path) -> None:
    """The event has the name of the value."""
    path = tmp_path / "a.json"
    path.write_text('{"a": "one"}')
    with capture_logs() as logs:
        assert JsonFile(path, dict[str, int], name="numbers").read() is None
    assert [line["event"] for line in logs] == ["numbers_unreadable"]


def test_file_that_cannot_be_replaced(tmp_path: Path) -> None:
    """It is logged, and no part of the new one is left."""
    path = tmp_path / "a.json"
    (path / "inside").mkdir(parents=True)
    with capture_logs() as logs:
        JsonFile(path, dict[str, int], name="numbers").write({"a": 1})
    assert [line["event"] for line in logs] == ["numbers_not_written"]
    with pytest.raises(OSError, match=r"a\.json"):
        write_private(path, b"")
    assert list(tmp_path.iterdir()) == [path]
