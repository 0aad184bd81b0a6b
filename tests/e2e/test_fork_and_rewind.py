"""Forked and rewound conversations on the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.harness import connect_client

if TYPE_CHECKING:
    from tests.e2e.harness import Daemon

GREEDY = {"temperature": 0.0, "max_tokens": 60}
SYSTEM = "You are Nova, a helpful assistant."


async def test_fork_and_parent_keep_separate_histories(daemon: Daemon) -> None:
    """Fork and parent share the history before the fork, and only that."""
    async with connect_client(daemon) as client:
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


async def test_rewound_turn_is_replaced(daemon: Daemon) -> None:
    """The rewound turn is forgotten, earlier turns are known, and only new tokens are prefilled."""
    async with connect_client(daemon) as client:
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
