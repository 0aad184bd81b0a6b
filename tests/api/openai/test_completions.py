"""Completions over HTTP: plain text is gone on with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.body import checked
from inferencecenter.api.openai.completions import Completion, CompletionHead, CompletionRequest, CompletionWriter
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability
from tests.api.asking import post
from tests.api.openai.told import data_of, end, token
from tests.api.streaming import say, say_each

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt.0"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "x", "regex": "a", "grammar": "b"}, "grammar"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": 0.5, "params": {"temp": 1}}, "params.temperature"),
        ({"prompt": "x", "stream_options": {}}, "stream_options"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_name(server: Running, body: dict[str, Any], field: str) -> None:
    """The error names the field, and no session is opened."""
    answer = await post(server, PATH, body)
    assert (answer.status, answer.error["param"]) == (400, field)
    assert server.context.sessions.session_ids() == ()


async def test_text_is_gone_on_with(server: Running, ada: AsyncOpenAI) -> None:
    """The openai package reads the answer, which begins with the prompt where that is wanted; its session stays."""
    answer, _ = await asyncio.gather(
        ada.completions.create(model="stub", prompt="Once", echo=True), say(server, " upon", " a time", reason="length")
    )
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Once upon a time"
    assert answer.choices[0].finish_reason == "length"
    assert len(server.context.sessions.session_ids()) == 1, "the next text may begin like this one"


async def test_text_is_streamed(server: Running, ada: AsyncOpenAI) -> None:
    """The prompt is echoed once, before the first token."""
    stream, _ = await asyncio.gather(
        ada.completions.create(model="stub", prompt="Once", echo=True, stream=True), say(server, " upon", " a time")
    )
    assert [chunk.choices[0].text async for chunk in stream] == ["Once upon", " a time", ""]


async def test_every_prompt_has_its_answers(server: Running, ada: AsyncOpenAI) -> None:
    """Two prompts with two answers each are four choices, those of a prompt side by side."""
    answer, _ = await asyncio.gather(
        ada.completions.create(model="stub", prompt=["a", "b"], n=2, echo=True), say_each(server, "0", "1", "2", "3")
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b2"), (3, "b3")]


def test_without_a_limit_there_are_sixteen_tokens() -> None:
    """OpenAI's default holds, unless ``params`` says otherwise."""
    assert checked(CompletionRequest, {"prompt": "x"}).max_tokens == 16


def test_probabilities_have_their_old_shape() -> None:
    """Lists of tokens, of probabilities, of the likeliest, and of places in the text."""
    top = (TokenProbability(token="a", token_id=1, logprob=-1), TokenProbability(token="b", token_id=2, logprob=-2))
    entries = tuple(TokenLogprobs(token=text, token_id=1, logprob=-1, top=top) for text in ("ab", "c"))
    head = CompletionHead(completion_id="cmpl-1", created=1, model="demo", prompts=("x",), logprobs=1)
    pieces = CompletionWriter(head)
    for entry in entries:
        pieces.take(0, token(entry.token, logprobs=(entry,)))
    pieces.take(0, end("stop"))
    document = Completion.model_validate(pieces.document())
    logprobs = document.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["ab", "c"], [0, 2])
    assert logprobs.top_logprobs == [{"a": -1.0}] * 2
    streamed = CompletionWriter(head)
    body = b"".join(streamed.write(0, token(entry.token, logprobs=(entry,))) for entry in entries)
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in data_of(body)]
    assert offsets == [[0], [2]]
