"""Writes the trained vision tower as a projector: `python -m tools.demo_model.vision_export DIR FILE`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import torch
import typer
from gguf import GGUFWriter
from torch import Tensor

from tools.demo_model.vision import DEVIATION, MEAN, VisionShape


def export(state: Mapping[str, Tensor], shape: VisionShape, out: Path) -> None:
    """Writes the parameters `state` of a tower to the file `out`, matrices as F16."""
    partial = out.with_suffix(".partial")
    writer = GGUFWriter(partial, "clip")
    writer.add_name("InferenceCenter Demo Vision")
    writer.add_description("Sees one colored shape or digit, for the demo model.")
    writer.add_license("Apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for name, value in (
        ("embedding_length", shape.width),
        ("feed_forward_length", shape.feed_forward),
        ("block_count", shape.layers),
        ("projection_dim", state["mm.2.bias"].numel()),
        ("attention.head_count", shape.heads),
        ("image_size", shape.side),
        ("patch_size", shape.patch),
    ):
        writer.add_uint32(f"clip.vision.{name}", value)
    # Without it llama.cpp leaves out the last layer.
    writer.add_array("clip.vision.feature_layer", [shape.layers])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", shape.norm_epsilon)
    writer.add_array("clip.vision.image_mean", [MEAN] * 3)
    writer.add_array("clip.vision.image_std", [DEVIATION] * 3)
    for name, tensor in state.items():
        is_matrix = tensor.dim() > 1 and name != "position_embd"
        values = tensor.detach().numpy().astype(np.float16 if is_matrix else np.float32)
        suffix = ".weight" if name == "position_embd" else ""
        writer.add_tensor(f"{'' if name.startswith('mm.') else 'v.'}{name}{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def main(
    run: Annotated[Path, typer.Argument(help="Directory that training wrote.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Writes the trained vision tower as a projector."""
    state = torch.load(run / "vision.pt", weights_only=True)["average"]
    tower = {name.removeprefix("module."): each for name, each in state.items() if name.startswith("module.")}
    export(tower, VisionShape(), out)


if __name__ == "__main__":
    typer.run(main)
