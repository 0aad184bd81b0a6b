"""Decodes image files: ``python -m inferencecenter.sessions.images.decoding_worker``.

A file is untrusted input for libraries in C, so each one is decoded in a process of its own with limits, forked from
this one, which has imported the libraries and reads no file. A fork takes milliseconds, the start of Python 0.2 s. The
child can write to one pipe, and its death, by a limit or a defect, costs one file.

Frames on standard input and output are eight bytes of length and the content: a file; then a line of JSON and the
pixels, or nothing if the child did not end well. Files are decoded one at a time, until the end of the input.
"""

from __future__ import annotations

import gc
import io
import json
import os
import select
import signal
import struct
import sys
import time
from typing import Final, cast

from PIL import Image, ImageOps, UnidentifiedImageError, WebPImagePlugin  # noqa: F401 - so that children have it

from inferencecenter.core.process_limits import limit_cpu, limit_memory

MAX_SIDE: Final = 2048
"""Longest side in pixels that the model is given; larger images are scaled down."""
MAX_PIXELS: Final = 64_000_000
"""Most pixels of a file."""
LENGTH: Final = struct.Struct(">Q")
"""Precedes the content of a frame."""
WALL_S: Final = 60.0
"""Time limit of a file."""
_CPU_S: Final = 10.0
_MEMORY_BYTES: Final = 768 * 1024 * 1024
_FORMATS: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


_MAX_RESULT_BYTES: Final = 3 * MAX_SIDE**2 + 4096
_READ_BYTES: Final = 2**20


def main() -> int:
    """Decode files until the end of standard input."""
    Image.preinit()  # imports the other formats
    gc.freeze()  # children share the memory of these objects
    while head := sys.stdin.buffer.read(LENGTH.size):
        (n_bytes,) = LENGTH.unpack(head)
        result = _decoded_apart(sys.stdin.buffer.read(n_bytes))
        sys.stdout.buffer.write(LENGTH.pack(len(result)) + result)
        sys.stdout.buffer.flush()
    return 0


def _decoded_apart(file: bytes) -> bytes:
    """Return what a child writes about a file; nothing if it is ended by a limit, or ends by itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _run_child(file, writing)
    os.close(writing)
    result = _read_all(reading, time.monotonic() + WALL_S)
    os.close(reading)
    if result is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return result or b"" if status == 0 else b""


def _read_all(pipe: int, deadline: float) -> bytes | None:
    """Return what is written to a pipe until its end; ``None`` after the deadline, or if it is too much."""
    result = bytearray()
    while len(result) <= _MAX_RESULT_BYTES:
        readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return None
        part = os.read(pipe, _READ_BYTES)
        if not part:
            return bytes(result)
        result += part
    return None


def _run_child(file: bytes, writing: int) -> None:
    """Decode a file, write the result, and end this process, which has no other open files."""
    status = 1
    try:
        limit_memory(_MEMORY_BYTES)
        limit_cpu(_CPU_S)
        os.dup2(writing, 0)
        os.closerange(1, os.sysconf("SC_OPEN_MAX"))
        with open(0, "wb") as pipe:
            pipe.write(_described(file))
        status = 0
    finally:
        os._exit(status)


def _described(file: bytes) -> bytes:
    try:
        image_type, image = _decoded(file)
        head: dict[str, object] = {"media_type": image_type, "width": image.width, "height": image.height}
        pixels = image.tobytes()
    # A border: libraries that decode untrusted files raise many kinds of exceptions.
    except Exception as error:  # noqa: BLE001
        reason = str(error) if isinstance(error, _UnusableError) else f"the file is damaged ({type(error).__name__})"
        head, pixels = {"error": reason}, b""
    return json.dumps(head).encode() + b"\n" + pixels


class _UnusableError(Exception):
    """Why a file cannot be used, for the client."""


def _decoded(file: bytes) -> tuple[str, Image.Image]:
    """Return the format and the first frame: upright, on white, scaled to ``MAX_SIDE``."""
    Image.MAX_IMAGE_PIXELS = None  # checked here, before anything is decoded
    try:
        opened = Image.open(io.BytesIO(file), formats=tuple(_FORMATS))
    except UnidentifiedImageError:
        raise _UnusableError("the file is none of a known format") from None
    if opened.width * opened.height > MAX_PIXELS:
        raise _UnusableError(f"it has {opened.width} x {opened.height} pixels; {MAX_PIXELS} are allowed")
    image_type = _FORMATS[cast("str", opened.format)]
    opened.draft("RGB", (MAX_SIDE, MAX_SIDE))
    upright = ImageOps.exif_transpose(opened)
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        layers = upright.convert("RGBA")
        upright = Image.new("RGBA", layers.size, "white")
        upright.alpha_composite(layers)
    image = upright.convert("RGB")
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return image_type, image


if __name__ == "__main__":
    sys.exit(main())
