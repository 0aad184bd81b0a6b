"""Chat completions over HTTP, asked for by OpenAI's own client and by less friendly ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.api.asking import post
from tests.api.streaming import CHAT, HI, chunk_of, gone, next_turn, say, say_each, streamed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from openai import AsyncOpenAI

    from tests.server.harness import Running

ASKED: Any = [{"role": "user", "content": "Hi"}]


async def test_a_question_is_answered(server: Running, ada: AsyncOpenAI) -> None:
    """The openai package reads the answer, its end and its tokens."""
    answer, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED), say(server, "Hel", "lo")
    )
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "stub")
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_an_answer_is_streamed(server: Running, ada: AsyncOpenAI) -> None:
    """Chunks come as tokens do, and usage is the last where it is asked for."""
    stream, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, stream=True, stream_options={"include_usage": True}),
        say(server, "Hel", "lo"),
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "Hel", "lo", None]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None


async def test_a_token_is_sent_when_it_is_there(server: Running) -> None:
    """Nothing waits for what comes later."""
    async with streamed(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        for text in "abc":
            server.engine.say(turn, text)
            chunk = await chunk_of(reader)
            if text == "a":
                assert chunk["choices"][0]["delta"]["role"] == "assistant"
                chunk = await chunk_of(reader)
            assert chunk["choices"][0]["delta"] == {"content": text}


async def test_several_answers_are_turns_of_their_own(server: Running, ada: AsyncOpenAI) -> None:
    """Each choice has its own text, and only the first one's session stays."""
    answer, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, n=3, seed=1),
        say_each(server, "answer 0", "answer 1", "answer 2"),
    )
    assert [choice.message.content for choice in answer.choices] == ["answer 0", "answer 1", "answer 2"]
    assert len(server.context.sessions.session_ids()) == 1


async def test_what_cannot_run_leaves_no_session(server: Running) -> None:
    """A request that is refused for its parameters opens nothing."""
    answer = await post(server, CHAT, {**HI, "n": 2, "logit_bias": {"x": 1}})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert server.context.sessions.session_ids() == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_leaves_has_the_turn_aborted(server: Running, stream: bool) -> None:
    """A connection that is dropped ends its turn, which leaves nothing in the conversation."""
    if stream:
        async with streamed(server, HI) as reader:
            turn = await next_turn(server)
            server.engine.begin(turn)
            server.engine.say(turn, "Hel")
            await chunk_of(reader)
    else:
        asking = asyncio.create_task(post(server, CHAT, HI))  # noqa: TID251 - the test's own
        turn = await next_turn(server)
        server.engine.begin(turn)
        asking.cancel()
    await gone(server)
    assert turn not in server.engine.turns
    (session,) = server.context.sessions._table
    assert session.history.messages == ()


async def test_a_failure_before_the_first_token_has_a_status(server: Running, ada: AsyncOpenAI) -> None:
    """A prompt that is too long is a 413 with OpenAI's code, also where a stream was asked for."""

    async def overflow() -> None:
        turn = await next_turn(server)
        server.engine.overflow(turn, n_tokens=99_999)

    with pytest.raises(openai.APIStatusError) as caught:
        await asyncio.gather(ada.chat.completions.create(model="stub", messages=ASKED, stream=True), overflow())
    assert (caught.value.status_code, caught.value.code) == (413, "context_length_exceeded")


async def test_a_failure_in_the_middle_is_the_last_event(server: Running, ada: AsyncOpenAI) -> None:
    """What was said stays said, and the client hears of the error."""
    heard = []

    async def listen() -> None:
        async for chunk in await ada.chat.completions.create(model="stub", messages=ASKED, stream=True):
            heard.append(chunk.choices[0].delta.content)
            if chunk.choices[0].delta.content == "Hel":
                server.context.sessions.purge("client", "ada")

    async def begin() -> None:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")

    with pytest.raises(openai.APIError, match=r"ended|closed"):
        await asyncio.gather(listen(), begin())
    assert heard == ["", "Hel"]


async def test_models_that_there_are_not(ada: AsyncOpenAI) -> None:
    """An unknown model is a 404 that names it."""
    with pytest.raises(openai.NotFoundError) as caught:
        await ada.chat.completions.create(model="gpt-99", messages=ASKED)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_a_wrong_key(server: Running) -> None:
    """The openai package raises its own error for a key that is wrong."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="ic_no") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_models_are_listed_and_looked_up(ada: AsyncOpenAI) -> None:
    """What the client may use is there, by name."""
    listed = await ada.models.list()
    assert [model.id for model in listed.data] == ["stub"]
    assert (await ada.models.retrieve("stub")).owned_by == "inferencecenter"
    with pytest.raises(openai.NotFoundError):
        await ada.models.retrieve("gpt-99")


async def test_a_silent_stream_says_that_it_is_alive(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """While a turn waits, comments come, and its answer after them."""
    async with serve(sse_keepalive_s=0.01) as server, streamed(server, HI) as reader:
        turn = await next_turn(server)
        await reader.readuntil(b": keepalive\n\n")
        server.engine.begin(turn)
        server.engine.say(turn, "Hello")
        await reader.readuntil(b'"content":"Hello"')


async def test_a_reader_that_stops_has_its_turn_aborted(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """What may wait is bounded; the turn ends when it is more, and nothing is kept of it."""
    async with serve(outbox_bytes=2**14) as server, streamed(server, HI) as reader:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        turn = await next_turn(server)
        server.engine.begin(turn)
        for _ in range(20_000):
            if turn not in server.engine.turns:
                break
            server.engine.say(turn, "x" * 1000)
            await asyncio.sleep(0)
        assert turn not in server.engine.turns
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        assert b"the response was not read fast enough" in await reader.readuntil(b"0\r\n\r\n")
