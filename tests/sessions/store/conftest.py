"""Fixtures: a session file, and faults that prevent writes to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from inferencecenter.core import sqlite_file
from inferencecenter.sessions.store.schema import DATABASE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NOBODY = 65534


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the lock timeout."""
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / "state" / DATABASE_NAME


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a factory of directories with a size limit in KiB; skips without the privileges."""
    mounted = tmp_path / "disk"

    def mount(size_kib: int) -> Path:
        mounted.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k,mode=700", "tmpfs", str(mounted)]
        if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("no small file system can be mounted here")
        return mounted

    yield mount
    if mounted.exists():
        subprocess.run(["umount", "-l", str(mounted)], check=False, capture_output=True)


@contextlib.contextmanager
def as_nobody() -> Iterator[Path]:
    """A directory of an unprivileged user, as which this process runs meanwhile."""
    directory = Path(tempfile.mkdtemp())
    if is_root := os.geteuid() == 0:
        os.chown(directory, _NOBODY, _NOBODY)
        os.seteuid(_NOBODY)
    try:
        yield directory
    finally:
        if is_root:
            os.seteuid(0)
        directory.chmod(0o700)
        shutil.rmtree(directory)
