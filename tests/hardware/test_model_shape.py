"""Model shapes read from headers, and the arithmetic of their memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from benchmarks.header import HEADERS, tensor_heads
from inferencecenter.config.settings import bundled_model
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.footprint import RuntimeConfig, kv_bytes, kv_bytes_per_token
from inferencecenter.hardware.gguf import Array, GgufFile, Tensor, read_gguf
from inferencecenter.hardware.model_shape import DENSE_FIRST, KNOWN, KV_FROM_START, WINDOW_EVERY, ModelShape, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.header import HeaderName

USUAL = RuntimeConfig(slots=8, n_ctx=4096, n_batch=2048, n_ubatch=512, kv_type_k="f16", kv_type_v="f16")
PLAIN: dict[str, Any] = {
    "block_count": 4,
    "embedding_length": 64,
    "context_length": 8192,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 128,
}


def make_shape(architecture: str, facts: dict[str, Any], *tensors: str) -> ModelShape:
    """Return the shape of a model with this metadata, whose tensors have 1024 bytes each."""
    metadata: dict[str, Any] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in {**PLAIN, **facts}.items() if value is not None}
    found = tensors or tuple(f"blk.{layer}.attn_k.weight" for layer in range(4))
    table = tuple(Tensor(name, (256,), 0, 1024) for name in ("token_embd.weight", "output.weight", *found))
    return describe(GgufFile((Path("model.gguf"),), 3, metadata, table))


@pytest.mark.parametrize("name", HEADERS)
def test_parts_add_up_to_the_file(shape_of: Callable[[HeaderName], ModelShape], name: HeaderName) -> None:
    """Layers, embeddings and output together are the file's tensors."""
    shape, expected = shape_of(name), HEADERS[name]
    assert shape.bytes == sum(tensor.bytes for tensor in tensor_heads(expected))
    assert shape.known
    assert (shape.n_layers, shape.n_embd, shape.n_vocab) == (expected.layers, expected.width, expected.vocabulary)
    assert (shape.tied, shape.n_heads, shape.n_ctx_train) == (expected.tied, expected.heads, expected.context_tokens)
    assert (shape.n_experts, shape.n_experts_used) == (expected.experts, expected.experts_used)
    assert {layer.k_width for layer in shape.layers} == {expected.kv_width}


@pytest.mark.parametrize(
    ("name", "mib"),
    # Sizes of the files as they are published: the headers here are those of real models.
    [
        ("llama3.2-1b", 770),
        ("llama3.2-3b", 1926),
        ("qwen2.5-7b", 4466),
        ("llama3.1-8b", 4693),
        ("qwen3-30b-a3b", 17697),
    ],
)
def test_headers_are_close_to_published_sizes(
    shape_of: Callable[[HeaderName], ModelShape], name: HeaderName, mib: int
) -> None:
    """They differ by at most one percent, because vocabularies differ."""
    assert shape_of(name).bytes / 2**20 == pytest.approx(mib, rel=0.015)


def test_experts_are_separate(shape_of: Callable[[HeaderName], ModelShape]) -> None:
    """The router counts as shared weights."""
    layer = shape_of("qwen3-30b-a3b").layers[0]
    experts = 128 * 768 * 2048 * (2 * 144 + 210) // 256
    assert layer.expert_bytes == experts
    assert 0 < layer.dense_bytes < experts // 10


def test_kv_size_of_a_grouped_query_model(shape_of: Callable[[HeaderName], ModelShape]) -> None:
    """8 KV heads of 128 in 32 layers, K and V, 2 bytes each: 128 KiB a token; other types by their blocks."""
    model = shape_of("llama3.1-8b")
    assert kv_bytes_per_token(model, type_k="f16", type_v="f16") == 128 * 1024
    assert kv_bytes_per_token(model, type_k="q8_0", type_v="q8_0") == 128 * 1024 * 34 // 64
    assert kv_bytes_per_token(model, type_k="f16", type_v="q4_0") == 64 * 1024 + 64 * 1024 * 18 // 64
    assert sum(kv_bytes(layer, USUAL) for layer in model.layers) == 8 * 4096 * 128 * 1024
    assert kv_bytes(model.layers[0], replace(USUAL, n_ctx=4000)) == kv_bytes(model.layers[0], USUAL)


def test_demo_model_shape() -> None:
    """A real file written by llama.cpp: 6 layers, complete metadata."""
    shape = describe(read_gguf(bundled_model()))
    assert (shape.architecture, shape.known, shape.n_layers, shape.tied) == ("llama", True, len(shape.layers), True)
    assert shape.digest == describe(read_gguf(bundled_model())).digest


