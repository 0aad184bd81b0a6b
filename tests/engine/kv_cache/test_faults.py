"""Directories that are missing, full, read-only or owned by another user."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache import directory
from inferencecenter.engine.kv_cache.ram import Mapping
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_missing_directories_are_made(tmp_path: Path) -> None:
    """A directory is created with its parents, and created again when it was removed."""
    bench = Bench(tmp_path / "deep" / "down")
    shutil.rmtree(bench.ram_dir)
    shutil.rmtree(bench.disk_dir)
    for number in range(15):
        assert bench.park(f"s{number}", [number])
    bench.settle()
    assert bench.load("s1") == payload_of("s1", [1], 3000)
    assert len(bench.disk_files()) > 0
    assert bench.log == []


def test_mapped_entries_survive_deleted_files(bench: Bench) -> None:
    """A mapped entry outlives its file; an entry that was only on disk is dropped when it is fetched."""
    bench.park_on_disk()
    shutil.rmtree(bench.ram_dir)
    shutil.rmtree(bench.disk_dir)
    assert bench.load("other19") == payload_of("other19", [9, 19], 3000)
    bench.store.fetch("s1")
    bench.settle()
    assert bench.store.find("client", [1]) is None
    assert bench.park("other19", [9, 19, 1], n_bytes=3 * PAGE_BYTES)
    assert bench.load("other19") == payload_of("other19", [9, 19, 1], 3 * PAGE_BYTES)


def test_file_in_place_of_a_directory_disables_the_tier(tmp_path: Path) -> None:
    """A tier without a directory is disabled with one log line; the other works."""
    (tmp_path / "ram").write_text("")
    bench = Bench(tmp_path)
    assert len(bench.warnings) == 1
    assert bench.warnings[0].startswith("KV is parked without a RAM tier: ")
    assert bench.park("s1", [1])
    bench.settle()
    assert len(bench.disk_files()) == 1
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "ram").write_text("")
    (tmp_path / "both" / "disk").write_text("")
    neither = Bench(tmp_path / "both")
    assert len(neither.warnings) == 2
    assert not neither.store.fits(1)


def test_directory_writable_by_others_is_not_used(tmp_path: Path) -> None:
    """Other users could plant files in it. Its mode is not changed."""
    shared = tmp_path / "disk"
    shared.mkdir()
    shared.chmod(0o777)
    bench = Bench(tmp_path)
    assert bench.warnings == [f"KV is parked without a disk tier: others may write to {shared}"]
    assert shared.stat().st_mode & 0o777 == 0o777


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory_disables_its_tier(tmp_path: Path) -> None:
    """One line of the log says so."""
    (tmp_path / "disk").mkdir(mode=0o500)
    bench = Bench(tmp_path)
    assert len(bench.warnings) == 1
    assert bench.park("s1", [1])


def failing(code: int) -> Callable[..., int]:
    """Return a stand-in for a function of ``os`` that fails."""

    def fail(*args: object) -> int:
        del args
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_directory_that_becomes_read_only_accepts_no_entries(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """No new entry is offloaded, one log line says so, and existing entries stay."""
    bench.park("s1", [1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(code))
        assert not bench.park("s2", [2])
        assert not bench.park("s3", [3])
        assert bench.load("s1") == payload_of("s1", [1], 3000)
    assert len(bench.warnings) == 1
    assert bench.warnings[0].startswith("KV cannot be parked (RAM tier): ")
    assert bench.park("s4", [4])
    bench.store.check_integrity()


def test_full_ram_refuses_an_entry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When tmpfs is full, nothing is written into unbacked memory and no file is left behind."""
    bench.park("s1", [1])
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    assert not bench.park("s2", [2])
    assert not bench.park("s1", [1, 2], n_bytes=5 * PAGE_BYTES)
    assert len(bench.warnings) == 1
    bench.settle()
    assert len(bench.ram_files()) == 1
    assert bench.ram_files()[0].stat().st_size == PAGE_BYTES == bench.store.usage.total_bytes


@pytest.mark.parametrize("function", ["write", "open"])
def test_full_disk_keeps_entries_in_ram(bench: Bench, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Entries stay in RAM while there is room, one log line says so, and no partial file is left."""
    for number in range(10):
        bench.park(f"s{number}", [number])
    bench.settle()
    with monkeypatch.context() as patch:
        for number in range(10, 20):
            bench.park(f"s{number}", [number])
        patch.setattr(os, function, failing(errno.ENOSPC))
        bench.settle()
        patch.undo()
    assert bench.disk_files() == []
    assert len(bench.warnings) == 1
    assert bench.warnings[0].startswith("KV cannot be parked (disk tier): ")
    assert all(bench.load(f"s{number}") for number in range(20))
    assert bench.park("s20", [20])
    assert bench.ready("s0", [0]) is None
    bench.settle()
    assert len(bench.disk_files()) > 0


def test_full_disk_is_not_retried_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry is tried once, however often others are offloaded."""
    write = os.write
    calls: list[bytes] = []

    def fail(descriptor: int, data: memoryview) -> int:
        del descriptor
        calls.append(bytes(data))
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", fail)
    for number in range(19):
        bench.park(f"s{number}", [number])
        bench.settle()
    assert len(calls) == len(set(calls)) == 9
    monkeypatch.setattr(os, "write", write)


def test_copy_truncated_by_a_full_disk_is_deleted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No partial file is left."""
    write = os.write
    calls: list[int] = []

    def half(descriptor: int, data: memoryview) -> int:
        calls.append(descriptor)
        if len(calls) % 2:
            return write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "full")

    for number in range(12):
        bench.park(f"s{number}", [number])
    monkeypatch.setattr(os, "write", half)
    bench.settle()
    assert len(calls) >= 2
    assert bench.disk_files() == []
    assert len(bench.warnings) == 1


def test_fetch_without_memory_drops_the_entry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry for which memory cannot be allocated is dropped, so that it is not fetched forever."""
    bench.park_on_disk()
    bench.ram_bytes = 0
    bench.open(adopt=RecoveryMode.ALL)
    monkeypatch.setattr(Mapping, "anonymous", failing(errno.ENOMEM))
    bench.store.fetch("s1")
    bench.settle()
    assert bench.fetched == 1
    assert bench.store.find("client", [1]) is None


def test_entry_larger_than_the_current_ram_budget_is_dropped(bench: Bench) -> None:
    """It was saved by an engine with more RAM, and is dropped when it is requested."""
    bench.park_on_disk()
    bench.ram_bytes = 100
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.ready("s1", [1]) is False
    bench.store.fetch("s1")
    bench.settle()
    assert bench.fetched == 1
    assert bench.store.find("client", [1]) is None


def test_unreadable_directory_is_logged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be listed recovers and deletes nothing, with one log line."""
    bench.park_on_disk()

    def refuse(*args: object) -> tuple[list[Path], list[Path]]:
        raise PermissionError(f"no listing of {args[0]}")

    monkeypatch.setattr(directory, "list_parked", refuse)
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.store.find("client", [1]) is None
    assert len(bench.warnings) == 1
    bench.open(adopt=RecoveryMode.NONE)
    assert len(bench.warnings) == 3


def test_exception_of_a_job_is_logged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing job does not affect the engine's loop."""
    monkeypatch.setattr("zlib.crc32", lambda *_: 1 / 0)
    bench.park("s1", [1])
    bench.settle()
    assert bench.log == [("error", "parking: ZeroDivisionError('division by zero')")]
    assert bench.load("s1") == payload_of("s1", [1], 3000)
