"""Files of the disk tier, written and read by a worker thread: a file is a copy of a mapping's used part."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from inferencecenter.engine.kv_cache import directory
from inferencecenter.engine.kv_cache.record import (
    START_BYTES,
    Record,
    RecordError,
    announced_bytes,
    decode,
    encode,
)

if TYPE_CHECKING:
    import io
    from collections.abc import Callable
    from pathlib import Path

    from inferencecenter.engine.kv_cache.ram import Mapping

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class ExpectedSequence:
    """The content that a file must have to be used."""

    key: str
    scope: str
    tokens: bytes


class DiskTier:
    """Files of one directory, named after the fingerprint and the key.

    Args:
        path: The directory.
        fingerprint: Digest that sequences are saved under (see ``record.digest``).
    """

    def __init__(self, path: Path, fingerprint: bytes) -> None:
        self._path = path
        self._fingerprint = fingerprint

    def write(self, key: str, mapping: Mapping, generation: int, n_bytes: int) -> bool:
        """Copy the first ``n_bytes`` of a sealed mapping; ``False`` when its content changed meanwhile.

        Raises:
            OSError: There is no room, or no usable directory.
        """
        directory.prepare(self._path)
        path = self._file(key)
        part = path.with_suffix(".part")
        try:
            with mapping.reading(generation) as data:
                if data is None or bytes(data[:START_BYTES]) == bytes(START_BYTES):
                    return False
                _write(part, data[:n_bytes])
            if mapping.generation != generation:  # overwritten during the copy
                return False
            part.replace(path)
        finally:
            directory.delete(part)
        return True

    def read(self, wanted: ExpectedSequence, into: Mapping | None, create: Callable[[int], Mapping]) -> Mapping:
        """Read a file back into a mapping, a new one unless ``into`` is given.

        Raises:
            RecordError: The content is not what was written.
            OSError: It cannot be read, or there is no room for it.
        """
        with self._file(wanted.key).open("rb", buffering=0) as file:
            header = _header(file)
            record = decode(header, self._fingerprint)
            if ExpectedSequence(record.key, record.scope, record.tokens) != wanted:
                raise RecordError("it is of another sequence")
            length = len(header) + record.payload_bytes
            if os.fstat(file.fileno()).st_size != length:
                raise RecordError("it is torn")
            mapping = into or create(length)
            try:
                self._fill(mapping, file, header, record)
            except (RecordError, OSError):
                if mapping is not into:
                    mapping.discard()
                raise
        return mapping

    def delete(self, key: str) -> None:
        """Delete the file of a sequence, if there is one."""
        directory.delete(self._file(key))

    def adopt(self) -> tuple[list[Record], list[str]]:
        """Return the headers of an earlier engine's files and the reasons for files that were deleted as invalid.

        Raises:
            OSError: The directory cannot be read.
        """
        return directory.adopt(self._path, ".disk", ".part", read=self._adopted)

    def clear(self) -> None:
        """Delete an earlier engine's files.

        Raises:
            OSError: The directory cannot be read.
        """
        directory.clear(self._path, ".disk", ".part")

    def _adopted(self, path: Path) -> Record:
        if path.suffix == ".part":
            raise RecordError("it was not finished")
        with path.open("rb", buffering=0) as file:
            header = _header(file)
            length = os.fstat(file.fileno()).st_size
        record = decode(header, self._fingerprint)
        if length != len(header) + record.payload_bytes:
            raise RecordError("it is torn")
        if path != self._file(record.key):
            raise RecordError("it is of another sequence")
        return record

    def _fill(self, mapping: Mapping, file: io.FileIO, header: bytes, record: Record) -> None:
        generation = mapping.begin()
        with mapping.view(len(header), record.payload_bytes) as payload:
            if _read_into(file, payload) != len(payload):
                raise RecordError("it is torn")
            if zlib.crc32(payload) != record.payload_crc:
                raise RecordError("its checksum is wrong")
        mapping.seal(header, generation)

    def _file(self, key: str) -> Path:
        return self._path / f"kv-{sha256(self._fingerprint + key.encode()).hexdigest()[:32]}.disk"


def seal(mapping: Mapping, generation: int, record: Record, fingerprint: bytes) -> None:
    """Complete a mapping with its header, including the payload's checksum; on a worker thread."""
    start = record.header_bytes
    with mapping.reading(generation) as data:
        if data is None:
            return
        crc = zlib.crc32(data[start : start + record.payload_bytes])
    mapping.seal(encode(record.with_crc(crc), fingerprint), generation)


def _header(file: io.FileIO) -> bytes:
    start = file.read(START_BYTES) or b""
    return start + (file.read(announced_bytes(start) - START_BYTES) or b"")


def _read_into(file: io.FileIO, data: memoryview) -> int:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            n_bytes = file.readinto(rest)
        if not n_bytes:
            break
        done += n_bytes
    return done


def _write(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, _WRITE, 0o600)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
