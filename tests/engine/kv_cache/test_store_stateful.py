"""Any sequence of calls, worker steps, faults and crashes returns correct bytes within the budgets."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from inferencecenter.engine.kv_cache import disk
from inferencecenter.engine.kv_cache.index import TierState
from inferencecenter.engine.kv_cache.record import decode, digest
from inferencecenter.engine.kv_cache.recovery import RecoveryMode
from tests.engine.kv_cache.harness import PAGE_BYTES, Bench, payload_of

# A session belongs to one client; prefixes have keys of their own.
SCOPES = {"s1": "a", "s2": "a", "s3": "b", "s4": "b", "prefix-1": "", "prefix-2": "a"}
KEYS = st.sampled_from(sorted(SCOPES))
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class StoreMachine(RuleBasedStateMachine):
    """Compares a store with the latest entries, and its index with its directories."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.parked: dict[str, tuple[list[int], int]] = {}
        self.disk_works = True

    @initialize(
        ram_pages=st.sampled_from([0, 1, 4, 7]),
        disk_pages=st.sampled_from([0, 1, 5, 12]),
        share=st.sampled_from([0.4, 0.7, 1.0]),
        can_truncate=st.booleans(),
    )
    def start(self, ram_pages: int, disk_pages: int, share: float, *, can_truncate: bool) -> None:
        """Begin with empty directories."""
        self.bench = Bench(
            self.path,
            ram_bytes=ram_pages * PAGE_BYTES,
            disk_bytes=disk_pages * PAGE_BYTES,
            client_share=share,
            can_truncate=can_truncate,
        )

    @rule(
        key=KEYS,
        tokens=TOKENS,
        n_bytes=st.sampled_from([1, 500, 3900, 5000, 9000]),
        durable=st.booleans(),
        keep=st.sets(KEYS, max_size=2),
    )
    def park(self, key: str, tokens: list[int], n_bytes: int, *, durable: bool, keep: set[str]) -> None:
        """Offload an entry: retained entries are unchanged, and the entry is in RAM."""
        kept = [other for other in keep - {key} if self.bench.load(other) is not None]
        before = self.parked.get(key)
        if self.bench.park(key, tokens, scope=SCOPES[key], n_bytes=n_bytes, durable=durable, keep=sorted(keep)):
            payload = self.bench.load(key)
            assert payload is not None
            assert payload == payload_of(key, tokens, len(payload))
            assert len(payload) == n_bytes or before == (tokens, len(payload))
            self.parked[key] = (tokens, len(payload))
        assert all(self.bench.load(other) is not None for other in kept)

    @rule(key=KEYS, tokens=TOKENS, n_bytes=st.sampled_from([500, 3900, 9000]))
    def copy(self, key: str, tokens: list[int], n_bytes: int) -> None:
        """Offload a spare copy: it needs free memory, and evicts no other entry."""
        index = self.bench.store._tiers.index
        before = {entry.key: (entry.tokens, entry.ram, entry.disk) for entry in index if entry.key != key}
        short = index.ram.allowed_bytes < index.ram.limits.budget_bytes
        same = key in self.parked and self.parked[key][0] == tokens
        if self.bench.park(key, tokens, scope=SCOPES[key], n_bytes=n_bytes, redundant=True):
            assert same or not short
            payload = self.payload_of_new(key, tokens)
            self.parked[key] = (tokens, len(payload))
        after = {entry.key: (entry.tokens, entry.ram, entry.disk) for entry in index if entry.key != key}
        # Only copies to disk may start.
        assert after.keys() == before.keys()
        assert all(after[other][:2] == before[other][:2] for other in before)

    @rule(key=KEYS)
    def load(self, key: str) -> None:
        """Load an entry in RAM."""
        self.payload(key)

    @rule(key=KEYS)
    def fetch(self, key: str) -> None:
        """Fetch an entry from disk."""
        self.bench.store.fetch(key)

    @rule(key=KEYS)
    def cancel_fetch(self, key: str) -> None:
        """Cancel a fetch; existing entries stay."""
        self.bench.store.cancel_fetch(key)

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        """Discard an entry."""
        self.bench.store.forget_session(key)
        self.parked.pop(key, None)
        assert self.bench.load(key) is None

    @rule(pages=st.none() | st.integers(0, 7))
    def limit(self, pages: int | None) -> None:
        """Limit the RAM tier; except for running fetches the limit holds at once."""
        self.bench.store.limit_ram(None if pages is None else pages * PAGE_BYTES)
        index = self.bench.store._tiers.index
        if pages is not None and not any(entry.ram is TierState.LOADING for entry in index.ram):
            assert index.ram.total_bytes + self.bench.store._tiers._ram.warm_bytes <= pages * PAGE_BYTES

    @rule(n_jobs=st.integers(1, 4))
    def work(self, n_jobs: int) -> None:
        """Run some of the worker's jobs."""
        self.run_jobs(n_jobs)

    @rule()
    def settle(self) -> None:
        """Run all jobs; the directories then equal the index, without discarded entries."""
        while len(self.bench.worker):
            self.run_jobs(None)
            self.bench.store.check_integrity()
        sizes = [path.stat().st_size for path in (*self.bench.ram_files(), *self.bench.disk_files())]
        if self.bench.ram_bytes:
            assert self.bench.store.usage.total_bytes == sum(sizes)
            in_ram = [path.stat().st_size for path in self.bench.ram_files()]
            assert self.bench.store.usage.ram_bytes == sum(in_ram)
        assert sum(path.stat().st_size for path in self.bench.ram_files()) <= self.bench.ram_bytes
        for path in self.bench.disk_files():
            record = decode(path.read_bytes(), digest("model"))
            assert record.durable
            assert record.key in self.parked

    @rule(works=st.booleans())
    def break_disk(self, *, works: bool) -> None:
        """Make writes to the disk fail, or work again."""
        self.disk_works = works

    @rule(adopt=st.sampled_from(RecoveryMode), in_order=st.booleans())
    def restart(self, *, adopt: RecoveryMode, in_order: bool) -> None:
        """Close or crash; the next engine finds only earlier entries, perhaps an older version."""
        if in_order:
            self.settle()
            self.bench.store.close()
        self.bench.open(adopt=adopt)
        if adopt is RecoveryMode.NONE:
            assert self.bench.ram_files() == self.bench.disk_files() == []
        elif adopt is RecoveryMode.DURABLE:
            assert all(entry.durable for entry in self.bench.store._tiers.index)
        self.parked = {
            entry.key: (list(memoryview(entry.tokens).cast("i")), entry.payload_bytes)
            for entry in self.bench.store._tiers.index
        }

    @rule(scope=st.sampled_from(["", "a", "b", "c"]), wanted=TOKENS)
    def find(self, scope: str, wanted: list[int]) -> None:
        """A match has the reported length, is visible to the scope, and is the longest."""
        match = self.bench.store.find(scope, wanted)
        index = self.bench.store._tiers.index
        there = {entry.key for entry in index if SCOPES[entry.key] in {scope, ""} and not index._exceeds_allowed(entry)}
        assert there <= self.parked.keys()
        common = {key: self.common(self.parked[key][0], wanted) for key in there}
        if not self.bench.can_truncate:
            common = {key: n if n == len(self.parked[key][0]) else 0 for key, n in common.items()}
        if match is None:
            assert not any(common.values())
            return
        assert match.common_tokens == common[match.key] == max(common.values()) > 0
        assert match.n_tokens == len(self.parked[match.key][0])
        assert match.ready == (self.payload(match.key) is not None)

    @invariant()
    def books_agree(self) -> None:
        """Sums are right, and the disk budget is never exceeded."""
        if not hasattr(self, "bench"):
            return
        self.bench.store.check_integrity()
        assert sum(path.stat().st_size for path in self.bench.disk_files()) <= self.bench.disk_bytes

    def teardown(self) -> None:
        """Everything can be discarded, and no file is left."""
        if hasattr(self, "bench"):
            for key in SCOPES:
                self.bench.store.forget(key)
            self.parked.clear()
            self.settle()
            assert self.bench.disk_files() == []
            assert self.bench.store.usage.sessions == 0
        shutil.rmtree(self.path)

    def run_jobs(self, n_jobs: int | None) -> None:
        """Run jobs with the disk as it is now."""
        error = None if self.disk_works else OSError(28, "full")
        with mock.patch.object(disk, "_write", wraps=disk._write, side_effect=error):
            self.bench.worker.run(n_jobs)

    def payload(self, key: str) -> bytes | None:
        """Load an entry and compare it with what was offloaded."""
        payload = self.bench.load(key)
        if payload is not None:
            tokens, n_bytes = self.parked[key]
            assert payload == payload_of(key, tokens, n_bytes)
        return payload

    def payload_of_new(self, key: str, tokens: list[int]) -> bytes:
        """Load an entry that was just offloaded."""
        payload = self.bench.load(key)
        assert payload is not None
        assert payload == payload_of(key, tokens, len(payload))
        return payload

    @staticmethod
    def common(a: list[int], b: list[int]) -> int:
        """Count equal tokens at the beginning."""
        pairs = list(zip(a, b, strict=False))
        return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))


@pytest.mark.parametrize("n_sequences", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_any_sequence_of_offloads(n_sequences: int) -> None:
    """Entries are returned unchanged or not at all."""
    limits = settings(max_examples=n_sequences, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(StoreMachine, settings=limits)