@pytest.mark.parametrize(
    ("architecture", "facts", "windows"),
    [
        ("llama", {"attention.sliding_window": 512}, (0, 0, 0, 0)),  # stated by some files, and not used
        ("phi3", {"attention.sliding_window": 512}, (0, 0, 0, 0)),
        ("gemma2", {"attention.sliding_window": 512}, (512, 0, 512, 0)),
        ("gemma3", {"attention.sliding_window": 512}, (512, 512, 512, 512)),
        ("olmo2", {"attention.sliding_window": 512}, (512, 512, 512, 0)),
        ("smallthinker", {"attention.sliding_window": 512}, (0, 512, 512, 512)),
        ("llama4", {"attention.chunk_size": 512}, (512, 512, 512, 0)),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2}, (512, 0, 512, 0)),
        (
            "gemma4",
            {
                "attention.sliding_window": 512,
                "attention.sliding_window_pattern": Array(4, (True, False, False, True)),
            },
            (512, 0, 0, 512),
        ),
        ("gemma3", {}, (0, 0, 0, 0)),
    ],
)
def test_sliding_window_sources(architecture: str, facts: dict[str, Any], windows: tuple[int, ...]) -> None:
    """The window comes from the file or is llama.cpp's default of the architecture."""
    assert tuple(layer.window for layer in make_shape(architecture, facts).layers) == windows


def test_window_bounds_the_kv() -> None:
    """KV holds the window and a batch, in full rows, at most the context."""
    layer = make_shape("gemma2", {"attention.sliding_window": 512}).layers[0]
    a_token = 2 * 2 * 16 * 2
    assert kv_bytes(layer, USUAL) == 8 * 1024 * a_token
    assert kv_bytes(layer, replace(USUAL, n_ctx=512)) == 8 * 512 * a_token
    assert kv_bytes(layer, replace(USUAL, n_ubatch=513)) == 8 * 1280 * a_token


def test_head_sizes_per_layer() -> None:
    """Heads may differ by layer, K and V in width, and both in windowed layers."""
    shape = make_shape(
        "deci", {"attention.head_count_kv": Array(4, (2, 1, 0, 2)), "attention.head_count": Array(4, (4,) * 4)}
    )
    assert [layer.k_width for layer in shape.layers] == [32, 16, 0, 32]
    shape = make_shape("llama", {"attention.key_length": 128, "attention.value_length": 64})
    assert {(layer.k_width, layer.v_width) for layer in shape.layers} == {(256, 128)}
    window = {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2}
    shape = make_shape("gemma4", {"attention.key_length": 128, "attention.key_length_swa": 64, **window})
    assert [layer.k_width for layer in shape.layers] == [128, 256, 128, 256]
    shape = make_shape("llama", {"attention.head_count_kv": None})
    assert {layer.k_width for layer in shape.layers} == {64}


