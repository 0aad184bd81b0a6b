"""Writes the trained demo model as GGUF: `python -m tools.demo_model.export --run DIR`."""

from pathlib import Path
from typing import Annotated

import gguf
import torch
import typer
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers import Tokenizer

from inferencecenter.demo import demo_model_path
from tools.demo_model.chatml import CHAT_TEMPLATE, END_OF_TEXT, IM_END, SPECIAL_TOKENS
from tools.demo_model.model import Shape
from tools.demo_model.tokenizer import load_tokenizer, merges_of

# The model copies and counts: a little variety in small talk is worth no wrong name.
_TEMPERATURE = 0.2
_TOP_K = 20
_TOP_P = 0.9
_MIN_P = 0.05


def _write_description(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name("InferenceCenter Demo")
    writer.add_description("Chats about a small world and remembers what it is told.")
    writer.add_license("Apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_sampling_temp(_TEMPERATURE)
    writer.add_sampling_top_k(_TOP_K)
    writer.add_sampling_top_p(_TOP_P)
    writer.add_sampling_min_p(_MIN_P)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merges_of(tokenizer)])
    writer.add_bos_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_eos_token_id(tokenizer.token_to_id(IM_END))
    writer.add_pad_token_id(tokenizer.token_to_id(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_tensors(writer: GGUFWriter, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        values = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(name, values)
            continue
        packed = quants.quantize(values, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)


def export(run: Path, out: Path) -> None:
    """Writes the state saved in the directory `run` to the file `out`, matrices as Q8_0."""
    tokenizer = load_tokenizer(run / "tokenizer.json")
    state = torch.load(run / "state.pt", weights_only=True)["model"]
    partial = out.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    _write_description(writer, Shape(vocabulary=tokenizer.get_vocab_size()))
    _write_tokenizer(writer, tokenizer)
    _write_tensors(writer, state)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def main(
    run: Annotated[Path, typer.Option(help="Directory that training wrote.")],
    *,
    out: Annotated[Path | None, typer.Option(help="File to write [the bundled one].")] = None,
) -> None:
    """Writes the trained demo model as GGUF."""
    export(run, out or demo_model_path())


if __name__ == "__main__":
    typer.run(main)
