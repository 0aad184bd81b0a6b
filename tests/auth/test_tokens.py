"""The format of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencecenter.auth import tokens


def test_token_round_trips() -> None:
    """Public id and secret of a new token are parsed from its text."""
    token_id, secret = tokens.generate_token()
    token = tokens.format_token(token_id, secret)
    assert tokens.parse_token(token) == (token_id, secret)
    assert tokens.public_id(token) == token_id


@pytest.mark.parametrize("mangle", ["{}0", " {}", "{}\n", "IC{}", "ic_0123_4567", "", "ic__", "\udc80"])
def test_malformed_token_has_no_public_id(mangle: str) -> None:
    """A near miss may have a secret in the wrong place, so no part of it is public."""
    assert tokens.public_id(mangle.format(tokens.format_token(*tokens.generate_token()))) is None


@given(st.text())
def test_any_text_can_be_hashed_and_parsed(text: str) -> None:
    """No text makes the check of a token fail."""
    assert len(tokens.hash_secret(text)) == 32
    token_id, secret = tokens.parse_token(text)
    assert token_id in text
    assert secret in text
