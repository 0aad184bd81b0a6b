"""Conversations that clients send whole continue in the matching session of the same client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.api.http_client import post
from tests.api.streaming import CHAT, send_answer
from tests.server.harness import ask, receive

if TYPE_CHECKING:
    from tests.server.harness import Running

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "One?"}
SECOND = {"role": "user", "content": "Two?"}


def assistant(text: str) -> dict[str, str]:
    """Return an answer as clients send it back."""
    return {"role": "assistant", "content": text}


async def complete(server: Running, *messages: dict[str, str], answer: str, token: str = "") -> None:
    """Send messages and have them answered."""
    response, _ = await asyncio.gather(
        post(server, CHAT, {"messages": list(messages)}, token=token), send_answer(server, answer)
    )
    assert response.json["choices"][0]["message"]["content"] == answer


def session_messages(server: Running) -> list[list[str]]:
    """Return the messages of each session, oldest first."""
    return [[message.content for message in session.history.messages] for session in server.context.sessions._table]


async def test_full_history_continues_its_session(server: Running) -> None:
    """Only the new question is submitted."""
    await complete(server, SYSTEM, FIRST, answer="1")
    await complete(server, SYSTEM, FIRST, assistant("1"), SECOND, answer="2")
    assert session_messages(server) == [["Be brief.", "One?", "1", "Two?", "2"]]


async def test_repeated_question_regenerates_the_answer(server: Running) -> None:
    """The session is rewound to that question."""
    await complete(server, FIRST, answer="1")
    await complete(server, FIRST, assistant("1"), SECOND, answer="2")
    await complete(server, FIRST, assistant("1"), SECOND, answer="other")
    assert session_messages(server) == [["One?", "1", "Two?", "other"]]


async def test_edited_message_keeps_the_common_prefix(server: Running) -> None:
    """Messages before the edit are kept, the rest is replaced."""
    await complete(server, FIRST, answer="1")
    await complete(server, FIRST, assistant("1"), SECOND, answer="2")
    await complete(server, FIRST, assistant("1"), SECOND, assistant("2"), FIRST, answer="3")
    await complete(server, FIRST, assistant("1"), {**SECOND, "content": "Three?"}, assistant("x"), FIRST, answer="4")
    assert session_messages(server) == [["One?", "1", "Three?", "x", "One?", "4"]]


async def test_unrelated_conversation_gets_a_new_session(server: Running) -> None:
    """The first session stays unchanged."""
    await complete(server, FIRST, answer="1")
    await complete(server, SECOND, assistant("2"), FIRST, answer="x")
    await complete(server, FIRST, assistant("1"), SECOND, answer="2")
    assert session_messages(server) == [["One?", "1", "Two?", "2"], ["Two?", "2", "One?", "x"]]


async def test_sessions_of_other_clients_are_not_matched(server: Running) -> None:
    """Equal messages of another client get their own session."""
    server.accounts.ensure_client("eve", max_sessions=3, priority="normal")
    eve = server.accounts.create_token("eve").token
    await complete(server, FIRST, answer="1")
    await complete(server, FIRST, assistant("1"), SECOND, answer="2", token=eve)
    assert session_messages(server) == [["One?", "1"], ["One?", "1", "Two?", "2"]]
    clients = {session.config.client_id for session in server.context.sessions._table}
    assert clients == {"ada", "eve"}


async def test_websocket_sessions_are_not_matched(server: Running) -> None:
    """A session that a socket opened is never continued over HTTP."""
    async with server.v1() as socket:
        await receive(socket)
        session_id = (await ask(socket, op="create_session"))["session_id"]
        await ask(socket, op="append", session_id=session_id, messages=[FIRST, assistant("1")])
        await complete(server, FIRST, assistant("1"), SECOND, answer="2")
        assert session_messages(server) == [["One?", "1"], ["One?", "1", "Two?", "2"]]
