"""Ollama's ``/api/chat`` and ``/api/generate``, with the ollama package's client and with raw HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from ollama import ResponseError

from inferencecenter.api.session_match import ConversationRequest, open_session
from inferencecenter.protocol.values import ChatMessage, ToolCall
from tests.api.http_client import post
from tests.api.streaming import next_turn, open_stream, send_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from ollama import AsyncClient

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

_Part = TypeVar("_Part")
CHAT = "/api/chat"
GENERATE = "/api/generate"
HI: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}]}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
LOOK_UP = {"function": {"name": "look_up", "arguments": {"word": "tea"}}}


def session_messages(server: Running) -> list[list[str]]:
    """Return the messages of each session, oldest first."""
    return [[message.content for message in session.history.messages] for session in server.context.sessions._table]


async def collected(stream: AsyncIterator[_Part]) -> list[_Part]:
    """Return the parts of a stream, which the package requests now."""
    return [part async for part in stream]


async def test_answer_has_text_reason_counts_and_durations(server: Running, client: AsyncClient) -> None:
    """The package parses the answer; durations are in nanoseconds, and the tag is the same model's."""
    answer, _ = await asyncio.gather(
        client.chat(model="stub:latest", messages=HI["messages"]), send_answer(server, "Hel", "lo")
    )
    assert (answer.model, answer.message.role, answer.message.content) == ("stub", "assistant", "Hello")
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count == 1
    assert answer.prompt_eval_count == 1
    assert [answer[name] for name in DURATIONS] == [3_000_000, 1_000_000, 1_000_000, 1_000_000]


async def test_stream_is_lines_of_which_the_last_is_done(server: Running, client: AsyncClient) -> None:
    """Each token is a line, and the last one has reason and counts."""
    stream = await client.chat(model="stub", messages=HI["messages"], stream=True)
    parts, _ = await asyncio.gather(collected(stream), send_answer(server, "Hel", "lo"))
    assert [part.message.content for part in parts] == ["Hel", "lo", ""]
    assert [part.done for part in parts] == [False, False, True]
    assert parts[-1].done_reason == "stop"
    assert parts[-1].total_duration == 3_000_000


async def test_requests_are_streamed_by_default(server: Running) -> None:
    """Without ``stream`` the response is lines of JSON."""
    response, _ = await asyncio.gather(post(server, CHAT, HI), send_answer(server, "Hello"))
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line)["done"] for line in response.body.splitlines()] == [False, True]


async def test_idle_stream_sends_answers_without_text(
    serve: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    """Clients parse each line, so the keepalive is an answer without text."""
    async with serve(sse_keepalive_s=0.01) as server, open_stream(server, HI, CHAT) as reader:
        await next_turn(server)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"\r\n")  # the size of the chunk
        line = json.loads(await reader.readuntil(b"\n"))
        assert (line["message"], line["done"]) == ({"role": "assistant", "content": ""}, False)


