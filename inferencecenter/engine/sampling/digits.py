"""Numbers in JSON that come to an end: small models repeat decimals for ever, where a grammar lets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

MOST_DIGITS: Final = 17
"""So many tell any two 64-bit floating point numbers from each other."""

_QUOTE: Final = ord('"')
_ESCAPE: Final = ord("\\")
_DIGITS: Final = frozenset(b"0123456789")


def begins_with_digit(n_tokens: int, token_bytes: Callable[[int], bytes]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a vocabulary begin with a digit."""
    return np.array([token_bytes(token)[:1].isdigit() for token in range(n_tokens)], dtype=np.bool_)


class Digits:
    """Follows JSON while it is written, and has a number end that has digits enough and may end.

    Args:
        more: Which tokens begin with a digit.
        token_bytes: Gives the bytes of a token.
    """

    def __init__(self, more: npt.NDArray[np.bool_], token_bytes: Callable[[int], bytes]) -> None:
        self._more = more
        self._token_bytes = token_bytes
        self._in_string = False
        self._escaped = False
        self._n_digits = 0

    def take(self, token: int) -> None:
        """Take in the next token."""
        for byte in self._token_bytes(token):
            if self._in_string:
                self._in_string = self._escaped or byte != _QUOTE
                self._escaped = not self._escaped and byte == _ESCAPE
            else:
                self._in_string = byte == _QUOTE
                self._n_digits = self._n_digits + 1 if byte in _DIGITS else 0

    def narrow(self, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return what of the tokens that are ``allowed`` may come next."""
        if self._n_digits < MOST_DIGITS:
            return allowed
        others = allowed & ~self._more[: len(allowed)]
        return others if others.any() else allowed
