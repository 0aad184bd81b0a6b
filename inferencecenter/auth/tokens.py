"""Format of tokens, ``ic_<id>_<secret>``, and the hash stored of a secret. Pure."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

_MARK: Final = "ic"
_ID_BYTES: Final = 6
_SECRET_BYTES: Final = 32
_TOKEN: Final = re.compile(rf"{_MARK}_([0-9a-f]{{{2 * _ID_BYTES}}})_[0-9a-f]{{{2 * _SECRET_BYTES}}}")


def generate_token() -> tuple[str, str]:
    return secrets.token_hex(_ID_BYTES), secrets.token_hex(_SECRET_BYTES)


def format_token(token_id: str, secret: str) -> str:
    return f"{_MARK}_{token_id}_{secret}"


def parse_token(token: str) -> tuple[str, str]:
    """Return the id and the secret of a token; the id is empty if the text is not a token."""
    parts = token.split("_")
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == _MARK else ("", token)


def public_id(token: str) -> str | None:
    """Return the id in text that has exactly the form of a token, whether or not the token exists."""
    match = _TOKEN.fullmatch(token)
    return match[1] if match else None


def hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