async def test_failure_during_stream_is_its_last_line(server: Running, client: AsyncClient) -> None:
    """Text sent before the failure is kept, and the package raises the error."""
    contents = []

    async def listen() -> None:
        async for part in await client.chat(model="stub", messages=HI["messages"], stream=True):
            contents.append(part.message.content)
            server.context.sessions.purge("client", "ada")

    async def begin() -> None:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")

    with pytest.raises(ResponseError, match=r"ended|closed"):
        await asyncio.gather(listen(), begin())
    assert contents == ["Hel"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {"model": "missing"}, 404, "model not found: "),
        (CHAT, {}, 400, "model"),
        (CHAT, {**HI, "options": {"top_k": -5}}, 400, "options.top_k"),
        (CHAT, {**HI, "options": {"temperature": "hot"}}, 400, "options.temperature"),
        (CHAT, {**HI, "format": "yaml"}, 400, "format"),
        (CHAT, {**HI, "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        (CHAT, {"model": "stub", "messages": [{"role": "user", "images": ["aGk="]}]}, 400, "none of a known format"),
        (CHAT, {"model": "stub", "messages": [{"role": "assistant", "content": "x"}]}, 400, "messages.0.role"),
        (
            CHAT,
            {**HI, "messages": [*HI["messages"], {"role": "assistant", "content": "x"}], "format": "json"},
            400,
            "format excludes",
        ),
        (CHAT, {"model": "stub", "messages": [{"role": "tool", "content": "x"}]}, 400, "no earlier tool call"),
        (
            CHAT,
            {"model": "stub", "messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
            400,
            "messages.0.tool_call_id",
        ),
        (CHAT, {"model": "stub", "messages": [{"role": "user", "tool_calls": [LOOK_UP]}]}, 400, "tool_calls belongs"),
        (CHAT, {**HI, "tools": [{"function": {"name": "f"}}] * 2}, 400, "two tools have the same name"),
        (GENERATE, {"model": "stub", "prompt": "x", "images": ["aGk="]}, 400, "none of a known format"),
        (GENERATE, {"model": "stub", "prompt": "x", "suffix": "y", "format": "yaml"}, 400, "format"),
        (GENERATE, {"model": "stub", "prompt": "x", "raw": True, "system": "y"}, 400, "raw excludes system"),
        (GENERATE, {"model": "stub", "prompt": "x", "context": [1, 2]}, 400, "context"),
        (GENERATE, {"model": "stub", "prompt": "x", "context": [-1]}, 400, "context"),
    ],
)
async def test_errors_are_a_message(server: Running, path: str, body: Any, status: int, message: str) -> None:
    """Refused before a session is created, in Ollama's format, which names the field."""
    response = await post(server, path, body)
    assert (response.status, list(response.json)) == (status, ["error"])
    assert message in response.json["error"]
    assert server.context.sessions.session_ids() == ()


async def test_package_raises_the_message_and_the_status(client: AsyncClient) -> None:
    """Programs pull a model after a 404."""
    with pytest.raises(ResponseError) as caught:
        await client.chat(model="missing", messages=HI["messages"])
    assert caught.value.status_code == 404
    assert caught.value.error.startswith("model not found")


async def test_options_reach_the_engine(server: Running) -> None:
    """Parameters are obeyed; options of loading have no effect, which a header reports."""
    options = {"top_k": 7, "num_predict": 5, "seed": 3, "stop": ["\n"], "temperature": 0, "num_ctx": 512}
    body = {**HI, "stream": False, "options": options, "keep_alive": "5m"}
    asking = asyncio.gather(post(server, CHAT, body))
    turn = await next_turn(server)
    params = json.loads(server.engine.submission(turn).params_json)
    assert {name: params[name] for name in ("top_k", "max_tokens", "seed", "stop", "temperature")} == {
        "top_k": 7,
        "max_tokens": 5,
        "seed": 3,
        "stop": ["\n"],
        "temperature": 0,
    }
    server.engine.begin(turn)
    server.engine.finish(turn)
    (response,) = await asking
    assert "options.num_ctx has no effect" in response.headers["x-warning"]
    assert "keep_alive has no effect" in response.headers["x-warning"]


@pytest.mark.parametrize("num_predict", [-1, -2, 0])
async def test_negative_numbers_mean_no_limit_and_a_random_seed(server: Running, num_predict: int) -> None:
    """Ollama defines them so; a limit of 0 means none, too."""
    asking = asyncio.gather(post(server, CHAT, {**HI, "options": {"num_predict": num_predict, "seed": -1}}))
    turn = await next_turn(server)
    params = json.loads(server.engine.submission(turn).params_json)
    assert params.get("max_tokens") is None
    assert params["seed"] >= 0
    server.engine.begin(turn)
    server.engine.finish(turn)
    await asking


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
async def test_format_constrains_the_answer(server: Running, form: Any) -> None:
    """The format is ``json``, for any object, or a JSON Schema."""
    asking = asyncio.gather(post(server, CHAT, {**HI, "format": form}))
    turn = await next_turn(server)
    assert server.engine.submission(turn).grammar
    server.engine.begin(turn)
    server.engine.finish(turn)
    await asking


async def test_begun_answer_is_continued(server: Running, client: AsyncClient) -> None:
    """The last message is the start of the answer; the response has what follows it, the session both."""
    messages = [*HI["messages"], {"role": "assistant", "content": "Hel"}]
    answer, _ = await asyncio.gather(client.chat(model="stub", messages=messages), send_answer(server, "lo"))
    assert answer.message.content == "lo"
    assert session_messages(server) == [["Hi", "Hello"]]


async def test_conversation_continues_in_its_session(server: Running, client: AsyncClient) -> None:
    """Only the new question is submitted."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    first, _ = await asyncio.gather(client.chat(model="stub", messages=messages), send_answer(server, "1"))
    messages = [*messages, first.message.model_dump(), {"role": "user", "content": "Two?"}]
    await asyncio.gather(client.chat(model="stub:latest", messages=messages), send_answer(server, "2"))
    assert session_messages(server) == [["Be brief.", "One?", "1", "Two?", "2"]]


CALLED = ChatMessage(
    role="assistant",
    content="",
    tool_calls=(
        ToolCall(call_id="call_a_0", name="look_up", arguments='{"word": "tea"}'),
        ToolCall(call_id="call_a_1", name="count", arguments="{}"),
    ),
)
SENT: list[Any] = [
    {"role": "user", "content": "What is tea?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [LOOK_UP, {"function": {"name": "count", "arguments": {}}}],
    },
]


LONG: dict[str, Any] = {
    "model": "stub",
    "messages": [
        {"role": "user", "content": "I am Ada."},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who am I?"},
    ],
}


@pytest.mark.parametrize("stream", [True, False])
async def test_oldest_messages_of_a_long_conversation_are_dropped(server: Running, stream: bool) -> None:
    """Ollama drops them, too; here a warning reports it."""

    async def answer() -> str:
        turn = await next_turn(server)
        server.engine.overflow(turn, n_tokens=5000)
        turn = await next_turn(server)
        prompt = "".join(piece.text for piece in server.engine.submission(turn).pieces)
        server.engine.begin(turn)
        server.engine.say(turn, "No idea.")
        server.engine.finish(turn)
        return prompt

    response, prompt = await asyncio.gather(post(server, CHAT, {**LONG, "stream": stream}), answer())
    last = json.loads(response.body.splitlines()[-1])
    assert "Ada" not in prompt
    assert "Who am I?" in prompt
    assert (last["done_reason"], last["warnings"]) == (
        "stop",
        ["the oldest messages were dropped: the conversation exceeds the context"],
    )


@pytest.mark.parametrize(
    ("path", "body", "may_shift"),
    [
        (CHAT, LONG, True),
        (CHAT, {**LONG, "truncate": False}, False),
        (GENERATE, {"model": "stub", "prompt": "Hi"}, True),
        (GENERATE, {"model": "stub", "prompt": "Hi", "truncate": False}, False),
        (GENERATE, {"model": "stub", "prompt": "Hi", "raw": True}, False),
    ],
)
async def test_request_says_whether_messages_are_dropped(
    server: Running, path: str, body: dict[str, Any], may_shift: bool
) -> None:
    """The engine refuses a prompt that is too long otherwise."""
    pending = asyncio.get_running_loop().create_task(post(server, path, body))
    turn = await next_turn(server)
    assert server.engine.submission(turn).may_shift == may_shift
    server.engine.begin(turn)
    server.engine.finish(turn)
    assert (await pending).status == 200


async def test_conversation_with_tool_calls_continues_in_its_session(server: Running, client: AsyncClient) -> None:
    """Ollama's calls have no ids: results go to the session's call of their name, whatever their order."""
    account = server.accounts.verify_token(server.token)
    assert account is not None
    told = (ChatMessage(role="user", content="What is tea?"), CALLED, ChatMessage(role="user", content="-"))
    conversation = ConversationRequest(messages=told, model="stub", on_full="shift")
    open_session(server.context.sessions, account, conversation)
    messages = [
        *SENT,
        {"role": "tool", "tool_name": "count", "content": "3"},
        {"role": "tool", "tool_name": "look_up", "content": "A drink."},
    ]
    first, _ = await asyncio.gather(client.chat(model="stub", messages=messages), send_answer(server, "A drink"))
    messages = [*messages, first.message.model_dump(exclude_none=True), {"role": "user", "content": "Thanks"}]
    await asyncio.gather(client.chat(model="stub", messages=messages), send_answer(server, "Welcome"))
    assert session_messages(server) == [["What is tea?", "", "3", "A drink.", "A drink", "Thanks", "Welcome"]]
    (session,) = server.context.sessions._table
    assert [message.tool_call_id for message in session.history.messages[2:4]] == ["call_a_1", "call_a_0"]


async def test_history_with_tool_calls_that_is_new_continues_too(server: Running, client: AsyncClient) -> None:
    """Calls of a conversation that no session has are numbered, so the same conversation is found again."""
    messages: list[Any] = [*SENT, {"role": "tool", "content": "A drink."}]
    first, _ = await asyncio.gather(client.chat(model="stub", messages=messages), send_answer(server, "A drink"))
    messages = [*messages, first.message.model_dump(exclude_none=True), {"role": "user", "content": "Thanks"}]
    await asyncio.gather(client.chat(model="stub", messages=messages), send_answer(server, "Welcome"))
    assert session_messages(server) == [["What is tea?", "", "A drink.", "A drink", "Thanks", "Welcome"]]


# Prompts.


async def test_prompt_is_answered_with_a_context(server: Running, client: AsyncClient) -> None:
    """The context is numbers that continue the conversation in its session."""
    first, _ = await asyncio.gather(
        client.generate(model="stub", prompt="One?", system="Be brief."), send_answer(server, "Eins \N{SNOWMAN}")
    )
    assert (first.response, first.done_reason, first.eval_count) == ("Eins \N{SNOWMAN}", "stop", 1)
    assert first.context is not None
    second, _ = await asyncio.gather(
        client.generate(model="stub", prompt="Two?", context=first.context), send_answer(server, "Zwei")
    )
    assert second.response == "Zwei"
    assert session_messages(server) == [["Be brief.", "One?", "Eins \N{SNOWMAN}", "Two?", "Zwei"]]


async def test_streamed_prompt_ends_with_the_context(server: Running, client: AsyncClient) -> None:
    """The last part has the same context as the response that is not streamed."""
    stream = await client.generate(model="stub", prompt="One?", stream=True)
    parts, _ = await asyncio.gather(collected(stream), send_answer(server, "Eins"))
    assert [part.response for part in parts] == ["Eins", ""]
    again, _ = await asyncio.gather(client.generate(model="stub", prompt="One?"), send_answer(server, "Eins"))
    assert parts[-1].context == again.context


async def test_raw_prompt_is_continued_as_it_is(server: Running, client: AsyncClient) -> None:
    """Neither a template nor a context is applied."""
    answer, _ = await asyncio.gather(
        client.generate(model="stub", prompt="Once upon", raw=True), send_answer(server, " a time")
    )
    assert (answer.response, answer.context) == (" a time", None)
    (session,) = server.context.sessions._table
    assert session.config.mode == "raw"


# Loading.


@pytest.mark.parametrize(("path", "field"), [(CHAT, "message"), (GENERATE, "response")])
async def test_request_without_question_loads_the_model(
    server: Running, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send such a request to load a model in advance."""
    loaded: list[str] = []
    monkeypatch.setattr(server.engine, "ensure_loaded", lambda name, _client_id: loaded.append(name))
    response = await post(server, path, {"model": "stub:latest", "keep_alive": -1})
    assert (response.json["done"], response.json["done_reason"], field in response.json) == (True, "load", True)
    assert loaded == ["stub"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (GENERATE, {"prompt": ""})])
async def test_loading_a_model_is_an_operation(serve: Serve, path: str, body: dict[str, Any]) -> None:
    """It counts as one of its client, as no turn does."""
    async with serve(operations_per_minute=1) as server:
        answers = [await post(server, path, {"model": "stub", **body}) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 429]


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", "0m"])
async def test_operator_unloads_the_model(server: Running, keep_alive: object) -> None:
    """A request without a question that keeps the model for no time."""
    server.accounts.ensure_client("eve", max_sessions=3, priority="normal", scopes=("user", "operator"))
    token = server.accounts.create_token("eve").token
    body = {"model": "stub", "keep_alive": keep_alive}
    response = await post(server, GENERATE, body, token=token)
    assert response.json["done_reason"] == "unload"
    assert server.engine.unloaded == ["stub"]
    refused = await post(server, GENERATE, body)
    assert (refused.status, server.engine.unloaded) == (403, ["stub"])
    assert "operator" in refused.json["error"]
