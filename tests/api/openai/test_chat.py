"""Chat completions over HTTP, with the openai package's client and with raw HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from inferencecenter.ipc.messages import PromptSegment
from inferencecenter.protocol.params import decode
from tests.api.http_client import post
from tests.api.streaming import CHAT, HI, next_chunk, next_turn, open_stream, requests_done, send_answer, send_answers

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from openai import AsyncOpenAI

    from inferencecenter.protocol.params import Params
    from tests.server.harness import Running

ASKED: Any = [{"role": "user", "content": "Hi"}]


async def test_completion_returns_text_finish_reason_and_usage(server: Running, ada: AsyncOpenAI) -> None:
    """The openai package parses the answer, its finish reason and its token counts."""
    answer, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED), send_answer(server, "Hel", "lo")
    )
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "stub")
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_stream_ends_with_usage_when_requested(server: Running, ada: AsyncOpenAI) -> None:
    """Each token is a chunk, and usage is the last chunk if the request includes it."""
    stream, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, stream=True, stream_options={"include_usage": True}),
        send_answer(server, "Hel", "lo"),
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "Hel", "lo", None]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage is not None


async def test_tokens_are_streamed_as_they_are_generated(server: Running) -> None:
    """A token is sent before the next one exists."""
    async with open_stream(server, HI) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        for text in "abc":
            server.engine.say(turn, text)
            chunk = await next_chunk(reader)
            if text == "a":
                assert chunk["choices"][0]["delta"]["role"] == "assistant"
                chunk = await next_chunk(reader)
            assert chunk["choices"][0]["delta"] == {"content": text}


async def test_each_choice_is_an_independent_turn(server: Running, ada: AsyncOpenAI) -> None:
    """Each choice has its own text, and only the session of the first one is kept."""
    answer, _ = await asyncio.gather(
        ada.chat.completions.create(model="stub", messages=ASKED, n=3, seed=1),
        send_answers(server, "answer 0", "answer 1", "answer 2"),
    )
    assert [choice.message.content for choice in answer.choices] == ["answer 0", "answer 1", "answer 2"]
    assert len(server.context.sessions.session_ids()) == 1


async def test_refused_request_creates_no_session(server: Running) -> None:
    """A request with invalid parameters opens no session."""
    answer = await post(server, CHAT, {**HI, "n": 2, "logit_bias": {"1": 101}})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert server.context.sessions.session_ids() == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_the_turn(server: Running, stream: bool) -> None:
    """A dropped connection aborts its turn and leaves no message in the conversation."""
    if stream:
        async with open_stream(server, HI) as reader:
            turn = await next_turn(server)
            server.engine.begin(turn)
            server.engine.say(turn, "Hel")
            await next_chunk(reader)
    else:
        pending = asyncio.create_task(post(server, CHAT, HI))  # noqa: TID251 - the test's own
        turn = await next_turn(server)
        server.engine.begin(turn)
        pending.cancel()
    await requests_done(server)
    assert turn not in server.engine.turns
    (session,) = server.context.sessions._table
    assert session.history.messages == ()


async def test_failure_before_first_token_has_http_status(server: Running, ada: AsyncOpenAI) -> None:
    """A prompt that exceeds the context is a 400 with OpenAI's code, also for a streaming request."""

    async def overflow() -> None:
        turn = await next_turn(server)
        server.engine.overflow(turn, n_tokens=99_999)

    with pytest.raises(openai.APIStatusError) as caught:
        await asyncio.gather(ada.chat.completions.create(model="stub", messages=ASKED, stream=True), overflow())
    assert isinstance(caught.value, openai.BadRequestError)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 4096 tokens." in caught.value.message


async def test_failure_during_stream_is_the_last_event(server: Running, ada: AsyncOpenAI) -> None:
    """Text sent before the failure is kept, and the error event ends the stream."""
    contents = []

    async def listen() -> None:
        async for chunk in await ada.chat.completions.create(model="stub", messages=ASKED, stream=True):
            contents.append(chunk.choices[0].delta.content)
            if chunk.choices[0].delta.content == "Hel":
                server.context.sessions.purge("client", "ada")

    async def begin() -> None:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")

    with pytest.raises(openai.APIError, match=r"ended|closed"):
        await asyncio.gather(listen(), begin())
    assert contents == ["", "Hel"]


async def test_unknown_model_is_404(ada: AsyncOpenAI) -> None:
    """The error names the unknown model."""
    with pytest.raises(openai.NotFoundError) as caught:
        await ada.chat.completions.create(model="gpt-99", messages=ASKED)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_wrong_api_key_raises_authentication_error(server: Running) -> None:
    """The openai package raises its authentication error."""
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="ic_no") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_models_are_listed_and_retrieved_by_name(ada: AsyncOpenAI) -> None:
    """The list and the lookup return the models that the client may use."""
    listed = await ada.models.list()
    assert [model.id for model in listed.data] == ["stub"]
    assert (await ada.models.retrieve("stub")).owned_by == "inferencecenter"
    with pytest.raises(openai.NotFoundError):
        await ada.models.retrieve("gpt-99")


