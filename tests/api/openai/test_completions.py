"""Text completions over HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from inferencecenter.api.body import BodyMemory, checked
from inferencecenter.api.endpoint import Call
from inferencecenter.api.openai import token_fields
from inferencecenter.api.openai.completions import Completion, CompletionHead, CompletionRequest, CompletionWriter
from inferencecenter.core.errors import ErrorCode, InferenceCenterError
from inferencecenter.core.fair_queue import FairShare
from inferencecenter.protocol.values import TokenLogprobs, TokenProbability
from tests.api.http_client import post
from tests.api.openai.events import data_of, end, token
from tests.api.streaming import send_answer, send_answers

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, -2]}, "prompt.0"),
        ({"prompt": [0xD800]}, "prompt.0.0"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "x", "regex": "a", "grammar": "b"}, "grammar"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": 0.5, "params": {"temp": 1}}, "params.temperature"),
        ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_unsupported_field_is_refused_by_name(server: Running, body: dict[str, Any], field: str) -> None:
    """The error names the field, and no session is created."""
    answer = await post(server, PATH, body)
    assert (answer.status, answer.error["param"]) == (400, field)
    assert server.context.sessions.session_ids() == ()


async def test_text_is_completed(server: Running, ada: AsyncOpenAI) -> None:
    """The answer begins with the prompt if echo is set, and its session is kept."""
    answer, _ = await asyncio.gather(
        ada.completions.create(model="stub", prompt="Once", echo=True),
        send_answer(server, " upon", " a time", reason="length"),
    )
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Once upon a time"
    assert answer.choices[0].finish_reason == "length"
    assert len(server.context.sessions.session_ids()) == 1, "the next text may begin like this one"


@pytest.mark.parametrize("prompt", [[79, 110, 99, 101], [[79, 110, 99, 101]], ["Once"]])
async def test_prompt_of_tokens_is_their_text(server: Running, prompt: Any) -> None:
    """Ids from client-side tokenization are converted to text; a warning says so."""
    body = {"prompt": prompt, "echo": True}
    answer, _ = await asyncio.gather(post(server, PATH, body), send_answer(server, " upon"))
    assert answer.json["choices"][0]["text"] == "Once upon"
    assert ("warnings" in answer.json) == (prompt != ["Once"])
    assert answer.json["timings"]["predicted_n"] == 1


async def test_texts_of_token_prompts_count_as_memory(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is a few bytes of a body, and its text may be many."""
    converted = []

    async def detokenized(*_: object, field: str) -> str:
        converted.append(field)
        return "x" * 600

    monkeypatch.setattr(token_fields, "detokenized", detokenized)
    request = checked(CompletionRequest, {"prompt": [[1], [2], [3]]})
    with BodyMemory(FairShare(1000), "ada") as memory:
        with pytest.raises(InferenceCenterError) as caught:
            await token_fields.with_text_prompts(Call(context=server.context, memory=memory, body=request))
        assert (caught.value.code, converted) == (ErrorCode.QUEUE_FULL, ["prompt.0", "prompt.1"])


async def test_stream_echoes_the_prompt_once(server: Running, ada: AsyncOpenAI) -> None:
    """The prompt is sent once, before the first token."""
    stream, _ = await asyncio.gather(
        ada.completions.create(model="stub", prompt="Once", echo=True, stream=True),
        send_answer(server, " upon", " a time"),
    )
    assert [chunk.choices[0].text async for chunk in stream] == ["Once upon", " a time", ""]


async def test_each_prompt_has_n_choices(server: Running, ada: AsyncOpenAI) -> None:
    """Two prompts with two answers each are four choices, grouped by prompt."""
    answer, _ = await asyncio.gather(
        ada.completions.create(model="stub", prompt=["a", "b"], n=2, echo=True),
        send_answers(server, "0", "1", "2", "3"),
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a0"), (1, "a1"), (2, "b2"), (3, "b3")]


def test_max_tokens_defaults_to_sixteen() -> None:
    """OpenAI's default applies unless ``params`` overrides it."""
    assert checked(CompletionRequest, {"prompt": "x"}).max_tokens == 16


def test_logprobs_have_the_legacy_shape() -> None:
    """They are lists of tokens, top logprobs and text offsets, and the offsets continue over streamed chunks."""
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
