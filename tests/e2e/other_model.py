"""Writes a copy of the demo model with other token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

_MARKS: Final = {"<|im_start|>": "[turn]", "<|im_end|>": "[over]"}
_IDS: Final = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.padding_token_id")


def write_other_model(source: Path, path: Path, *, template: str | None = None) -> Path:
    """Write ``source`` with permuted token ids, other special tokens and another template.

    The template is ``template``, or by default that of ``source`` with the new special tokens. Conversations give
    the same answers as with ``source``, but token ids of one model are meaningless to the other.
    """
    reader = gguf.GGUFReader(source)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    n_vocab = len(fields["tokenizer.ggml.tokens"])
    order = np.random.default_rng(11).permutation(n_vocab)
    new_id = np.argsort(order)
    fields["general.name"] = path.stem
    fields["tokenizer.ggml.tokens"] = [_renamed(fields["tokenizer.ggml.tokens"][old]) for old in order]
    fields["tokenizer.ggml.token_type"] = [fields["tokenizer.ggml.token_type"][old] for old in order]
    fields["tokenizer.chat_template"] = template or _renamed(fields["tokenizer.chat_template"])
    for name in _IDS:
        fields[name] = int(new_id[fields[name]])
    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, fields[name], *field.types[:2])
    for tensor in reader.tensors:
        data = tensor.data[order] if tensor.name == "token_embd.weight" else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(text: str) -> str:
    for mark, other in _MARKS.items():
        text = text.replace(mark, other)
    return text
