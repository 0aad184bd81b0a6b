"""Finding the best offloaded entry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.kv_cache.index import PUBLIC, KvEntry, KvIndex, TierLimits, TierState
from inferencecenter.ipc.messages import pack_tokens

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
# Token ids that differ in one byte only: a comparison of bytes must not match part of a token.
WIDE = st.lists(st.sampled_from([1, 257, 65537, 1 + 2**24]), min_size=1, max_size=6)


def catalogue_of(entries: list[tuple[str, list[int], bool]], *, can_truncate: bool = True) -> KvIndex:
    """Return an index of entries of a scope, each in RAM or on disk."""
    index = KvIndex(ram=TierLimits(10_000), disk=TierLimits(10_000), can_truncate=can_truncate)
    for number, (scope, tokens, ready) in enumerate(entries):
        entry = KvEntry(str(number), scope, pack_tokens(tokens), True, number, 64, 10)
        index.add(entry)
        entry.ram, entry.disk = (
            (TierState.RESIDENT, TierState.ABSENT) if ready else (TierState.ABSENT, TierState.RESIDENT)
        )
        (index.ram if ready else index.disk).put(entry, scope, 10)
    index.check_integrity()
    return index


def common(a: list[int], b: list[int]) -> int:
    """Count equal tokens at the beginning."""
    pairs = list(zip(a, b, strict=False))
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))


@given(
    entries=st.lists(st.tuples(st.sampled_from([PUBLIC, "a", "b"]), TOKENS | WIDE, st.booleans()), max_size=12),
    scope=st.sampled_from([PUBLIC, "a", "b", "unknown"]),
    wanted=TOKENS | WIDE,
    can_truncate=st.booleans(),
)
def test_find_returns_the_longest_prefix(
    entries: list[tuple[str, list[int], bool]], scope: str, wanted: list[int], *, can_truncate: bool
) -> None:
    """The longest match wins, then RAM over disk, then the shorter entry; entries of other scopes are invisible."""
    match = catalogue_of(entries, can_truncate=can_truncate).find(scope, wanted)
    usable = [
        (common(tokens, wanted), ready, -len(tokens), number)
        for number, (owner, tokens, ready) in enumerate(entries)
        if owner in {scope, PUBLIC} and common(tokens, wanted) >= (1 if can_truncate else len(tokens))
    ]
    if not usable:
        assert match is None
        return
    shared, ready, length, number = max(usable)
    assert match is not None
    assert (match.key, match.common_tokens, match.n_tokens, match.ready) == (str(number), shared, -length, ready)


def test_removed_entries_are_not_found() -> None:
    """A removed entry is no longer in its scope's index either."""
    index = catalogue_of([("a", [1, 2], True)])
    entry = index.get("0")
    assert entry is not None
    index.remove(entry)
    index.ram.drop(entry)
    assert index.find("a", [1, 2]) is None
    assert len(index) == 0
    index.check_integrity()


def test_copy_evicts_only_older_entries() -> None:
    """Entries that evict each other in turn do not wear out the disk."""
    index = KvIndex(ram=TierLimits(100), disk=TierLimits(74), can_truncate=True)
    entries = [KvEntry(str(number), "a", pack_tokens([1]), True, number, 64, 10) for number in range(3)]
    for entry in entries:
        index.add(entry)
        index.ram.put(entry, "a", 10)
        entry.ram = TierState.RESIDENT
    oldest, middle, newest = entries
    index.disk.put(middle, "a", 74)
    middle.disk = TierState.RESIDENT
    assert index.room_on_disk(oldest) is None
    assert index.room_on_disk(newest) == (middle,)
    middle.disk = TierState.LOADING
    assert index.room_on_disk(newest) is None
    middle.disk, middle.ram = TierState.RESIDENT, TierState.LOADING
    assert index.room_on_disk(newest) is None


def test_copyable_entries_leave_ram_last() -> None:
    """Entries with a copy are evicted first, those being copied are kept, and of the rest the oldest is evicted."""
    index = KvIndex(ram=TierLimits(40), disk=TierLimits(1000), can_truncate=True)
    places = [TierState.ABSENT, TierState.LOADING, TierState.ABSENT, TierState.RESIDENT]
    entries = [KvEntry(str(number), "a", pack_tokens([1]), True, number, 64, 10) for number in range(4)]
    for entry, place in zip(entries, places, strict=True):
        index.add(entry)
        index.ram.put(entry, "a", 10)
        entry.ram, entry.disk = TierState.RESIDENT, place
    first, copying, third, copied = entries
    assert index.room_in_ram("a", 10, without=None, keep=()) == (copied,)
    assert index.room_in_ram("a", 30, without=None, keep=()) == (copied, first, third)
    assert index.room_in_ram("a", 30, without=copying, keep=()) == (copied, first)
    assert index.room_in_ram("a", 40, without=None, keep=()) is None
    assert index.to_copy(20) == [first]
    assert index.to_copy(40) == [first, third]
