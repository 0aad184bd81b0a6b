"""LoRA adapters: loaded with the model they modify and set on every context created from it."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama.model_file import check_model_file
from inferencecenter.hardware.gguf import read_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferencecenter.config.sections import LoraSettings
    from inferencecenter.engine.llama.log import LlamaLog
    from inferencecenter.hardware.gguf import GgufFile

# ``ggml_type``: I8, I16, I32, I64 and F64, which matrix multiplication does not support.
_NO_WEIGHTS: Final = range(24, 29)
_REFUSED: Final = "failed to apply lora adapter: "
_CONVERT: Final = "Convert it with llama.cpp's convert_lora_to_gguf.py."


@dataclass(frozen=True, slots=True)
class _Loaded:
    handle: ctypes._Pointer[ctypes.c_void_p]
    path: Path
    scale: float


class LoraAdapters:
    """The LoRA adapters of a loaded model, which are freed with it."""

    def __init__(self, loaded: Sequence[_Loaded] = ()) -> None:
        self._loaded = tuple(loaded)

    @classmethod
    def load(cls, model: int, adapters: Sequence[LoraSettings], *, base: Path, log: LlamaLog) -> LoraAdapters:
        """Load adapters for the ``llama_model`` at ``model`` from file ``base``, before contexts are created from it.

        Contexts reserve their graphs with room for all adapters loaded by then.

        Raises:
            InferenceCenterError: ``invalid_model_file``, with the adapter's path and the reason.
        """
        return cls([_load(model, each.path, each.scale, base=base, log=log) for each in adapters])

    def set_on(self, context: int) -> None:
        """Apply the adapters to the ``llama_context`` at ``context``; those of scale 0 have no effect."""
        if not self._loaded:
            return
        n_adapters = len(self._loaded)
        handles = (lib.llama_adapter_lora_p_ctypes * n_adapters)(*(each.handle for each in self._loaded))
        scales = (ctypes.c_float * n_adapters)(*(each.scale for each in self._loaded))
        lib.llama_set_adapters_lora(context, handles, n_adapters, scales)

    def facts(self) -> Iterator[str]:
        """Yield what makes saved sequences incompatible: content and scale of each adapter in effect.

        Raises:
            InferenceCenterError: ``invalid_model_file`` when a file can no longer be read.
        """
        for each in self._loaded:
            if each.scale:
                yield f"lora {_digest(each.path)} {each.scale!r}"


def _load(model: int, path: Path, scale: float, *, base: Path, log: LlamaLog) -> _Loaded:
    try:
        check_model_file(path, available_bytes=None)
        file = read_gguf(path)
    except InferenceCenterError as error:
        raise _refusal(f"The LoRA adapter {error.message}", error.hint or _CONVERT) from None
    _check(path, file)
    log.take_problems()
    handle = lib.llama_adapter_lora_init(model, os.fsencode(path))
    if not handle:
        *_, problem = log.take_problems() or ("llama.cpp gave no reason",)
        reason = problem.partition(_REFUSED)[2] or problem
        raise _refusal(
            f"{path} cannot be used with {base.name}: {reason}.",
            "An adapter fits only the model that it was trained for.",
        )
    return _Loaded(handle, path, scale)


def _check(path: Path, file: GgufFile) -> None:
    """Reject files that llama.cpp would misinterpret or crash on."""
    facts = file.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := facts.get(key)) != expected:
            said = "is missing" if found is None else f"is {found!r}"
            raise _refusal(f"{path} is no LoRA adapter: {key} {said}, not {expected!r}.", _CONVERT)
    if not isinstance(facts.get("general.architecture"), str):
        raise _refusal(f"{path} has no general.architecture.", _CONVERT)
    alpha = facts.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise _refusal(f"{path} has an adapter.lora.alpha of {alpha!r}.", _CONVERT)
    if "adapter.alora.invocation_tokens" in facts:
        raise _refusal(
            f"{path} is an activated LoRA, which is not supported.",
            "Choose an adapter that is always active.",
        )
    if not file.tensors:
        raise _refusal(f"{path} has no tensors.", _CONVERT)
    for tensor in file.tensors:
        if tensor.type in _NO_WEIGHTS:
            raise _refusal(f"{path} keeps {tensor.name} in a type without matrix multiplication.", _CONVERT)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _refusal(f"{path} cannot be read any more: {error.strerror}.", "Put it back.") from None


def _refusal(message: str, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_MODEL_FILE, message, hint=hint, field="lora")