def test_latent_attention_stores_no_values() -> None:
    """One head of latent and rotated numbers, from which V is computed."""
    facts = {"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512}
    tensors = [f"blk.{layer}.attn_kv_a_mqa.weight" for layer in range(4)]
    shape = make_shape("deepseek2", {**facts, "attention.key_length_mla": 192}, *tensors)
    assert {(layer.k_width, layer.v_width) for layer in shape.layers} == {(576, 0)}


def test_shared_kv_layers() -> None:
    """The last layers reuse the KV of earlier ones."""
    assert [layer.k_width for layer in make_shape("gemma4", {"attention.shared_kv_layers": 1}).layers] == [
        32,
        32,
        32,
        0,
    ]
    facts = {"block_count": 24}
    shape = make_shape("gemma3n", facts, *(f"blk.{layer}.attn_k.weight" for layer in range(24)))
    assert sum(layer.k_width > 0 for layer in shape.layers) == 20


def test_recurrent_layers_have_a_constant_state() -> None:
    """The state does not grow with tokens; hybrids are recognized by their tensors."""
    ssm = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.group_count": 1}
    tensors = ["blk.0.ssm_in.weight", "blk.1.attn_k.weight", "blk.2.ssm_in.weight", "blk.2.attn_qkv.weight"]
    shape = make_shape("qwen3next", ssm, *tensors)
    state = 4 * (3 * (128 + 2 * 16) + 16 * 128)
    assert [layer.state_bytes for layer in shape.layers] == [state, 0, state, 0]
    assert [layer.k_width for layer in shape.layers] == [0, 32, 0, 0]
    assert kv_bytes(shape.layers[0], USUAL) == 8 * state == kv_bytes(shape.layers[0], replace(USUAL, n_ctx=64))
    shape = make_shape("rwkv7", {"wkv.head_size": None, "wkv_head_size": 64}, "blk.0.time_mix_w0.weight")
    assert shape.layers[0].state_bytes == 4 * 64 * (2 + 64)
    shape = make_shape("lfm2", {"shortconv.l_cache": 3}, "blk.0.shortconv.conv.weight")
    assert shape.layers[0].state_bytes == 4 * 64 * 2
    shape = make_shape("kimi-linear", {"kda.head_dim": 16, "ssm.conv_kernel": 4}, "blk.0.ssm_a.weight")
    assert shape.layers[0].state_bytes == 4 * (3 * 3 * 64 + 16 * 16 * 4)


def test_prediction_layers_take_no_kv() -> None:
    """Layers for multi-token prediction count as layers, and take nothing."""
    shape = make_shape("glm4moe", {"nextn_predict_layers": 1})
    assert [layer.bytes for layer in shape.layers] == [1024, 1024, 1024, 0]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block_count": None}, "does not state llama.block_count"),
        ({"embedding_length": None}, "does not state llama.embedding_length"),
        ({"context_length": None}, "does not state llama.context_length"),
        ({"block_count": 0}, "llama.block_count as 0"),
        ({"block_count": 2**40}, "llama.block_count as"),
        ({"block_count": "many"}, "llama.block_count as 'many'"),
        ({"block_count": 2}, "has 'blk.2.attn_k.weight', but states 2 layers"),
        ({"attention.head_count_kv": Array(2, (1, 1))}, "for 2 layers of 4"),
        (
            {"attention.head_count_kv": Array(4, (1, 1, 1, -1))},
            "a whole number from 0 to 16777216 for each of 4 layers",
        ),
        ({"attention.key_length": 1.5}, "attention.key_length as 1.5"),
        ({"expert_count": -1}, "expert_count as -1"),
        ({"block_count": 513}, "llama.block_count as 513; expected a whole number from 1 to 512"),
        ({"attention.head_count": Array(4, (1, 1, nan, 1))}, "attention.head_count as (1, 1, nan, 1)"),
        ({"attention.head_count": Array(4, (1, 1, inf, 1))}, "attention.head_count as (1, 1, inf, 1)"),
        ({"attention.head_count": Array(9000)}, "attention.head_count as '9000 values'"),
        ({"feed_forward_length": nan}, "feed_forward_length as nan"),
        ({"context_length": Array(2, (nan, 1))}, "context_length as nan"),
        ({"attention.key_length": 2**24}, "states KV heads of 33554432 numbers a layer; up to 1048576 are possible"),
        (
            {"embedding_length": 2**24, "attention.key_length": 8, "attention.value_length": 8, "wkv.head_size": 2**24},
            "bytes of state a layer; up to",
        ),
    ],
)
def test_missing_or_absurd_metadata_is_refused(facts: dict[str, Any], reason: str) -> None:
    """The error names the key."""
    with pytest.raises(InferenceCenterError) as caught:
        make_shape("llama", facts)
    assert caught.value.code is ErrorCode.INVALID_MODEL_FILE
    assert reason in caught.value.message


def test_layer_number_of_5000_digits_is_refused() -> None:
    """Python refuses to parse it; the error has the beginning of the name."""
    with pytest.raises(InferenceCenterError, match=r"has 'blk\.9+\.\.\., but states 4 layers") as caught:
        make_shape("llama", {}, f"blk.{'9' * 5000}.attn_k.weight")
    assert caught.value.code is ErrorCode.INVALID_MODEL_FILE


@pytest.mark.parametrize("architecture", [None, "", 7, nan, "a" * 65, "a b"])
def test_file_without_an_architecture_is_refused(architecture: Any) -> None:
    """Its shape is unknown."""
    with pytest.raises(InferenceCenterError, match=r"general\.architecture"):
        describe(GgufFile((Path("model.gguf"),), 3, {"general.architecture": architecture}, ()))


def test_model_name_is_bounded() -> None:
    """A long name is shortened, an invalid one replaced by the file's."""
    for stated, expected in (("x" * 1000, "x" * 256), (nan, "model"), (None, "model")):
        facts: dict[str, Any] = {"general.architecture": "llama", "general.name": stated}
        facts |= {f"llama.{key}": value for key, value in PLAIN.items()}
        assert describe(GgufFile((Path("model.gguf"),), 3, facts, ())).name == expected


def test_any_exception_while_describing_is_refused() -> None:
    """One error names the file."""

    class Strange(Array):
        @property
        def count(self) -> int:
            raise RecursionError("too deep")

    with pytest.raises(InferenceCenterError, match="RecursionError: too deep") as caught:
        make_shape("llama", {"attention.head_count": Strange.__new__(Strange)})
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_MODEL_FILE, "model.path")


def test_unknown_architecture_is_described() -> None:
    """All layers count as full attention."""
    shape = make_shape("novel", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2})
    assert not shape.known
    assert {layer.window for layer in shape.layers} == {0}


def test_architecture_names_exist_in_the_reference() -> None:
    """A name that the reference does not know is an error here."""
    names = set(gguf.MODEL_ARCH_NAMES.values())
    assert names >= KNOWN
    assert names >= WINDOW_EVERY.keys() | DENSE_FIRST | KV_FROM_START.keys()


def test_header_digests(shape_of: Callable[[HeaderName], ModelShape]) -> None:
    """Different models have different digests."""
    assert len({shape_of(name).digest for name in HEADERS}) == len(HEADERS)
