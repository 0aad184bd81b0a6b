"""Limits of numbers in JSON."""

from __future__ import annotations

import numpy as np
import pytest

from inferencecenter.engine.sampling.constraint import MOST_DIGITS, NumberLimiter, begins_with_digit

N_TOKENS = 256
MORE = begins_with_digit(N_TOKENS, lambda token: bytes((token,)))


def narrowed(text: str, allowed: bytes) -> bytes:
    """Return which of the bytes that are ``allowed`` may follow a text."""
    digits = NumberLimiter(MORE, lambda token: bytes((token,)))
    for token in text.encode():
        digits.take(token)
    mask = np.zeros(N_TOKENS, dtype=np.bool_)
    mask[list(allowed)] = True
    return bytes(np.flatnonzero(digits.narrow(mask)).tolist())


LONG = "3" * MOST_DIGITS


@pytest.mark.parametrize("text", [f"0.{LONG}", f'{{"a": {LONG}', f'["1\\"2", "\\\\", -{LONG}', f"1e{LONG}"])
def test_number_ends_at_the_digit_limit(text: str) -> None:
    """The text before it does not matter."""
    assert narrowed(text, b"12,]") == b",]"


@pytest.mark.parametrize("text", ["", f"0.{LONG[1:]}", f'"{LONG}', f'["\\"{LONG}', f"{LONG}.3", f"[{LONG}, 1"])
def test_other_numbers_are_not_limited(text: str) -> None:
    """Shorter ones, digits in a string, and the next number."""
    assert narrowed(text, b"12,]") == b",12]"


def test_incomplete_number_continues() -> None:
    """A schema that requires more digits gets them."""
    assert narrowed(LONG, b"12") == b"12"
