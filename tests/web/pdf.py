"""PDF files for tests."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

LATIN: Final = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
_PADDING: Final = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")
_ID: Final = bytes(range(16))
_PERMISSIONS: Final = -4


def composite_font(encoding: str, ordering: str) -> str:
    """Return a font with a predefined character map of an Asian script, which is not embedded."""
    metrics = "/Flags 4 /ItalicAngle 0 /Ascent 859 /Descent -140 /StemV 80"
    below = (
        "<< /Type /Font /Subtype /CIDFontType0 /BaseFont /Mincho"
        f" /CIDSystemInfo << /Registry (Adobe) /Ordering ({ordering}) /Supplement 2 >>"
        f" /FontDescriptor << /Type /FontDescriptor /FontName /Mincho {metrics} >> >>"
    )
    return f"<< /Type /Font /Subtype /Type0 /BaseFont /Mincho /Encoding /{encoding} /DescendantFonts [{below}] >>"


def pdf(pages: Sequence[str | bytes], *, extra: str = "", font: str = LATIN, password: str | None = None) -> bytes:
    """Return a PDF with a line of text on each page.

    Args:
        pages: ASCII text, or bytes in the encoding of the font.
        extra: Further entries of its catalog.
        font: The font of all pages.
        password: Encrypts the pages with RC4 and a key of 40 bits; the font and ``extra`` then have no strings.
    """
    n_pages = len(pages)
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(n_pages))
    owner = _rc4(hashlib.md5(_padded("owner")).digest()[:5], _padded(password or ""))
    permissions = _PERMISSIONS.to_bytes(4, "little", signed=True)
    key = hashlib.md5(_padded(password or "") + owner + permissions + _ID).digest()[:5]
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {extra} >>".encode("ascii"),
        f"<< /Type /Pages /Kids [{kids}] /Count {n_pages} >>".encode("ascii"),
        font.encode("ascii"),
    ]
    for text in pages:
        line = text.encode("ascii") if isinstance(text, str) else text
        content = b"BT /F1 12 Tf 50 700 Td <%s> Tj ET" % line.hex().encode("ascii")
        number = len(objects) + 2
        if password is not None:
            content = _rc4(hashlib.md5(key + number.to_bytes(3, "little") + bytes(2)).digest()[:10], content)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
            b" /Resources << /Font << /F1 3 0 R >> >> >>" % number
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    made, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, each in enumerate(objects, start=1):
        offsets.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    start = len(made)
    entries = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    made += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{entries}".encode("ascii")
    encryption = ""
    if password is not None:
        user = _rc4(key, _PADDING)
        encryption = (
            f"/ID [<{_ID.hex()}> <{_ID.hex()}>] /Encrypt << /Filter /Standard /V 1 /R 2 /O <{owner.hex()}>"
            f" /U <{user.hex()}> /P {_PERMISSIONS} >>"
        )
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R {encryption} >>"
    made += f"trailer\n{trailer}\nstartxref\n{start}\n%%EOF\n".encode("ascii")
    return bytes(made)


def _padded(password: str) -> bytes:
    return (password.encode("ascii") + _PADDING)[:32]


def _rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    result, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        result.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(result)
