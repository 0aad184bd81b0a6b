"""Mapped memory that is reused, and the files that are written from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inferencecenter.engine.kv_cache.disk import DiskTier, ExpectedSequence, seal
from inferencecenter.engine.kv_cache.ram import Mapping, RamTier, is_sound
from inferencecenter.engine.kv_cache.record import Record, RecordError, digest
from inferencecenter.ipc.messages import pack_tokens
from tests.engine.kv_cache.harness import PAGE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

MODEL = digest("model")
RECORD = Record("key", "scope", pack_tokens([1, 2]), True, 1, 100, 0)
N_BYTES = RECORD.header_bytes + RECORD.payload_bytes


@pytest.fixture
def mapping(tmp_path: Path) -> Mapping:
    """One page of a file."""
    return Mapping.create(tmp_path / "file", PAGE_BYTES)


def fill(mapping: Mapping) -> int:
    """Write a payload and return its generation."""
    generation = mapping.begin()
    with mapping.view(RECORD.header_bytes, RECORD.payload_bytes) as payload:
        payload[:] = b"x" * RECORD.payload_bytes
    return generation


def test_seal_lasts_until_the_next_content(mapping: Mapping) -> None:
    """A sealed mapping is sound until its next content begins."""
    generation = fill(mapping)
    assert not is_sound(mapping, generation, MODEL)
    seal(mapping, generation, RECORD, MODEL)
    assert is_sound(mapping, generation, MODEL)
    assert not is_sound(mapping, generation, digest("other"))
    later = mapping.begin()
    assert not is_sound(mapping, generation, MODEL)
    assert not is_sound(mapping, later, MODEL)


def test_late_seal_is_ignored(mapping: Mapping) -> None:
    """A seal for an earlier content does not mark the next one as sound."""
    generation = fill(mapping)
    later = fill(mapping)
    assert not mapping.seal(bytes(64), generation)
    seal(mapping, generation, RECORD, MODEL)
    assert not is_sound(mapping, later, MODEL)
    with mapping.reading(generation) as data:
        assert data is None


def test_resize_keeps_the_content(mapping: Mapping, tmp_path: Path) -> None:
    """Content survives growing and shrinking; the file is as long as the mapping."""
    fill(mapping)
    for pages in (5, 2):
        assert mapping.resize(pages * PAGE_BYTES)
        assert mapping.capacity_bytes == (tmp_path / "file").stat().st_size == pages * PAGE_BYTES
        with mapping.view(RECORD.header_bytes, 3, readonly=True) as payload:
            assert bytes(payload) == b"xxx"


def test_mapping_with_readers_is_not_resized(mapping: Mapping, tmp_path: Path) -> None:
    """Memory with a reader is not moved, and its file keeps its size."""
    generation = mapping.begin()
    with mapping.reading(generation) as data:
        assert data is not None
        assert not mapping.resize(5 * PAGE_BYTES)
        assert not mapping.resize(PAGE_BYTES // 2)
    assert mapping.capacity_bytes == (tmp_path / "file").stat().st_size == PAGE_BYTES


def test_mapping_without_its_file_cannot_grow(mapping: Mapping, tmp_path: Path) -> None:
    """A mapping whose file was deleted stays usable."""
    (tmp_path / "file").unlink()
    assert not mapping.resize(5 * PAGE_BYTES)
    generation = fill(mapping)
    seal(mapping, generation, RECORD, MODEL)
    assert is_sound(mapping, generation, MODEL)


def test_anonymous_memory_grows() -> None:
    """Anonymous memory works wherever a file's mapping does."""
    mapping = Mapping.anonymous(PAGE_BYTES)
    assert mapping.resize(3 * PAGE_BYTES)
    with mapping.view(0, 3 * PAGE_BYTES) as data:
        data[-1] = 7
    mapping.discard()


def test_view_of_a_discarded_mapping_stays_valid(mapping: Mapping, tmp_path: Path) -> None:
    """New views are refused."""
    generation = fill(mapping)
    with mapping.reading(generation) as data:
        mapping.discard()
        assert data is not None
        assert data[RECORD.header_bytes] == ord("x")
    assert not (tmp_path / "file").exists()
    with mapping.reading(generation) as data:
        assert data is None


def test_warm_memory_with_readers_is_replaced(tmp_path: Path) -> None:
    """Warm memory that cannot be resized is replaced by new memory, within the budget."""
    tier = RamTier(tmp_path, MODEL)
    mapping = tier.create(2 * PAGE_BYTES)
    assert tier.give_back(mapping) is None
    with mapping.reading(mapping.generation):
        taken = tier.take(3 * PAGE_BYTES, at_most_bytes=4 * PAGE_BYTES, room_bytes=4 * PAGE_BYTES)
    assert taken is not mapping
    assert tier.warm_bytes == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_mapping_can_be_copied(mapping: Mapping, tmp_path: Path) -> None:
    """A sealed mapping is written and read back into another one."""
    disk = DiskTier(tmp_path / "disk", MODEL)
    generation = fill(mapping)
    assert not disk.write("key", mapping, generation, N_BYTES)
    seal(mapping, generation, RECORD, MODEL)
    assert disk.write("key", mapping, generation, N_BYTES)
    again = disk.read(ExpectedSequence("key", "scope", pack_tokens([1, 2])), None, Mapping.anonymous)
    assert is_sound(again, again.generation, MODEL)
    with pytest.raises(RecordError, match="another sequence"):
        disk.read(ExpectedSequence("key", "another scope", pack_tokens([1, 2])), None, Mapping.anonymous)


def test_copy_of_overwritten_memory_is_discarded(
    mapping: Mapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn copy never gets its final name."""
    disk = DiskTier(tmp_path / "disk", MODEL)
    generation = fill(mapping)
    seal(mapping, generation, RECORD, MODEL)
    monkeypatch.setattr("inferencecenter.engine.kv_cache.disk._write", lambda path, _: (path.touch(), mapping.begin()))
    assert not disk.write("key", mapping, generation, N_BYTES)
    assert list((tmp_path / "disk").iterdir()) == []
