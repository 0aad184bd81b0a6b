"""The GGUF reader, with the ``gguf`` package as the reference."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencecenter.config.settings import bundled_model
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware import gguf as own
from inferencecenter.hardware.gguf import BLOCKS, Array, read_gguf, read_summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.header import HeaderName

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def text(value: str) -> bytes:
    """Return a string in GGUF's encoding."""
    return U64.pack(len(value.encode())) + value.encode()


def header(*, tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    """Return the first bytes of a file."""
    return b"GGUF" + U32.pack(version) + U64.pack(tensors) + U64.pack(entries)


def refused(path: Path, content: bytes | None = None) -> str:
    """Return why the file is refused."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InferenceCenterError) as caught:
        read_gguf(path)
    assert caught.value.code is ErrorCode.INVALID_MODEL_FILE
    assert caught.value.hint
    return caught.value.message


def test_demo_model_is_read_like_the_reference() -> None:
    """Compares every tensor's shape, type and size, and all metadata but long arrays."""
    file, reference = read_gguf(bundled_model()), gguf.GGUFReader(bundled_model())
    assert [(each.name, each.shape, each.type, each.bytes) for each in file.tensors] == [
        (each.name, tuple(int(size) for size in each.shape), int(each.tensor_type), int(each.n_bytes))
        for each in reference.tensors
    ]
    for name, field in reference.fields.items():
        if not name.startswith("GGUF."):
            expected, found = field.contents(), file.metadata[name]
            if isinstance(expected, list):
                assert isinstance(found, Array)
                assert found.count == len(expected)
            else:
                assert found == expected


def test_type_sizes_equal_the_reference() -> None:
    """A type that llama.cpp adds fails here when the reference is updated."""
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert dict(BLOCKS) == reference


class ReadCounter:
    """Counts bytes read from files, and values decoded from a header."""

    def __init__(self) -> None:
        self.n_bytes = self.n_pieces = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> ReadCounter:
    """Count from now on."""
    counted = ReadCounter()
    read_to, take = own._Header._read_to, own._Header._read_bytes

    def counted_read_to(header: own._Header, end: int) -> None:
        before = len(header._data)
        read_to(header, end)
        counted.n_bytes += len(header._data) - before

    def counted_take(header: own._Header, n_bytes: int) -> bytes:
        counted.n_pieces += 1
        return take(header, n_bytes)

    monkeypatch.setattr(own._Header, "_read_to", counted_read_to)
    monkeypatch.setattr(own._Header, "_read_bytes", counted_take)
    return counted


def test_large_vocabulary_is_skipped(header_of: Callable[[HeaderName], Path], reads: ReadCounter) -> None:
    """The work depends on entries and tensors, not on the 152,064 tokens."""
    file = read_gguf(header_of("qwen2.5-7b"))
    assert file.metadata["tokenizer.ggml.tokens"] == Array(152_064)
    assert reads.n_pieces <= 12 * (len(file.metadata) + len(file.tensors))


def test_summary_stops_before_the_vocabulary(header_of: Callable[[HeaderName], Path], reads: ReadCounter) -> None:
    """Architecture and name cost a read of 32 KiB."""
    path = header_of("qwen2.5-7b")
    found = read_summary(path)
    assert reads.n_bytes == 2**15
    whole = read_gguf(path).metadata
    assert found["general.architecture"] == "qwen2"
    assert not any(name.startswith("tokenizer.") for name in found)
    assert found == {name: whole[name] for name in found}


def _sparse(path: Path, content: bytes) -> Path:
    """Write a sparse file of 16 GiB."""
    with path.open("wb") as file:
        file.write(content)
        file.truncate(2**34)
    return path


@pytest.mark.parametrize(
    "claim",
    [
        U32.pack(9) + U32.pack(0) + U64.pack(2**33),
        U32.pack(9) + U32.pack(8) + U64.pack(2**30),
        U32.pack(9) + U32.pack(9) + U64.pack(2**29),
        U32.pack(9) + U32.pack(8) + U64.pack(2) + U64.pack(2**32),
        U32.pack(8) + U64.pack(2**32),
    ],
    ids=["numbers", "strings", "arrays", "a-long-string", "a-text"],
)
def test_header_size_is_bounded(tmp_path: Path, reads: ReadCounter, claim: bytes) -> None:
    """A header has a limit, however long the file is."""
    message = refused(_sparse(tmp_path / "huge.gguf", header(entries=1) + text("key") + claim))
    assert "has a header of more than 134217728 bytes" in message or "a text of 4294967296 bytes" in message
    assert reads.n_bytes <= 2 * own._CHUNK_BYTES


def test_nested_arrays_are_limited(tmp_path: Path) -> None:
    """Nested arrays count against a limit, in one array or in several."""
    array = U32.pack(9) + U32.pack(9) + U64.pack(40_000) + (U32.pack(0) + U64.pack(0)) * 40_000
    content = header(entries=2) + text("a") + array + text("b") + array
    assert "more than 65536 arrays inside arrays" in refused(tmp_path / "nested.gguf", content)


def test_stored_numbers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further arrays are only counted."""
    monkeypatch.setattr(own, "_MAX_KEPT", 5)
    array = U32.pack(9) + U32.pack(0) + U64.pack(3) + bytes(3)
    path = tmp_path / "many.gguf"
    path.write_bytes(header(entries=2) + text("a") + array + text("b") + array)
    assert read_gguf(path).metadata == {"a": Array(3, (0, 0, 0)), "b": Array(3)}


@pytest.mark.parametrize("raised", [RecursionError(), MemoryError(), ValueError("x" * 5000), OverflowError("\ud800\n")])
def test_any_exception_becomes_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    """One line names the file; a summary returns what it knows."""

    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(own._Header, "_read_bytes", fail)
    message = refused(tmp_path / "strange.gguf", b"GGUF")
    assert f"cannot be parsed: {type(raised).__name__}" in message
    assert len(message) < 500
    assert message.isprintable()
    assert read_summary(tmp_path / "strange.gguf") == {}


def test_error_shortens_long_names(tmp_path: Path) -> None:
    """A log line stays short."""
    tensor = text("t" * 60_000) + U32.pack(9)
    assert len(refused(tmp_path / "long.gguf", header(tensors=1) + tensor)) < 500


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"GGUF", header(entries=1, version=9), header(entries=2**40)])
def test_summary_of_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    """It returns nothing and raises nothing; loading reports the error."""
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    assert read_summary(path) == {}
    assert read_summary(tmp_path / "missing.gguf") == {}


def test_summary_of_a_truncated_file(tmp_path: Path) -> None:
    """Entries before the cut are returned; an array over the rest of a huge file is not searched."""
    path = tmp_path / "file.gguf"
    one = text("general.type") + U32.pack(8) + text("adapter")
    path.write_bytes(header(entries=2) + one + text("general.name") + U32.pack(8) + U64.pack(50) + b"A")
    assert read_summary(path) == {"general.type": "adapter"}
    with path.open("wb") as file:
        file.write(header(entries=2) + one + text("a.weights") + U32.pack(9) + U32.pack(0) + U64.pack(2**33))
        file.truncate(2**34)
    assert read_summary(path) == {"general.type": "adapter"}


def test_every_value_type(tmp_path: Path) -> None:
    """Version 2 is read like version 3; short arrays of numbers are kept, others counted."""
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 65_535)
    writer.add_int16("a.i16", -300)
    writer.add_int32("a.i32", -70_000)
    writer.add_float32("a.f32", 0.5)
    writer.add_uint64("a.u64", 2**40)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.25)
    writer.add_bool("a.yes", val=True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.texts", ["one", "two"])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_array("a.long", list(range(5000)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected: dict[str, Any] = {
        "a.u8": 200,
        "a.i8": -5,
        "a.u16": 65_535,
        "a.i16": -300,
        "a.i32": -70_000,
        "a.f32": 0.5,
        "a.u64": 2**40,
        "a.i64": -(2**40),
        "a.f64": 0.25,
        "a.yes": True,
        "a.text": "grüße",
        "a.numbers": Array(3, (1, 2, 3)),
        "a.texts": Array(2),
        "a.nested": Array(2),
        "a.long": Array(5000),
    }
    found = read_gguf(path)
    assert {name: found.metadata[name] for name in expected} == expected
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert read_gguf(path).metadata == found.metadata
    assert read_gguf(path).version == 2


def test_values_across_read_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings, arrays and names may cross the ends of blocks."""
    whole = read_gguf(bundled_model())
    for size in (24, 61, 1000):
        monkeypatch.setattr(own, "_CHUNK_BYTES", size)
        pieces = read_gguf(bundled_model())
        assert (pieces.metadata, pieces.tensors) == (whole.metadata, whole.tensors)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is truncated"),
        (b"GG", "is truncated"),
        (b"PK\x03\x04 and so on", "starts with b'PK"),
        (header(version=1), "is GGUF version 1"),
        (header(version=1 << 24), "big-endian"),
        (b"GGUF" + U32.pack(3), "is truncated"),
        (header(tensors=2**60), "claims 1152921504606846976 tensors"),
        (header(entries=2**33), "claims 8589934592 metadata entries"),
        (header(entries=1), "is truncated"),
        (header(entries=1) + U64.pack(2**50), "a text of 1125899906842624 bytes"),
        (header(entries=1) + text("key") + U32.pack(13), "type 13"),
        (header(entries=1) + text("key") + U32.pack(9) + U32.pack(8) + U64.pack(2**62), "is truncated"),
        (header(entries=1) + text("key") + U32.pack(9) + U32.pack(4) + U64.pack(2**62), "is truncated"),
        (header(entries=1) + text("key") + U32.pack(9) + U32.pack(8) + U64.pack(1) + U64.pack(2**63), "is truncated"),
        (header(entries=1) + text("key") + U32.pack(9) + (U32.pack(9) + U64.pack(1)) * 9, "arrays inside arrays"),
        (header(entries=1) + text("general.alignment") + U32.pack(4) + U32.pack(0), "general.alignment as 0"),
        (header(tensors=1) + text("t") + U32.pack(9), "9 dimensions"),
        (header(tensors=1) + text("t") + U32.pack(1) + U64.pack(31) + U32.pack(8) + U64.pack(0), "do not fill"),
        (header(tensors=1) + text("t") + U32.pack(2) + U64.pack(2**40) * 2 + U32.pack(0) + U64.pack(0), "do not fill"),
        (header(tensors=1) + text("t") + U32.pack(1) + U64.pack(32) + U32.pack(99) + U64.pack(0), "type 99"),
        (header(tensors=1) + text("t") + U32.pack(1) + U64.pack(32) + U32.pack(0) + U64.pack(0), "'t' ends at byte"),
    ],
)
def test_invalid_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """The error names the file, the defect and a remedy."""
    path = tmp_path / "wrong.gguf"
    message = refused(path, content)
    assert reason in message
    assert str(path) in message


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    """The file may end in the header, in the tensor table or in the weights."""
    content = bundled_model().read_bytes()
    path = tmp_path / "short.gguf"
    for length in (*range(0, 300, 7), 10_000, 30_000, 60_000, len(content) // 2, len(content) - 1):
        assert refused(path, content[:length])


@cache
def _beginning() -> bytes:
    with bundled_model().open("rb") as file:
        return file.read(2**17)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_mutated_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A file with any bytes changed is read or refused, quickly."""
    content = bytearray(_beginning())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(InferenceCenterError):
        read_gguf(path)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    """A missing file and a directory are refused by name."""
    assert "cannot be read" in refused(tmp_path / "missing.gguf")
    assert "cannot be read" in refused(tmp_path)


def _split(folder: Path, *, parts: int, promised: int = 3) -> list[Path]:
    """Write a model in parts of one tensor each."""
    paths = [folder / f"model-{number:05}-of-{parts:05}.gguf" for number in range(1, parts + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", parts)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", promised)
        writer.add_tensor(f"blk.{number}.attn_k.weight", np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_model_is_read_from_its_first_part(tmp_path: Path) -> None:
    """The tensors of all parts are found."""
    paths = _split(tmp_path, parts=3)
    file = read_gguf(paths[0])
    assert file.paths == tuple(paths)
    assert [tensor.name for tensor in file.tensors] == [f"blk.{number}.attn_k.weight" for number in range(3)]


def test_missing_part_is_named(tmp_path: Path) -> None:
    """The error has its expected path."""
    paths = _split(tmp_path, parts=3)
    paths[1].unlink()
    assert f"{paths[1].name} is not beside it" in refused(paths[0])


def test_damaged_part_is_named(tmp_path: Path) -> None:
    """The error has its path."""
    paths = _split(tmp_path, parts=2, promised=2)
    paths[1].write_bytes(paths[1].read_bytes()[:40])
    assert str(paths[1]) in refused(paths[0])


def test_later_part_is_refused(tmp_path: Path) -> None:
    """The error names the first part."""
    paths = _split(tmp_path, parts=3)
    assert "is part 2 of 3" in refused(paths[1])


def test_renamed_part_is_refused(tmp_path: Path) -> None:
    """The others cannot be found then."""
    paths = _split(tmp_path, parts=3)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    assert "-00001-of-00003.gguf" in refused(renamed)


def test_inconsistent_parts_are_refused(tmp_path: Path) -> None:
    """They may belong to two different downloads."""
    paths = _split(tmp_path, parts=2, promised=7)
    assert "states 7 tensors" in refused(paths[0])
