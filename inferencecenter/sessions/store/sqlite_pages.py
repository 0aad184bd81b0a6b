"""Reads rows directly from the pages of a SQLite file, without its b-trees. Pure.

SQLite reaches a page through interior pages: if one of those is damaged, all intact pages below it are unreachable.
Here each page is parsed by itself according to https://www.sqlite.org/fileformat2.html: leaves of tables hold rows, as
do all pages of indexes and of tables without row ids; long rows continue in chains of overflow pages. Deleted rows are
not found, since the files are written with ``secure_delete``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from mmap import mmap

Value: TypeAlias = int | float | str | bytes | None

_DEFAULT_PAGE_BYTES: Final = 4096
_MAGIC: Final = b"SQLite format 3\0"
_FIRST_PAGE_HEADER: Final = 100
_TABLE_LEAF: Final = 13
_INDEX_LEAF: Final = 10
_INDEX_INTERIOR: Final = 2
_HEADER_BYTES: Final[Mapping[int, int]] = {_TABLE_LEAF: 8, _INDEX_LEAF: 8, _INDEX_INTERIOR: 12}
_INT_BYTES: Final[Mapping[int, int]] = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_WAL_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_MASK: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A stored row; ``row`` is its row id, ``None`` in indexes and tables without row ids."""

    row: int | None
    values: tuple[Value, ...]


class PageFile:
    """A database file together with the committed transactions of its WAL.

    Args:
        content: The content of the file.
        wal: The content of its WAL; uncommitted and damaged frames are ignored.
    """

    def __init__(self, content: bytes | mmap, wal: bytes = b"") -> None:
        self._content = content
        self._page_bytes = _page_bytes(content)
        self._newer = _pages_in_wal(wal)
        self.n_pages = max(len(content) // self._page_bytes, max(self._newer, default=0))
        self.n_damaged = 0
        """Pages and rows that ``rows`` could not parse."""

    def rows(self) -> Iterator[StoredRow]:
        """Yield every readable row of all tables and indexes."""
        for number in range(1, self.n_pages + 1):
            page = self._page(number)
            start = _FIRST_PAGE_HEADER if number == 1 else 0
            if page[start : start + 1] and page[start] in _HEADER_BYTES:
                yield from self._rows_of(page, start)
            elif not any(page) or page[start] not in (0, 5):
                # A free page is empty too: there are at least as few that are damaged.
                self.n_damaged += 1

    def _rows_of(self, page: bytes, start: int) -> Iterator[StoredRow]:
        kind = page[start]
        (n_cells,) = struct.unpack_from(">H", page, start + 3)
        first = start + _HEADER_BYTES[kind]
        for at in range(first, first + 2 * n_cells, 2):
            try:
                (cell,) = struct.unpack_from(">H", page, at)
                yield self._row_at(page, cell, kind)
            except (ValueError, IndexError, struct.error, OverflowError):
                self.n_damaged += 1

    def _row_at(self, page: bytes, at: int, kind: int) -> StoredRow:
        if kind == _INDEX_INTERIOR:
            at += 4
        n_bytes, at = _varint(page, at)
        row = None
        if kind == _TABLE_LEAF:
            row, at = _varint(page, at)
            row -= (row >> 63) << 64
        return StoredRow(row, _record(self._payload(page, at, n_bytes, is_table=kind == _TABLE_LEAF)))

    def _payload(self, page: bytes, at: int, n_bytes: int, *, is_table: bool) -> bytes:
        """Return a row's bytes, including its overflow pages."""
        usable = self._page_bytes
        least = (usable - 12) * 32 // 255 - 23
        most = usable - 35 if is_table else (usable - 12) * 64 // 255 - 23
        if n_bytes > usable * self.n_pages:
            raise ValueError("longer than the file")
        if n_bytes <= most:
            return _piece(page, at, n_bytes)
        n_here = least + (n_bytes - least) % (usable - 4)
        n_here = n_here if n_here <= most else least
        parts = [_piece(page, at, n_here)]
        (number,) = struct.unpack_from(">I", page, at + n_here)
        left = n_bytes - n_here
        while left > 0:
            if not 1 < number <= self.n_pages:
                raise ValueError("the chain is broken")
            chained = self._page(number)
            if not any(chained):
                raise ValueError("a page of the chain is empty")
            (number,) = struct.unpack_from(">I", chained)
            parts.append(_piece(chained, 4, min(left, usable - 4)))
            left -= usable - 4
        if number:
            raise ValueError("the chain is too long")
        return b"".join(parts)

    def _page(self, number: int) -> bytes:
        if (newer := self._newer.get(number)) is not None:
            return newer
        return self._content[(number - 1) * self._page_bytes : number * self._page_bytes]


def _page_bytes(content: bytes | mmap) -> int:
    if content[: len(_MAGIC)] != _MAGIC:
        return _DEFAULT_PAGE_BYTES
    size = int.from_bytes(content[16:18], "big")
    size = 65_536 if size == 1 else size
    return size if size >= 512 and size & (size - 1) == 0 else _DEFAULT_PAGE_BYTES


def _pages_in_wal(wal: bytes) -> dict[int, bytes]:
    """Return the last committed content of each page in a WAL, by page number."""
    if len(wal) < _WAL_HEADER_BYTES:
        return {}
    magic, _version, page_bytes, _sequence, *salts = struct.unpack_from(">6I", wal)
    if magic & ~1 != 0x377F0682:
        return {}
    order = ">" if magic & 1 else "<"
    sums = _checksum(wal[:24], (0, 0), order)
    committed: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    step = _FRAME_HEADER_BYTES + page_bytes
    for at in range(_WAL_HEADER_BYTES, len(wal) - step + 1, step):
        number, size_after, *frame_salts = struct.unpack_from(">4I", wal, at)
        page = wal[at + _FRAME_HEADER_BYTES : at + step]
        sums = _checksum(wal[at : at + 8] + page, sums, order)
        if frame_salts != salts or struct.unpack_from(">2I", wal, at + 16) != sums:
            break
        pending[number] = page
        if size_after:
            committed |= pending
            pending = {}
    return committed


def _checksum(data: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at an offset, and the offset after it."""
    value = 0
    for index in range(at, at + 8):
        byte = data[index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, index + 1
    return value << 8 | data[at + 8], at + 9


def _piece(data: bytes, at: int, n_bytes: int) -> bytes:
    piece = data[at : at + n_bytes]
    if len(piece) != n_bytes:
        raise ValueError("it is truncated")
    return piece


def _record(payload: bytes) -> tuple[Value, ...]:
    n_header, at = _varint(payload, 0)
    kinds = []
    while at < n_header:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    if at != n_header:
        raise ValueError("the header is truncated")
    values: list[Value] = []
    for kind in kinds:
        value, at = _value(payload, at, kind)
        values.append(value)
    if at != len(payload):
        raise ValueError("trailing bytes after the values")
    return tuple(values)


def _value(payload: bytes, at: int, kind: int) -> tuple[Value, int]:
    if kind == 0:
        return None, at
    if kind in _INT_BYTES:
        end = at + _INT_BYTES[kind]
        return int.from_bytes(_piece(payload, at, end - at), "big", signed=True), end
    if kind == 7:
        return struct.unpack(">d", _piece(payload, at, 8))[0], at + 8
    if kind in (8, 9):
        return kind - 8, at
    if kind < 12:
        raise ValueError("an invalid type of value")
    n_bytes = (kind - 12) // 2
    piece = _piece(payload, at, n_bytes)
    return (piece.decode() if kind % 2 else piece), at + n_bytes
