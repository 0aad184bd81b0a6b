"""A conversation without messages is refused in the words of the servers whose dialect it is sent in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.api.http_client import post

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from tests.server.harness import Running

OPENAI_WORDS = (
    "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead."
)


async def test_chat_completion_without_messages(server: Running, ada: AsyncOpenAI) -> None:
    """A prompt template does not change it; a stream does not begin."""
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await ada.chat.completions.create(model="stub", messages=[], stream=streams)
        body = refused.value.body
        assert isinstance(body, dict)
        assert (body["message"], body["param"], body["type"]) == (OPENAI_WORDS, "messages", "invalid_request_error")
    template = await post(server, "/apply-template", {"messages": []})
    assert (template.status, template.error["message"]) == (400, OPENAI_WORDS)


async def test_message_without_messages(server: Running) -> None:
    """Counting its tokens is refused, too."""
    async with AsyncAnthropic(
        base_url=f"http://127.0.0.1:{server.port}", auth_token=server.token, max_retries=0
    ) as claude:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await claude.messages.create(model="stub", max_tokens=9, messages=[], system="Be brief.")
        with pytest.raises(anthropic.BadRequestError) as not_counted:
            await claude.messages.count_tokens(model="stub", messages=[])
    for each in (refused, not_counted):
        assert isinstance(each.value.body, dict)
        error = each.value.body["error"]
        assert (error["type"], error["message"]) == (
            "invalid_request_error",
            "messages: at least one message is required",
        )
