"""Calls during the worker's jobs, and its end."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache.store import KvStore, TierOptions
from inferencecenter.ipc.messages import pack_tokens
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

if TYPE_CHECKING:
    from pathlib import Path


def test_entry_discarded_during_a_copy_leaves_no_file(bench: Bench) -> None:
    """The entry is discarded before, during or after the copy, and cannot be found afterwards."""
    for jobs in range(25):
        for number in range(15):
            bench.park(f"s{number}", [number, jobs])
        bench.worker.run(jobs)
        for number in range(15):
            bench.store.forget_session(f"s{number}")
        bench.settle()
        assert bench.disk_files() == []
        assert bench.store.find("client", [1, jobs]) is None


def test_entry_discarded_during_a_fetch_does_not_return(bench: Bench) -> None:
    """It may or may not have been read already."""
    for read_first in (False, True):
        bench.park("s1", [1, 2])
        for number in range(20):
            bench.park(f"other{number}", [9])
            bench.settle()
        assert bench.ready("s1", [1]) is False
        bench.store.fetch("s1")
        if read_first:
            bench.worker.run()
        bench.store.forget_session("s1")
        bench.settle()
        assert bench.store.find("client", [1, 2]) is None
        assert bench.load("s1") is None
        assert b"s1:" not in b"".join(path.read_bytes() for path in bench.disk_files())
    assert bench.fetched == 2


def test_fetch_can_be_cancelled(bench: Bench) -> None:
    """A fetch that has not started reads nothing, reserves no memory and ends at once; it can be repeated."""
    bench.park("s1", [1, 2])
    for number in range(20):
        bench.park(f"other{number}", [9])
        bench.settle()
    ram_bytes = bench.store.usage.ram_bytes
    for number in range(3):
        bench.store.fetch("s1")
        assert bench.store.usage.ram_bytes >= ram_bytes
        bench.store.cancel_fetch("s1")
        bench.store.check_integrity()
        assert bench.fetched == number + 1
        assert bench.ready("s1", [1]) is False
    bench.settle()
    assert bench.ready("s1", [1]) is False
    bench.store.fetch("s1")
    bench.worker.run()
    bench.store.cancel_fetch("s1")
    bench.store.cancel_fetch("nothing")
    assert bench.ready("s1", [1]) is True
    assert bench.load("s1") is not None


def test_entry_offloaded_during_a_fetch_stays(bench: Bench) -> None:
    """The new version replaces the one being fetched."""
    bench.park("s1", [1, 2])
    for number in range(20):
        bench.park(f"other{number}", [9])
        bench.settle()
    bench.store.fetch("s1")
    assert bench.park("s1", [1, 2, 3])
    bench.settle()
    assert bench.load("s1") == payload_of("s1", [1, 2, 3], 3000)


def test_copy_of_reused_memory_is_discarded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory was given to another entry during the copy."""
    write = os.write
    written: list[bytes] = []

    def overwriting(descriptor: int, data: memoryview) -> int:
        if not written:
            bench.park("s0", [0, 0])
        written.append(bytes(data))
        return write(descriptor, data)

    for number in range(12):
        bench.park(f"s{number}", [number])
    monkeypatch.setattr(os, "write", overwriting)
    bench.settle()
    assert b"s0:0,0;" in written[0]
    assert len(written) > 1
    assert not any(b"s0:" in path.read_bytes() for path in bench.disk_files())
    assert bench.load("s0") == payload_of("s0", [0, 0], 3000)
    assert bench.log == []


def test_failed_save_during_a_copy_drops_entry_and_copy(bench: Bench) -> None:
    """The memory to be copied was overwritten."""
    for number in range(11):
        bench.park(f"s{number}", [number])
    assert not bench.store.park("s0", scope="client", tokens=[0, 0], size_bytes=50, write=lambda _: 0, durable=True)
    bench.store.check_integrity()
    assert bench.store.find("client", [0]) is None
    bench.settle()
    assert bench.store.find("client", [0]) is None
    assert not any(b"s0:" in path.read_bytes() for path in bench.disk_files())


def test_fetch_of_a_missing_entry_ends_at_once(bench: Bench) -> None:
    """So does one of an entry in RAM; one that is already being fetched ends with that fetch."""
    bench.store.fetch("unknown")
    bench.park("s1", [1])
    bench.store.fetch("s1")
    bench.settle()
    assert bench.fetched == 2


