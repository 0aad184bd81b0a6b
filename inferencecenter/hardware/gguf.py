"""Reads the header, the metadata and the tensor table of GGUF files (versions 2 and 3), and no weights.

Long arrays are skipped: the two of a vocabulary make up nearly all of a header and are not used here. The file is read,
not mapped, so that truncation by another process is an error and not a signal. Sizes that a file claims are bounded
before they are trusted: a header has at most ``_MAX_HEADER_BYTES``, which limits what is read and kept of it, and
arrays that are traversed or kept element by element have limits for the whole header. The format:
github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import BufferedReader
    from pathlib import Path


# ``ggml_type``: weights per block and bytes per block (ggml-common.h).
BLOCKS: Final[Mapping[int, tuple[int, int]]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 40),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}


_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_CHUNK_BYTES: Final = 2**22
_SUMMARY_BYTES: Final = 2**20
_SUMMARY_CHUNK_BYTES: Final = 2**15
_MAX_TENSORS: Final = 100_000
_MAX_ENTRIES: Final = 100_000
_MAX_NAME_BYTES: Final = 2**16 - 1
_MAX_TEXT_BYTES: Final = 2**24
_MAX_HEADER_BYTES: Final = 2**27
_MAX_DIMENSIONS: Final = 4
_MAX_NESTING: Final = 4
_MAX_NESTED: Final = 2**16
_KEPT_ELEMENTS: Final = 4096
_MAX_KEPT: Final = 2**20
_SHOWN_CHARS: Final = 80
_MAX_ALIGNMENT: Final = 2**20
_DEFAULT_ALIGNMENT: Final = 32
_DOWNLOAD_AGAIN: Final = "Download the file again and compare its size or checksum with the source's."
SHARD: Final = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
"""The stem of a part of a split model."""

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
# ``gguf_metadata_value_type``: those of a fixed size; strings and arrays have none.
_SCALARS: Final = {
    number: struct.Struct(f"<{code}")
    for number, code in enumerate(("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d"))
    if code
}
_STRING, _ARRAY = 8, 9

Scalar: TypeAlias = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata; ``values`` are its numbers if it is short, and empty if it was skipped."""

    count: int
    values: tuple[int | float | bool, ...] = ()


Value: TypeAlias = Scalar | Array


