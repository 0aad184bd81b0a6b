"""Images between the front and the engine: how one is named, and the numbers that stand for its rows."""

from __future__ import annotations

from array import array
from hashlib import shake_256
from typing import Final

import msgspec

_SIGN: Final = -(2**31)


class ImageRef(msgspec.Struct, frozen=True, array_like=True):
    """An image of ``width`` by ``height`` pixels; ``digest`` is the SHA-256 of its file, in hex."""

    digest: str
    width: int
    height: int


def row_ids(image: ImageRef, run: int, count: int) -> list[int]:
    """Return the numbers that stand for the rows of an image's run in a list of tokens, where a run is a tile.

    They are negative and pseudorandom by the digest: two images have no row in common, and equal images have the same.
    """
    numbers = array("i", shake_256(f"{image.digest}/{run}".encode()).digest(4 * count))
    return [number | _SIGN for number in numbers]


def is_row(token: int) -> bool:
    """Return whether a token is a row of an image."""
    return token < 0
