"""Checks of a model file before llama.cpp reads it."""

from __future__ import annotations

import re
import stat
import struct
from pathlib import Path

from inferencecenter.core.errors import ErrorCode, InferenceCenterError

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
