"""Checks of a model file before llama.cpp reads it."""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.hardware.gguf import read_gguf

_MAGIC = b"GGUF"
_HEADER = struct.Struct("<4sIQQ")
_VERSIONS = (2, 3)
_SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf$")
_DOWNLOAD_AGAIN = "Download the file again and compare its size or checksum with the source's."

# First bytes of files commonly given instead of a model.
_LOOKALIKES = (
    (b"version https://git-lfs", "It is a Git LFS pointer: run `git lfs pull` where it came from."),
    (b"<", "It looks like a web page: download the file itself, not the page that describes it."),
    (b"PK\x03\x04", "It looks like a PyTorch checkpoint: convert it with llama.cpp's convert_hf_to_gguf.py."),
    (b"{", "It looks like JSON: give the path of the .gguf file."),
)


def check_model_file(path: Path, *, available_bytes: int | None) -> int:
    """Return the size in bytes of a model file (of all its shards) that looks loadable.

    Args:
        path: A GGUF file, or the first shard of a split one.
        available_bytes: Memory that the weights must fit; ``None`` when they are not in host memory.

    Raises:
        InferenceCenterError: ``invalid_model_file``, with the path and a hint.
    """
    _check_is_file(path)
    header = _read_header(path)
    _check_header(path, header)
    size_bytes = sum(shard.stat().st_size for shard in shards(path))
    if available_bytes is not None and size_bytes > available_bytes:
        raise _refusal(
            f"{path} needs {_gib(size_bytes)} of memory for its weights, and {_gib(available_bytes)} are available.",
            "Free memory, choose a smaller model or a smaller quantization, or offload layers to a GPU.",
        )
    return size_bytes


def check_projector_file(path: Path) -> None:
    """Refuse a projector file whose loading would end the process, or whose images would be misread.

    llama.cpp itself refuses a file without some tensors, and follows null pointers for lack of others. These are looked
    for here, as far as its code for a type of projector uses them without a check.

    Raises:
        InferenceCenterError: ``invalid_model_file``, with the path and the names of missing tensors.
    """
    _check_is_file(path)
    _check_header(path, _read_header(path))
    file = read_gguf(path)
    kind = str(file.metadata.get("clip.projector_type", file.metadata.get("clip.vision.projector_type", "")))
    if kind in _UNSUPPORTED_PROJECTORS:
        raise _refusal(f"{path} is a projector of the type {kind}: {_UNSUPPORTED_PROJECTORS[kind]}.", _OTHER_PROJECTOR)
    if not file.metadata.get("clip.has_vision_encoder") or kind in _OTHER_TOWERS:
        return
    names = {tensor.name for tensor in file.tensors}
    missing = sorted(_needed_tensors(kind, names, file.metadata.get("clip.vision.block_count")) - names)
    if missing:
        shown = ", ".join(missing[:_SHOWN_TENSORS]) + (", …" if len(missing) > _SHOWN_TENSORS else "")
        raise _refusal(f"{path} lacks {len(missing)} of its tensors: {shown}.", _DOWNLOAD_AGAIN)


