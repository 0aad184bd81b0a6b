"""Loads a GGUF model through llama.cpp and reads its metadata."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama.devices import host_buffer_type, pointers, present
from inferencecenter.engine.llama.log import LlamaLog
from inferencecenter.engine.llama.model_file import check_model_file, load_refusal, unusable
from inferencecenter.engine.llama.vocab import Vocabulary
from inferencecenter.hardware.gguf import read_gguf
from inferencecenter.hardware.memory import available_memory_bytes
from inferencecenter.ipc.messages import Adapter, ModelInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack

    from inferencecenter.config.sections import LoraSettings, ModelKind
    from inferencecenter.engine.llama.log import BufferSizes, LlamaLog
    from inferencecenter.hardware.gguf import GgufFile
    from inferencecenter.ipc.engine_options import EngineOptions
    from inferencecenter.ipc.messages import BufferUse


# LoRA adapters: loaded with the model they modify and set on every context created from it.

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
            description = "is missing" if found is None else f"is {found!r}"
            raise _refusal(f"{path} is no LoRA adapter: {key} {description}, not {expected!r}.", _CONVERT)
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


N_CTX_DEFAULT_MAX = 4096

# ``general.sampling.*`` keys of a GGUF file, the parameter each stands for, and its type.
_SAMPLING_KEYS: tuple[tuple[str, str, type[int] | type[float]], ...] = (
    ("temp", "temperature", float),
    ("top_k", "top_k", int),
    ("top_p", "top_p", float),
    ("min_p", "min_p", float),
    ("xtc_probability", "xtc_probability", float),
    ("xtc_threshold", "xtc_threshold", float),
    ("penalty_last_n", "repeat_last_n", int),
    ("penalty_repeat", "repeat_penalty", float),
    ("mirostat", "mirostat", int),
    ("mirostat_tau", "mirostat_tau", float),
    ("mirostat_eta", "mirostat_eta", float),
)

_LOAD_MODES = {
    (True, False): lib.LLAMA_LOAD_MODE_AUTO,
    (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, False): lib.LLAMA_LOAD_MODE_NONE,
    (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
}


_SPLIT_MODES = {"layer": lib.LLAMA_SPLIT_MODE_LAYER, "none": lib.LLAMA_SPLIT_MODE_NONE}


class _TensorPlace(ctypes.Structure):
    """``llama_model_tensor_buft_override`` of llama.h, missing in the binding."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class LlamaModel:
    """A loaded ``llama_model`` with its vocabulary and adapters; outlives every context made from it."""

    def __init__(
        self, handle: int, *, path: Path, n_gpu_layers: int, params: ModelParams, adapters: LoraAdapters
    ) -> None:
        self.handle = handle
        # llama.cpp reads some of them again when a context is created.
        self._params = params
        self.path = path
        self.adapters = adapters
        self.n_layers: int = lib.llama_model_n_layer(handle)
        self.n_bytes: int = lib.llama_model_size(handle)
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(handle)
        self.n_gpu_layers = self.n_layers if n_gpu_layers < 0 else min(n_gpu_layers, self.n_layers)
        self.vocab = Vocabulary(lib.llama_model_get_vocab(handle))

    @classmethod
    def load(cls, options: EngineOptions, *, on_progress: Callable[[float], None], log: LlamaLog) -> LlamaModel:
        """Load the files named by ``options``; ``on_progress`` receives the fraction done, from 0 to 1.

        Raises:
            InferenceCenterError: ``invalid_model_file``, or ``invalid_config`` for GPU layers without a GPU.
        """
        offload: bool = lib.llama_supports_gpu_offload()
        n_gpu_layers = resolve_gpu_layers(options.n_gpu_layers, offload=offload)
        path = Path(options.model_path)
        check_model_file(path, available_bytes=available_memory_bytes() if n_gpu_layers == 0 else None)
        params = ModelParams(options, n_gpu_layers=n_gpu_layers)
        progress = _progress_callback(on_progress)
        params.struct.progress_callback = progress
        log.take_problems()
        lib.llama_backend_init()
        progress(0.0, None)  # reported before layers are loaded to a GPU, which may crash the process
        handle = lib.llama_model_load_from_file(str(path).encode(), params.struct)
        if not handle:
            raise load_refusal(path, log.take_problems())
        reason = _why_unusable(handle, options.kind)
        if reason:
            lib.llama_model_free(handle)
            raise unusable(path, reason)
        try:
            adapters = LoraAdapters.load(handle, options.lora, base=path, log=log)
        except InferenceCenterError:
            lib.llama_model_free(handle)
            raise
        return cls(handle, path=path, n_gpu_layers=n_gpu_layers, params=params, adapters=adapters)

    def n_ctx(self, requested: int) -> int:
        """Return the tokens per slot for a setting in which 0 leaves it to the model."""
        return requested or min(self.n_ctx_train, N_CTX_DEFAULT_MAX)

    def info(self, options: EngineOptions, *, n_threads: int, memory: tuple[BufferUse, ...] = ()) -> ModelInfo:
        """Return the front's description of this model, run with ``options``."""
        vocab = self.vocab
        return ModelInfo(
            name=options.model_name or self.metadata("general.name") or self.path.stem,
            path=str(self.path),
            description=_read_text(lambda buffer, size: lib.llama_model_desc(self.handle, buffer, size)),
            architecture=self.metadata("general.architecture"),
            backend="llama",
            n_params=lib.llama_model_n_params(self.handle),
            size_bytes=self.n_bytes,
            n_vocab=vocab.n_tokens,
            n_layers=self.n_layers,
            n_gpu_layers=self.n_gpu_layers,
            n_ctx_train=self.n_ctx_train,
            n_ctx=self.n_ctx(options.n_ctx),
            slots=options.slots,
            n_threads=n_threads,
            chat_template=(lib.llama_model_chat_template(self.handle, None) or b"").decode("utf-8", errors="replace"),
            bos_token=vocab.token_text(vocab.bos),
            eos_token=vocab.token_text(vocab.eos),
            add_bos=vocab.add_bos,
            special_tokens=vocab.special_texts,
            sampling_defaults_json=msgspec.json.encode(self._sampling_defaults()),
            library=f"llama.cpp {lib.llama_version().decode()} via llama-cpp-python {version('llama-cpp-python')}",
            memory=memory,
            lora=tuple(Adapter(str(each.path), each.scale) for each in options.lora),
            max_token_bytes=vocab.max_token_bytes,
            kind=options.kind,
            n_embd=lib.llama_model_n_embd_out(self.handle),
            infill=vocab.infill,
            projector=options.mmproj_path,
        )

    def metadata(self, key: str) -> str:
        """Return a metadata value as text, empty where the file has none."""
        name = key.encode()
        return _read_text(lambda buffer, size: lib.llama_model_meta_val_str(self.handle, name, buffer, size))

    def all_metadata(self) -> tuple[str, ...]:
        """Return every metadata entry that is not an array as ``key=value``, sorted."""
        handle = self.handle

        def entry(index: int) -> str:
            key = _read_text(lambda *buffer: lib.llama_model_meta_key_by_index(handle, index, *buffer))
            value = _read_text(lambda *buffer: lib.llama_model_meta_val_str_by_index(handle, index, *buffer))
            return f"{key}={value}"

        return tuple(sorted(map(entry, range(lib.llama_model_meta_count(handle)))))

    def close(self) -> None:
        """Free the model, after everything made from it."""
        lib.llama_model_free(self.handle)

    def _sampling_defaults(self) -> dict[str, int | float]:
        found = ((name, self.metadata(f"general.sampling.{key}"), kind) for key, name, kind in _SAMPLING_KEYS)
        values = {name: _number(text, kind) for name, text, kind in found}
        return {name: value for name, value in values.items() if value is not None}


