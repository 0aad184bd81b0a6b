"""Compaction of a conversation, through the openai package on a server with a scripted engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import BadRequestError

from inferencecenter.config.limits import AccessLimits
from tests.api.http_client import post, tick
from tests.api.responses import openai_types
from tests.api.responses.helpers import (
    PATH,
    begin_turns,
    create_response,
    frames_of,
    get,
    receive,
    send,
    socket,
    text_of,
    wait_turns_left,
)
from tests.api.streaming import next_turn, send_answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from openai import AsyncOpenAI

    from tests.server.harness import Running

    Serve = Callable[..., AbstractAsyncContextManager[Running]]

COMPACT = f"{PATH}/compact"
SAID: list[Any] = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello, Ada."},
    {"role": "user", "content": "I live in Paris."},
    {"role": "assistant", "content": "Good."},
]


async def prompt_of_next(server: Running, *texts: str) -> str:
    """Answer the next turn and return its prompt."""
    (turn,) = await begin_turns(server)
    prompt = text_of(server.engine.submission(turn))
    for text in texts:
        server.engine.say(turn, text)
    server.engine.finish(turn)
    return prompt


async def test_summary_replaces_the_conversation(server: Running, ada: AsyncOpenAI) -> None:
    """The user's messages are kept, and the answers are in the summary alone."""
    compacted, prompt = await asyncio.gather(
        ada.responses.compact(model="stub", input=SAID, instructions="Be brief."),
        prompt_of_next(server, "The user is Ada, ", "of Paris.\n"),
    )
    assert "Be brief." in prompt
    assert "Hello, Ada." in prompt
    assert "Summarize our conversation" in prompt
    kept, summary = (item.to_dict(warnings=False) for item in compacted.output)
    assert compacted.object == "response.compaction"
    assert (kept["role"], kept["content"]) == (
        "user",
        [{"type": "input_text", "text": "My name is Ada.\n\nI live in Paris."}],
    )
    assert summary["type"] == "compaction"
    assert compacted.usage.output_tokens > 0
    following: Any = [kept, summary, {"role": "user", "content": "Who am I?"}]
    answer, prompt = await asyncio.gather(
        ada.responses.create(model="stub", input=following, store=False), prompt_of_next(server, "Ada")
    )
    assert answer.output_text == "Ada"
    assert "The user is Ada, of Paris." in prompt
    assert "Hello, Ada." not in prompt
    assert [item.type for item in compacted.output] == ["message", "compaction"]


async def test_stored_conversation_is_compacted(server: Running, ada: AsyncOpenAI) -> None:
    """The previous response names it; no session is left in the client's list."""
    first = (await create_response(server, {"input": "My name is Ada."}, "Hello, Ada.")).json
    compacted, prompt = await asyncio.gather(
        ada.responses.compact(model="stub", previous_response_id=first["id"]), prompt_of_next(server, "Ada.")
    )
    assert "Hello, Ada." in prompt
    assert len(compacted.output) == 2
    assert len(server.context.sessions.session_ids()) == 2
    assert server.context.sessions.session_counts("ada")[0] == 1


async def test_question_for_the_summary_joins_an_unanswered_message(server: Running, ada: AsyncOpenAI) -> None:
    """Roles alternate, as some templates require."""
    _, prompt = await asyncio.gather(
        ada.responses.compact(model="stub", input="My name is Ada."), prompt_of_next(server, "Ada.")
    )
    assert "My name is Ada.\n\nSummarize our conversation" in prompt


async def test_summary_is_bounded_by_context_and_token(serve: Serve) -> None:
    """The summary takes an eighth of the context at most, or what the token may generate; tools stay in the prompt."""
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    for limits, expected in ((AccessLimits(), b'"max_tokens":512'), (AccessLimits(max_tokens=10), b'"max_tokens":10')):
        async with serve(limits=limits) as server:
            body = {"input": SAID, "tools": [tool], "params": {"max_tokens": 5}}
            pending = asyncio.get_running_loop().create_task(post(server, COMPACT, body))
            (turn,) = await begin_turns(server)
            submitted = server.engine.submission(turn)
            assert expected in submitted.params_json
            assert '"look"' in text_of(submitted)
            server.engine.say(turn, "Ada")
            server.engine.finish(turn)
            assert (await pending).status == 200


async def test_long_messages_of_the_user_are_left_to_the_summary(server: Running) -> None:
    """The latest messages are kept, up to a quarter of the context."""
    said = [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "Oh."}, *SAID]
    compacted, _ = await asyncio.gather(post(server, COMPACT, {"input": said}), send_answer(server, "Ada."))
    kept, _ = compacted.json["output"]
    assert kept["content"][0]["text"] == "My name is Ada.\n\nI live in Paris."
    alone, _ = await asyncio.gather(post(server, COMPACT, {"input": said[:2]}), send_answer(server, "x"))
    assert [item["type"] for item in alone.json["output"]] == ["compaction"]


