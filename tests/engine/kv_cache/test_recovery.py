"""What a new engine takes over from one that ended in any way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.ipc.messages import pack_tokens
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

if TYPE_CHECKING:
    from pathlib import Path


def test_after_a_crash(bench: Bench) -> None:
    """Sequences of both tiers are there again, in the order in which they were parked, and are loaded as they were."""
    for number in range(30):
        bench.park(f"s{number}", [number])
        bench.settle()
    ready = [bench.ready(f"s{number}", [number]) for number in range(30)]
    assert True in ready
    assert False in ready
    held_bytes = bench.store.total_bytes
    bench.open(adopt=RecoveryMode.ALL)
    assert [bench.ready(f"s{number}", [number]) for number in range(30)] == ready
    assert bench.store.total_bytes == held_bytes
    bench.settle()
    for number in (10, 29):
        assert bench.load(f"s{number}") == payload_of(f"s{number}", [number], 3000)
    bench.store.fetch("s0")
    bench.settle()
    assert bench.load("s0") == payload_of("s0", [0], 3000)
    assert bench.park("s30", [30])
    assert bench.log == []


def test_store_recovers_after_close(bench: Bench) -> None:
    """A store that was closed in order leaves all that it parked."""
    bench.park("s1", [1], durable=False)
    bench.settle()
    bench.store.close()
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.load("s1") == payload_of("s1", [1], 3000)


def test_unknown_sessions_are_deleted(bench: Bench) -> None:
    """Without adoption everything is deleted, also what was not finished."""
    for number in range(30):
        bench.park(f"s{number}", [number])
    bench.settle()
    (bench.disk_dir / f"kv-{'0' * 32}.part").write_bytes(b"half")
    bench.open(adopt=RecoveryMode.NONE)
    assert bench.ram_files() == bench.disk_files() == []
    assert bench.store.total_bytes == 0


class Died(BaseException):
    """The end of an engine."""


@pytest.mark.parametrize("on_disk", [False, True])
def test_entry_restored_during_a_crash_is_dropped(bench: Bench, on_disk: bool) -> None:
    """From neither tier, by no engine after it; what was restored well before stays."""

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
    """It is a cache: what cannot be taken over for a reason that was not foreseen is deleted, and that is said."""

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


def test_crash_while_saving(bench: Bench) -> None:
    """A sequence that was being overwritten when the engine ended is not taken over, neither old nor new."""
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


def test_crash_before_the_checksum(bench: Bench) -> None:
    """A sequence whose header was not written yet is not taken over."""
    bench.park("s1", [1])
    bench.settle()
    bench.park("s1", [1, 2])
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.store.find("client", [1]) is None
    assert len(bench.warnings) == 1


def test_discarded_memory_is_not_recovered(bench: Bench) -> None:
    """A forgotten sequence is gone at once, though its memory is kept warm and its copy not yet deleted."""
    for number in range(20):
        bench.park(f"s{number}", [number])
        bench.settle()
    bench.store.forget("s19")
    assert len(bench.ram_files()) == 20
    bench.open(adopt=RecoveryMode.ALL)
    assert bench.store.find("client", [19]) is None
    assert bench.store.sessions == 19


def test_the_later_version_counts(bench: Bench) -> None:
    """When the copy on disk is older than what is in RAM, it is deleted, and a new one is made when it is time."""
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


def test_two_files_of_one_key(bench: Bench) -> None:
    """Of two versions in RAM the later one is taken over, and the other deleted."""
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


def test_smaller_budgets(bench: Bench) -> None:
    """Of more than the new budgets hold, what was parked last stays."""
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
    """A tier that is turned off is not looked at; the other one is taken over."""
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
    """What is private is deleted from memory without a word, an older version on disk with it; the rest is there."""
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
