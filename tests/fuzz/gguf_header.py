"""Builds small GGUF headers from parts that a test changes one by one. Layout: ggml's docs/gguf.md."""

from __future__ import annotations

import struct
from ctypes import c_double, c_float
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import TYPE_CHECKING, Any, Final

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = range(13)
_CODES: Final = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q"} | {
    F64: "d"
}
_LIMITS: Final = {"B": 2**8, "H": 2**16, "I": 2**32, "Q": 2**64}
_ALIGNMENT: Final = 32


@dataclass(frozen=True)
class Entry:
    """A metadata entry: a key, and the bytes of its type and value."""

    key: bytes
    value: bytes


@dataclass(frozen=True)
class TensorInfo:
    """An entry of the tensor table; its dimension count may be wrong."""

    name: bytes
    dimensions: tuple[int, ...]
    kind: int = 0
    offset: int = 0
    n_dimensions: int | None = None


@dataclass(frozen=True)
class Header:
    """A header; ``None`` for a count means the right one."""

    entries: tuple[Entry, ...]
    tensors: tuple[TensorInfo, ...]
    version: int = 3
    n_tensors: int | None = None
    n_entries: int | None = None
    data: bytes = field(default=bytes(4096), repr=False)

    def encode(self) -> bytes:
        """Return the file's bytes."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_entries = len(self.entries) if self.n_entries is None else self.n_entries
        head = b"GGUF" + struct.pack("<IQQ", self.version, n_tensors, n_entries)
        head += b"".join(_text(entry.key) + entry.value for entry in self.entries)
        head += b"".join(map(_tensor, self.tensors))
        return head + bytes(-len(head) % _ALIGNMENT) + self.data


def scalar(kind: int, value: Any) -> bytes:
    """Return a value with its type; too large integers are truncated."""
    return struct.pack("<I", kind) + _packed(kind, value)


def text(value: bytes, *, length: int | None = None) -> bytes:
    """Return a string with its type; ``length`` is its claimed length."""
    return struct.pack("<I", TEXT) + _text(value, length=length)


def array(kind: int, values: Sequence[Any], *, count: int | None = None) -> bytes:
    """Return an array with its type; ``count`` is its claimed length."""
    items = b"".join(_text(each) if kind == TEXT else each if kind == ARRAY else _packed(kind, each) for each in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count) + items


def base(architecture: str = "llama", *, layers: int = 2, experts: bool = False) -> Header:
    """Return the header of a tiny valid model."""
    own = architecture.encode()
    numbers = {
        "block_count": layers,
        "embedding_length": 32,
        "context_length": 512,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        **({"expert_count": 4, "expert_used_count": 2} if experts else {}),
    }
    entries = [Entry(b"general.architecture", text(own)), Entry(b"general.name", text(b"tiny"))]
    entries += [Entry(b"%s.%s" % (own, key.encode()), scalar(U32, number)) for key, number in numbers.items()]
    entries += [Entry(b"tokenizer.ggml.tokens", array(TEXT, [b"a", b"b", b"c"]))]
    ffn = b"ffn_up_exps" if experts else b"ffn_up"
    tensors = [TensorInfo(b"token_embd.weight", (32, 3)), TensorInfo(b"output.weight", (32, 3))]
    for layer in range(layers):
        tensors += [TensorInfo(b"blk.%d.%s.weight" % (layer, name), (32,)) for name in (b"attn_k", b"attn_v", ffn)]
    return Header(tuple(entries), tuple(tensors))


def _packed(kind: int, value: Any) -> bytes:
    code = _CODES[kind]
    if code in "fd":
        return bytes(c_float(value) if code == "f" else c_double(value))
    return struct.pack(f"<{code.upper()}", int(value) % _LIMITS[code.upper()])


def _text(value: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def _tensor(info: TensorInfo) -> bytes:
    n_dimensions = len(info.dimensions) if info.n_dimensions is None else info.n_dimensions
    shape = b"".join(struct.pack("<Q", size) for size in info.dimensions)
    sizes = struct.pack("<I", n_dimensions % 2**32) + shape
    return _text(info.name) + sizes + struct.pack("<IQ", info.kind, info.offset)


# Values as in hostile files.
_COUNTS: Final = st.sampled_from(
    [0, 1, 2, 3, 511, 512, 513, 4096, 2**16, 2**24, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]
)
_FLOATS: Final = st.sampled_from([nan, inf, -inf, 0.0, -0.0, 1.5, 1e300, 2.0**24]) | st.floats()
_OF_ARCHITECTURE: Final = """
    block_count embedding_length context_length feed_forward_length expert_feed_forward_length expert_count
    expert_used_count vocab_size nextn_predict_layers attention.head_count attention.head_count_kv
    attention.key_length attention.value_length attention.key_length_swa attention.value_length_swa
    attention.key_length_mla attention.shared_kv_layers attention.sliding_window attention.chunk_size
    attention.sliding_window_pattern wkv.head_size wkv_head_size token_shift_count shortconv.l_cache
    ssm.conv_kernel ssm.state_size ssm.inner_size ssm.group_count kda.head_dim
