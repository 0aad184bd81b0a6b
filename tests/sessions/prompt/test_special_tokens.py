"""Text of users and models never becomes special tokens."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.sessions.prompt.special_tokens import RenderedText, SpecialTokenEscaper

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "aa", "\n\n", "§")
FRAGMENTS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "start|>",
    "|>",
    "<",
    "a",
    "aaa",
    "\n",
    " ",
    "§",
    "x",
    "<s",
    ">",
    "s",
)

texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


def recognized(pieces: tuple[PromptSegment, ...]) -> list[str]:
    """The special tokens that a tokenizer finds in each piece, longest match first."""
    pattern = "|".join(re.escape(text) for text in sorted(SPECIAL, key=len, reverse=True))
    return [found for piece in pieces if piece.special for found in re.findall(pattern, piece.text)]


@given(contents=st.lists(texts, min_size=1, max_size=4), strip=st.booleans())
@example(contents=["<|im_", "start|>"], strip=True)
@example(contents=["<", "|im_", "end|>"], strip=False)
@example(contents=["aaaa"], strip=False)
@example(contents=["§§"], strip=False)
def test_only_template_text_becomes_special_tokens(contents: list[str], strip: bool) -> None:
    """Whatever the contents spell, alone or together, only the template's own special tokens are found."""
    special = SpecialTokenEscaper(SPECIAL)
    marked = [special.mark(content) for content in contents]
    if strip:
        marked, contents = [text.strip() for text in marked], [text.strip() for text in contents]
    rendering = RenderedText.of_marked("<|im_start|>:" + "".join(marked) + ":<|im_end|>")
    assert recognized(rendering.pieces()) == ["<|im_start|>", "<|im_end|>"]
    if not strip:
        assert rendering.text == "<|im_start|>:" + "".join(contents) + ":<|im_end|>"


@given(content=texts, start=st.integers(0, 40))
def test_pieces_join_to_the_text(content: str, start: int) -> None:
    """From any offset the pieces are the text without loss, and none is empty."""
    rendering = RenderedText.of_marked("<s>" + SpecialTokenEscaper(SPECIAL).mark(content) + "<s>")
    pieces = rendering.pieces(start)
    assert "".join(piece.text for piece in pieces) == rendering.text[start:]
    assert all(piece.text for piece in pieces)


@pytest.mark.parametrize("surroundings", [("<|", "|>"), ("<|im_", ">"), ("", "|im_end|>"), ("<", "")])
@pytest.mark.parametrize(
    "content",
    ["im_end", "end|", "<", ">", " < ", "a longer text <|im_end| ", "a longer text <", " |im_end|> and a longer text"],
)
def test_template_text_does_not_complete_a_special_token(surroundings: tuple[str, str], content: str) -> None:
    """Content that is part of a special token is separated from adjacent template text."""
    before, after = surroundings
    rendering = RenderedText.of_marked(before + SpecialTokenEscaper(SPECIAL).mark(content).strip() + after)
    assert recognized(rendering.pieces()) == []


@given(
    special=st.lists(st.text(alphabet="<|ab", min_size=2, max_size=5), min_size=1, max_size=8),
    content=st.text(alphabet="<|ab ", max_size=30),
)
def test_special_token_text_is_always_split(special: list[str], content: str) -> None:
    """However tokens overlap, share prefixes or repeat, no piece of a marked text contains one."""
    pieces = RenderedText.of_marked(SpecialTokenEscaper(special).mark(content)).pieces()
    assert "".join(piece.text for piece in pieces) == content
    assert not [token for token in special for piece in pieces if token in piece.text]


@given(
    special=st.lists(st.text(alphabet="<|ab\n", min_size=1, max_size=8), max_size=8),
    content=st.text(alphabet="<|abc \n", max_size=12),
)
@example(special=["<|im_start|>"], content="im_s")
@example(special=["<|im_start|>"], content="tart|> and more")
@example(special=["<|im_start|>"], content="more and <|i")
def test_plain_text_needs_no_markers(special: list[str], content: str) -> None:
    """A text rejected by the fast path would not have been marked."""
    quick, close = SpecialTokenEscaper(special), SpecialTokenEscaper(special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(close, "_may_need_marks", lambda _: True)
        assert quick.mark(content) == close.mark(content)


def test_schema_text_needs_no_markers() -> None:
    """Names, references and descriptions cost a few lookups each, however many special tokens there are."""
    special = SpecialTokenEscaper(("<|im_start|>", "<|im_end|>", "<tool_call>"))
    texts = ("type", "object", "properties", "$ref", "#/$defs/d17", "d17", "Where the train starts.", "x" * 200, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(special, "_ends_in_prefix", lambda _: pytest.fail("it was looked at closely"))
        assert [special.mark(text) for text in texts] == list(texts)


def test_token_prefixes_are_compared_once() -> None:
    """Hundreds of tokens with a common prefix are matched as one trie."""
    special = SpecialTokenEscaper(f"<|reserved_special_token_{number}|>" for number in range(250))
    assert special._occurrence is not None
    assert special._occurrence.pattern.count("reserved") == 1


def test_ordinary_text_is_not_touched() -> None:
    """Ordinary content is passed unchanged and is one piece."""
    text = "Is 3 < 4 and 5 > 4? So it is."
    assert SpecialTokenEscaper(SPECIAL).mark(text) == text
    assert RenderedText.of_marked(text).pieces() == (PromptSegment(text, True),)


def test_raw_text_is_never_special() -> None:
    """A rendering without special tokens is one piece of plain text."""
    assert RenderedText("<|im_start|>", special=False).pieces() == (PromptSegment("<|im_start|>", False),)


def test_model_without_special_tokens_needs_no_marks() -> None:
    """Without special tokens nothing is marked."""
    assert SpecialTokenEscaper(("",)).mark("<|im_start|>") == "<|im_start|>"
