"""Conversations that clients send whole go on where they were, in sessions of their own client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.api.asking import post
from tests.api.streaming import CHAT, say
from tests.server.harness import ask, hear

if TYPE_CHECKING:
    from tests.server.harness import Running

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "One?"}
SECOND = {"role": "user", "content": "Two?"}


def assistant(text: str) -> dict[str, str]:
    """Return an answer as clients send it back."""
    return {"role": "assistant", "content": text}


async def asked(server: Running, *messages: dict[str, str], answer: str, token: str = "") -> None:
    """Have messages answered."""
    heard, _ = await asyncio.gather(post(server, CHAT, {"messages": list(messages)}, token=token), say(server, answer))
    assert heard.json["choices"][0]["message"]["content"] == answer


def held(server: Running) -> list[list[str]]:
    """Return what sessions hold, oldest first."""
    return [[message.content for message in session.history.messages] for session in server.context.sessions._table]


async def test_what_was_said_is_not_said_again(server: Running) -> None:
    """A conversation that is sent back with its answer and a new question goes on in its session."""
    await asked(server, SYSTEM, FIRST, answer="1")
    await asked(server, SYSTEM, FIRST, assistant("1"), SECOND, answer="2")
    assert held(server) == [["Be brief.", "One?", "1", "Two?", "2"]]


async def test_an_answer_is_made_again(server: Running) -> None:
    """The last question asked again takes the session back to where it was asked."""
    await asked(server, FIRST, answer="1")
    await asked(server, FIRST, assistant("1"), SECOND, answer="2")
    await asked(server, FIRST, assistant("1"), SECOND, answer="other")
    assert held(server) == [["One?", "1", "Two?", "other"]]


async def test_a_question_is_put_otherwise(server: Running) -> None:
    """Where an early message is another, what agrees before it is kept, and the rest is told anew."""
    await asked(server, FIRST, answer="1")
    await asked(server, FIRST, assistant("1"), SECOND, answer="2")
    await asked(server, FIRST, assistant("1"), SECOND, assistant("2"), FIRST, answer="3")
    await asked(server, FIRST, assistant("1"), {**SECOND, "content": "Three?"}, assistant("x"), FIRST, answer="4")
    assert held(server) == [["One?", "1", "Three?", "x", "One?", "4"]]


async def test_another_beginning_is_another_conversation(server: Running) -> None:
    """Where nothing agrees there is a session of its own, and the first goes on as it was."""
    await asked(server, FIRST, answer="1")
    await asked(server, SECOND, assistant("2"), FIRST, answer="x")
    await asked(server, FIRST, assistant("1"), SECOND, answer="2")
    assert held(server) == [["One?", "1", "Two?", "2"], ["Two?", "2", "One?", "x"]]


async def test_nobody_goes_on_with_another_client_s_conversation(server: Running) -> None:
    """The same words of another client are a session of its own."""
    server.accounts.ensure_client("eve", max_sessions=3, priority="normal")
    eve = server.accounts.create_token("eve").token
    await asked(server, FIRST, answer="1")
    await asked(server, FIRST, assistant("1"), SECOND, answer="2", token=eve)
    assert held(server) == [["One?", "1"], ["One?", "1", "Two?", "2"]]
    clients = {session.config.client_id for session in server.context.sessions._table}
    assert clients == {"ada", "eve"}


async def test_conversations_of_sockets_are_left_alone(server: Running) -> None:
    """A session that a socket has opened is never gone on with."""
    async with server.v1() as socket:
        await hear(socket)
        session_id = (await ask(socket, op="create_session"))["session_id"]
        await ask(socket, op="append", session_id=session_id, messages=[FIRST, assistant("1")])
        await asked(server, FIRST, assistant("1"), SECOND, answer="2")
        assert held(server) == [["One?", "1"], ["One?", "1", "Two?", "2"]]