async def test_conversation_beyond_the_context_loses_its_oldest_turns(server: Running) -> None:
    """A warning reports it."""

    async def answer() -> None:
        turn = await next_turn(server)
        server.engine.overflow(turn, n_tokens=5000)
        await send_answer(server, "Paris.")

    compacted, _ = await asyncio.gather(post(server, COMPACT, {"input": SAID}), answer())
    assert compacted.json["warnings"] == ["the summary lacks the oldest turns, which exceed the context"]


async def test_summary_of_another_server_has_no_effect(server: Running) -> None:
    """It is named in the warnings, and the model does not see it."""
    items = [{"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAAB"}, *SAID[:1]]
    answer, prompt = await asyncio.gather(post(server, PATH, {"input": items}), prompt_of_next(server, "Hello"))
    assert "gAAAAB" not in prompt
    assert any(warning.startswith("input.0 (compaction) has no effect") for warning in answer.json["warnings"])


COMPACT_AT: Any = [{"type": "compaction", "compact_threshold": 20}]


async def test_long_conversation_is_compacted_before_it_is_answered(server: Running, ada: AsyncOpenAI) -> None:
    """The output begins with the summary, also when it is retrieved, and a continuation begins with it."""

    async def answer() -> tuple[str, str]:
        return await prompt_of_next(server, "Ada of Paris."), await prompt_of_next(server, "You are Ada.")

    asked: Any = [*SAID, {"role": "user", "content": "Who am I?"}]
    response, (first, second) = await asyncio.gather(
        ada.responses.create(input=asked, instructions="Be brief.", context_management=COMPACT_AT), answer()
    )
    assert "Hello, Ada." in first
    assert "Who am I?" not in first
    assert ("Hello, Ada." in second, "Be brief." in second, "I live in Paris." in second) == (False, True, True)
    assert second.index("Ada of Paris.") < second.index("Who am I?")
    assert [item.type for item in response.output] == ["compaction", "message"]
    assert response.output_text == "You are Ada."
    assert (await ada.responses.retrieve(response.id)).output == response.output
    later = await create_response(server, {"input": "And?", "previous_response_id": response.id})
    items = (await get(server, later.json["id"], "/input_items?order=asc")).json["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant", "user"]


async def test_stream_begins_with_the_summary(server: Running) -> None:
    """The package knows every event, and indexes count the summary."""
    body = {"input": [*SAID, {"role": "user", "content": "Hi"}], "context_management": COMPACT_AT, "stream": True}

    async def answer() -> None:
        await prompt_of_next(server, "Ada.")
        await prompt_of_next(server, "Hello")

    streamed, _ = await asyncio.gather(post(server, PATH, body), answer())
    frames = frames_of(streamed)
    for frame in frames:
        openai_types.event(frame)
    items = [(frame["type"][21:], frame["output_index"], frame["item"]["type"]) for frame in frames if "item" in frame]
    assert items == [
        ("added", 0, "compaction"),
        ("done", 0, "compaction"),
        ("added", 1, "message"),
        ("done", 1, "message"),
    ]
    assert [item["type"] for item in frames[-1]["response"]["output"]] == ["compaction", "message"]