@dataclass(frozen=True, slots=True)
class Tensor:
    """An entry of the tensor table; ``shape`` has the fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    type: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The headers of a model's files: the metadata of the first, and the tensors of all.

    Attributes:
        paths: The file, or all parts of a split one.
    """

    paths: tuple[Path, ...]
    version: int
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: tuple[Tensor, ...] = field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file, or the first part of a split one and the other parts beside it.

    Raises:
        InferenceCenterError: ``invalid_model_file``: which file, what is wrong with it, and where.
    """
    with foreign_input(lambda reason: _refusal(f"{path} cannot be parsed: {reason}.", _DOWNLOAD_AGAIN)):
        return _read(path)


def _read(path: Path) -> GgufFile:
    first = _read_part(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    parts = [first]
    for other in _other_parts(path, first, count):
        if not other.is_file():
            raise _refusal(
                f"{path} is the first of {count} parts, and {other.name} is not beside it.",
                f"Download {other.name} into {other.parent}.",
            )
        parts.append(_read_part(other))
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise _refusal(
            f"{path} states {shown(expected)} tensors; its {count} parts have {len(tensors)}.", _DOWNLOAD_AGAIN
        )
    return GgufFile(tuple(part.paths[0] for part in parts), first.version, first.metadata, tensors)


def read_summary(path: Path) -> dict[str, Value]:
    """Return the metadata before the vocabulary, as far as it is readable; costs a single read."""
    found: dict[str, Value] = {}
    # Any error ends the parsing, as in a damaged file: the metadata before it is returned.
    with suppress(Exception), path.open("rb") as file:
        size_bytes = min(path.stat().st_size, _SUMMARY_BYTES)
        for name, value in _Header(path, file, size_bytes, chunk_bytes=_SUMMARY_CHUNK_BYTES).metadata():
            if name.startswith("tokenizer."):
                break
            found[name] = value
    return found


def _other_parts(path: Path, first: GgufFile, count: int) -> list[Path]:
    named = SHARD.match(path.stem)
    if named is None or int(named["count"]) != count:
        raise _refusal(
            f"{path} is one of {count} parts, but its name does not end with -00001-of-{count:05}.gguf.",
            "Give all parts the names back that they had where they came from.",
        )
    number = first.metadata.get("split.no", 0)
    if number != 0:
        raise _refusal(
            f"{path} is part {int(named['number'])} of {count}.",
            f"Name the first part: {named['stem']}-00001-of-{count:05}.gguf.",
        )
    return [path.with_name(f"{named['stem']}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]


def _read_part(path: Path) -> GgufFile:
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            return _Header(path, file, size_bytes, chunk_bytes=_CHUNK_BYTES).read()
    except OSError as error:
        raise _refusal(f"{path} cannot be read: {error.strerror}.", "Name a readable GGUF file.") from None


class _Header:
    """One pass over the beginning of a file, which reads no more than needed."""

    def __init__(self, path: Path, file: BufferedReader, size_bytes: int, *, chunk_bytes: int) -> None:
        self._path = path
        self._file = file
        self._size_bytes = size_bytes
        self._header_bytes = min(size_bytes, _MAX_HEADER_BYTES)
        self._n_nested = self._n_kept = 0
        self._chunk_bytes = chunk_bytes
        self._version = self._n_tensors = 0
        self._data = b""
        self._position = 0

    def read(self) -> GgufFile:
        metadata = dict(self.metadata())
        table = [self._tensor() for _ in range(self._n_tensors)]
        self._check_data(table, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return GgufFile((self._path,), self._version, metadata, tuple(tensor for tensor, _ in table))

    def metadata(self) -> Iterator[tuple[str, Value]]:
        """Yield the entries in order; the tensor table follows them."""
        magic = self._read_bytes(4)
        if magic != _MAGIC:
            raise self._wrong(f"starts with {magic!r}, not with {_MAGIC!r}", "Give the path of a .gguf file.")
        self._version = self._u32()
        if self._version not in _VERSIONS:
            if self._version & 0xFFFF == 0:
                raise self._wrong("is a big-endian GGUF file", "Get the little-endian one, which is the usual form.")
            raise self._wrong(
                f"is GGUF version {self._version}; versions 2 and 3 can be read",
                "Convert the model again with a current llama.cpp, or download a current file.",
            )
        self._n_tensors = self._count("tensors", _MAX_TENSORS)
        for _ in range(self._count("metadata entries", _MAX_ENTRIES)):
            name = self._text(_MAX_NAME_BYTES)
            yield name, self._value(self._u32())

    def _check_data(self, table: list[tuple[Tensor, int]], alignment: Value) -> None:
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise self._wrong(
                f"states general.alignment as {shown(alignment)}; expected a number from 1 to {_MAX_ALIGNMENT}"
            )
        start = -(-self._position // alignment) * alignment
        for tensor, offset in table:
            end = start + offset + tensor.bytes
            if end > self._size_bytes:
                raise self._wrong(
                    f"is truncated: {shown(tensor.name)} ends at byte {end}, and the file has {self._size_bytes}"
                )

    def _tensor(self) -> tuple[Tensor, int]:
        name = self._text(_MAX_NAME_BYTES)
        n_dimensions = self._u32()
        if n_dimensions > _MAX_DIMENSIONS:
            raise self._wrong(f"gives {shown(name)} {n_dimensions} dimensions; llama.cpp has {_MAX_DIMENSIONS}")
        shape = tuple(self._u64() for _ in range(n_dimensions))
        kind = self._u32()
        if kind not in BLOCKS:
            raise self._wrong(
                f"stores {shown(name)} as type {kind}, which is unknown",
                "A newer type may need a newer InferenceCenter and llama-cpp-python.",
            )
        weights, block_bytes = BLOCKS[kind]
        if not shape or 0 in shape or shape[0] % weights or prod(shape) >= 2**60:
            raise self._wrong(f"gives {shown(name)} the shape {shape}, which blocks of {weights} weights do not fill")
        return Tensor(name, shape, kind, prod(shape) // weights * block_bytes), self._u64()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text(_MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array()
        scalar = self._scalar(kind)
        value: Scalar = scalar.unpack(self._read_bytes(scalar.size))[0]
        return value

    def _array(self, depth: int = 1) -> Array:
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            self._skip_strings(count)
            return Array(count)
        if kind == _ARRAY:
            if depth == _MAX_NESTING:
                raise self._wrong(f"has arrays inside arrays, more than {_MAX_NESTING} deep")
            self._check_count(count, 12)
            self._n_nested += count
            if self._n_nested > _MAX_NESTED:
                raise self._wrong(f"has more than {_MAX_NESTED} arrays inside arrays")
            for _ in range(count):
                self._array(depth + 1)
            return Array(count)
        scalar = self._scalar(kind)
        self._check_count(count, scalar.size)
        if count > _KEPT_ELEMENTS or self._n_kept + count > _MAX_KEPT:
            self._skip(count * scalar.size)
            return Array(count)
        self._n_kept += count
        packed = self._read_bytes(count * scalar.size)
        return Array(count, tuple(value for (value,) in scalar.iter_unpack(packed)))

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise self._wrong(f"has a metadata value of the unknown type {kind}")
        return _SCALARS[kind]

    def _skip_strings(self, count: int) -> None:
        """Skip strings without creating objects: a vocabulary has some hundred thousand."""
        self._check_count(count, _U64.size)
        unpack, limit = _U64.unpack_from, self._header_bytes
        data, position = self._data, self._position
        for _ in repeat(None, count):
            try:
                position += 8 + unpack(data, position)[0]
            except (struct.error, OverflowError):
                # The end of the data read so far, or a length that exceeds the file.
                if position + _U64.size > limit:
                    raise self._truncated() from None
                self._read_to(position + _U64.size)
                data = self._data
                position += 8 + unpack(data, position)[0]
        if position > limit:
            raise self._truncated()
        self._position = position

    def _count(self, what: str, limit: int) -> int:
        count = self._u64()
        if count > limit:
            raise self._wrong(f"claims {count} {what}, more than the limit of {limit}")
        return count

    def _check_count(self, count: int, least_bytes: int) -> None:
        """Refuse an array that is longer than the rest of the header."""
        if count * least_bytes > self._header_bytes - self._position:
            raise self._truncated()

    def _text(self, limit: int) -> str:
        n_bytes = self._u64()
        if n_bytes > limit:
            raise self._wrong(f"has a text of {n_bytes} bytes at byte {self._position}, more than the limit of {limit}")
        return self._read_bytes(n_bytes).decode("utf-8", errors="replace")

    def _u32(self) -> int:
        value: int = _U32.unpack(self._read_bytes(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._read_bytes(8))[0]
        return value

    def _read_bytes(self, n_bytes: int) -> bytes:
        end = self._position + n_bytes
        self._read_to(end)
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _skip(self, n_bytes: int) -> None:
        self._read_to(self._position + n_bytes)
        self._position += n_bytes

    def _read_to(self, end: int) -> None:
        if end <= len(self._data):
            return
        if end > self._header_bytes:
            raise self._truncated()
        # At least doubles what was read: a long header is copied a few times, not once per part.
        self._data += self._file.read(max(end - len(self._data), len(self._data), self._chunk_bytes))
        if end > len(self._data):
            raise self._truncated()

    def _truncated(self) -> InferenceCenterError:
        if self._header_bytes < self._size_bytes:
            return self._wrong(f"has a header of more than {_MAX_HEADER_BYTES} bytes, the limit")
        return self._wrong(f"is truncated: its header does not end within its {self._size_bytes} bytes")

    def _wrong(self, what: str, hint: str = _DOWNLOAD_AGAIN) -> InferenceCenterError:
        return _refusal(f"{self._path} {what}.", hint)


def shown(value: object) -> str:
    """Return a header's value for a message, truncated."""
    text = repr(value.values or f"{value.count} values") if isinstance(value, Array) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _refusal(message: str, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_MODEL_FILE, message, hint=hint, field="model.path")
