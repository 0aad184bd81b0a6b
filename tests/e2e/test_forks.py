"""Conversations that are forked and taken back, on the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.harness import talk

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

GREEDY = {"temperature": 0.0, "max_tokens": 60}
SYSTEM = "You are Nova, a helpful assistant."


async def test_a_fork_and_its_parent_remember_their_own(daemon: Daemon) -> None:
    """What is said after the fork is known where it was said, and what was said before it in both."""
    async with talk(daemon) as client:
        parent = await client.create(system=SYSTEM)
        await client.turn(parent, "My name is Ada.", **GREEDY)
        fork = (await client.ask(op="fork_session", session_id=parent))["session_id"]
        await client.turn(parent, "I live in Oslo.", **GREEDY)
        await client.turn(fork, "I live in Lima.", **GREEDY)
        for session, city in ((parent, "Oslo"), (fork, "Lima")):
            text, end = await client.turn(session, "Where do I live?", **GREEDY)
            assert city in text
            assert end["stats"]["cached_tokens"] > 0
            assert "Ada" in (await client.turn(session, "What is my name?", **GREEDY))[0]


async def test_an_edited_question_is_answered_anew(daemon: Daemon) -> None:
    """The rewound words are forgotten, those before them are known, and only the new ones are read."""
    async with talk(daemon) as client:
        session = await client.create(system=SYSTEM)
        _, first = await client.turn(session, "My name is Ada.", **GREEDY)
        await client.turn(session, "I live in Oslo.", **GREEDY)
        kept = await client.ask(op="rewind_session", session_id=session, turn=first["turn_id"])
        assert (kept["op"], kept["messages"]) == ("session_rewound", 3)
        _, edited = await client.turn(session, "I live in Lima.", **GREEDY)
        n_new = edited["stats"]["prompt_tokens"] - edited["stats"]["cached_tokens"]
        assert n_new < len("<|im_end|>\n<|im_start|>user\nI live in Lima.<|im_end|>\n<|im_start|>assistant\n") / 2
        assert "Lima" in (await client.turn(session, "Where do I live?", **GREEDY))[0]
        assert "Ada" in (await client.turn(session, "What is my name?", **GREEDY))[0]
