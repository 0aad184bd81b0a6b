"""Tests of what a token looks like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth import tokens


def test_a_token_comes_apart_as_it_was_put_together() -> None:
    """A new token has a public id and a secret, both read back from its text."""
    token_id, secret = tokens.generate_token()
    token = tokens.format_token(token_id, secret)
    assert tokens.parse_token(token) == (token_id, secret)
    assert tokens.public_id(token) == token_id


@pytest.mark.parametrize("mangle", ["{}0", " {}", "{}\n", "IC{}", "ic_0123_4567", "", "ic__", "\udc80"])
def test_what_is_not_a_token_to_the_letter_has_no_public_id(mangle: str) -> None:
    """A near miss may hold a secret in the wrong place, so nothing of it is public."""
    assert tokens.public_id(mangle.format(tokens.format_token(*tokens.generate_token()))) is None


@given(st.text())
def test_any_text_has_a_hash_and_comes_apart(text: str) -> None:
    """No text makes the check of a token fail."""
    assert len(tokens.hash_secret(text)) == 32
    token_id, secret = tokens.parse_token(text)
    assert token_id in text
    assert secret in text