_UNSUPPORTED_PROJECTORS: Final[Mapping[str, str]] = {
    "hunyuanvl": "positions of its images depend on their number in the conversation, which is not supported",
}
_OTHER_PROJECTOR: Final = "Choose another model, or set mmproj to off for text only."
_SHOWN_TENSORS: Final = 5
_MOST_BLOCKS: Final = 1024
_OTHER_TOWERS: Final = frozenset({"gemma3nv", "yasa2"})
"""Convolutional networks, whose tensors have other names."""
_LEARNED_POSITIONS: Final = frozenset(
    {"mlp", "ldp", "ldpv2", "adapter", "resampler", "cogvlm", "internvl", "llama4", "nemotron_v2_vl", "step3vl"}
    | {"qwen3vl_merger", "gemma4v", "gemma4uv", "granite4_vision", "kimivl", "kimik25", "ling3vl", "paddleocr"}
)
_PAIRS_OF_FRAMES: Final = frozenset(
    {"qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "glm4v", "mimovl", "minimax_m3"}
)
_BIASED_ATTENTION: Final = frozenset({"qwen2vl_merger", "qwen2.5vl_merger"})


def _needed_tensors(kind: str, names: set[str], n_blocks: object) -> set[str]:
    """Return tensors that a vision transformer with a projector of this kind needs."""
    needed = {"v.patch_embd.weight"}
    if kind in _LEARNED_POSITIONS:
        needed.add("v.position_embd.weight")
    if kind in _PAIRS_OF_FRAMES:
        needed.add("v.patch_embd.weight.1")
    attention = {name for name in _ATTENTION if any(each.endswith(f".{name}") for each in names)}
    if "attn_qkv.weight" not in attention:
        attention |= {f"attn_{part}.weight" for part in "qkv"}
        if kind in _BIASED_ATTENTION:
            attention |= {f"attn_{part}.bias" for part in "qkv"}
    blocks = min(n_blocks, _MOST_BLOCKS) if isinstance(n_blocks, int) else 0
    needed |= {f"v.blk.{block}.{name}" for block in range(blocks) for name in attention}
    if kind == "mlp":
        layers = {0, 1, 3, 4} if any(name.startswith(("mm.3.", "mm.4.")) for name in names) else {0, 2}
        if not any(name.startswith(f"mm.{max(layers)}.") for name in names):
            layers = {0}
        needed |= {f"mm.{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    return needed


_ATTENTION: Final = tuple(f"attn_{name}.{part}" for name in ("q", "k", "v", "qkv") for part in ("weight", "bias"))


def load_refusal(path: Path, problems: tuple[str, ...]) -> InferenceCenterError:
    """Return the error for a file that llama.cpp rejected, with the last lines it logged about it."""
    detail = " ".join(problems) or "llama.cpp gave no reason."
    hint = _DOWNLOAD_AGAIN + " A newer architecture may need a newer llama-cpp-python."
    return _refusal(f"{path} ({path.stat().st_size} bytes) cannot be loaded: {detail}", hint)


def unusable(path: Path, why: str) -> InferenceCenterError:
    """Return the error for a model that loads but cannot generate text."""
    return _refusal(f"{path} {why}", "Choose a text generation model.")


def _check_is_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise _refusal(f"{path} does not exist.", _missing_hint(path)) from None
    except OSError as error:
        raise _refusal(f"{path} cannot be accessed: {error.strerror}.", _access_hint(path)) from None
    if stat.S_ISDIR(mode):
        found = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"Name one of: {', '.join(found[:5])}." if found else "Give the path of a .gguf file."
        raise _refusal(f"{path} is a directory.", hint)
    if not stat.S_ISREG(mode):
        raise _refusal(f"{path} is not a regular file.", "Give the path of a .gguf file.")


def _read_header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEADER.size)
    except OSError as error:
        raise _refusal(f"{path} cannot be read: {error.strerror}.", _access_hint(path)) from None


def _check_header(path: Path, header: bytes) -> None:
    if not header:
        raise _refusal(f"{path} is empty.", _DOWNLOAD_AGAIN)
    if not header.startswith(_MAGIC):
        hint = next((hint for start, hint in _LOOKALIKES if header.startswith(start)), "Give the path of a .gguf file.")
        raise _refusal(f"{path} is not a GGUF file: it starts with {header[:4]!r}, not {_MAGIC!r}.", hint)
    if len(header) < _HEADER.size:
        raise _refusal(f"{path} ends inside its header, after {len(header)} bytes.", _DOWNLOAD_AGAIN)
    version: int = _HEADER.unpack(header)[1]
    if version & 0xFFFF == 0 and version:
        raise _refusal(f"{path} is a big-endian GGUF file.", "Get the little-endian one, which is the usual form.")
    if version not in _VERSIONS:
        supported = " and ".join(map(str, _VERSIONS))
        raise _refusal(
            f"{path} is GGUF version {version}; versions {supported} can be read.",
            "Convert the model again with a current llama.cpp, or download a current file.",
        )


def shards(path: Path) -> list[Path]:
    """Return the files of a model, of which ``path`` is the first."""
    split = _SHARD.match(path.name)
    if split is None:
        return [path]
    return sorted(path.parent.glob(f"{split['stem'].translate(_GLOB_ESCAPES)}-*-of-{split['count']}.gguf"))


_GLOB_ESCAPES = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


def _missing_hint(path: Path) -> str:
    near = path.parent
    while not near.is_dir():
        near = near.parent
    if near != path.parent:
        return f"The directory {path.parent} does not exist; {near} does."
    found = sorted(file.name for file in near.glob("*.gguf"))
    return f"In that directory there is: {', '.join(found[:5])}." if found else f"{near} holds no .gguf file."


def _access_hint(path: Path) -> str:
    return f"Let the user that runs the daemon read {path} and enter the directories above it."


def _refusal(message: str, hint: str) -> InferenceCenterError:
    return InferenceCenterError(ErrorCode.INVALID_MODEL_FILE, message, hint=hint, field="model_path")


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
