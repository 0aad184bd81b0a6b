"""The devices that llama.cpp computes on."""

from __future__ import annotations

import ctypes
from typing import Final

from llama_cpp import llama_cpp as lib
from llama_cpp._ggml import libggml

# enum ggml_backend_dev_type: a GPU with memory of its own, and one that shares the host's.
_GPU_TYPES: Final = (1, 2)
_device_by_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("ggml_backend_dev_by_type", libggml))


def offloads() -> bool:
    """Tell whether there is a GPU that takes layers.

    ``llama_supports_gpu_offload`` alone is also true where llama.cpp was built to use other machines.
    """
    return bool(lib.llama_supports_gpu_offload()) and any(_device_by_type(each) for each in _GPU_TYPES)
