"""Image files are decoded in a process with limits."""

from __future__ import annotations

import hashlib
import io

import pytest
from PIL import Image

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.images import library
from inferencecenter.sessions.images.library import decode
from tests.sessions.images.files import image_file


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif")],
)
def test_formats_are_recognized_by_content(kind: str, media_type: str) -> None:
    """The digest is that of the file, and pixels are red, green and blue."""
    file = image_file((8, 6), kind=kind, color=(250, 10, 20))
    decoded = decode(file)
    assert decoded.image.model_dump() == {
        "digest": hashlib.sha256(file).hexdigest(),
        "width": 8,
        "height": 6,
        "media_type": media_type,
    }
    assert len(decoded.pixels) == 8 * 6 * 3
    assert decoded.pixels[:3] == pytest.approx((250, 10, 20), abs=6)


def test_large_image_is_scaled_down() -> None:
    """The longest side has 2,048 pixels, and the form stays."""
    decoded = decode(image_file((4096, 1024)))
    assert (decoded.image.width, decoded.image.height) == (2048, 512)
    assert len(decoded.pixels) == 2048 * 512 * 3


def test_transparent_image_is_on_white() -> None:
    """A transparent pixel is white, whatever color it hides."""
    assert decode(image_file((1, 1), mode="RGBA", color=(255, 0, 0, 0))).pixels == b"\xff\xff\xff"


def test_photo_is_turned_upright() -> None:
    """The orientation in the file's metadata is applied."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decode(image_file((8, 6), kind="JPEG", exif=exif)).image
    assert (image.width, image.height) == (6, 8)


def test_first_frame_of_an_animation_is_used() -> None:
    """The other frames are not decoded."""
    buffer = io.BytesIO()
    red, blue = (Image.new("RGB", (2, 2), color) for color in ("red", "blue"))
    red.save(buffer, "GIF", save_all=True, append_images=[blue])
    assert decode(buffer.getvalue()).pixels == b"\xff\x00\x00" * 4


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "none of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of a known format"),
        (image_file(kind="BMP"), "none of a known format"),
        (image_file((64, 64))[:80], "damaged"),
        (image_file((9000, 9000)), "9000 x 9000 pixels; 64000000 are allowed"),
    ],
)
def test_unusable_file_is_refused(file: bytes, reason: str) -> None:
    """The error has the reason, and the hint the formats."""
    with pytest.raises(InferenceCenterError, match=reason) as caught:
        decode(file)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "PNG, JPEG, WebP and GIF" in str(caught.value.hint)


def test_process_that_ends_early_fails_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel ends one at a limit."""
    monkeypatch.setattr(library, "DECODER", "inferencecenter.no_such_module")
    with pytest.raises(InferenceCenterError, match="too much time or memory"):
        decode(image_file())
