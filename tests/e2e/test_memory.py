"""Each session remembers its own conversation, on the real model."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import ENDLESS, connect_client

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon, SocketClient

NAMES = ("Ada", "Nora", "Felix", "Oscar", "Clara", "Hugo", "Mira", "Leo")
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Vienna", "Madrid", "Tokyo")
GREEDY = {"temperature": 0.0, "max_tokens": 60}


async def test_session_remembers_a_name_over_three_turns(daemon: Daemon) -> None:
    """A name stated first is known after three turns about other things."""
    async with connect_client(daemon) as client:
        session = await client.create()
        await client.turn(session, "My name is Ada.", **GREEDY)
        for prompt in ("Count from 3 to 7.", "What is the capital of France?", "What is 4 plus 5?"):
            await client.turn(session, prompt, **GREEDY)
        text, end = await client.turn(session, "What is my name?", **GREEDY)
    assert "Ada" in text
    assert end["stats"]["cached_tokens"] > 0, "the history was read again instead of being kept in its slot"


async def test_concurrent_sessions_keep_their_own_facts(daemon: Daemon) -> None:
    """Eight sessions on one socket, generating concurrently, answer with their own facts only."""
    async with connect_client(daemon) as client:
        sessions = [await client.create() for _ in NAMES]
        for number, session in enumerate(sessions):
            prompt = f"My name is {NAMES[number]} and I live in {CITIES[number]}."
            await client.send(op="infer", session_id=session, prompt=prompt, params=GREEDY)
        await _ends(client, len(sessions))
        for session in sessions:
            await client.send(op="infer", session_id=session, prompt="What is my name?", params=GREEDY)
        answers = await _ends(client, len(sessions))
    for number, session in enumerate(sessions):
        told = [name for name in NAMES if name in answers[session]]
        assert told == [NAMES[number]], f"session {number} answered {answers[session]!r}"


async def test_sessions_without_a_slot_are_recomputed(daemon: Daemon) -> None:
    """Sessions that lost their slot are prefilled again from their tokens."""
    async with connect_client(daemon) as client:
        sessions = [await client.create() for _ in range(12)]
        for number, session in enumerate(sessions):
            await client.turn(session, f"My name is {NAMES[number % 8]}.", **GREEDY)
        for number, session in enumerate(sessions):
            text, _ = await client.turn(session, "What is my name?", **GREEDY)
            assert NAMES[number % 8] in text


@pytest.mark.slow
async def test_two_sockets_stream_concurrently(daemon: Daemon) -> None:
    """Tokens of two clients' turns interleave."""
    async with connect_client(daemon) as one, connect_client(daemon) as two:
        order: list[str] = []

        async def run(name: str, client: SocketClient) -> None:
            session = await client.create()
            await client.send(
                op="infer", session_id=session, prompt="Count from 1 to 30.", params={**ENDLESS, "max_tokens": 1000}
            )
            while (await client.receive())["op"] != "end":
                order.append(name)

        await asyncio.gather(run("one", one), run("two", two))
    switches = sum(first != second for first, second in itertools.pairwise(order))
    assert switches > 10, f"the turns ran one after the other: {switches} switches in {len(order)} frames"


async def test_abort_keeps_the_partial_answer(daemon: Daemon) -> None:
    """After an abort the received part is in the transcript, and the session works."""
    async with connect_client(daemon) as client:
        session = await client.create()
        await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.", params=ENDLESS)
        shown = ""
        while len(shown) < 10:
            message = await client.receive()
            shown += message["content"] if message["op"] == "token" else ""
        await client.send(op="abort", session_id=session, id="stop")
        while (message := await client.receive())["op"] != "end":
            shown += message["content"] if message["op"] == "token" else ""
        assert message["finish_reason"] == "aborted"
        assert message["id"] == "stop"
        transcript = (await client.ask(op="get_session", session_id=session))["transcript"]
        assert transcript[-1] == {"role": "assistant", "content": shown}
        text, end = await client.turn(session, "What is the capital of Italy?", **GREEDY)
    assert "Rome" in text
    assert end["finish_reason"] == "stop"


async def test_abort_with_discard_removes_the_turn(daemon: Daemon) -> None:
    """``discard`` removes the question and the partial answer from the history."""
    async with connect_client(daemon) as client:
        session = await client.create()
        await client.turn(session, "My name is Nora.", **GREEDY)
        before = (await client.ask(op="get_session", session_id=session))["transcript"]
        await client.send(op="infer", session_id=session, prompt="Count from 1 to 100.", params=ENDLESS)
        await client.until(lambda message: message["op"] == "token")
        await client.ask(op="abort", session_id=session, discard=True)
        assert (await client.ask(op="get_session", session_id=session))["transcript"] == before
        text, _ = await client.turn(session, "What is my name?", **GREEDY)
    assert "Nora" in text


async def _ends(client: SocketClient, count: int) -> dict[str, str]:
    """Receive frames until ``count`` turns have ended; return the text of each by session."""
    answers: dict[str, str] = {}
    while count:
        message = await client.receive()
        assert message["op"] != "error", message
        if message["op"] == "token":
            answers[message["session_id"]] = answers.get(message["session_id"], "") + message["content"]
        count -= message["op"] == "end"
    return answers
