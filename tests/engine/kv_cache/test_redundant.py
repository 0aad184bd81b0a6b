"""Spare copies of slots: they use free memory only, and are evicted first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench

if TYPE_CHECKING:
    from pathlib import Path


def bench_of(path: Path, *, pages: int, disk_pages: int = 100, client_share: float = 1.0) -> Bench:
    """Return a store with entries of one page each."""
    return Bench(path, ram_bytes=pages * PAGE_BYTES, disk_bytes=disk_pages * PAGE_BYTES, client_share=client_share)


def keys(bench: Bench) -> set[str]:
    """Return the keys of all entries."""
    return {entry.key for entry in bench.store._tiers.index}


def test_spare_copy_evicts_nothing(tmp_path: Path) -> None:
    """Without room it is not offloaded; it may only replace its own older version."""
    bench = bench_of(tmp_path, pages=2)
    assert bench.park("a", [1])
    assert bench.park("b", [2], redundant=True)
    assert not bench.store.has_room("c", "client", 1)
    assert not bench.park("c", [3], redundant=True)
    assert bench.store.has_room("b", "client", 1)
    assert bench.park("b", [2, 2], redundant=True)
    assert keys(bench) == {"a", "b"}
    assert bench.ready("b", [2, 2])
    assert not bench.park("b", [2, 2, 2], n_bytes=2 * PAGE_BYTES, redundant=True)
    bench.settle()
    assert bench.load("a") is not None


def test_spare_copy_is_evicted_first(tmp_path: Path) -> None:
    """It is evicted before entries used less recently, on disk or not."""
    bench = bench_of(tmp_path, pages=4)
    for number, key in enumerate("abc"):
        assert bench.park(key, [number])
    bench.settle()
    assert bench.park("redundant", [9], redundant=True)
    bench.settle()
    assert bench.park("d", [5])
    assert keys(bench) == set("abcd")


def test_spare_copy_is_not_written_to_disk(tmp_path: Path) -> None:
    """It would be rewritten after each answer; it is written at a stop."""
    bench = bench_of(tmp_path, pages=4)
    for number in range(4):
        assert bench.park(f"s{number}", [number], redundant=True)
        bench.settle()
    assert bench.disk_files() == []
    # The worker runs jobs while the store waits.
    bench.store._tiers._jobs.drain = lambda progressed: bench.settle()  # type: ignore[method-assign]
    bench.store.save(lambda: None)
    assert len(bench.disk_files()) == 4


def test_spare_copy_can_become_permanent(tmp_path: Path) -> None:
    """It is not written again, and is found as a permanent entry."""
    bench = bench_of(tmp_path, pages=2)
    assert bench.park("a", [1], redundant=True)
    match = bench.store.find("client", [1])
    assert match is not None
    assert match.redundant
    stamp = bench.store._stamp
    assert bench.park("a", [1])
    assert bench.store._stamp == stamp
    match = bench.store.find("client", [1])
    assert match is not None
    assert not match.redundant
    bench.settle()
    assert bench.park("b", [2], redundant=True)
    assert bench.park("c", [3])
    assert keys(bench) == {"a", "c"}


def test_spare_copy_keeps_the_sessions_entry(tmp_path: Path) -> None:
    """A copy that replaces a permanent entry is not evicted earlier than that entry would have been."""
    bench = bench_of(tmp_path, pages=3)
    assert bench.park("a", [1])
    assert bench.park("a", [1, 2], redundant=True)
    assert bench.park("b", [3], redundant=True)
    assert bench.park("c", [4])
    bench.settle()
    assert bench.park("d", [5])
    assert keys(bench) == {"a", "c", "d"}
    assert bench.ready("a", [1, 2])


def test_permanent_entry_is_preferred_to_a_spare_copy(tmp_path: Path) -> None:
    """A lookup of permanent entries finds it."""
    bench = bench_of(tmp_path, pages=3)
    assert bench.park("a", [1])
    assert bench.park("b", [1], redundant=True)
    match = bench.store.find("client", [1])
    assert match is not None
    assert (match.key, match.redundant) == ("a", False)


@pytest.mark.parametrize("allowed_pages", [0, 1, 3])
def test_spare_copy_is_evicted_first_under_pressure(tmp_path: Path, allowed_pages: int) -> None:
    """None is made until the limit is lifted."""
    bench = bench_of(tmp_path, pages=4)
    for number, key in enumerate("abc"):
        assert bench.park(key, [number])
    assert bench.park("redundant", [9], redundant=True)
    bench.store.limit_ram(allowed_pages * PAGE_BYTES)
    in_ram = {entry.key for entry in bench.store._tiers.index.ram}
    assert "redundant" not in in_ram
    assert len(in_ram) == allowed_pages
    assert not bench.store.has_room("redundant", "client", 1)
    bench.store.limit_ram(None)
    assert bench.store.has_room("redundant", "client", 1)
    assert bench.park("redundant", [9], redundant=True)


def test_spare_copies_count_against_the_clients_share(tmp_path: Path) -> None:
    """They count like other entries."""
    bench = bench_of(tmp_path, pages=4, client_share=0.5)
    assert bench.park("a", [1], redundant=True)
    assert bench.park("b", [2], redundant=True)
    assert not bench.store.has_room("c", "client", 1)
    assert bench.store.has_room("c", "other", 1)


def test_no_spare_copies_without_a_ram_tier(tmp_path: Path) -> None:
    """All entries would go to the disk, which must not be written after every answer."""
    bench = bench_of(tmp_path, pages=0)
    assert not bench.store.has_room("a", "client", 1)
    bench = bench_of(tmp_path, pages=0, disk_pages=0)
    assert not bench.store.has_room("a", "client", 1)


def test_next_engine_recovers_spare_copies(tmp_path: Path) -> None:
    """After a crash no slot holds the sequence, so the copy is a permanent entry."""
    bench = bench_of(tmp_path, pages=4)
    assert bench.park("a", [1, 2, 3], redundant=True)
    bench.settle()
    bench.open(adopt=RecoveryMode.DURABLE)
    match = bench.store.find("client", [1, 2, 3])
    assert match is not None
    assert (match.n_tokens, match.redundant) == (3, False)


def test_buffers_have_room_for_growth(tmp_path: Path) -> None:
    """A buffer is reused for several saves, since resizing takes longer than saving; it stays within the budget."""
    bench = bench_of(tmp_path, pages=40, disk_pages=0, client_share=0.5)
    sizes = []
    for n_pages in range(8, 20):
        assert bench.park("a", list(range(n_pages)), n_bytes=n_pages * PAGE_BYTES - 1000, redundant=True)
        bench.settle()
        (path,) = bench.ram_files()
        sizes.append(path.stat().st_size // PAGE_BYTES)
        assert n_pages <= sizes[-1] <= 20
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < len(sizes)
    assert bench.park("b", [1], scope="other", n_bytes=12 * PAGE_BYTES - 1000)
    bench.settle()
    assert sum(path.stat().st_size for path in bench.ram_files()) == (sizes[-1] + 12) * PAGE_BYTES
