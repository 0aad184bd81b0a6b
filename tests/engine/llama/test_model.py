"""Tests of ``engine.llama.model`` and ``engine.llama.model_file``."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama.model import (
    N_CTX_DEFAULT_MAX,
    LlamaModel,
    ModelParams,
    may_repack,
    resolve_gpu_layers,
)
from inferencecenter.engine.llama.model_file import check_model_file
from inferencecenter.ipc.engine_options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path

    from inferencecenter.engine.llama.log import LlamaLog
    from tests.engine.llama.conftest import Loaded


def _header(version: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, 0, 0)


BAD_STARTS = {
    "empty": (b"", "is empty"),
    "text": (b"Once upon a time there was a model.", "is not a GGUF file"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is not a GGUF file"),
    "web page": (b"<!doctype html><title>Sign in</title>", "is not a GGUF file"),
    "magic only": (b"GGUF", "ends inside its header, after 4 bytes"),
    "half a header": (_header(3)[:20], "ends inside its header"),
    "version 0": (_header(0), "is GGUF version 0"),
    "version 1": (_header(1), "is GGUF version 1"),
    "version 99": (_header(99), "is GGUF version 99"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    "header and no more": (_header(3), "cannot be loaded"),
    "counts beyond the file": (struct.pack("<4sIQQ", b"GGUF", 3, 2**40, 2**40), "cannot be loaded"),
}


def _refusal(path: Path | str, options: EngineOptions, log: LlamaLog) -> InferenceCenterError:
    with pytest.raises(InferenceCenterError) as refusal:
        LlamaModel.load(options.replace(model_path=str(path)), on_progress=lambda _: None, log=log)
    assert refusal.value.code is ErrorCode.INVALID_MODEL_FILE
    assert refusal.value.hint
    assert refusal.value.field == "model_path"
    assert str(path) in refusal.value.message
    return refusal.value


@pytest.mark.parametrize(("content", "message"), BAD_STARTS.values(), ids=BAD_STARTS.keys())
def test_bad_files_are_refused(
    tmp_path: Path, options: EngineOptions, log: LlamaLog, content: bytes, message: str
) -> None:
    """Each kind of invalid file is refused with what it is and what to do."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert message in _refusal(path, options, log).message


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.05, 0.2, 0.5, 0.99, 0.999999])
def test_truncated_files_are_refused(
    tmp_path: Path, demo_model_path: Path, options: EngineOptions, log: LlamaLog, share: float
) -> None:
    """A file truncated in its metadata or weights is refused with llama.cpp's own message."""
    whole = demo_model_path.read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    refusal = _refusal(path, options, log)
    assert "cannot be loaded: " in refusal.message
    assert "gave no reason" not in refusal.message


def test_missing_file_error_lists_models_beside_it(tmp_path: Path, options: EngineOptions, log: LlamaLog) -> None:
    """If the directory is missing, the error names it."""
    (tmp_path / "other.gguf").touch()
    assert "other.gguf" in (_refusal(tmp_path / "model.gguf", options, log).hint or "")
    missing = _refusal(tmp_path / "a" / "b" / "model.gguf", options, log)
    assert f"{tmp_path / 'a' / 'b'} does not exist; {tmp_path} does" in (missing.hint or "")


def test_directory_error_lists_its_models(tmp_path: Path, options: EngineOptions, log: LlamaLog) -> None:
    """A directory is not a model file."""
    assert ".gguf" in (_refusal(tmp_path, options, log).hint or "")
    (tmp_path / "other.gguf").touch()
    refusal = _refusal(tmp_path, options, log)
    assert "is a directory" in refusal.message
    assert "other.gguf" in (refusal.hint or "")


def test_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path, options: EngineOptions, log: LlamaLog) -> None:
    """A named pipe is not opened."""
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    assert "not a regular file" in _refusal(path, options, log).message