async def test_idle_stream_sends_keepalive_comments(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """Comments are sent while a turn waits, and the answer follows them."""
    async with serve(sse_keepalive_s=0.01) as server, open_stream(server, HI) as reader:
        turn = await next_turn(server)
        await reader.readuntil(b": keepalive\n\n")
        server.engine.begin(turn)
        server.engine.say(turn, "Hello")
        await reader.readuntil(b'"content":"Hello"')


async def test_stalled_reader_has_its_turn_aborted(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """Output beyond the buffer limit aborts the turn, and nothing of it is kept."""
    async with serve(outbox_bytes=2**14) as server, open_stream(server, HI) as reader:
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


async def params_of_turn(server: Running) -> Params:
    """Answer the next turn and return its parameters."""
    turn = await next_turn(server)
    params = decode(server.engine.submission(turn).params_json)
    server.engine.begin(turn)
    server.engine.finish(turn)
    return params


@pytest.mark.parametrize("biases", [{"ab": -5, "7": 1, "c": False}, [["ab", -5], [7, 1], ["c", False]]])
async def test_bias_of_a_word_is_that_of_its_tokens(server: Running, biases: Any) -> None:
    """Words and tokens may be mixed, as an object or as llama-server's pairs."""
    _, params = await asyncio.gather(post(server, CHAT, {**HI, "logit_bias": biases}), params_of_turn(server))
    assert dict(params.logit_bias) == {ord("a"): -5, ord("b"): -5, 7: 1, ord("c"): False}


async def test_too_many_words_are_refused(server: Running) -> None:
    """Each of them is tokenized."""
    answer = await post(server, CHAT, {**HI, "logit_bias": {f"w{index}": 1 for index in range(65)}})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")


async def test_long_words_are_refused(server: Running) -> None:
    """A word of megabytes would be as many tokens, of which at most 1024 may have a bias."""
    answer = await post(server, CHAT, {**HI, "logit_bias": {"w" * 257: 1}})
    assert (answer.status, answer.error["param"]) == (400, "logit_bias")
    assert "word" in answer.error["message"]


async def test_message_of_the_assistant_at_the_end_is_continued(server: Running, ada: AsyncOpenAI) -> None:
    """The prompt ends with it, the answer continues it, and the conversation matches with both joined."""
    begun: Any = [*ASKED, {"role": "assistant", "content": "Sure, "}]
    prompts: list[str] = []

    async def answer() -> None:
        turn = await next_turn(server)
        submitted = server.engine.submission(turn)
        prompts.append("".join(piece.text for piece in submitted.pieces))
        assert submitted.pieces[-1] == PromptSegment("Sure, ", special=False)
        server.engine.begin(turn)
        server.engine.say(turn, "why not")
        server.engine.finish(turn)

    first, _ = await asyncio.gather(ada.chat.completions.create(model="stub", messages=begun), answer())
    assert prompts[0].endswith("assistant\nSure, ")
    assert first.choices[0].message.content == "why not"
    assert first.model_extra is not None
    assert "warnings" not in first.model_extra
    (session,) = server.context.sessions._table
    assert [message.content for message in session.history.messages] == ["Hi", "Sure, why not"]
    later: Any = [*ASKED, {"role": "assistant", "content": "Sure, why not"}, {"role": "user", "content": "When?"}]
    await asyncio.gather(ada.chat.completions.create(model="stub", messages=later), send_answer(server, "Now"))
    assert len(server.context.sessions.session_ids()) == 1


async def test_answer_with_a_form_is_not_continued(server: Running) -> None:
    """The form is that of the whole answer, so the beginning has no effect and is named."""
    messages = [*ASKED, {"role": "assistant", "content": "{"}]
    body = {"messages": messages, "response_format": {"type": "json_object"}}
    answer, _ = await asyncio.gather(post(server, CHAT, body), send_answer(server, "{}"))
    assert answer.json["warnings"] == ["the last message has no effect: an answer with a form is not continued"]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_has_the_timings_of_llama_server(server: Running, stream: bool) -> None:
    """A stream has them in its last chunk."""
    answer, _ = await asyncio.gather(post(server, CHAT, {**HI, "stream": stream}), send_answer(server, "Hello"))
    found = json.loads(answer.body.split(b"\n\n")[-3].removeprefix(b"data: ")) if stream else answer.json
    assert (found["timings"]["predicted_n"], found["timings"]["predicted_per_second"]) == (1, 4.0)
    assert found["choices"][0]["finish_reason"] == "stop"
