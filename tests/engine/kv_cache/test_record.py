"""The header of an offloaded entry."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.engine.kv_cache.record import Record, RecordError, announced_bytes, decode, digest, encode
from inferencecenter.ipc.messages import pack_tokens

MODEL = digest("model")

records = st.builds(
    Record,
    key=st.text(max_size=20),
    scope=st.text(max_size=20),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=50).map(pack_tokens),
    durable=st.booleans(),
    stamp=st.integers(0, 2**64 - 1),
    payload_bytes=st.integers(0, 2**64 - 1),
    payload_crc=st.integers(0, 2**32 - 1),
)


@given(records, st.binary(max_size=100))
def test_header_survives_the_round_trip(record: Record, payload: bytes) -> None:
    """A header is decoded regardless of what follows it, and its payload is aligned."""
    header = encode(record, MODEL)
    assert decode(header + payload, MODEL) == record
    assert len(header) == record.header_bytes == announced_bytes(header)
    assert len(header) % 64 == 0


@given(records, st.data())
def test_damaged_header_is_refused(record: Record, data: st.DataObject) -> None:
    """A header with any bit flipped, or truncated anywhere, is refused; unused bytes may change."""
    header = bytearray(encode(record, MODEL))
    at = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(RecordError):
        decode(bytes(header[:at]), MODEL)
    header[at] ^= 1 << data.draw(st.integers(0, 7))
    if at in (10, 11):
        assert decode(bytes(header), MODEL) == record
    else:
        with pytest.raises(RecordError):
            decode(bytes(header), MODEL)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    """Bytes that are no header raise nothing but ``RecordError``."""
    with pytest.raises(RecordError):
        decode(data, MODEL)


def test_other_models_and_versions_are_refused() -> None:
    """Another fingerprint or format version is refused with the reason."""
    header = encode(Record("k", "s", pack_tokens([1]), True, 1, 10, 0), MODEL)
    with pytest.raises(RecordError, match="another model"):
        decode(header, digest("other"))
    newer = header[:8] + struct.pack("<H", 2) + header[10:]
    with pytest.raises(RecordError, match="format version 2"):
        decode(newer, MODEL)
