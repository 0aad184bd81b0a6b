"""Offloading, loading, fetching and discarding without faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.ipc.messages import pack_tokens
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

if TYPE_CHECKING:
    from pathlib import Path


def test_offloaded_entry_is_loaded(bench: Bench) -> None:
    """An entry is found by any tokens with that prefix, and loaded byte for byte."""
    assert bench.park("s1", [1, 2, 3])
    match = bench.store.find("client", [1, 2, 9, 9])
    assert match is not None
    assert (match.key, match.common_tokens, match.n_tokens, match.ready) == ("s1", 2, 3, True)
    assert bench.load("s1") == payload_of("s1", [1, 2, 3], 3000)
    assert bench.store.usage.sessions == 1
    assert bench.store.usage.total_bytes == bench.store.usage.ram_bytes == PAGE_BYTES


def test_entry_may_be_shorter_than_its_buffer(bench: Bench) -> None:
    """An entry is as long as what was written, not as what was reserved."""

    def write(buffer: memoryview) -> int:
        buffer[:4] = b"only"
        return 4

    assert bench.store.park("s1", scope="c", tokens=[1], size_bytes=100, write=write, durable=True)
    assert bench.load("s1") == b"only"


def test_entries_are_private_to_a_client(bench: Bench) -> None:
    """An entry is found by its own scope only, a public one by all."""
    bench.park("s1", [1, 2], scope="a")
    assert bench.ready("s1", [1, 2], "b") is None
    bench.park("prefix-1", [1], scope="")
    assert bench.ready("prefix-1", [1, 2], "b") is True
    assert bench.ready("s1", [1, 2], "a") is True
    assert bench.store.usage.sessions == 1


def test_equal_tokens_are_not_rewritten(bench: Bench) -> None:
    """Offloading an unchanged entry costs nothing and keeps its place."""
    bench.park("s1", [1, 2])

    def write(buffer: memoryview) -> int:
        raise AssertionError(buffer)

    assert bench.store.park("s1", scope="client", tokens=[1, 2], size_bytes=3000, write=write, durable=True)


def test_repeated_offload_reuses_the_buffer(bench: Bench) -> None:
    """A longer sequence reuses its file, which grows by the difference."""
    bench.park("s1", [1])
    (before,) = bench.ram_files()
    assert bench.park("s1", [1, 2], n_bytes=9000)
    assert bench.ram_files() == [before]
    assert bench.load("s1") == payload_of("s1", [1, 2], 9000)
    assert bench.store.usage.total_bytes == before.stat().st_size == 3 * PAGE_BYTES


def test_discarded_buffers_are_reused(bench: Bench) -> None:
    """The file of a discarded entry is kept warm for the next one, and truncated if it is far too large."""
    bench.park("s1", [1], n_bytes=5 * PAGE_BYTES)
    (before,) = bench.ram_files()
    bench.store.forget("s1")
    assert bench.store.usage.total_bytes == 6 * PAGE_BYTES
    bench.park("s2", [2])
    assert bench.ram_files() == [before]
    assert bench.store.usage.total_bytes == PAGE_BYTES
    assert bench.load("s2") == payload_of("s2", [2], 3000)


def test_few_mappings_are_kept_warm(bench: Bench) -> None:
    """Discarding many entries releases all but a few of their mappings."""
    for number in range(10):
        bench.park(f"s{number}", [number])
    for number in range(10):
        bench.store.forget_session(f"s{number}")
    bench.settle()
    assert len(bench.ram_files()) == 4
    assert bench.store.usage.total_bytes == 4 * PAGE_BYTES
    assert bench.store.usage.sessions == 0


def test_failed_write_drops_the_entry(bench: Bench) -> None:
    """A failed save leaves no entry, nor an older one whose buffer it overwrote."""
    bench.park("s1", [1])
    assert not bench.store.park("s1", scope="client", tokens=[1, 2], size_bytes=50, write=lambda _: 0, durable=True)
    assert bench.store.find("client", [1, 2]) is None
    bench.store.check_integrity()


def test_exception_of_a_write_reaches_the_caller(bench: Bench) -> None:
    """The memory is not leaked."""

    def write(buffer: memoryview) -> int:
        raise RuntimeError(len(buffer))

    with pytest.raises(RuntimeError):
        bench.store.park("s1", scope="client", tokens=[1], size_bytes=50, write=write, durable=True)
    assert bench.store.find("client", [1]) is None
    bench.store.check_integrity()


def test_entry_that_cannot_be_restored_is_dropped(bench: Bench) -> None:
    """One log line says so."""
    bench.park("s1", [1])
    assert not bench.store.load("s1", pack_tokens([1]), lambda _: False)
    assert bench.store.find("client", [1]) is None
    assert bench.warnings == ["parked KV of s1 is dropped: it could not be restored"]
    bench.settle()
    assert bench.disk_files() == []


def test_buffer_with_a_reader_is_not_reused(bench: Bench) -> None:
    """The next entry gets other memory."""
    kept: list[memoryview] = []
    bench.park("s1", [1])
    bench.settle()

    def read(data: memoryview) -> bool:
        kept.append(data[:2])
        return True

    assert bench.store.load("s1", pack_tokens([1]), read)
    assert bench.park("s1", [1, 2], n_bytes=3 * PAGE_BYTES)
    assert bench.load("s1") == payload_of("s1", [1, 2], 3 * PAGE_BYTES)
    bench.store.check_integrity()
    assert kept


def test_oldest_entries_move_to_disk_and_back(bench: Bench) -> None:
    """Entries are copied to disk before RAM is full, are evicted without loss, and are fetched again."""
    for number in range(20):
        assert bench.park(f"s{number}", [number, 1])
        bench.settle()
    assert bench.ready("s0", [0]) is True
    assert bench.park("s20", [20])
    assert bench.ready("s0", [0]) is False
    assert bench.load("s0") is None
    bench.store.fetch("s0")
    assert bench.fetched == 0
    bench.settle()
    assert bench.fetched == 1
    assert bench.ready("s0", [0]) is True
    assert bench.load("s0") == payload_of("s0", [0, 1], 3000)
    assert bench.ready("s1", [1]) is False
    assert bench.log == []


def test_offload_never_evicts_retained_entries(bench: Bench) -> None:
    """An entry that the same plan restores stays, even if it is the oldest."""
    for number in range(20):
        bench.park(f"s{number}", [number])
        bench.settle()
    assert bench.park("s20", [20], keep=["s0"])
    assert bench.ready("s0", [0]) is True
    assert bench.ready("s1", [1]) is False


def test_entries_that_are_not_durable_stay_off_disk(bench: Bench) -> None:
    """They stay in RAM and are lost with it."""
    for number in range(30):
        bench.park(f"s{number}", [number], durable=False)
        bench.settle()
    assert bench.disk_files() == []
    assert bench.store.find("client", [0]) is None
    assert bench.ready("s29", [29]) is True


def test_entry_that_is_no_longer_durable_leaves_the_disk(bench: Bench) -> None:
    """An entry offloaded again as not durable loses its copy on disk."""
    bench.park("s0", [0])
    for number in range(1, 20):
        bench.park(f"s{number}", [number])
        bench.settle()
    assert any(b"s0:" in path.read_bytes() for path in bench.disk_files())
    bench.park("s0", [0], durable=False)
    bench.settle()
    assert not any(b"s0:" in path.read_bytes() for path in bench.disk_files())
    assert bench.load("s0") == payload_of("s0", [0], 3000)


def test_client_evicts_only_its_own_entries_above_its_share(tmp_path: Path) -> None:
    """Other clients' entries stay."""
    bench = Bench(tmp_path, client_share=0.25, disk_bytes=0)
    bench.park("theirs", [1], scope="b")
    for number in range(10):
        bench.park(f"mine{number}", [number], scope="a")
    assert bench.store.usage.sessions == 6
    assert bench.ready("theirs", [1], "b") is True
    assert bench.ready("mine4", [4], "a") is None
    assert bench.ready("mine5", [5], "a") is True
    assert not bench.park("large", [1], scope="a", n_bytes=6 * PAGE_BYTES)
    assert bench.park("prefix-large", [1], scope="", n_bytes=6 * PAGE_BYTES)


