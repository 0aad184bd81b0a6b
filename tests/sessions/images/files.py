"""Image files for tests."""

from __future__ import annotations

import io

from PIL import Image


def image_file(
    size: tuple[int, int] = (8, 6), *, kind: str = "PNG", mode: str = "RGB", color: object = "red", **options: object
) -> bytes:
    """An image of one color."""
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()
