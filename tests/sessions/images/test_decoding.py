"""Image files are decoded in a process with limits."""

from __future__ import annotations

import hashlib
import io
import os
import signal
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.sessions.images import decoding_worker
from inferencecenter.sessions.images.decoder import ImageDecoder
from tests.sessions.images.files import image_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    """A decoder."""
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif")],
)
def test_formats_are_recognized_by_content(decoder: ImageDecoder, kind: str, media_type: str) -> None:
    """The digest is that of the file, and pixels are red, green and blue."""
    file = image_file((8, 6), kind=kind, color=(250, 10, 20))
    decoded = decoder.decode(file)
    assert decoded.image.model_dump(exclude_none=True) == {
        "digest": hashlib.sha256(file).hexdigest(),
        "width": 8,
        "height": 6,
        "media_type": media_type,
    }
    assert len(decoded.pixels) == 8 * 6 * 3
    assert decoded.pixels[:3] == pytest.approx((250, 10, 20), abs=6)


def test_large_image_is_scaled_down(decoder: ImageDecoder) -> None:
    """The longest side has 2,048 pixels, and the form stays."""
    decoded = decoder.decode(image_file((4096, 1024)))
    assert (decoded.image.width, decoded.image.height) == (2048, 512)
    assert len(decoded.pixels) == 2048 * 512 * 3


def test_transparent_image_is_on_white(decoder: ImageDecoder) -> None:
    """A transparent pixel is white, whatever color it hides."""
    assert decoder.decode(image_file((1, 1), mode="RGBA", color=(255, 0, 0, 0))).pixels == b"\xff\xff\xff"


def test_photo_is_turned_upright(decoder: ImageDecoder) -> None:
    """The orientation in the file's metadata is applied."""
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decoder.decode(image_file((8, 6), kind="JPEG", exif=exif)).image
    assert (image.width, image.height) == (6, 8)


def test_first_frame_of_an_animation_is_used(decoder: ImageDecoder) -> None:
    """The other frames are not decoded."""
    buffer = io.BytesIO()
    red, blue = (Image.new("RGB", (2, 2), color) for color in ("red", "blue"))
    red.save(buffer, "GIF", save_all=True, append_images=[blue])
    assert decoder.decode(buffer.getvalue()).pixels == b"\xff\x00\x00" * 4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (bytes, "none of a known format"),
        (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of a known format"),
        (lambda: image_file(kind="BMP"), "none of a known format"),
        (lambda: image_file((64, 64))[:80], "damaged"),
        (lambda: image_file((9000, 9000), mode="1", color=1), "9000 x 9000 pixels; 64000000 are allowed"),
    ],
    ids=["empty", "svg", "bmp", "cut", "large"],
)
def test_unusable_file_is_refused(decoder: ImageDecoder, make: Callable[[], bytes], reason: str) -> None:
    """The error has the reason, and the hint the formats."""
    with pytest.raises(InferenceCenterError, match=reason) as caught:
        decoder.decode(make())
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert "PNG, JPEG, WebP and GIF" in str(caught.value.hint)


def test_worker_that_does_not_start_fails_one_file() -> None:
    """As if it were killed at once."""
    with pytest.raises(InferenceCenterError, match="too much time or memory"):
        ImageDecoder(worker="inferencecenter.no_such_module").decode(image_file())


def _allocate(_file: bytes) -> bytes:
    held = []
    while True:
        held.append(bytes(10**8))


def _compute(_file: bytes) -> bytes:
    while True:
        pass


@pytest.mark.parametrize(("limit", "work"), [("_CPU_S", _compute), ("_MEMORY_BYTES", _allocate)])
def test_limits_end_one_file(monkeypatch: pytest.MonkeyPatch, limit: str, work: Callable[[bytes], bytes]) -> None:
    """Its process ends, and the next file has another one."""
    monkeypatch.setattr(decoding_worker, limit, 0)
    monkeypatch.setattr(decoding_worker, "_described", work)
    assert decoding_worker._decoded_apart(b"") == b""
    monkeypatch.undo()
    assert decoding_worker._decoded_apart(image_file()).startswith(b'{"media_type"')


def test_process_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, which the limit of CPU time does not end."""
    monkeypatch.setattr(decoding_worker, "WALL_S", 0.05)
    monkeypatch.setattr(decoding_worker, "_described", lambda _: signal.pause())
    assert decoding_worker._decoded_apart(b"") == b""


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_process_of_a_file_holds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither input and output of the worker nor its standard error."""
    monkeypatch.setattr(decoding_worker, "_described", lambda _: bytes(map(_is_open, range(1024))))
    assert decoding_worker._decoded_apart(b"") == b"\1" + bytes(1023)  # the pipe for the result


def test_worker_is_replaced_when_it_was_killed(decoder: ImageDecoder) -> None:
    """The file that it has is refused, the next one is not."""
    decoder.decode(image_file())
    process = decoder._process
    assert process is not None
    process.kill()
    process.wait()
    assert decoder.decode(image_file()).pixels
    assert decoder._process is not process


def test_worker_ends_with_its_input(decoder: ImageDecoder) -> None:
    """It does not survive a daemon that was killed."""
    decoder.decode(image_file())
    process = decoder._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0
