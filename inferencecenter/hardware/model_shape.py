"""The memory that a model takes, layer by layer, from its GGUF header.

Which layers keep KV, its width and its window follow llama.cpp's models (``src/models/*.cpp`` and
``src/llama-hparams.cpp``): from the metadata where it is stated, from a layer's tensors, and for sliding windows from
the architecture.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeGuard

from inferencecenter.core.errors import ErrorCode, InferenceCenterError, foreign_input
from inferencecenter.hardware.gguf import Array, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from inferencecenter.hardware.gguf import GgufFile, Tensor, Value


_NAMES: Final = """
    apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cohere2
    command-r dbrx deci deepseek deepseek2 dots1 ernie4_5 ernie4_5-moe exaone exaone4 falcon falcon-h1 gemma gemma2
    gemma3 gemma3n gemma4 glm4 glm4moe gpt-oss gpt2 gptj gptneox granite granitehybrid granitemoe grok grovemoe
    hunyuan-dense hunyuan-moe internlm2 jais jamba lfm2 lfm2moe llama llama4 maincoder mamba mamba2 minicpm minicpm3
    minimax-m2 mistral3 mpt nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion phi2 phi3 phimoe plamo plm
    qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe refact rwkv6 rwkv6qwen2 rwkv7 seed_oss
    smallthinker smollm3 stablelm starcoder starcoder2 xverse
"""

_ENCODER_NAMES: Final = """
    bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 modern-bert neo-bert nomic-bert nomic-bert-moe t5encoder
"""

ENCODERS: Final = frozenset(_ENCODER_NAMES.split())
"""Encoder architectures: they compute a text at once, generate none and keep no KV."""

KNOWN: Final = frozenset(_NAMES.split()) | ENCODERS
"""Architectures whose rules were checked in llama.cpp's source; for others every layer is assumed to use full KV."""

WINDOW_EVERY: Final[Mapping[str, int]] = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma4": 6,
    "gpt-oss": 2,
    "llama4": 4,
    "olmo2": 4,
    "smallthinker": 4,
}
"""The period of layers with full attention between those with a sliding window (``load_swa_pattern``)."""

DENSE_FIRST: Final = frozenset({"smallthinker"})
"""Of these, architectures in which the full layer is the first of each group, not the last."""

KV_FROM_START: Final[Mapping[str, int]] = {"gemma3n": 20}
"""Layers with KV of their own, where that is not stated."""


_MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS: llama.cpp loads no more, and planning tries every number up to it
_MAX_WIDTH: Final = 2**24
_MAX_KV_WIDTH: Final = 2**20
_MAX_STATE_BYTES: Final = 2**36
_MAX_NAME_CHARS: Final = 256
_MAX_DIGITS: Final = 9
_ARCHITECTURE: Final = re.compile(r"[\w.-]{1,64}")
_IN_LAYER: Final = re.compile(r"^blk\.([0-9]+)\.(.+)$", re.DOTALL)
_EXPERTS: Final = re.compile(r"^ffn_(up|down|gate|gate_up)_(ch)?exps\.")
_INPUTS: Final = ("token_embd", "per_layer_token_embd", "position_embd", "token_types")
_RECURRENT: Final = ("ssm_", "shortconv", "time_mix_")
_STATE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One repeating layer.

    Attributes:
        dense_bytes: Weights that every token uses.
        expert_bytes: Weights of its experts.
        largest_bytes: The largest of its tensors.
        k_width: Numbers that a token adds to the K half of the KV; 0 in layers without KV.
        v_width: Numbers that it adds to the V half.
        window: Length of the attention window in tokens; 0 is unlimited.
        state_bytes: A sequence's state in recurrent layers, independent of its length.
    """

    dense_bytes: int
    expert_bytes: int = 0
    largest_bytes: int = 0
    k_width: int = 0
    v_width: int = 0
    window: int = 0
    state_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All weights."""
        return self.dense_bytes + self.expert_bytes


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """The memory of a projector: its weights, and what encoding an image takes."""

    name: str
    weight_bytes: int
    compute_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.compute_bytes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The properties of a model that determine its memory and placement.

    Attributes:
        known: Whether the rules here were checked for the architecture.
        n_layers: Repeating layers, including those that are not loaded (multi-token prediction).
        n_ff: Width of the widest feed-forward part; of one expert in ``expert_ff``.
        embedding_bytes: The token embeddings, which stay in the host's memory.
        output_bytes: The output matrix; with ``tied`` a copy of the embeddings.
        digest: A hex digest that is equal for equal headers.
        adapter_bytes: LoRA adapters, which are counted among the layers' weights.
        draft: The model that drafts tokens for it, in the same process.
        projector: Its projector, if it takes images.
    """

    paths: tuple[Path, ...]
    name: str
    architecture: str
    known: bool
    n_layers: int
    n_embd: int
    n_heads: int
    n_ff: int
    expert_ff: int
    n_experts: int
    n_experts_used: int
    n_vocab: int
    n_ctx_train: int
    embedding_bytes: int
    output_bytes: int
    tied: bool
    layers: tuple[LayerShape, ...]
    digest: str
    adapter_bytes: int = 0
    draft: ModelShape | None = None
    projector: ProjectorShape | None = None

    @cached_property
    def bytes(self) -> int:
        """All weights, as stored in the files."""
        copied = self.embedding_bytes if self.tied else 0
        return self.embedding_bytes + self.output_bytes - copied + sum(layer.bytes for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(layer.expert_bytes for layer in self.layers)


def describe(file: GgufFile) -> ModelShape:
    """Return the shape of a model.

    Raises:
        InferenceCenterError: ``invalid_model_file`` for metadata that is missing or implausible.
    """
    with foreign_input(lambda reason: _refusal(file, f"has metadata that cannot be parsed: {reason}")):
        return _describe(file)


def _describe(file: GgufFile) -> ModelShape:
    facts = _Facts(file)
    layers = facts.layers()
    by_place = facts.outside_layers()
    tied = not any(tensor.name == "output.weight" for tensor in file.tensors)
    return ModelShape(
        paths=file.paths,
        name=_name(file),
        architecture=facts.architecture,
        known=facts.architecture in KNOWN,
        n_layers=facts.n_layers,
        n_embd=facts.n_embd,
        n_heads=max(facts.each("attention.head_count", 0)),
        n_ff=max(facts.each("feed_forward_length", 0)),
        expert_ff=max(facts.each("expert_feed_forward_length", 0)) or max(facts.each("feed_forward_length", 0)),
        n_experts=facts.number("expert_count", 0),
        n_experts_used=facts.number("expert_used_count", 0),
        n_vocab=facts.n_vocab(),
        n_ctx_train=facts.number("context_length"),
        embedding_bytes=by_place["input"],
        output_bytes=by_place["output"] + (facts.tensor_bytes("token_embd.weight") if tied else 0),
        tied=tied,
        layers=layers,
        digest=_digest(file),
    )


_GRID_PROJECTORS: Final = frozenset({"qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"})
_GRID_PATCHES: Final = (2 * 46) ** 2


def describe_projector(file: GgufFile) -> ProjectorShape:
    """Return the shape of a projector.

    A pass of its transformer holds, for each patch, one row of the widest part and about four of the embedding's width;
    without flash attention also a score for each head and pair of patches. Measured with three usual shapes, of 576 to
    1,024 patches: 17.05 and 23.27 MiB are estimated as 18.0 and 24.8 MiB, and the scores are added.

    Projectors that keep the shape of an image reserve memory for ``_GRID_PATCHES``, of which the scores alone would be
    gigabytes; flash attention is assumed. With Qwen2.5-VL's shape 226 MiB are estimated as 276 MiB.
    """

    def number(name: str) -> int:
        value = file.metadata.get(f"clip.vision.{name}", 0)
        return value if isinstance(value, int) and 0 <= value <= _MAX_WIDTH else 0

    is_grid = file.metadata.get("clip.projector_type") in _GRID_PROJECTORS
    patches = _GRID_PATCHES if is_grid else (number("image_size") // max(1, number("patch_size"))) ** 2
    rows = 4 * patches * (number("feed_forward_length") + 4 * number("embedding_length"))
    scores = 0 if is_grid else 4 * patches**2 * number("attention.head_count")
    return ProjectorShape(
        name=_name(file), weight_bytes=sum(tensor.bytes for tensor in file.tensors), compute_bytes=rows + scores
    )


def with_adapters(model: ModelShape, adapter_bytes: int) -> ModelShape:
    """Return the shape of a model with LoRA adapters, which are placed with the layers that they change.

    They are assumed to change all layers equally.
    """
    if not adapter_bytes or not model.layers:
        return model
    share = -(-adapter_bytes // len(model.layers))
    layers = tuple(replace(layer, dense_bytes=layer.dense_bytes + share) for layer in model.layers)
    return replace(model, layers=layers, adapter_bytes=adapter_bytes)


class _Facts:
    """The metadata of a file under the keys of its architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        architecture = file.metadata.get("general.architecture")
        if not architecture:
            raise self._missing("general.architecture")
        if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
            raise self._wrong("general.architecture", architecture, "a name of up to 64 letters and digits")
        self.architecture = architecture
        self.n_layers = self.number("block_count", limit=_MAX_LAYERS)
        self.n_embd = self.number("embedding_length")

    def number(self, key: str, default: int | None = None, *, limit: int = _MAX_WIDTH) -> int:
        """Return a non-negative integer; without a default it must be present and positive."""
        name = f"{self.architecture}.{key}"
        value = self._file.metadata.get(name)
        if value is None:
            if default is None:
                raise self._missing(name)
            return default
        if isinstance(value, Array) and value.values:
            value = max(value.values)
        if isinstance(value, bool) or not isinstance(value, int) or not (default is None) <= value <= limit:
            least = int(default is None)
            raise self._wrong(name, value, f"a whole number from {least} to {limit}")
        return value

    def each(self, key: str, default: int) -> tuple[int, ...]:
        """Return a number per layer, which is stated once or for each."""
        name = f"{self.architecture}.{key}"
        value = self._file.metadata.get(name)
        if not isinstance(value, Array):
            return (self.number(key, default),) * self.n_layers
        if value.count < self.n_layers:
            raise self._refusal(f"states {name} for {value.count} layers of {self.n_layers}")
        numbers = tuple(number for number in value.values[: self.n_layers] if _is_width(number))
        if len(numbers) < self.n_layers:
            raise self._wrong(name, value, f"a whole number from 0 to {_MAX_WIDTH} for each of {self.n_layers} layers")
        return numbers

    def n_vocab(self) -> int:
        """Return the size of the vocabulary, by its list or by the width of the embeddings."""
        tokens = self._file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, Array):
            return tokens.count
        embedding = next((tensor for tensor in self._file.tensors if tensor.name == "token_embd.weight"), None)
        return self.number("vocab_size", embedding.shape[-1] if embedding else 0)

    def tensor_bytes(self, name: str) -> int:
        """Return the size of a tensor, 0 if there is none."""
        return next((tensor.bytes for tensor in self._file.tensors if tensor.name == name), 0)

    def outside_layers(self) -> Mapping[str, int]:
        """Return the sizes of the tensors outside layers: the input embeddings, and the others."""
        places = {"input": 0, "output": 0}
        for tensor in self._file.tensors:
            if not _IN_LAYER.match(tensor.name):
                goes_in = tensor.name.removesuffix(".weight").removesuffix(".bias") in _INPUTS
                places["input" if goes_in else "output"] += tensor.bytes
        return places

    def layers(self) -> tuple[LayerShape, ...]:
        """Return all repeating layers; those for multi-token prediction are not loaded and take nothing."""
        tensors: list[list[Tensor]] = [[] for _ in range(self.n_layers)]
        for tensor in self._file.tensors:
            match = _IN_LAYER.match(tensor.name)
            if match is None:
                continue
            if len(match[1]) > _MAX_DIGITS or int(match[1]) >= self.n_layers:
                raise self._refusal(f"has {shown(tensor.name)}, but states {self.n_layers} layers")
            tensors[int(match[1])].append(tensor)
        loaded = self.n_layers - self.number("nextn_predict_layers", 0)
        keep_kv = self._layers_with_kv()
        windows, widths, state_bytes = self._windows(), self._widths(), self._state_bytes()
        return tuple(
            _layer(own, kv=widths[layer], window=windows[layer], state_bytes=state_bytes, keeps_kv=layer < keep_kv)
            if layer < loaded
            else LayerShape(dense_bytes=0)
            for layer, own in enumerate(tensors)
        )

    def _layers_with_kv(self) -> int:
        """Return how many layers, from the first, have KV of their own; the others share that of earlier ones."""
        if self.architecture in ENCODERS:
            return 0
        if self.architecture in KV_FROM_START:
            return KV_FROM_START[self.architecture]
        return self.n_layers - self.number("attention.shared_kv_layers", 0)

    def _widths(self) -> list[tuple[int, int]]:
        """Return each layer's widths of K and V."""
        heads = self.each("attention.head_count", 0)
        kv_heads = (
            self.each("attention.head_count_kv", 0)
            if f"{self.architecture}.attention.head_count_kv" in self._file.metadata
            else heads
        )
        usual = self.n_embd // max(1, *heads)
        k, v = self.number("attention.key_length", usual), self.number("attention.value_length", usual)
        k_short = self.number("attention.key_length_swa", k)
        v_short = self.number("attention.value_length_swa", v)
        if self.number("attention.key_length_mla", 0):
            v = v_short = 0  # latent attention: V is computed from what K keeps
        widths = [
            (n * (k_short if window else k), n * (v_short if window else v))
            for n, window in zip(kv_heads, self._windows(), strict=True)
        ]
        if (widest := max(map(max, widths))) > _MAX_KV_WIDTH:
            raise self._refusal(f"states KV heads of {widest} numbers a layer; up to {_MAX_KV_WIDTH} are possible")
        return widths

    def _windows(self) -> tuple[int, ...]:
        """Return each layer's attention window; 0 is unlimited."""
        every = WINDOW_EVERY.get(self.architecture)
        window = self.number("attention.sliding_window", 0) or self.number("attention.chunk_size", 0)
        stated = self._file.metadata.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(stated, Array) and len(stated.values) >= self.n_layers and every is not None:
            return tuple(window if short else 0 for short in stated.values[: self.n_layers])
        if isinstance(stated, int) and every is not None:
            every = stated
        if not window or not every:
            return (0,) * self.n_layers
        full = 0 if self.architecture in DENSE_FIRST else every - 1
        return tuple(0 if layer % every == full else window for layer in range(self.n_layers))

    def _state_bytes(self) -> int:
        """Return the size of a recurrent layer's state per sequence."""
        state_bytes = self._stated_state_bytes()
        if state_bytes > _MAX_STATE_BYTES:
            raise self._refusal(f"states {state_bytes} bytes of state a layer; up to {_MAX_STATE_BYTES} are possible")
        return state_bytes

    def _stated_state_bytes(self) -> int:
        head, cached = self.number("wkv.head_size", 0), self.number("shortconv.l_cache", 0)
        if head or f"{self.architecture}.wkv_head_size" in self._file.metadata:
            head = head or self.number("wkv_head_size", 0)
            return _STATE_BYTES * self.n_embd * (self.number("token_shift_count", 2) + head)
        if cached:
            return _STATE_BYTES * self.n_embd * (cached - 1)
        d_conv, d_state = max(1, self.number("ssm.conv_kernel", 0)), self.number("ssm.state_size", 0)
        d_inner, groups = self.number("ssm.inner_size", 0), self.number("ssm.group_count", 0)
        kda = self.number("kda.head_dim", 0)
        if kda:
            heads = max(self.each("attention.head_count", 0))
            return _STATE_BYTES * kda * heads * (3 * (d_conv - 1 or 3) + kda)
        return _STATE_BYTES * ((d_conv - 1) * (d_inner + 2 * groups * d_state) + d_state * d_inner)

    def _missing(self, key: str) -> InferenceCenterError:
        return self._refusal(f"does not state {key}")

    def _wrong(self, key: str, value: Value, allowed: str) -> InferenceCenterError:
        return self._refusal(f"states {key} as {shown(value)}; expected {allowed}")

    def _refusal(self, what: str) -> InferenceCenterError:
        return _refusal(self._file, what)


