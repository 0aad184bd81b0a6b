"""A conversation as a component: each line of the input is a turn, and its answer is written.

pip install componentize-py
componentize-py --wit-path wit --world command componentize app --output chat-component.wasm
inferencecenter wasm run chat-component.wasm
"""

import sys

from componentize_py_types import Err
from wit_world import exports
from wit_world.imports import graph
from wit_world.imports.tensor import Tensor, TensorType


def text_tensor(text: str) -> Tensor:
    """Return a text as a tensor of bytes."""
    data = text.encode()
    return Tensor([len(data)], TensorType.U8, data)


class Run(exports.Run):
    """The command of the component."""

    def run(self) -> None:
        """Answer each line."""
        try:
            context = graph.load_by_name("default").init_execution_context()
            metadata = '{"stopping": {"max_tokens": 200}}'
            for line in map(str.strip, sys.stdin):
                if line:
                    outputs = context.compute([("prompt", text_tensor(line)), ("metadata", text_tensor(metadata))])
                    print(dict(outputs)["0"].data().decode(), flush=True)
        except Err as error:
            print(error.value.code().name, error.value.data(), file=sys.stderr)
            raise Err(None) from None