class ModelParams:
    """``llama_model_params`` with everything it points to.

    Raises:
        InferenceCenterError: ``invalid_config`` for an unknown GPU.
    """

    def __init__(self, options: EngineOptions, *, n_gpu_layers: int) -> None:
        self.struct = struct = lib.llama_model_default_params()
        struct.n_gpu_layers = n_gpu_layers
        struct.load_mode = _LOAD_MODES[options.use_mmap, options.use_mlock]
        struct.use_extra_bufts = may_repack(lib.llama_print_system_info().decode())
        struct.split_mode = _SPLIT_MODES[options.split_mode]
        struct.main_gpu = options.main_gpu
        if options.devices:
            found = pointers(options.devices)
            self._devices = (ctypes.c_void_p * (len(found) + 1))(*found, None)
            struct.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if options.tensor_split:
            self._shares = (ctypes.c_float * lib.llama_max_devices())(*options.tensor_split)
            struct.tensor_split = ctypes.cast(self._shares, ctypes.POINTER(ctypes.c_float))
        if options.cpu_tensors:
            host = host_buffer_type()
            places = [_TensorPlace(pattern.encode(), host) for pattern in options.cpu_tensors]
            self._places = (_TensorPlace * (len(places) + 1))(*places, _TensorPlace(None, None))
            struct.tensor_buft_overrides = ctypes.cast(self._places, ctypes.c_void_p)


