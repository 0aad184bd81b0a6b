"""Generated prompts."""

from __future__ import annotations

import itertools
import string

import pytest

from benchmarks.peers.prompts import calibrate
from benchmarks.target import Opening, Work
from inferencecenter.core.errors import InferenceCenterError


class _Tokenizer:
    """Counts tokens by words: a letter after a space is one token unless it is in ``costly``, as is any other byte."""

    def __init__(self, *, costly: str = "", overhead_tokens: int = 0) -> None:
        self._costly = costly
        self._overhead_tokens = overhead_tokens

    async def count(self, text: str) -> int:
        """Return the tokens of a text, overhead included."""
        tokens = sum(1 for char in text if char != " ")
        tokens += sum(1 for space, letter in itertools.pairwise(text) if space == " " and letter in self._costly)
        return tokens + self._overhead_tokens


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(_Tokenizer(), id="every letter"),
        pytest.param(_Tokenizer(overhead_tokens=1), id="with BOS"),
        pytest.param(_Tokenizer(costly="jqxz", overhead_tokens=2), id="some letters"),
        pytest.param(_Tokenizer(costly=string.ascii_lowercase), id="bytes"),
    ],
)
async def test_prompts_have_the_requested_tokens(tokenizer: _Tokenizer) -> None:
    """The first text of a conversation allows for the server's overhead; later ones have none."""
    prompts = await calibrate(tokenizer.count)
    overhead = await tokenizer.count("")

    for seed in range(20):
        work = Work(prompt_tokens=50, max_tokens=1, seed=seed)
        assert await tokenizer.count(prompts.text(work, first=True)) == 50
        assert await tokenizer.count(prompts.text(work, first=False)) - overhead == 50


async def test_seed_determines_the_words() -> None:
    """Different seeds differ within the first words."""
    prompts = await calibrate(_Tokenizer().count)

    texts = [prompts.text(Work(prompt_tokens=64, max_tokens=1, seed=seed), first=True) for seed in (*range(30), 7)]

    assert texts[-1] == texts[7]
    assert len({text[:20] for text in texts}) == 30


async def test_shared_prefix_is_exact() -> None:
    """Its tokens, with the server's overhead, are the first of the prompt; the rest differs."""
    tokenizer = _Tokenizer(overhead_tokens=2)
    prompts = await calibrate(tokenizer.count)
    opening = Opening(tokens=30, seed=99)

    one, other = (prompts.text(Work(50, 1, seed=seed, opening=opening), first=True) for seed in (1, 2))

    assert await tokenizer.count(one) == await tokenizer.count(other) == 50
    words, others = one.split(), other.split()
    assert words[:28] == others[:28]
    assert words[28:40] != others[28:40]
    changed = prompts.text(Work(50, 1, seed=1, opening=Opening(tokens=30, seed=98)), first=True).split()
    assert changed[:20] != words[:20]
    assert changed[28:] == words[28:]


async def test_vocabulary_without_letters_is_refused() -> None:
    """No text has one token a word, so exact prompts are impossible."""

    async def count(text: str) -> int:
        return 3 * len(text)

    with pytest.raises(InferenceCenterError, match="fewer than 4 letters"):
        await calibrate(count)


async def test_prompt_without_room_for_a_word_is_refused() -> None:
    """A server with an overhead of one token cannot be given a prompt of one."""
    prompts = await calibrate(_Tokenizer(overhead_tokens=1).count)

    with pytest.raises(InferenceCenterError, match="no room for a word"):
        prompts.text(Work(prompt_tokens=1, max_tokens=1, seed=0), first=True)
    with pytest.raises(InferenceCenterError, match="20 tokens, 20 of them shared, has no room"):
        prompts.text(Work(20, 1, seed=0, opening=Opening(tokens=20, seed=1)), first=True)
    with pytest.raises(InferenceCenterError, match="no room for a word"):
        prompts.text(Work(20, 1, seed=0, opening=Opening(tokens=1, seed=1)), first=True)
