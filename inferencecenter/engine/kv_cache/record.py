"""File format of a parked sequence: a header, then the payload (the bytes of its KV).

Little endian: a start (magic, version, length of the header, checksum of its rest), fixed-size fields, key, scope and
the tokens as packed int32, zeros up to a multiple of 64 bytes, the payload. A file of the RAM tier may be longer.

One byte of the start is non-zero while the sequence is being restored into a slot. If an engine finds it set, an
earlier engine crashed in llama.cpp while restoring this file, and restoring it again would crash the next one.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field, replace
from hashlib import sha256

_MARK = b"ICKV\r\n\x1a\n"
_VERSION = 1
# Magic, version, length of the header, checksum of the rest of the header.
_START = struct.Struct("<8sHxxII")
SUSPECT_AT = 10
# Fingerprint, flags, checksum and length of the payload, stamp, lengths of key, scope and tokens.
_FACTS = struct.Struct("<32sIIQQIII")
_DURABLE = 1
_ALIGNMENT_BYTES = 64
_MAX_HEADER_BYTES = 64 * 1024 * 1024
START_BYTES = _START.size
TOKEN_BYTES = 4


class RecordError(Exception):
    """A file holds no valid parked sequence of this engine; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Record:
    """Content of a header. ``tokens`` are packed; of two records the one with the higher ``stamp`` is newer.

    A ``suspect`` record was being restored when its file was last written.
    """

    key: str
    scope: str
    tokens: bytes
    durable: bool
    stamp: int
    payload_bytes: int
    payload_crc: int
    suspect: bool = field(default=False, compare=False)

    @property
    def header_bytes(self) -> int:
        """The length of the header, which is the offset of the payload."""
        return header_bytes(self.key, self.scope, len(self.tokens) // TOKEN_BYTES)

    def with_crc(self, payload_crc: int) -> Record:
        """Return the record with the checksum of its payload."""
        return replace(self, payload_crc=payload_crc)


def header_bytes(key: str, scope: str, n_tokens: int) -> int:
    """Return the length of a sequence's header."""
    length = _START.size + _FACTS.size + len(key.encode()) + len(scope.encode()) + TOKEN_BYTES * n_tokens
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def digest(fingerprint: str) -> bytes:
    """Return the 32-byte digest of a fingerprint that headers contain."""
    return sha256(fingerprint.encode()).digest()


def encode(record: Record, fingerprint: bytes) -> bytes:
    """Return the header of a sequence whose payload was saved under ``fingerprint`` (see ``digest``)."""
    key, scope = record.key.encode(), record.scope.encode()
    facts = _FACTS.pack(
        fingerprint,
        _DURABLE if record.durable else 0,
        record.payload_crc,
        record.payload_bytes,
        record.stamp,
        len(key),
        len(scope),
        len(record.tokens),
    )
    length = record.header_bytes
    rest = (facts + key + scope + record.tokens).ljust(length - _START.size, b"\0")
    return _START.pack(_MARK, _VERSION, length, zlib.crc32(rest)) + rest


def announced_bytes(start: bytes | memoryview) -> int:
    """Return the length of the header that begins with ``start``.

    Raises:
        RecordError: It is no start of a header.
    """
    if len(start) < _START.size:
        raise RecordError("it is too short")
    mark, version, length, _ = _START.unpack_from(start)
    if mark != _MARK:
        raise RecordError("it is incomplete, or no parked KV")
    if version != _VERSION:
        raise RecordError(f"it has format version {version}")
    if not _START.size + _FACTS.size <= length <= _MAX_HEADER_BYTES:
        raise RecordError("its header is damaged")
    return int(length)


def decode(data: bytes | memoryview, fingerprint: bytes) -> Record:
    """Read the header at the start of ``data``, which may be longer.

    Raises:
        RecordError: It is damaged, of another version, or was saved under another ``fingerprint``.
    """
    length = announced_bytes(data)
    rest = bytes(data[_START.size : length])
    if len(rest) != length - _START.size or zlib.crc32(rest) != _START.unpack_from(data)[3]:
        raise RecordError("its header is damaged")
    found, flags, crc, payload_bytes, stamp, *lengths = _FACTS.unpack_from(rest)
    if found != fingerprint:
        raise RecordError("it belongs to another model or version")
    fields: list[bytes] = []
    at = _FACTS.size
    for field_bytes in lengths:
        fields.append(rest[at : at + field_bytes])
        at += field_bytes
    key, scope, tokens = fields
    try:
        names = key.decode(), scope.decode()
    except UnicodeDecodeError:
        raise RecordError("its header is damaged") from None
    suspect = data[SUSPECT_AT] != 0
    record = Record(*names, tokens, bool(flags & _DURABLE), stamp, payload_bytes, crc, suspect)
    if record.header_bytes != length or len(tokens) != lengths[-1] or len(tokens) % TOKEN_BYTES:
        raise RecordError("its header is damaged")
    return record
