"""Recovery of an earlier engine's entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.ipc.messages import pack_tokens
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

if TYPE_CHECKING:
    from pathlib import Path


def test_entries_are_recovered_after_a_crash(bench: Bench) -> None:
    """Entries of both tiers are recovered in the order in which they were offloaded, with their content."""
    for number in range(30):
        bench.park(f"s{number}", [number])
        bench.settle()
    ready = [bench.ready(f"s{number}", [number]) for number in range(30)]
    assert True in ready
    assert False in ready
    held_bytes = bench.store.usage.total_bytes
    bench.open(adopt=RecoveryMode.ALL)
    assert [bench.ready(f"s{number}", [number]) for number in range(30)] == ready
    assert bench.store.usage.total_bytes == held_bytes
    bench.settle()
    for number in (10, 29):
        assert bench.load(f"s{number}") == payload_of(f"s{number}", [number], 3000)
    bench.store.fetch("s0")
    bench.settle()
    assert bench.load("s0") == payload_of("s0", [0], 3000)
    assert bench.park("s30", [30])
    assert bench.log == []


def test_store_recovers_after_close(bench: Bench) -> None:
    """After a clean close every entry is recovered."""
    bench.park("s1", [1], durable=False)
    bench.settle()
    bench.store.close()
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.load("s1") == payload_of("s1", [1], 3000)


def test_unknown_sessions_are_deleted(bench: Bench) -> None:
    """Without recovery all files are deleted, incomplete ones too."""
    for number in range(30):
        bench.park(f"s{number}", [number])
    bench.settle()
    (bench.disk_dir / f"kv-{'0' * 32}.part").write_bytes(b"half")
    bench.open(adopt=RecoveryMode.NONE)
    assert bench.ram_files() == bench.disk_files() == []
    assert bench.store.usage.total_bytes == 0


class Died(BaseException):
    """The end of an engine."""


@pytest.mark.parametrize("on_disk", [False, True])
def test_entry_restored_during_a_crash_is_dropped(bench: Bench, on_disk: bool) -> None:
    """It is deleted from both tiers for good; entries that were restored successfully stay."""

    def die(_data: memoryview) -> bool:
        raise Died

    if on_disk:
        bench.park_on_disk()
        bench.store.fetch("s1")
    else:
        bench.park("s1", [1, 2, 3])
    bench.park("well", [7, 8])
    bench.settle()
    assert bench.load("well") is not None
    with pytest.raises(Died):
        bench.store.load("s1", pack_tokens([1, 2, 3]), die)
    n_on_disk = len(bench.disk_files())
    bench.open(adopt=RecoveryMode.ALL)
    bench.settle()
    assert bench.ready("s1", [1, 2, 3]) is None
    assert bench.load("well") == payload_of("well", [7, 8], 3000)
    assert len(bench.disk_files()) == n_on_disk - on_disk
    assert ["s1" in line and "ended while" in line for line in bench.warnings] == [True]
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.ready("s1", [1, 2, 3]) is None


def test_damaged_leftovers_never_fail_an_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that cannot be recovered for an unforeseen reason is deleted and logged."""

    def strange(*_: object) -> None:
        raise ValueError("a length of NaN")

    bench.park("s1", [1])
    bench.settle()
    with monkeypatch.context() as changed:
        changed.setattr("inferencecenter.engine.kv_cache.ram.decode", strange)
        bench.open(adopt=RecoveryMode.ALL)
    assert bench.ram_files() == bench.disk_files() == []
    assert "NaN" in bench.warnings[-1]
    assert bench.park("s1", [1])


def test_entry_overwritten_during_a_crash_is_dropped(bench: Bench) -> None:
    """Neither the old nor the new version is recovered."""
    bench.park("s1", [1])
    bench.settle()

    class Killed(BaseException):
        pass

    def write(buffer: memoryview) -> int:
        buffer[:100] = bytes(100)
        bench.open(adopt=RecoveryMode.ALL)
        assert bench.store.find("client", [1]) is None
        raise Killed

    before = bench.store
    with pytest.raises(Killed):
        before.park("s1", scope="client", tokens=[1, 2], size_bytes=3000, write=write, durable=True)
    assert bench.ram_files() == []


