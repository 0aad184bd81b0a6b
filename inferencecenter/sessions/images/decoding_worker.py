"""Process that decodes one image file: ``python -m inferencecenter.sessions.images.decoding_worker``.

It reads the file from standard input, and writes a line of JSON and the pixels. It imports little, since a process is
started for each file.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Final, cast

from PIL import Image, ImageOps, UnidentifiedImageError

from inferencecenter.core.process_limits import limit_cpu, limit_memory

MAX_SIDE: Final = 2048
"""Longest side in pixels that the model is given; larger images are scaled down."""
MAX_PIXELS: Final = 64_000_000
"""Most pixels of a file."""
_CPU_S: Final = 10.0
_MEMORY_BYTES: Final = 768 * 1024 * 1024
_FORMATS: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def main() -> int:
    """Decode the file on standard input."""
    limit_memory(_MEMORY_BYTES)
    limit_cpu(_CPU_S)
    output = sys.stdout.buffer
    try:
        image_type, image = _decoded(sys.stdin.buffer.read())
        head: dict[str, object] = {"media_type": image_type, "width": image.width, "height": image.height}
        pixels = image.tobytes()
    # A border: libraries that decode untrusted files raise many kinds of exceptions.
    except Exception as error:  # noqa: BLE001
        reason = str(error) if isinstance(error, _UnusableError) else f"the file is damaged ({type(error).__name__})"
        head, pixels = {"error": reason}, b""
    output.write(json.dumps(head).encode() + b"\n")
    output.write(pixels)
    return 0


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
