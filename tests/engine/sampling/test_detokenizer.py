"""Complete characters from token bytes, and complete tokens from emitted characters."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from inferencecenter.engine.sampling.text import TokenText, Utf8Stream

characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    """Draw a text's bytes, split anywhere, with empty pieces among them."""
    data = draw(characters).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(pieces())
def test_chunking_does_not_change_the_text(parts: list[bytes]) -> None:
    """Characters are emitted whole however their bytes are split."""
    stream = Utf8Stream()
    assert "".join(map(stream.feed, parts)) == b"".join(parts).decode()
    assert not stream.pending


@given(st.lists(st.binary(max_size=5), max_size=10))
@example([b"\xed\xa0"])
def test_any_bytes_decode(parts: list[bytes]) -> None:
    """Invalid bytes become replacement characters, as in a single decode, less an incomplete tail."""
    stream = Utf8Stream()
    text = "".join(map(stream.feed, parts))
    whole = b"".join(parts).decode(errors="replace")
    assert whole.startswith(text)
    held_back = whole.removeprefix(text)
    assert bool(held_back) == stream.pending
    assert held_back in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")


def test_incomplete_character_is_held_back() -> None:
    """Three of an emoji's four bytes emit nothing; the fourth emits it whole."""
    stream = Utf8Stream()
    assert stream.feed("é🙂".encode()[:5]) == "é"
    assert stream.pending
    assert stream.feed("🙂".encode()[3:]) == "🙂"
    assert not stream.pending


def naive_kept(parts: list[bytes], shown_chars: int) -> tuple[int, int]:
    """Try every number of tokens, the largest first."""
    shown = b"".join(parts).decode()[:shown_chars]
    for count in range(len(parts), -1, -1):
        try:
            text = b"".join(parts[:count]).decode()
        except UnicodeDecodeError:
            continue
        if shown.startswith(text):
            return count, len(text)
    raise AssertionError


@given(pieces(), st.integers(0, 40))
def test_kept_tokens_are_the_longest_within_the_emitted_text(parts: list[bytes], shown_chars: int) -> None:
    """The answer equals that of trying every number of tokens."""
    tokens = TokenText()
    text = "".join(map(tokens.push, parts))
    assert text == b"".join(parts).decode()
    assert tokens.kept(shown_chars) == naive_kept(parts, shown_chars)


def test_token_that_splits_a_character_is_not_kept() -> None:
    """Tokens that share a character are kept or dropped together."""
    tokens = TokenText()
    for part in (b"a", b"\xc3", b"\xa9", b"bc"):
        tokens.push(part)
    assert [tokens.kept(chars) for chars in range(5)] == [(0, 0), (1, 1), (3, 2), (3, 2), (4, 4)]