def test_entry_without_a_checksum_is_dropped(bench: Bench) -> None:
    """An entry whose header was not yet written is not recovered."""
    bench.park("s1", [1])
    bench.settle()
    bench.park("s1", [1, 2])
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.store.find("client", [1]) is None
    assert len(bench.warnings) == 1


def test_discarded_memory_is_not_recovered(bench: Bench) -> None:
    """A discarded entry is gone at once, though its memory is kept warm and its copy is not yet deleted."""
    for number in range(20):
        bench.park(f"s{number}", [number])
        bench.settle()
    bench.store.forget("s19")
    assert len(bench.ram_files()) == 20
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.store.find("client", [19]) is None
    assert bench.store.usage.sessions == 19


def test_later_version_of_an_entry_is_recovered(bench: Bench) -> None:
    """An older copy on disk is deleted, and the newer RAM entry is copied again when due."""
    bench.park("s0", [0])
    for number in range(1, 11):
        bench.park(f"s{number}", [number])
        bench.settle()
    (older,) = bench.disk_files()
    data = older.read_bytes()
    bench.park("s0", [0, 0])
    bench.worker.run(2)
    assert not older.exists()
    older.write_bytes(data)
    bench.open(adopt=RecoveryMode.ALL)
    assert not older.exists()
    assert bench.load("s0") == payload_of("s0", [0, 0], 3000)


def test_later_of_two_files_of_one_key_is_recovered(bench: Bench) -> None:
    """The other one is deleted."""
    bench.park("s1", [1])
    bench.settle()
    (older,) = bench.ram_files()
    data = older.read_bytes()
    bench.park("s1", [1, 2])
    bench.settle()
    (bench.ram_dir / f"kv-{'0' * 32}.ram").write_bytes(data)
    bench.open(adopt=RecoveryMode.ALL)
    assert len(bench.ram_files()) == 1
    assert bench.load("s1") == payload_of("s1", [1, 2], 3000)


def test_smaller_budgets_keep_the_latest_entries(bench: Bench) -> None:
    """Of more than the new budgets hold, the entries offloaded last stay."""
    for number in range(30):
        bench.park(f"s{number}", [number])
        bench.settle()
    bench.ram_bytes = bench.disk_bytes = 5 * PAGE_BYTES
    bench.open(adopt=RecoveryMode.ALL)
    bench.settle()
    assert sum(path.stat().st_size for path in bench.ram_files()) <= 5 * PAGE_BYTES
    assert sum(path.stat().st_size for path in bench.disk_files()) <= 5 * PAGE_BYTES
    assert bench.ready("s29", [29]) is True
    assert bench.store.find("client", [0]) is None


def test_recovery_with_one_tier_less(bench: Bench, tmp_path: Path) -> None:
    """A disabled tier is not read; the other one is recovered."""
    for number in range(30):
        bench.park(f"s{number}", [number])
        bench.settle()
    bench.ram_bytes = 0
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.ready("s0", [0]) is False
    bench.store.fetch("s0")
    bench.settle()
    assert bench.load("s0") == payload_of("s0", [0], 3000)
    assert len(list((tmp_path / "ram").iterdir())) == 20


def test_only_durable_entries_are_saved(bench: Bench) -> None:
    """Entries that are not durable are deleted silently, with older versions on disk; the others are saved."""
    for number in range(30):
        bench.park(f"s{number}", [number])
        bench.settle()
    for number in (2, 20, 29):
        bench.park(f"s{number}", [number, 1], durable=False)
    bench.settle()
    bench.open(adopt=RecoveryMode.DURABLE)
    assert [number for number in range(30) if bench.ready(f"s{number}", [number]) is None] == [2, 20, 29]
    assert len(bench.ram_files()) == sum(bench.ready(f"s{number}", [number]) is True for number in range(30))
    assert bench.log == []
    bench.settle()
    bench.store.check_integrity()