def test_close_waits_for_the_worker(tmp_path: Path) -> None:
    """Closing completes the running job and skips copies that have not started; the store is disabled afterwards."""
    worker = ThreadPoolExecutor(1)
    gate = threading.Event()
    store = KvStore(
        fingerprint="model",
        bytes_per_token=4,
        ram=TierOptions(tmp_path / "ram", 20 * PAGE_BYTES),
        disk=TierOptions(tmp_path / "disk", 100 * PAGE_BYTES),
        client_share=1.0,
        worker=worker,
        on_fetched=gate.set,
        on_log=lambda level, line: pytest.fail(f"{level}: {line}"),
    )
    worker.submit(gate.wait)
    for number in range(20):
        assert store.park(f"s{number}", scope="c", tokens=[number], size_bytes=10, write=lambda _: 10, durable=True)
    threading.Timer(0.05, gate.set).start()
    store.close()
    store.close()
    worker.shutdown()
    assert list((tmp_path / "disk").iterdir()) == []
    assert len(list((tmp_path / "ram").iterdir())) == 20
    assert store.find("c", [1]) is None
    assert not store.fits(1)
    assert not store.park("s", scope="c", tokens=[1], size_bytes=1, write=lambda _: 1, durable=True)
    assert not store.load("s1", pack_tokens([1]), lambda _: True)


def test_store_without_its_worker_drops_jobs(tmp_path: Path) -> None:
    """It does not raise."""
    worker = ThreadPoolExecutor(1)
    worker.shutdown()
    fetched: list[int] = []
    store = KvStore(
        fingerprint="model",
        bytes_per_token=4,
        ram=TierOptions(tmp_path / "ram", 20 * PAGE_BYTES),
        disk=TierOptions(tmp_path / "disk", 100 * PAGE_BYTES),
        worker=worker,
        on_fetched=lambda: fetched.append(1),
        on_log=lambda level, line: pytest.fail(f"{level}: {line}"),
    )
    for number in range(30):
        store.park(f"s{number}", scope="c", tokens=[number], size_bytes=10, write=lambda _: 10, durable=True)
    store.fetch("s1")
    store.forget("s29")
    store.check_integrity()
    store.close()
    assert fetched == [1]


def test_store_works_with_a_real_worker_thread(tmp_path: Path) -> None:
    """The same guarantees hold while the worker runs concurrently."""
    lots = random.Random(1)
    parked: dict[str, tuple[list[int], int]] = {}
    log: list[tuple[str, str]] = []
    with ThreadPoolExecutor(1) as worker:
        bench = Bench(tmp_path / "unused", ram_bytes=0, disk_bytes=0)
        bench.store = KvStore(
            fingerprint="model",
            bytes_per_token=4,
            ram=TierOptions(tmp_path / "ram", 60 * PAGE_BYTES),
            disk=TierOptions(tmp_path / "disk", 200 * PAGE_BYTES),
            client_share=1.0,
            worker=worker,
            on_fetched=lambda: None,
            on_log=lambda level, line: log.append((level, line)),
        )
        for step in range(2000):
            key = f"s{lots.randrange(25)}"
            action = lots.choice(["park", "park", "load", "load", "fetch", "forget"])
            if action == "park":
                n_bytes = lots.randrange(1, 8 * PAGE_BYTES)
                if bench.park(key, [step, 1], n_bytes=n_bytes):
                    parked[key] = ([step, 1], n_bytes)
            elif action == "load":
                payload = bench.load(key)
                assert payload is None or payload == payload_of(key, *parked[key])
            elif action == "fetch":
                bench.store.fetch(key)
            else:
                bench.store.forget(key)
                parked.pop(key, None)
            bench.store.check_integrity()
        bench.store.close()
    assert log == []
    sizes = [sum(path.stat().st_size for path in (tmp_path / tier).iterdir()) for tier in ("ram", "disk")]
    # Which tier holds an entry in the end depends on the worker's pace.
    assert sum(sizes) > 0
    assert sizes[0] <= 60 * PAGE_BYTES
    assert sizes[1] <= 200 * PAGE_BYTES
