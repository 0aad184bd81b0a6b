"""Fuzzed GGUF headers: each is planned for or refused, at a cost bounded by its size."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import example, given

from inferencecenter.core.errors import InferenceCenterError
from inferencecenter.hardware import gguf
from tests.fuzz import gguf_header
from tests.fuzz.budget import examples
from tests.fuzz.gguf_header import F32, U32, Entry, TensorInfo, array, base, headers, scalar
from tests.fuzz.targets import model_file

NAN = float("nan")


def changed(*entries: Entry, tensors: tuple[TensorInfo, ...] = ()) -> bytes:
    """Return a tiny model with other metadata and further tensors."""
    header = base()
    keys = {entry.key for entry in entries}
    kept = tuple(entry for entry in header.entries if entry.key not in keys)
    return gguf_header.Header(kept + entries, header.tensors + tensors).encode()


def test_unchanged_header_is_accepted() -> None:
    """The fuzzer starts from a valid header."""
    for architecture in ("llama", "gemma3", "rwkv6"):
        for experts in (False, True):
            model_file(base(architecture, experts=experts).encode())


@pytest.mark.slow
@examples(1500)
@given(headers())
@example(changed(Entry(b"llama.attention.head_count", array(F32, [NAN, NAN]))))
@example(changed(Entry(b"llama.attention.head_count", array(F32, [float("inf")] * 2))))
@example(changed(Entry(b"llama.context_length", scalar(F32, NAN))))
@example(changed(Entry(b"llama.attention.key_length", scalar(U32, 2**24))))
@example(changed(Entry(b"split.count", scalar(U32, 2**31))))
@example(changed(tensors=(TensorInfo(b"blk.%s.attn_k.weight" % (b"9" * 5000), (32,)),)))
@example(changed(tensors=(TensorInfo(b"blk.0.", (32,)),)))
def test_any_header_is_planned_for_or_refused(data: bytes) -> None:
    """The headers have any counts, types, lengths, names and numbers."""
    model_file(data)


@pytest.mark.slow
@examples(300)
@given(headers())
def test_memory_of_header_parsing_is_bounded(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """With a hole of 16 GiB behind it, a header takes a small multiple of its limit."""
    path = tmp_path_factory.getbasetemp() / "bounded.gguf"
    path.write_bytes(data)
    with path.open("r+b") as file:
        file.truncate(2**34)
    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patched, suppress(InferenceCenterError):
            patched.setattr(gguf, "_MAX_HEADER_BYTES", 2**22)
            gguf.read_summary(path)
            gguf.read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**22
    finally:
        tracemalloc.stop()