"""
_OF_ANY: Final = """
    general.architecture general.name general.alignment general.file_type split.count split.no
    split.tensors.count tokenizer.ggml.tokens tokenizer.chat_template
"""
_KEYS: Final = (*(f"{{own}}.{name}" for name in _OF_ARCHITECTURE.split()), *_OF_ANY.split())
_ARCHITECTURES: Final = ("llama", "gemma3", "gemma3n", "gpt-oss", "smallthinker", "rwkv6", "qwen3next", "novel")
_NAMES: Final = st.sampled_from(
    [
        b"blk.0.attn_qkv.weight",
        b"blk.1.ffn_up_exps.weight",
        b"blk.1.ssm_in.weight",
        b"blk.999999999999.attn_k.weight",
        b"blk.%s.attn_k.weight" % (b"9" * 5000),
        b"blk.\xd9\xa3.attn_k.weight",
        b"blk.0.",
        b"blk.0.\n",
        b"blk..x",
        b"token_embd.weight",
        b"\xff\xfe",
        b"",
        b"x" * 300,
    ]
) | st.binary(max_size=20)


@st.composite
def _scalars(draw: st.DrawFn) -> tuple[int, Any]:
    kind = draw(st.sampled_from(sorted(_CODES)))
    return kind, draw(_FLOATS if kind in (F32, F64) else _COUNTS | st.integers(0, 600))


@st.composite
def values(draw: st.DrawFn, *, honest: bool) -> bytes:
    """Draw a value of any type with its type; an ``honest`` one has its claimed length."""
    claims = st.none() if honest else st.none() | _COUNTS
    form = draw(
        st.sampled_from(["scalar", "scalar", "array", "text", "texts", "nested", "bytes"][: 5 if honest else 7])
    )
    if form == "scalar":
        return scalar(*draw(_scalars()))
    if form == "text":
        return text(draw(st.binary(max_size=40) | st.just(b"n" * 400)), length=draw(claims))
    if form == "array":
        kind, value = draw(_scalars())
        return array(kind, [value] * draw(st.sampled_from([0, 1, 2, 3, 512, 5000])), count=draw(claims))
    if form == "texts":
        return array(TEXT, draw(st.lists(st.binary(max_size=8), max_size=4)), count=draw(claims))
    if form == "nested":
        inner = struct.pack("<IQ", draw(st.sampled_from([U8, TEXT, ARRAY])), draw(_COUNTS))
        return array(ARRAY, [inner] * draw(st.integers(1, 6)), count=draw(claims))
    return struct.pack("<I", draw(st.integers(0, 20))) + draw(st.binary(max_size=16))


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Draw a file: half are well formed with odd values, the others also have wrong lengths, counts and bytes."""
    honest = draw(st.booleans())
    own = draw(st.sampled_from(_ARCHITECTURES))
    header = base(own, layers=draw(st.sampled_from([1, 2, 2, 2, 30])), experts=draw(st.booleans()))
    entries, tensors = list(header.entries), list(header.tensors)
    for _ in range(draw(st.integers(0, 4))):
        key = draw(st.sampled_from(_KEYS)).format(own=own).encode()
        entries = [entry for entry in entries if entry.key != key]
        if draw(st.integers(0, 9)):
            entries.insert(draw(st.integers(0, len(entries))), Entry(key, draw(values(honest=honest))))
    for _ in range(draw(st.integers(0, 2))):
        tensors.insert(draw(st.integers(0, len(tensors))), draw(_tensor_infos(honest=honest)))
    header = replace(header, entries=tuple(entries), tensors=tuple(tensors))
    return header.encode() if honest else draw(_damaged(header))


@st.composite
def _tensor_infos(draw: st.DrawFn, *, honest: bool) -> TensorInfo:
    if honest:
        return TensorInfo(name=draw(_NAMES), dimensions=draw(st.sampled_from([(32,), (1,), (32, 3), (256, 1, 1, 1)])))
    return TensorInfo(
        name=draw(_NAMES),
        dimensions=tuple(draw(st.lists(_COUNTS | st.just(32), max_size=5))),
        kind=draw(st.sampled_from([0, 1, 2, 8, 12, 40, 99, 2**31])),
        offset=draw(_COUNTS),
        n_dimensions=draw(st.none() | _COUNTS),
    )


@st.composite
def _damaged(draw: st.DrawFn, header: Header) -> bytes:
    if draw(st.integers(0, 4)) == 0:
        header = replace(
            header,
            version=draw(st.sampled_from([0, 1, 2, 3, 4, 1 << 24, 2**32 - 1])),
            n_tensors=draw(st.none() | _COUNTS),
            n_entries=draw(st.none() | _COUNTS),
        )
    content = bytearray(header.encode())
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 9)) == 0 else content)