def test_entry_fits_in_a_clients_share(tmp_path: Path) -> None:
    """The share is that of the RAM tier or, without one, of the disk."""
    bench = Bench(tmp_path / "1", client_share=0.5)
    assert bench.store.fits(4_000)
    assert not bench.store.fits(8_000)
    without_ram = Bench(tmp_path / "2", ram_bytes=0, client_share=0.5)
    assert without_ram.store.fits(20_000)
    assert not without_ram.store.fits(40_000)


def test_store_without_a_budget_is_disabled(tmp_path: Path) -> None:
    """Nothing fits, nothing is offloaded, and no directory is created."""
    bench = Bench(tmp_path, ram_bytes=0, disk_bytes=0)
    assert not bench.store.fits(1)
    assert not bench.park("s1", [1])
    assert bench.store.find("client", [1]) is None
    bench.store.fetch("s1")
    bench.settle()
    assert bench.fetched == 1
    assert list(tmp_path.iterdir()) == []


def test_budget_smaller_than_a_page_holds_no_entry(tmp_path: Path) -> None:
    """Offloading is refused without an error."""
    bench = Bench(tmp_path, ram_bytes=100, disk_bytes=100)
    assert not bench.store.fits(1)
    assert not bench.park("s1", [1])
    bench.settle()
    assert bench.ram_files() == bench.disk_files() == []


