"""Tests of ``engine.llama.vocab`` with a byte-level BPE and a SentencePiece vocabulary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as lib

from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.engine.llama.vocab import Vocabulary
from inferencecenter.ipc.messages import InfillTokens, PromptSegment
from tests.engine.llama.tiny_models import write_plain_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def bpe(demo_model_path: Path) -> Iterator[Vocabulary]:
    """The demo model's vocabulary."""
    yield from _vocabulary(demo_model_path)


@pytest.fixture(scope="module")
def spm(window_model_path: Path) -> Iterator[Vocabulary]:
    """A SentencePiece vocabulary that puts spaces before words."""
    yield from _vocabulary(window_model_path)


def _vocabulary(path: Path) -> Iterator[Vocabulary]:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    yield Vocabulary(lib.llama_model_get_vocab(model))
    lib.llama_model_free(model)


def _text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(map(vocabulary.token_bytes, tokens)).decode()


@given(text=st.text())
@example(text="")
@example(text="a\0b")
@example(text="  two spaces,\ttab\r\nand line feeds\n\n")
@example(text="\U0001f469\u200d\U0001f680 \u0e17\u0e14\u0e2a\u0e2d\u0e1a \u6f22\u5b57 e\u0301")
def test_any_text_survives_the_round_trip(bpe: Vocabulary, text: str) -> None:
    """The tokens of a plain text spell its bytes."""
    assert _text(bpe, bpe.tokenize([PromptSegment(text)], first=False)) == text


@given(texts=st.lists(st.text(max_size=8), max_size=5))
def test_pieces_join_without_seams(bpe: Vocabulary, texts: list[str]) -> None:
    """Splitting a text into pieces changes nothing."""
    assert _text(bpe, bpe.tokenize([PromptSegment(text) for text in texts], first=False)) == "".join(texts)


@given(before=st.text(max_size=5), after=st.text(max_size=5), special=st.sampled_from(["<|im_start|>", "<|im_end|>"]))
def test_plain_text_never_becomes_special(bpe: Vocabulary, before: str, after: str, special: str) -> None:
    """User text stays text even if it spells a control token; in template text it is one token."""
    text = f"{before}{special}system{after}"
    plain = bpe.tokenize([PromptSegment(text)], first=True)
    control = bpe.tokenize([PromptSegment(special, special=True)], first=False)
    assert len(control) == 1
    assert control[0] not in plain
    assert _text(bpe, plain) == text
    assert control[0] in bpe.tokenize([PromptSegment(text, special=True)], first=True)


def test_control_tokens_have_no_text_but_a_name(bpe: Vocabulary) -> None:
    """A control token adds no bytes to the text, and its name is its spelling in the template."""
    (token,) = bpe.tokenize([PromptSegment("<|im_end|>", special=True)], first=False)
    assert bpe.token_bytes(token) == b""
    assert bpe.token_text(token) == "<|im_end|>"
    assert bpe.is_end(token)
    assert "<|im_end|>" in bpe.special_texts
    assert not bpe.is_end(bpe.tokenize([PromptSegment("a")], first=False)[0])


@pytest.mark.parametrize("text", ["\ud800", "half a pair: \udc00!", "\ud83d" * 3])
def test_lone_surrogates_are_refused(bpe: Vocabulary, text: str) -> None:
    """Invalid Unicode is the sender's error, with its position."""
    with pytest.raises(
        InferenceCenterError, match=f"at character {text.find(max(text, key=_is_surrogate))}"
    ) as refusal:
        bpe.tokenize([PromptSegment(text)], first=True)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def test_megabyte_of_text_is_tokenized(bpe: Vocabulary) -> None:
    """A very long text is tokenized, not truncated."""
    text = "one two three, " * 70_000
    assert _text(bpe, bpe.tokenize([PromptSegment(text)], first=True)) == text


def test_threads_tokenize_concurrently(bpe: Vocabulary) -> None:
    """Threads that share a vocabulary get the same results as one alone."""
    texts = [f"{number} plus {number} is {2 * number}. " * 50 for number in range(32)]
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(lambda text: bpe.tokenize([PromptSegment(text)], first=True), texts))
    assert [_text(bpe, row) for row in tokens] == texts