def _refusal(file: GgufFile, what: str) -> InferenceCenterError:
    return InferenceCenterError(
        ErrorCode.INVALID_MODEL_FILE,
        f"{file.paths[0]} {what}.",
        hint="Download the file again, or convert the model again with a current llama.cpp.",
        field="model.path",
    )


def _name(file: GgufFile) -> str:
    """Return the model's name in the file, truncated to a valid name; the file's stem if there is none."""
    stated = file.metadata.get("general.name")
    return stated[:_MAX_NAME_CHARS] if isinstance(stated, str) and stated else file.paths[0].stem


def _is_width(number: float) -> TypeGuard[int]:
    return isinstance(number, int) and 0 <= number <= _MAX_WIDTH


def _layer(
    tensors: Sequence[Tensor], *, kv: tuple[int, int], window: int, state_bytes: int, keeps_kv: bool
) -> LayerShape:
    names = {tensor.name.split(".", 2)[2] for tensor in tensors}
    recurrent = any(name.startswith(_RECURRENT) for name in names)
    attends = any(name.startswith(("attn_k.", "attn_kv_a_mqa.")) for name in names)
    # Linear attention has a tensor of that name too, but keeps a state.
    attends = attends or (not recurrent and any(name.startswith("attn_qkv.") for name in names))
    experts = sum(tensor.bytes for tensor in tensors if _EXPERTS.match(tensor.name.split(".", 2)[2]))
    k_width, v_width = kv if attends and keeps_kv else (0, 0)
    return LayerShape(
        dense_bytes=sum(tensor.bytes for tensor in tensors) - experts,
        expert_bytes=experts,
        largest_bytes=max((tensor.bytes for tensor in tensors), default=0),
        k_width=k_width,
        v_width=v_width,
        window=window if k_width else 0,
        state_bytes=state_bytes if recurrent else 0,
    )


def _digest(file: GgufFile) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(file.metadata.items()):
        digest.update(f"{key}={_shown(value)}\0".encode())
    for tensor in file.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.type}\0".encode())
    return digest.hexdigest()[:32]


def _shown(value: Value) -> str:
    return f"{value.count} {value.values}" if isinstance(value, Array) else repr(value)
