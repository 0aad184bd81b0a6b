"""The Messages API over HTTP, with the anthropic package's client and with raw HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.api.http_client import post
from tests.api.streaming import next_turn, open_stream, requests_done, send_answer

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

    from tests.server.harness import Running

MESSAGES = "/v1/messages"
ASKED: Any = [{"role": "user", "content": "Hi"}]
HI: dict[str, Any] = {"model": "stub", "max_tokens": 50, "messages": ASKED}


@pytest.fixture
def ada(claude: AsyncAnthropic) -> AsyncAnthropic:
    """The anthropic client, by which the client ada speaks here."""
    return claude


async def test_message_has_text_stop_reason_and_usage(server: Running, ada: AsyncAnthropic) -> None:
    """The package parses the answer; the tokens read and reused are the whole prompt."""
    answer, _ = await asyncio.gather(
        ada.messages.create(model="stub", max_tokens=50, messages=ASKED), send_answer(server, "Hel", "lo")
    )
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "stub")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens > 0
    assert answer.usage.cache_creation_input_tokens == 0


async def test_stream_has_the_events_of_the_api(server: Running, ada: AsyncAnthropic) -> None:
    """Each piece of text is an event as soon as it exists, and the package assembles the same message."""

    async def read() -> Any:
        async with ada.messages.stream(model="stub", max_tokens=50, messages=ASKED) as stream:
            kinds = [event.type async for event in stream if event.type != "text"]
            return kinds, await stream.get_final_message()

    (kinds, message), _ = await asyncio.gather(read(), send_answer(server, "Hel", "lo"))
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert message.content[0].text == "Hello"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0


async def test_unknown_fields_and_beta_features_have_no_effect(server: Running) -> None:
    """A coding agent's request is answered, and the response names what had no effect."""
    body = {
        **HI,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "novel": 1,
    }
    answer, _ = await asyncio.gather(post(server, f"{MESSAGES}?beta=true", body), send_answer(server, "Hello"))
    assert answer.status == 200
    warnings = "\n".join(answer.json["warnings"])
    for named in ("cache_control", "context_management", "output_config.effort", "tools.0 (web_search", "novel"):
        assert named in warnings


async def test_errors_have_the_form_of_the_api(server: Running, ada: AsyncAnthropic) -> None:
    """The package raises the class of the status, and the message names the field."""
    from anthropic import BadRequestError, NotFoundError  # noqa: PLC0415 - it takes more than a second to import, which other workers are spared

    with pytest.raises(BadRequestError) as caught:
        await ada.messages.create(model="stub", max_tokens=0, messages=ASKED)
    assert "max_tokens" in caught.value.message
    with pytest.raises(NotFoundError):
        await ada.messages.create(model="gone", max_tokens=5, messages=ASKED)
    refused = await post(server, MESSAGES, HI, token="ic_wrong_token")
    assert (refused.status, refused.json["type"]) == (401, "error")
    assert refused.json["error"]["type"] == "authentication_error"


async def test_prompt_that_is_too_long_is_an_invalid_request(server: Running, ada: AsyncAnthropic) -> None:
    """The message begins as agents expect, which then compact their conversation."""
    from anthropic import BadRequestError  # noqa: PLC0415 - likewise

    async def overflow() -> None:
        server.engine.overflow(await next_turn(server), n_tokens=99_999)

    with pytest.raises(BadRequestError) as caught:
        await asyncio.gather(ada.messages.create(model="stub", max_tokens=5, messages=ASKED, stream=True), overflow())
    assert "prompt is too long" in caught.value.message


async def test_failure_during_stream_is_an_error_event(server: Running) -> None:
    """Text sent before the failure is kept."""
    async with open_stream(server, HI, MESSAGES) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await reader.readuntil(b"text_delta")
        server.context.sessions.purge("client", "ada")
        data = await reader.readuntil(b'"request_id":null}\n\n')
    assert b"event: error\ndata: " in data


async def test_disconnect_aborts_the_turn(server: Running) -> None:
    """A dropped connection aborts its turn and leaves no message in the conversation."""
    async with open_stream(server, HI, MESSAGES) as reader:
        turn = await next_turn(server)
        server.engine.begin(turn)
        server.engine.say(turn, "Hel")
        await reader.readuntil(b"text_delta")
    await requests_done(server)
    assert turn not in server.engine.turns


async def test_conversation_continues_in_its_session(server: Running) -> None:
    """The history sent again matches the session of the first request, whatever the billing header is."""

    def body(messages: list[Any], header: str) -> dict[str, Any]:
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={header};"},
            {"type": "text", "text": "Be brief."},
        ]
        return {**HI, "system": system, "messages": messages}

    first, _ = await asyncio.gather(post(server, MESSAGES, body(ASKED, "1a")), send_answer(server, "Hello"))
    assert first.status == 200
    again = [*ASKED, {"role": "assistant", "content": first.json["content"]}, {"role": "user", "content": "And?"}]
    second, _ = await asyncio.gather(post(server, MESSAGES, body(again, "2b")), send_answer(server, "That is all."))
    assert second.status == 200
    (session,) = server.context.sessions._table
    assert [message.role for message in session.history.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


async def test_user_id_is_kept_with_the_session(server: Running) -> None:
    """It is stored as metadata of the session."""
    body = {**HI, "metadata": {"user_id": "u1"}}
    await asyncio.gather(post(server, MESSAGES, body), send_answer(server, "Hello"))
    (session,) = server.context.sessions._table
    assert json.dumps(dict(session.config.metadata or {})) == '{"user_id": "u1"}'
