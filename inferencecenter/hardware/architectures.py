"""What llama.cpp knows of architectures and GGUF files do not say: which layers look back how far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_NAMES: Final = """
    apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell cohere2
    command-r dbrx deci deepseek deepseek2 dots1 ernie4_5 ernie4_5-moe exaone exaone4 falcon falcon-h1 gemma gemma2
    gemma3 gemma3n gemma4 glm4 glm4moe gpt-oss gpt2 gptj gptneox granite granitehybrid granitemoe grok grovemoe
    hunyuan-dense hunyuan-moe internlm2 jais jamba lfm2 lfm2moe llama llama4 maincoder mamba mamba2 minicpm minicpm3
    minimax-m2 mistral3 mpt nemotron nemotron_h nemotron_h_moe olmo olmo2 olmoe openelm orion phi2 phi3 phimoe plamo plm
    qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe refact rwkv6 rwkv6qwen2 rwkv7 seed_oss
    smallthinker smollm3 stablelm starcoder starcoder2 xverse
"""

KNOWN: Final = frozenset(_NAMES.split())
"""Architectures whose memory was looked up in llama.cpp's source; of others it is taken that all layers look at all."""

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
"""Every how manyth layer sees everything, where the others have a sliding window (``load_swa_pattern``)."""

DENSE_FIRST: Final = frozenset({"smallthinker"})
"""Of these, those in which it is the first of each group and not the last."""

KV_FROM_START: Final[Mapping[str, int]] = {"gemma3n": 20}
"""Layers that have KV of their own, where that is not stated."""