def test_tokens_around_a_gap_are_known_by_their_texts(tmp_path: Path) -> None:
    """Their texts are parsed as these tokens; a vocabulary that lacks one of the three cannot fill a gap."""
    tokens = InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    write_plain_model(tmp_path / "whole.gguf", *msgspec.structs.astuple(tokens))
    for vocabulary in _vocabulary(tmp_path / "whole.gguf"):
        assert vocabulary.infill == tokens
        framed = [PromptSegment(tokens.prefix, special=True), PromptSegment(tokens.suffix)]
        assert len(vocabulary.tokenize(framed[:1], first=False)) == 1
        assert len(vocabulary.tokenize(framed, first=False)) > 2, "text of users is no token"
    write_plain_model(tmp_path / "plain.gguf", tokens.prefix, tokens.suffix)
    for vocabulary in _vocabulary(tmp_path / "plain.gguf"):
        assert vocabulary.infill is None


def test_missing_token_has_empty_text(bpe: Vocabulary) -> None:
    """A model without a BOS or EOS token has the id -1, whose text is empty."""
    assert bpe.token_text(-1) == ""
    assert bpe.token_text(bpe.n_tokens) == ""


def test_bos_is_added_once_at_the_start(spm: Vocabulary) -> None:
    """This holds for templates that contain it; later parts of a sequence get none."""
    hello = spm.tokenize([PromptSegment("hello")], first=False)
    assert spm.tokenize([], first=True) == [spm.bos]
    assert spm.tokenize([], first=False) == []
    assert spm.tokenize([PromptSegment("<s>", special=True), PromptSegment("hello")], first=True)[:1] == [spm.bos]
    assert spm.tokenize([PromptSegment("<s>hello", special=True)], first=True).count(spm.bos) == 1
    assert spm.bos not in spm.tokenize([PromptSegment("<s>hello")], first=False)
    assert spm.bos not in hello


def test_space_prefix_equals_llama_cpps(spm: Vocabulary) -> None:
    """Pieces get a leading space at the start and after special tokens, and none in the middle of a text."""
    whole = spm.tokenize([PromptSegment("hello there</s>hello", special=True)], first=True)
    assert _text(spm, whole) == " hello there hello"
    pieces = [
        PromptSegment("hello th", special=True),
        PromptSegment("ere"),
        PromptSegment("</s>", special=True),
        PromptSegment("hel"),
        PromptSegment("lo"),
    ]
    assert _text(spm, spm.tokenize(pieces, first=True)) == " hello there hello"
    assert _text(spm, spm.tokenize([PromptSegment("more")], first=False)) == "more"


@given(data=st.data(), first=st.booleans())
def test_text_in_two_parts_has_the_same_tokens(
    bpe: Vocabulary, spm: Vocabulary, data: st.DataObject, *, first: bool
) -> None:
    """A prefix is tokenized on its own to count its tokens, and the rest after it."""
    texts = data.draw(
        st.lists(st.sampled_from(["", "he", "llo ", " there", "\n", "<s>", "</s>", "<|im_end|>"]), max_size=5)
    )
    pieces = [PromptSegment(text, special=data.draw(st.booleans())) for text in texts]
    cut = data.draw(st.integers(0, len(pieces)))
    for vocabulary in (bpe, spm):
        head = vocabulary.tokenize(pieces[:cut], first=first) if cut else []
        rest = vocabulary.tokenize(pieces[cut:], first=first, after=head)
        assert head + rest == vocabulary.tokenize(pieces, first=first)


@given(texts=st.lists(st.text(alphabet="aehlo \n\u00e9\U0001f642<s>", max_size=6), max_size=4))
def test_sentencepiece_pieces_join_without_seams(spm: Vocabulary, texts: list[str]) -> None:
    """In the middle of a text no piece adds a space, whatever it starts with."""
    assert _text(spm, spm.tokenize([PromptSegment(text) for text in texts], first=False)) == "".join(texts)


def test_user_defined_tokens_are_text(spm: Vocabulary) -> None:
    """A user-defined token is recognized everywhere and is text, not control."""
    tokens = spm.tokenize([PromptSegment("<mark>")], first=False)
    assert _text(spm, tokens) == "<mark>"
    assert "<mark>" not in spm.special_texts
    assert set(spm.special_texts) == {"<unk>", "<s>", "</s>"}


def test_long_token_texts_are_read_whole(spm: Vocabulary) -> None:
    """A very long token text is not truncated."""
    text = f"<{'x' * 100}>"
    (token,) = spm.tokenize([PromptSegment(text)], first=False)
    assert spm.token_text(token) == text


@pytest.mark.parametrize("name", ["bpe", "spm"])
def test_token_text_length_is_bounded(name: str, request: pytest.FixtureRequest) -> None:
    """The bound covers every token, so a text's length gives the minimum number of its tokens."""
    vocabulary: Vocabulary = request.getfixturevalue(name)
    longest = max(len(vocabulary.token_bytes(token)) for token in range(vocabulary.n_tokens))
    assert longest <= vocabulary.max_token_bytes <= 8 * longest