def resolve_gpu_layers(requested: int, *, offload: bool) -> int:
    """Return the number of layers to offload to a GPU; -1 means all.

    Raises:
        InferenceCenterError: ``invalid_config`` when layers are requested but there is no GPU.
    """
    if offload:
        return requested
    if requested > 0:
        raise InferenceCenterError(
            ErrorCode.INVALID_CONFIG,
            f"n_gpu_layers is {requested}, but this build of llama.cpp finds no GPU.",
            hint="Install with CUDA=1 on a machine with a GPU, or set n_gpu_layers to -1 (all that can be) or 0.",
            field="n_gpu_layers",
        )
    return 0


def may_repack(system_info: str) -> bool:
    """Return whether weights may be repacked into the layout that is fastest for the CPU.

    Not where llama.cpp was built for AMX: its kernels for that layout crash when compiled by GCC
    (github.com/ggml-org/llama.cpp/issues/20824). ``tools/llama`` builds without them; other builds run without any
    repacking.
    """
    return "AMX_INT8 = 1" not in system_info


def _why_unusable(handle: int, kind: ModelKind) -> str:
    if lib.llama_vocab_type(lib.llama_model_get_vocab(handle)) == lib.LLAMA_VOCAB_TYPE_NONE:
        return "has no vocabulary."
    if kind == "chat" and (lib.llama_model_has_encoder(handle) or not lib.llama_model_has_decoder(handle)):
        return "has an encoder, as translation and embedding models do."
    if kind != "chat" and lib.llama_model_has_encoder(handle) and lib.llama_model_has_decoder(handle):
        return "has an encoder and a decoder, as translation models do."
    if lib.llama_model_is_diffusion(handle):
        return "is a diffusion model, which does not generate token by token."
    return ""


def _progress_callback(on_progress: Callable[[float], None]) -> ctypes._FuncPointer:
    """Return a C callback that reports whole percents and never cancels loading."""
    reported = -1

    def receive(fraction: float, _user_data: int | None) -> bool:
        nonlocal reported
        percent = int(fraction * 100)
        if percent > reported:
            reported = percent
            # C calls this; no exception may propagate through it.
            with suppress(Exception):
                on_progress(percent / 100)
        return True

    callback: ctypes._FuncPointer = lib.llama_progress_callback(receive)
    return callback


def _read_text(read: Callable[[ctypes.Array[ctypes.c_char], int], int]) -> str:
    """Return the text that a C function writes into a buffer, as snprintf does; empty when it fails."""
    buffer = ctypes.create_string_buffer(256)
    needed = read(buffer, len(buffer))
    if needed >= len(buffer):
        buffer = ctypes.create_string_buffer(needed + 1)
        read(buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace") if needed > 0 else ""


def _number(text: str, kind: type[int] | type[float]) -> int | float | None:
    """Return metadata text as a number; ``None`` if it is absent or not a finite number of its kind."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value) or (kind is int and value != int(value)):
        return None
    return kind(value)


def load_model(
    options: EngineOptions,
    *,
    sizes: BufferSizes,
    on_progress: Callable[[float], None],
    on_log: Callable[[str, str], None],
    resources: ExitStack,
) -> tuple[EngineOptions, LlamaModel, LlamaLog]:
    """Install llama.cpp's log and load a model, both closed with ``resources``.

    Returns the options for the devices that are present, the model and the log, whose buffer sizes go to ``sizes``.

    Raises:
        InferenceCenterError: ``invalid_model_file`` or ``invalid_config``.
    """

    def logged(level: str, line: str) -> None:
        sizes.read(line)
        on_log(level, line)

    log = LlamaLog(logged)
    log.install()
    resources.callback(log.close)
    options = present(options, on_log=on_log)
    model = LlamaModel.load(options, on_progress=on_progress, log=log)
    resources.callback(model.close)
    return options, model, log
