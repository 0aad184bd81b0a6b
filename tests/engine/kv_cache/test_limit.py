"""A temporary limit of the RAM tier: what is evicted, what stays, and that its memory is released."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def in_ram_bytes(bench: Bench) -> int:
    """Allocated bytes of the files in memory."""
    return sum(path.stat().st_blocks * 512 for path in bench.ram_files())


def park(bench: Bench, *numbers: int, durable: bool = False) -> None:
    """Offload entries of one page each, which are copied to disk only if ``durable``."""
    for number in numbers:
        assert bench.park(f"s{number}", [number, 1], durable=durable)


def left(bench: Bench, numbers: Sequence[int]) -> list[int]:
    """Return which of these are in memory, and check their content."""
    found = [number for number in numbers if bench.load(f"s{number}") is not None]
    assert all(bench.load(f"s{number}") == payload_of(f"s{number}", [number, 1], 3000) for number in found)
    return found


def test_least_recently_used_entry_is_evicted(bench: Bench) -> None:
    """No more entries than necessary are evicted, with their files."""
    park(bench, 1, 2, 3, 4, 5)
    assert bench.load("s1") is not None
    bench.store.limit_ram(3 * PAGE_BYTES)
    assert left(bench, range(1, 6)) == [1, 4, 5]
    assert in_ram_bytes(bench) == bench.store.usage.total_bytes == 3 * PAGE_BYTES
    bench.store.check_integrity()


def test_warm_mappings_are_evicted_first(bench: Bench) -> None:
    """They hold no entry."""
    park(bench, 1, 2, 3, 4, 5)
    for number in (3, 4, 5):
        bench.store.forget(f"s{number}")
    assert in_ram_bytes(bench) == 5 * PAGE_BYTES
    bench.store.limit_ram(2 * PAGE_BYTES)
    assert left(bench, [1, 2]) == [1, 2]
    assert in_ram_bytes(bench) == 2 * PAGE_BYTES


def test_entries_on_disk_leave_ram_first(bench: Bench) -> None:
    """Only their memory is released; they are fetched again when there is room."""
    park(bench, 1)
    park(bench, 2, 3, durable=True)
    copy_to_disk(bench)
    bench.store.limit_ram(PAGE_BYTES)
    assert left(bench, [1]) == [1]
    assert [bench.ready(f"s{number}", [number]) for number in (2, 3)] == [False, False]
    bench.store.limit_ram(None)
    bench.store.fetch("s2")
    bench.settle()
    assert left(bench, [1, 2]) == [1, 2]


def copy_to_disk(bench: Bench) -> None:
    """Copy all durable entries to disk."""
    for entry in bench.store._tiers.index.unsaved():
        assert bench.store._tiers._disk is not None
        bench.store._tiers._copy(bench.store._tiers._disk, entry, optional=False)
    bench.settle()


@pytest.mark.parametrize("n_jobs", [0, 1])
def test_entries_being_written_are_evicted_last(bench: Bench, n_jobs: int) -> None:
    """The disk copy is discarded too, however far it had come; entries that were not to be copied went before."""
    park(bench, 1, 2)
    bench.park("s3", [3, 1])
    entry = bench.store._tiers.index.get("s3")
    assert entry is not None
    assert bench.store._tiers._disk is not None
    bench.store._tiers._copy(bench.store._tiers._disk, entry, optional=False)
    bench.worker.run(n_jobs)
    bench.store.limit_ram(PAGE_BYTES)
    assert left(bench, [1, 2, 3]) == [3]
    bench.store.limit_ram(0)
    assert in_ram_bytes(bench) == 0
    bench.settle()
    assert bench.disk_files() == []
    assert bench.store.find("client", [3, 1]) is None


def test_fetched_entry_may_exceed_the_budget_temporarily(bench: Bench) -> None:
    """A running fetch cannot be stopped; its entry is evicted by the next limit."""
    bench.park_on_disk()
    bench.store.fetch("s1")
    bench.store.limit_ram(0)
    bench.settle()
    assert bench.ready("s1", [1]) is True
    bench.store.limit_ram(0)
    assert in_ram_bytes(bench) == 0
    assert bench.ready("s1", [1]) is None
    bench.store.limit_ram(None)
    assert bench.ready("s1", [1]) is False


def test_offloaded_kv_stays_within_the_budget(bench: Bench) -> None:
    """A limit acts as a smaller tier: the oldest is evicted, and an oversized entry neither fits nor is offloaded."""
    park(bench, 1, 2, 3)
    bench.store.limit_ram(2 * PAGE_BYTES)
    park(bench, 4)
    assert left(bench, [1, 2, 3, 4]) == [3, 4]
    assert not bench.park("large", [5], n_bytes=3 * PAGE_BYTES)
    assert bench.store.fits(900)
    assert not bench.store.fits(1100)
    bench.store.limit_ram(0)
    assert not bench.park("s1", [1, 1])
    assert not bench.store.fits(1)
    assert in_ram_bytes(bench) == 0


def test_lifted_limit_restores_the_budget(bench: Bench) -> None:
    """A limit above the budget has no effect."""
    for allowed_bytes in (None, 10**9):
        bench.store.limit_ram(0)
        bench.store.limit_ram(allowed_bytes)
        park(bench, *range(30))
        assert in_ram_bytes(bench) == bench.ram_bytes
        bench.store.check_integrity()


def test_unfetchable_entries_are_not_found(bench: Bench) -> None:
    """A turn would wait for the fetch in vain, so an entry in RAM is found instead. Nothing is dropped."""
    bench.park_on_disk()
    bench.park("other", [1], durable=False)
    bench.store.limit_ram(PAGE_BYTES - 1)
    assert bench.store.find("client", [1, 2, 3]) is None
    bench.store.fetch("s1")
    bench.settle()
    assert bench.fetched == 1
    assert bench.log == []
    bench.store.limit_ram(None)
    assert bench.ready("s1", [1, 2, 3]) is False


def test_limit_without_a_ram_tier(tmp_path: Path) -> None:
    """Entries that wait to be written are dropped too, and nothing is offloaded until the limit is lifted."""
    bench = Bench(tmp_path, ram_bytes=0)
    assert bench.park("s1", [1, 1])
    bench.store.limit_ram(0)
    bench.settle()
    assert bench.store.usage.total_bytes == 0
    assert bench.disk_files() == []
    assert not bench.park("s2", [2, 1])
    bench.store.limit_ram(None)
    assert bench.park("s2", [2, 1])
    bench.settle()
    assert len(bench.disk_files()) == 1


def test_next_engine_recovers_remaining_entries(bench: Bench) -> None:
    """Evicted entries are not recovered."""
    park(bench, 1, 2, 3)
    bench.settle()
    bench.store.limit_ram(PAGE_BYTES)
    bench.store.close()
    bench.open(adopt=RecoveryMode.ALL)
    bench.settle()
    assert left(bench, [1, 2, 3]) == [3]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([500, 5000, 9000])), max_size=12),
    allowed_pages=st.integers(0, 20),
)
def test_eviction_is_oldest_first(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[str, int]], allowed_pages: int
) -> None:
    """The newest entries of all clients remain, byte for byte, within the limit."""
    bench = Bench(tmp_path_factory.mktemp("kv"))
    parked = {}
    for number, (scope, n_bytes) in enumerate(sizes):
        if bench.park(f"s{number}", [number], scope=scope, n_bytes=n_bytes, durable=False):
            parked[number] = payload_of(f"s{number}", [number], n_bytes)
    before = [number for number in parked if bench.load(f"s{number}") is not None]
    bench.store.limit_ram(allowed_pages * PAGE_BYTES)
    after = [number for number in parked if bench.load(f"s{number}") is not None]
    assert after == before[len(before) - len(after) :]
    assert all(bench.load(f"s{number}") == parked[number] for number in after)
    assert in_ram_bytes(bench) == bench.store.usage.total_bytes <= allowed_pages * PAGE_BYTES
    for number, (scope, _) in enumerate(sizes):
        match = bench.store.find("b" if scope == "a" else "a", [number])
        assert match is None, "found by another client"
    bench.settle()