@pytest.mark.parametrize("method", ["open", "stat"])
def test_unreadable_file_error_names_the_missing_permission(
    tmp_path: Path, options: EngineOptions, log: LlamaLog, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A file without read permission, or behind a directory without search permission: both are named."""
    path = tmp_path / "model.gguf"
    path.write_bytes(_header(3))

    # Tests may run as root, for which permissions do not apply.
    def denied(*_arguments: object, **_named: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(type(path), method, denied)
        refusal = _refusal(path, options, log)
    assert "Permission denied" in refusal.message
    assert "user that runs the daemon" in (refusal.hint or "")


def test_file_larger_than_memory_is_refused_with_both_sizes(demo_model_path: Path) -> None:
    """The error has the needed and the available size; unknown memory refuses nothing."""
    size = demo_model_path.stat().st_size
    with pytest.raises(InferenceCenterError, match=r"needs 0\.0 GiB .* 0\.0 GiB are available") as refusal:
        check_model_file(demo_model_path, available_bytes=size - 1)
    assert refusal.value.code is ErrorCode.INVALID_MODEL_FILE
    assert check_model_file(demo_model_path, available_bytes=size) == size
    assert check_model_file(demo_model_path, available_bytes=None) == size


@pytest.mark.parametrize(
    ("system_info", "may"), [("CPU : AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | ", False), ("CPU : AVX512 = 1 | ", True)]
)
def test_weights_are_not_repacked_for_amx(system_info: str, may: bool) -> None:
    """A build whose AMX kernels would crash keeps the weights in their file format."""
    assert may_repack(system_info) is may


def test_shards_are_counted_together(tmp_path: Path) -> None:
    """A split model needs the memory of all its files, and of no other's."""
    for name in ("m[1]-00001-of-00002", "m[1]-00002-of-00002", "m1-00001-of-00002", "m[1]-00001-of-00003"):
        (tmp_path / f"{name}.gguf").write_bytes(_header(3))
    assert check_model_file(tmp_path / "m[1]-00001-of-00002.gguf", available_bytes=None) == 2 * len(_header(3))


@pytest.mark.parametrize(
    ("asked", "offload", "expected"), [(-1, True, -1), (-1, False, 0), (0, False, 0), (0, True, 0), (7, True, 7)]
)
def test_gpu_layers_are_resolved(asked: int, offload: bool, expected: int) -> None:
    """All layers means none without a GPU; a number is used where there is one."""
    assert resolve_gpu_layers(asked, offload=offload) == expected


def test_gpu_layers_without_a_gpu_are_refused() -> None:
    """The setting cannot be satisfied."""
    with pytest.raises(InferenceCenterError, match="n_gpu_layers is 7") as refusal:
        resolve_gpu_layers(7, offload=False)
    assert refusal.value.code is ErrorCode.INVALID_CONFIG
    assert "CUDA=1" in (refusal.value.hint or "")


def test_metadata_of_the_demo_model(demo: Loaded, options: EngineOptions, demo_model_path: Path) -> None:
    """The model description comes from its file and the options."""
    info = demo.model.info(options, n_threads=3)
    assert (info.path, info.backend, info.architecture) == (str(demo_model_path), "llama", "llama")
    assert (info.slots, info.n_ctx, info.n_threads, info.n_gpu_layers) == (8, 256, 3, 0)
    assert info.n_ctx_train >= 1024
    assert info.n_params > 1_000_000
    assert 0 < info.size_bytes <= demo_model_path.stat().st_size
    assert info.n_layers > 0
    assert "<|im_start|>" in info.chat_template
    assert info.eos_token == "<|im_end|>"
    assert {"<|im_start|>", "<|im_end|>"} <= set(info.special_tokens)
    assert info.library.startswith("llama.cpp ")
    assert "llama-cpp-python 0.3." in info.library
    renamed = options.replace(model_name="pet")
    assert demo.model.info(renamed, n_threads=1).name == "pet"


def test_metadata_defaults(window: Loaded, options: EngineOptions) -> None:
    """A file without a template has an empty one; sampling recommendations that are numbers become parameters."""
    info = window.model.info(options, n_threads=1)
    assert (info.name, info.architecture, info.chat_template) == ("window", "gemma2", "")
    assert (info.bos_token, info.eos_token, info.add_bos) == ("<s>", "</s>", True)
    defaults = msgspec.json.decode(info.sampling_defaults_json)
    assert defaults == {"temperature": 0.75, "top_k": 12, "repeat_last_n": 32}
    assert isinstance(defaults["top_k"], int)


def test_context_length_left_to_the_model_is_capped(demo: Loaded, window: Loaded) -> None:
    """Zero selects the trained length, up to a limit; a number is used as it is."""
    assert demo.model.n_ctx(0) == min(demo.model.n_ctx_train, N_CTX_DEFAULT_MAX)
    assert window.model.n_ctx_train == 8192
    assert window.model.n_ctx(0) == 4096
    assert window.model.n_ctx(5000) == 5000


def test_refusal_repeats_no_earlier_problem(tmp_path: Path, options: EngineOptions, log: LlamaLog) -> None:
    """Only llama.cpp's messages about this file are reported."""
    path = tmp_path / "model.gguf"
    path.write_bytes(_header(3))
    log.write(4, "trouble of yesterday\n")
    assert "yesterday" not in _refusal(path, options, log).message


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        ("llama_vocab_type", lib.LLAMA_VOCAB_TYPE_NONE),
        ("llama_model_has_encoder", True),
        ("llama_model_has_decoder", False),
        ("llama_model_is_diffusion", True),
    ],
)
def test_models_that_do_not_generate_text_are_refused(
    options: EngineOptions, log: LlamaLog, monkeypatch: pytest.MonkeyPatch, function: str, answer: object
) -> None:
    """A model without vocabulary or decoder, or with an encoder, loads but is refused."""
    monkeypatch.setattr(lib, function, lambda _handle: answer)
    assert "text generation model" in (_refusal(options.model_path, options, log).hint or "")


def test_progress_callback_that_raises_does_not_stop_the_loading(options: EngineOptions, log: LlamaLog) -> None:
    """Nothing is raised through C: the model loads although the callback fails."""
    calls = []

    def broken(fraction: float) -> None:
        calls.append(fraction)
        raise OSError("broken pipe")

    LlamaModel.load(options, on_progress=broken, log=log).close()
    assert calls[-1] == 1.0


def test_parameters_that_c_points_to_live_as_long_as_the_model(options: EngineOptions) -> None:
    """Split shares have as many floats as llama.cpp reads; patterns end with a null entry and use host memory."""
    placed = options.replace(split_mode="none", main_gpu=-1, tensor_split=(3.0, 1.0), cpu_tensors=("_exps", "_shexp"))
    params = ModelParams(placed, n_gpu_layers=5)
    struct_ = params.struct
    assert (struct_.n_gpu_layers, struct_.main_gpu) == (5, -1)
    assert struct_.split_mode == lib.LLAMA_SPLIT_MODE_NONE
    assert struct_.tensor_split[: lib.llama_max_devices()] == [3.0, 1.0] + [0.0] * (lib.llama_max_devices() - 2)
    assert [place.pattern for place in params._places] == [b"_exps", b"_shexp", None]
    assert params._places[0].buffer_type == params._places[1].buffer_type != 0
