"""Saving to disk before an engine ends, and dropping unknown sessions when a new one begins."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache import disk
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from inferencecenter.engine.kv_cache.store import KvStore, TierOptions
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Store:
    """A store with its own worker and entries of one page."""

    def __init__(self, path: Path, *, ram_pages: int = 20, disk_pages: int = 20) -> None:
        self.path = path
        self.worker = ThreadPoolExecutor(1)
        self.log: list[str] = []
        self.progress = 0
        self.kv = KvStore(
            fingerprint="model",
            bytes_per_token=4,
            ram=TierOptions(path / "ram", ram_pages * PAGE_BYTES),
            disk=TierOptions(path / "disk", disk_pages * PAGE_BYTES),
            client_share=1.0,
            adopt=RecoveryMode.ALL,
            worker=self.worker,
            on_fetched=lambda: None,
            on_log=lambda level, line: self.log.append(line),
        )

    def park(self, key: str, token: int, *, scope: str = "client", durable: bool = True) -> bool:
        """Offload an entry of one token."""
        return self.kv.park(key, scope=scope, tokens=[token], size_bytes=3500, write=len, durable=durable)

    def save(self) -> int:
        """Save everything to disk and return the number of saved sessions."""
        self.kv.save(self._progressed)
        self.kv.check_integrity()
        return self.kv.sessions_on_disk

    def close(self) -> None:
        """End in order."""
        self.kv.close()
        self.worker.shutdown()

    def _progressed(self) -> None:
        self.progress += 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with as much room on disk as in memory."""
    store = Store(tmp_path)
    yield store
    store.close()


def test_every_durable_entry_is_saved(store: Store) -> None:
    """Others are not; prefixes are saved but not counted; a second save has nothing to do."""
    for number in range(5):
        store.park(f"s{number}", number)
    store.park("private", 9, durable=False)
    store.park("prefix-a", 10)
    assert store.save() == 5
    assert store.progress > 0
    files = {path: path.stat().st_mtime_ns for path in (store.path / "disk").iterdir()}
    assert len(files) == 6
    assert store.save() == 5
    assert files == {path: path.stat().st_mtime_ns for path in (store.path / "disk").iterdir()}


def test_most_recent_entries_are_saved_on_a_small_disk(tmp_path: Path) -> None:
    """The oldest are skipped, and no newer one is evicted for them."""
    store = Store(tmp_path, ram_pages=6, disk_pages=3)
    for number in range(6):
        store.park(f"s{number}", number)
    assert store.kv.load("s0", (0).to_bytes(4, "little"), lambda _: True)
    assert store.save() == 3
    store.close()
    following = Store(tmp_path, ram_pages=0, disk_pages=3)
    found = [number for number in range(6) if following.kv.find("client", [number]) is not None]
    following.close()
    assert found == [0, 4, 5]


def test_saving_without_a_ram_tier(tmp_path: Path) -> None:
    """More entries than may be pending at once: the next ones are accepted when the first are written."""
    store = Store(tmp_path, ram_pages=0)
    parked = 0
    for number in range(12):
        if not store.park(f"s{number}", number):
            store.save()
            assert store.park(f"s{number}", number)
        parked += 1
    assert store.save() == parked == 12
    store.close()


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS])
def test_failing_disk_is_logged_once(store: Store, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """No entry is reported as saved, and the RAM tier is unchanged."""

    def fail(path: Path, data: memoryview) -> None:
        raise OSError(fault, "planned", str(path))

    monkeypatch.setattr(disk, "_write", fail)
    for number in range(5):
        store.park(f"s{number}", number)
    assert store.save() == 0
    assert store.kv.usage.sessions == 5
    assert len(store.log) == 1
    assert list((store.path / "disk").iterdir()) == []


def test_missing_directory_is_recreated(store: Store) -> None:
    """Closing the store loses no saved entry."""
    store.park("s", 1)
    (store.path / "disk").rmdir()
    assert store.save() == 1


def test_known_sessions_are_kept(store: Store) -> None:
    """They are kept with their clients' public prefixes; all others are deleted from RAM and disk."""
    for number, (key, scope) in enumerate(
        [("a1", "a"), ("a2", "a"), ("b1", "b"), ("prefix-a", "a"), ("prefix-b", "b"), ("prefix-public", "")]
    ):
        store.park(key, number, scope=scope)
    store.save()
    store.kv.keep(("a2", "unknown"))
    store.save()
    assert {entry.key for entry in store.kv._tiers.index} == {"a2", "prefix-a", "prefix-public"}
    assert len(list((store.path / "disk").iterdir())) == 3
    store.kv.keep(())
    store.save()
    assert {entry.key for entry in store.kv._tiers.index} == {"prefix-public"}


def test_entry_with_other_tokens_is_not_loaded(bench: Bench) -> None:
    """A load that expects other tokens under the key gets nothing, and the entry stays."""
    bench.park("s", [1, 2, 3])
    never = pytest.fail
    for tokens in ([1, 2], [1, 2, 3, 4], [3, 2, 1], []):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        assert not bench.store.load("s", packed, lambda _: never("it was read"))
    assert bench.load("s") is not None
    assert bench.log == []
