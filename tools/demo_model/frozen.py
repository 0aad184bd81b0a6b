"""The shipped demo model as a network of torch whose parameters do not learn."""

from pathlib import Path

import gguf
import torch

from tools.demo_model.model import DemoModel, Shape


def load_frozen(path: Path) -> DemoModel:
    """Returns the network with the weights of a model file, dequantized."""
    tensors = gguf.GGUFReader(path).tensors
    state = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in tensors}
    model = DemoModel(Shape(vocabulary=len(state["token_embd.weight"])))
    model.load_state_dict(state)
    model.requires_grad_(requires_grad=False)
    return model
