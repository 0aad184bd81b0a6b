"""Truncated, damaged and foreign files."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from tests.engine.kv_cache.harness import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.kv_cache.harness import Bench


def cut(path: Path) -> None:
    """Truncate to the first half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Truncate to nothing."""
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    """Add a byte."""
    path.write_bytes(path.read_bytes() + b"\0")


def flip_payload(path: Path) -> None:
    """Change a bit of the payload."""
    flip(path, -100 if path.suffix == ".disk" else 1000)


def flip_header(path: Path) -> None:
    """Change a bit of the header."""
    flip(path, 40)


def other_version(path: Path) -> None:
    """Write another format version."""
    flip(path, 8)


def other_content(path: Path) -> None:
    """Replace the content."""
    path.write_bytes(b"#!/bin/sh\n" * 500)


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


BAD = [cut, empty, lengthen, flip_payload, flip_header, other_version, other_content, os.unlink]


@pytest.mark.parametrize("damage", BAD)
def test_bad_file_is_deleted_when_fetched(bench: Bench, damage: Callable[[Path], None]) -> None:
    """A file with unexpected content is deleted with one log line, and its entry is dropped."""
    path = bench.park_on_disk()
    damage(path)
    bench.store.fetch("s1")
    bench.settle()
    assert bench.fetched == 1
    assert bench.store.find("client", [1, 2, 3]) is None
    assert not path.exists()
    assert len(bench.warnings) == 1
    assert bench.warnings[0].startswith("parked KV of s1 is dropped: ")


@pytest.mark.parametrize("damage", BAD)
def test_bad_file_is_not_recovered(bench: Bench, damage: Callable[[Path], None]) -> None:
    """A bad file of an earlier engine is never loaded: it is deleted when it is found or read."""
    damage(bench.park_on_disk())
    bench.open(adopt=RecoveryMode.ALL)
    if bench.ready("s1", [1]) is not None:
        bench.store.fetch("s1")
    bench.settle()
    assert bench.ready("s1", [1, 2, 3]) is None
    assert not any(b"s1:" in path.read_bytes() for path in bench.disk_files())
    assert len(bench.warnings) == (damage is not os.unlink)
    assert bench.ready("other5", [9, 5]) is not None


@pytest.mark.parametrize("damage", [cut, empty, flip_payload, flip_header, other_version, other_content])
@pytest.mark.parametrize("checked_by", ["worker", "load"])
def test_bad_ram_file_is_not_recovered(bench: Bench, damage: Callable[[Path], None], checked_by: str) -> None:
    """A bad file of the RAM tier is dropped when it is found, verified or first loaded, whichever comes first."""
    bench.park("s1", [1, 2, 3], n_bytes=2 * PAGE_BYTES)
    bench.settle()
    (path,) = bench.ram_files()
    damage(path)
    bench.open(adopt=RecoveryMode.ALL)
    if checked_by == "worker":
        bench.settle()
    assert bench.load("s1") is None
    assert bench.store.find("client", [1]) is None
    assert len(bench.warnings) == 1
    bench.settle()
    assert bench.ready("s1", [1]) is None
    assert len(bench.warnings) == 1


def test_renamed_file_is_deleted(bench: Bench) -> None:
    """A sound file under another entry's name is not used for it."""
    path = bench.park_on_disk()
    (mine,) = (path for path in bench.disk_files() if b"other0:" in path.read_bytes())
    shutil.copy(mine, path)
    bench.store.fetch("s1")
    bench.settle()
    assert bench.load("s1") is None
    assert bench.warnings == ["parked KV of s1 is dropped: it is of another sequence"]
    bench.open(adopt=RecoveryMode.ALL)
    bench.settle()
    assert bench.store.find("client", [1]) is None


@pytest.mark.parametrize("adopt", RecoveryMode)
def test_files_of_another_model_are_deleted(bench: Bench, adopt: RecoveryMode) -> None:
    """Another model's entries are deleted, with and without recovery."""
    bench.park_on_disk()
    bench.fingerprint = "another"
    bench.open(adopt=adopt)
    assert bench.ram_files() == bench.disk_files() == []
    assert bench.store.find("client", [1, 2, 3]) is None
    assert len(bench.warnings) == (adopt is not RecoveryMode.NONE)


def test_other_files_are_left_alone(bench: Bench) -> None:
    """Files whose names do not match the store's pattern are neither read nor deleted."""
    for directory in (bench.ram_dir, bench.disk_dir):
        (directory / "letter.txt").write_text("dear")
        (directory / "kv-short.ram").write_text("dear")
        (directory / f"kv-{'0' * 32}.disk").mkdir()
    bench.open(adopt=RecoveryMode.ALL)
    bench.open(adopt=RecoveryMode.NONE)
    assert (bench.ram_dir / "letter.txt").exists()
    assert (bench.disk_dir / "kv-short.ram").exists()


def test_links_are_not_followed(bench: Bench, tmp_path: Path) -> None:
    """A symbolic link in the directory is deleted; its target is not."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    link = bench.ram_dir / f"kv-{'a' * 32}.ram"
    link.symlink_to(precious)
    bench.open(adopt=RecoveryMode.ALL)
    assert not link.is_symlink()
    assert precious.read_text() == "mine"
