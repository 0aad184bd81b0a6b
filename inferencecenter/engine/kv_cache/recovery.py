"""Recovers the parked sequences of an earlier engine from the two directories."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache.index import KvEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inferencecenter.engine.kv_cache.disk import DiskTier
    from inferencecenter.engine.kv_cache.ram import Mapping, RamTier
    from inferencecenter.engine.kv_cache.record import Record


class RecoveryMode(StrEnum):
    """What a new engine recovers: nothing, durable sequences, or everything."""

    NONE = "none"
    DURABLE = "durable"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class RecoveredSequence:
    """A recovered sequence: mapped, on disk, or both. Its payload is not verified yet."""

    entry: KvEntry
    mapping: Mapping | None
    on_disk: bool


def clear(tiers: Iterable[RamTier | DiskTier], on_log: Callable[[str, str], None]) -> None:
    """Delete all files of an earlier engine."""
    for tier in tiers:
        try:
            tier.clear()
        except OSError as error:
            on_log("warning", f"parked KV of an earlier engine cannot be deleted: {error}")


def recover(
    ram: RamTier | None, disk: DiskTier | None, on_log: Callable[[str, str], None], *, durable_only: bool
) -> list[RecoveredSequence]:
    """Return the usable sequences of an earlier engine, oldest first; delete the other files.

    Of several versions of a sequence only the newest is used. With ``durable_only`` sequences that must not be on disk
    are deleted. A sequence that was being restored when the engine ended is deleted from both tiers: it could crash
    this engine too.
    """
    faults: list[str] = []
    try:
        mapped = {} if ram is None else _last_versions(*ram.adopt(), faults)
        on_disk = {} if disk is None else _by_key(*disk.adopt(), faults)
    except OSError as error:
        on_log("warning", f"parked KV of an earlier engine cannot be read: {error}")
        return []
    if faults:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in Counter(faults).most_common())
        on_log("warning", f"parked KV of an earlier engine is dropped: {reasons}")
    recovered: list[RecoveredSequence] = []
    for key in mapped.keys() | on_disk.keys():
        mapping, in_ram = mapped.get(key, (None, None))
        copy = on_disk.get(key)
        if copy is not None and disk is not None and in_ram is not None and copy != in_ram:
            disk.delete(key)
            copy = None
        record = in_ram or copy
        assert record is not None
        if record.suspect:
            on_log("warning", f"parked KV of {key} is dropped: an engine ended while it was restored")
        if record.suspect or (durable_only and not record.durable):
            _discard(key, mapping, disk if copy is not None else None)
            continue
        recovered.append(RecoveredSequence(_entry(record), mapping, copy is not None))
    return sorted(recovered, key=lambda each: each.entry.stamp)


def _discard(key: str, mapping: Mapping | None, disk: DiskTier | None) -> None:
    if mapping is not None:
        mapping.discard()
    if disk is not None:
        disk.delete(key)


def _last_versions(
    left: list[tuple[Mapping, Record]], bad: list[str], faults: list[str]
) -> dict[str, tuple[Mapping, Record]]:
    faults += bad
    last: dict[str, tuple[Mapping, Record]] = {}
    for mapping, record in sorted(left, key=lambda each: each[1].stamp):
        older = last.get(record.key)
        if older is not None:
            older[0].discard()
        last[record.key] = (mapping, record)
    return last


def _by_key(left: list[Record], bad: list[str], faults: list[str]) -> dict[str, Record]:
    faults += bad
    return {record.key: record for record in left}


def _entry(record: Record) -> KvEntry:
    return KvEntry(
        key=record.key,
        scope=record.scope,
        tokens=record.tokens,
        durable=record.durable,
        stamp=record.stamp,
        payload_start=record.header_bytes,
        payload_bytes=record.payload_bytes,
        verified=False,
    )