async def test_output_of_a_function_keeps_its_call(server: Running) -> None:
    """Only what precedes the call is summarized."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"sky"}'}
    asked = [*SAID, {"role": "user", "content": "Look"}, call]
    asked.append({"type": "function_call_output", "call_id": "c1", "output": "Stars"})

    async def answer() -> tuple[str, str]:
        return await prompt_of_next(server, "Ada."), await prompt_of_next(server, "Nice")

    body = {"input": asked, "context_management": COMPACT_AT}
    answered, (first, second) = await asyncio.gather(post(server, PATH, body), answer())
    assert answered.status == 200
    assert ("sky" in first, "Stars" in first, "Look" in first) == (False, False, True)
    assert ("sky" in second, "Stars" in second) == (True, True)


@pytest.mark.parametrize(
    ("asked", "threshold"),
    [([*SAID, {"role": "user", "content": "Hi"}], 4000), ([{"role": "user", "content": "Hi" * 40}], 20)],
)
async def test_conversation_is_answered_as_it_is(server: Running, asked: Any, threshold: int) -> None:
    """Below the threshold, or with only a question, nothing is summarized."""
    management = [{"type": "compaction", "compact_threshold": threshold}, {"type": "other"}]
    answered = await create_response(server, {"input": asked, "context_management": management}, "Hello")
    assert [item["type"] for item in answered.json["output"]] == ["message"]
    assert [warning.split(" has no effect")[0] for warning in answered.json["warnings"]] == [
        "context_management.1 (other)"
    ]


async def test_conversation_keeps_its_items_when_it_is_compacted(server: Running, ada: AsyncOpenAI) -> None:
    """Later responses receive the summary and what follows it, even with other instructions."""
    made = await ada.conversations.create(items=SAID)

    async def answer() -> tuple[str, str]:
        return await prompt_of_next(server, "Ada of Paris."), await prompt_of_next(server, "You are Ada.")

    response, (first, second) = await asyncio.gather(
        ada.responses.create(input="Who am I?", conversation=made.id, context_management=COMPACT_AT), answer()
    )
    assert ("Hello, Ada." in first, "Who am I?" in first) == (True, False)
    assert ("Hello, Ada." in second, "I live in Paris." in second) == (False, True)
    assert second.index("Ada of Paris.") < second.index("Who am I?")
    assert [item.type for item in response.output] == ["compaction", "message"]
    items = [item.to_dict() async for item in ada.conversations.items.list(made.id, order="asc")]
    texts = [item["content"][0]["text"] for item in items]  # type: ignore[index]
    assert texts[: len(SAID)] == [item["content"] for item in SAID]
    assert texts[-2:] == ["Who am I?", "You are Ada."]
    others: list[Any] = [{}, {"instructions": "Be brief."}]
    for more in others:
        _, prompt = await asyncio.gather(
            ada.responses.create(input="And?", conversation=made.id, **more), prompt_of_next(server, "Yes")
        )
        assert ("Hello, Ada." in prompt, "Be brief." in prompt) == (False, bool(more))
    assert len([item async for item in ada.conversations.items.list(made.id)]) == len(items) + 4


async def test_summary_of_a_conversation_that_has_changed_is_dropped(server: Running, ada: AsyncOpenAI) -> None:
    """Messages added in the meantime are in no summary and must stay visible."""
    made = await ada.conversations.create(items=SAID)
    body = {"input": "Who am I?", "conversation": made.id, "context_management": COMPACT_AT}
    pending = asyncio.get_running_loop().create_task(post(server, PATH, body))
    await begin_turns(server)
    await ada.conversations.items.create(made.id, items=[{"role": "user", "content": "I am Eve."}])
    await prompt_of_next(server, "Ada of Paris.")
    refused = await pending
    assert (refused.status, refused.error["code"]) == (409, "session_busy")
    assert len([item async for item in ada.conversations.items.list(made.id)]) == len(SAID) + 1


async def test_conversation_is_compacted_over_a_websocket(server: Running) -> None:
    """Other streams continue in the meantime; the next request of this stream waits."""
    asked = [*SAID, {"role": "user", "content": "Who am I?"}]
    async with socket(server) as connection:
        await send(connection, input=asked, context_management=COMPACT_AT)
        await begin_turns(server)
        await send(connection, input="Hi")
        await send(connection, input="Hi", stream_id="other")
        *_, other = await begin_turns(server, 2)
        server.engine.finish(other)
        assert (await receive(connection, "response.completed"))["stream_id"] == "other"
        assert "Who am I?" not in await prompt_of_next(server, "Ada of Paris.")
        assert "Ada of Paris." in await prompt_of_next(server, "You are Ada.")
        done = (await receive(connection, "response.completed"))["response"]
        assert [item["type"] for item in done["output"]] == ["compaction", "message"]
        assert "Paris" not in await prompt_of_next(server, "Hello")
        assert (await receive(connection, "response.completed"))["response"]["warnings"] == []


async def test_compaction_over_a_websocket_can_be_cancelled(server: Running) -> None:
    """The request names the stream; its turn is aborted, the client is notified, and the stream continues."""
    async with socket(server) as connection:
        for _ in range(2):
            await send(connection, input=[*SAID, {"role": "user", "content": "Hi"}], context_management=COMPACT_AT)
        (summary,) = await begin_turns(server)
        await send(connection, "response.cancel")
        refused = await receive(connection, "error")
        assert refused["error"]["message"] == "the response was cancelled before it began"
        assert summary not in server.engine.turns
        await prompt_of_next(server, "Ada.")
        await prompt_of_next(server, "Hello")
        assert (await receive(connection, "response.completed"))["response"]["status"] == "completed"


async def test_compaction_ends_with_its_socket(server: Running) -> None:
    """Its turn is aborted, and no response follows."""
    async with socket(server) as connection:
        await send(connection, input=[*SAID, {"role": "user", "content": "Hi"}], context_management=COMPACT_AT)
        await begin_turns(server)
    await wait_turns_left(server)
    await tick(10)
    assert not server.engine.turns


async def test_nothing_to_summarize_is_refused(server: Running, ada: AsyncOpenAI) -> None:
    """Instructions alone are no conversation; no turn starts."""
    with pytest.raises(BadRequestError) as refused:
        await ada.responses.compact(model="stub", instructions="Be brief.")
    assert refused.value.param == "input"
    assert not server.engine.turns