def test_store_works_without_a_ram_tier(tmp_path: Path) -> None:
    """Entries are handed to the worker, refused while too many wait, and fetched to be loaded."""
    bench = Bench(tmp_path, ram_bytes=0)
    assert [bench.park(f"s{number}", [number]) for number in range(6)] == [True] * 4 + [False] * 2
    bench.settle()
    assert len(bench.disk_files()) == 4
    assert all(bench.park(f"more{number}", [number + 10]) for number in range(4))
    bench.settle()
    assert bench.ready("s0", [0]) is False
    bench.store.fetch("s0")
    bench.settle()
    assert bench.load("s0") == payload_of("s0", [0], 3000)
    assert not bench.park("secret", [1], durable=False)
    assert len(bench.disk_files()) == 8
    assert not bench.ram_dir.exists()


def test_many_fetches_without_a_ram_tier(tmp_path: Path) -> None:
    """More fetches than buffers all finish; those without a buffer are reported and can be repeated."""
    bench = Bench(tmp_path, ram_bytes=0)
    for number in range(10):
        assert bench.park(f"s{number}", [number])
        bench.settle()
    for number in range(5):
        bench.store.fetch(f"s{number}")
    bench.settle()
    assert bench.fetched == 5
    assert [bench.ready(f"s{number}", [number]) for number in range(5)] == [True] * 4 + [False]
    found = [bench.store.find("client", [number]) for number in range(6)]
    assert [match.load_failed for match in found if match is not None] == [False] * 4 + [True, False]
    bench.store.fetch("s4")
    bench.settle()
    assert [match.load_failed for match in [bench.store.find("client", [4])] if match is not None] == [False]
    assert bench.load("s4") == payload_of("s4", [4], 3000)


def test_files_are_private(bench: Bench) -> None:
    """Directories and files are accessible to their owner only."""
    for number in range(15):
        bench.park(f"s{number}", [number])
    bench.settle()
    assert len(bench.disk_files()) > 0
    for directory in (bench.ram_dir, bench.disk_dir):
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_file_names_do_not_contain_keys(bench: Bench) -> None:
    """A key may be any text; it never becomes a path."""
    key = "../../etc/pass wd\0ü"
    assert bench.park(key, [1])
    for number in range(15):
        bench.park(f"s{number}", [number])
    bench.settle()
    assert bench.load(key) is not None
    assert len(list(bench.path.rglob("*"))) == 2 + len(bench.ram_files()) + len(bench.disk_files())
