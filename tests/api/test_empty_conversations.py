"""A conversation without messages is refused in the words of the servers whose dialect it is sent in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from tests.api.http_client import post

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
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


async def test_message_without_messages(claude: AsyncAnthropic) -> None:
    """Counting its tokens is refused, too."""
    from anthropic import BadRequestError  # noqa: PLC0415 - it takes seconds to import, which other workers are spared

    with pytest.raises(BadRequestError) as refused:
        await claude.messages.create(model="stub", max_tokens=9, messages=[], system="Be brief.")
    with pytest.raises(BadRequestError) as not_counted:
        await claude.messages.count_tokens(model="stub", messages=[])
    for each in (refused, not_counted):
        assert isinstance(each.value.body, dict)
        error = each.value.body["error"]
        assert (error["type"], error["message"]) == (
            "invalid_request_error",
            "messages: at least one message is required",
        )
